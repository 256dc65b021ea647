"""Bulk and tensor copies on the emulator, held against NumPy: which bytes go where, and the rules of each copy."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest

from leanconv.plan import Number, Pointer, TensorMap
from leanconv.runtime.compile import compile_source
from tests import emulator
from tests.emulator import ORDERS, EmulatorError, run_source
from tests.emulator.test_emulator import floats
from tests.emulator.test_emulator_barriers import without

ARGUMENTS = (Pointer("x", "int"), Pointer("y", "int", written=True), Pointer("at", "int"), Number("int", "n"))
SHARED = 16384


def unit(body, maps=()):
    """A kernel whose shared memory is ``s``, with an mbarrier ``full`` behind 16 KiB that thread 0 has made."""
    parameters = "".join(f"{m.ctype} {m.name}, " for m in maps)
    return (
        f"{emulator.ALL_PTX}"
        "using namespace leanconv;\n"
        'extern "C" __global__ void __launch_bounds__(1024) '
        f"probe({parameters}const int* __restrict__ x, int* y, const int* at, int n) {{\n"
        "  int* s = reinterpret_cast<int*>(shared_memory_for_swizzles());\n"
        "  const int t = threadIdx.x, b = blockIdx.x; (void)b; (void)s; (void)t;\n"
        f"  Mbarrier* full = reinterpret_cast<Mbarrier*>(shared_memory_for_swizzles() + {SHARED}); (void)full;\n"
        f"{body}\n}}\n"
    )


def play(body, x, y, *, maps=(), at=(0,), n=0, block=64, grid=1, orders=ORDERS, offsets=None):
    values = {"x": x, "y": y, "at": np.array(at, np.int32), "n": n}
    arguments = (*maps, *ARGUMENTS)
    if offsets is None:
        how = {"grid": grid, "block": block, "shared_bytes": SHARED + 64, "orders": orders}
        run_source(unit(body, maps), "probe", arguments, values, **how)
    else:
        built = emulator.build(unit(body, maps), "probe", arguments)
        emulator.execute(built, arguments, values, grid=grid, block=block, shared_bytes=SHARED + 64, offsets=offsets)
    return y


MAKE = "if (t == 0) {\n/* init */ mbarrier_init(full, 1);\n/* fence */ fence_mbarrier_init();\n}\n__syncthreads();\n"
LOAD = (
    MAKE + "if (t == 0) {\n/* expect */ mbarrier_arrive_expect_tx(full, n);\n/* copy */ COPY;\n}\n"
    "/* wait */ mbarrier_wait_parity(full, 0);\n/* read */ for (int k = t; k < n / 4; k += 64) y[k] = s[k];\n"
)
BULK = LOAD.replace("COPY", "cp_async_bulk_shared_global(s, x + at[0], n, full)")


def words(count):
    return np.arange(1, count + 1, dtype=np.int32)


def test_a_bulk_copy_brings_its_bytes():
    for first, count in ((0, 4), (4, 64), (96, 4000)):
        y = play(BULK, words(4096), np.full(count, -1, np.int32), at=(first,), n=4 * count)
        np.testing.assert_array_equal(y, words(4096)[first : first + count])


# Tiled maps


def loader(rank, extra=""):
    coordinates = ", ".join(f"at[{i}]" for i in range(rank))
    return LOAD.replace("COPY", f"cp_async_bulk_tensor_shared_global(s{extra}, x_map, full, {coordinates})")


def tile(x, spec, start):
    """What a tiled copy brings: ``x`` has the innermost axis last, ``start`` has it first."""
    indices = [c + np.arange(e) * step for c, e, step in zip(start, spec.extents, spec.steps, strict=True)][::-1]
    inside = [(i >= 0) & (i < size) for i, size in zip(indices, x.shape, strict=True)]
    taken = x[np.ix_(*(np.clip(i, 0, size - 1) for i, size in zip(indices, x.shape, strict=True)))]
    return np.where(reduce(np.logical_and.outer, inside), taken, 0).astype(x.dtype)


def swizzled(values, span):
    """The bytes of ``values`` as they lie from a multiple of 1024 on: the number of a row of 128 says who moves."""
    units = np.frombuffer(np.ascontiguousarray(values).tobytes(), np.uint8).reshape(-1, 16)
    if not span:
        return units.reshape(-1)
    moved, group = np.empty_like(units), span // 16
    for i, content in enumerate(units):
        moved[i // group * group + (i % group ^ (i // 8) % group)] = content
    return moved.reshape(-1)


def map_of(x, box, element=None, role="x", **more):
    shape, strides = x.shape[::-1], x.strides[::-1]
    assert strides[0] == x.itemsize
    return TensorMap(role, element or x.dtype.name, shape, strides[1:], box=box, **more)


def check_tile(x, spec, start):
    n = spec.copy_bytes
    y = play(loader(spec.rank), x, np.full(n // 4, -1, np.int32), maps=(spec,), at=start, n=n)
    expected = swizzled(tile(x, spec, start), spec.swizzle)
    np.testing.assert_array_equal(y.view(np.uint8), expected)


def values_of(shape, dtype=np.float32):
    return (np.arange(1, np.prod(shape) + 1) % 251 + 1).astype(dtype).reshape(shape)


@pytest.mark.parametrize(
    ("shape", "box", "starts"),
    [
        ((100,), (32,), [(0,), (12,), (-4,), (88,), (-40,), (2**31 - 40,)]),
        ((9, 20), (8, 4), [(0, 0), (4, 2), (-4, -2), (16, 7), (4, 100)]),
        ((5, 7, 12), (4, 3, 2), [(0, 0, 0), (4, 5, 4), (8, -2, -1)]),
        ((3, 4, 5, 8), (8, 2, 3, 2), [(0, 0, 0, 0), (-4, 4, -1, 2), (4, -1, 2, -1)]),
        ((2, 3, 4, 5, 4), (4, 3, 2, 2, 2), [(0, 0, 0, 0, 0), (0, -1, 3, 2, 1), (0, 4, -1, -1, -1)]),
    ],
)
def test_tiled_boxes_overhang_with_zeros(shape, box, starts):
    x = values_of(shape)
    for start in starts:
        check_tile(x, map_of(x, box), start)


@pytest.mark.parametrize("dtype", ["int8", "float16", "uint16", "int32"])
def test_elements_of_each_size(dtype):
    x = values_of((6, 64), np.dtype(dtype))
    check_tile(x, map_of(x, (32 // x.itemsize, 4)), (-16 // x.itemsize, 4))
    if dtype == "uint16":
        check_tile(x, map_of(x, (16, 4), "bfloat16"), (56, -1))


@pytest.mark.parametrize(("dtype", "first"), [("float32", 2), ("float16", -4), ("uint8", 8)])
def test_a_copy_begins_at_a_multiple_of_16_bytes(dtype, first):
    x = values_of((6, 64), np.dtype(dtype))
    with pytest.raises(
        EmulatorError, match=f"coordinate {first} of axis 0 is {first * x.itemsize} bytes from the start"
    ):
        check_tile(x, map_of(x, (32 // x.itemsize, 4)), (first, 0))


def test_rows_may_lie_apart_and_end_where_no_unit_does():
    x = values_of((5, 6, 16))
    spec = TensorMap("x", "float32", (11, 6, 5), (64, 384), box=(8, 3, 2))
    n = spec.copy_bytes
    for start in ((0, 0, 0), (8, 4, 4), (-4, -1, 0)):
        y = play(loader(3), x, np.full(n // 4, -1, np.int32), maps=(spec,), at=start, n=n)
        np.testing.assert_array_equal(y.view(np.float32), tile(x[:, :, :11], spec, start).reshape(-1))


@pytest.mark.parametrize("span", [32, 64, 128])
def test_swizzles_permute_units_of_16_bytes(span):
    x = values_of((40, 80))
    for dtype in (np.float32, np.uint8):
        x = x.astype(dtype)
        check_tile(x, map_of(x, (span // x.itemsize, 32), swizzle=span), (-16 // x.itemsize, 12))


def test_a_swizzle_follows_the_address_in_shared_memory_for_swizzles():
    """A box that begins one row of 128 bytes behind a multiple of 1024 continues the pattern of the rows before it."""
    x = values_of((40, 32))
    spec = map_of(x, (32, 9), swizzle=128)
    n = spec.copy_bytes
    y = play(
        loader(2, " + 32").replace("y[k] = s[k]", "y[k] = s[32 + k]"), x, words(n // 4), maps=(spec,), at=(0, 3), n=n
    )
    padded = np.concatenate([x[:1], tile(x, spec, (0, 3))])
    np.testing.assert_array_equal(y.view(np.uint8), swizzled(padded, 128)[128:])


def test_steps_of_a_box_take_every_so_manyth_element():
    x = values_of((9, 10, 8))
    for box, steps in (((4, 6, 5), (1, 2, 3)), ((8, 7, 1), (1, 3, 8))):
        spec = map_of(x, box, traversal=steps)
        assert spec.extents[1:] == tuple(-(-b // s) for b, s in zip(box[1:], steps[1:], strict=True))
        for start in ((0, 0, 0), (4, -3, 1), (-4, 7, 8)):
            check_tile(x, spec, start)


def test_several_maps_of_one_array_and_prefetches():
    x = values_of((16, 16))
    maps = (map_of(x, (8, 2)), map_of(x, (4, 4), suffix="tall"))
    copies = (
        "prefetch_tensormap(x_map); prefetch_tensormap(x_tall);\n"
        "cp_async_bulk_tensor_shared_global(s, x_map, full, 4, 2);\n"
        "cp_async_bulk_tensor_shared_global(s + 32, x_tall, full, 8, 4);\n"
        "cp_async_bulk_shared_global(s + 16, x, 64, full)"
    )
    y = play(LOAD.replace("COPY", copies), x, words(48), maps=maps, n=192).view(np.float32)
    tiles = tile(x, maps[0], (4, 2)), x[0], tile(x, maps[1], (8, 4))
    np.testing.assert_array_equal(y, np.concatenate([t.reshape(-1) for t in tiles]))


# Im2col maps


def convolution_map(x, filters, padding, stride, dilation, channels, pixels, **more):
    """The map of a convolution; ``x`` is N[D][H]WC, the other tuples have the order of its axes of pixels."""
    lower = tuple(-p for p in padding)[::-1]
    upper = tuple(p - (s - 1) * d for p, s, d in zip(padding, filters, dilation, strict=True))[::-1]
    shape, strides = x.shape[::-1], x.strides[::-1]
    steps = (1, *stride[::-1], 1)
    return TensorMap(
        "x", x.dtype.name, shape, strides[1:], lower=lower, upper=upper, channels=channels, pixels=pixels,
        traversal=steps, **more,
    )  # fmt: skip


def im2col(x, filters, padding, stride, dilation, position):
    """The columns of one filter position: (output pixels of all images, channels)."""
    padded = np.pad(x, ((0, 0), *((p, p) for p in padding), (0, 0)))
    index = [slice(None)]
    for size, s, p, step, d, r in zip(x.shape[1:-1], filters, padding, stride, dilation, position, strict=True):
        outputs = (size + 2 * p - (s - 1) * d - 1) // step + 1
        index.append(slice(r * d, r * d + (outputs - 1) * step + 1, step))
    return padded[tuple(index)].reshape(-1, x.shape[-1])


def outputs_of(x, filters, padding, stride, dilation):
    return [
        (size + 2 * p - (s - 1) * d - 1) // step + 1
        for size, s, p, step, d in zip(x.shape[1:-1], filters, padding, stride, dilation, strict=True)
    ]


def im2col_loader(rank):
    axes = "cwhdn"[: rank - 1] + "n" if rank < 5 else "cwhdn"
    numbers = ", ".join(f"at[{i}]" for i in range(len(axes) + rank - 2))
    return LOAD.replace("COPY", f"cp_async_bulk_tensor_im2col_shared_global(s, x_map, full, {numbers})")


def play_columns(x, spec, convolution, first, channel, position, **how):
    """Columns from output pixel ``first`` on, at filter ``position``, as an array of (pixels, channels)."""
    _, padding, stride, dilation = convolution
    image, *pixel = np.unravel_index(first, (x.shape[0], *outputs_of(x, *convolution)))
    start = [int(p) * step - pad for p, step, pad in zip(pixel, stride, padding, strict=True)]
    offsets = [r * d for r, d in zip(position, dilation, strict=True)]
    at = (channel, *start[::-1], int(image), *offsets[::-1])
    n = spec.copy_bytes
    return play(im2col_loader(spec.rank), x, np.full(n // 4, -1, np.int32), maps=(spec,), at=at, n=n, **how)


def check_columns(x, convolution, channels, pixels, first, channel, position, **more):
    spec = convolution_map(x, *convolution, channels, pixels, **more)
    y = play_columns(x, spec, convolution, first, channel, position)
    expected = np.zeros((pixels, channels), x.dtype)
    columns = im2col(x, *convolution, position)[first : first + pixels, channel : channel + channels]
    expected[: columns.shape[0], : columns.shape[1]] = columns
    np.testing.assert_array_equal(y.view(np.uint8), swizzled(expected, spec.swizzle))


@pytest.mark.parametrize(
    ("shape", "convolution"),
    [
        ((3, 11, 8), ((3,), (1,), (1,), (1,))),
        ((3, 20, 8), ((5,), (4,), (3,), (2,))),
        ((3, 7, 9, 8), ((3, 3), (1, 1), (1, 1), (1, 1))),
        ((3, 7, 9, 8), ((3, 2), (0, 1), (2, 1), (1, 1))),
        ((2, 10, 13, 8), ((3, 3), (2, 0), (2, 3), (2, 3))),
        ((3, 6, 5, 8), ((1, 1), (0, 0), (2, 2), (1, 1))),
        ((2, 4, 5, 6, 8), ((3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1))),
        ((2, 5, 6, 7, 8), ((2, 3, 1), (1, 0, 2), (2, 1, 3), (1, 2, 1))),
    ],
)
def test_im2col_walks_as_a_convolution_does(shape, convolution):
    x = values_of(shape)
    filters = convolution[0]
    total = shape[0] * int(np.prod(outputs_of(x, *convolution)))
    last = tuple(s - 1 for s in filters)
    for first, position in (
        (0, (0,) * len(filters)),
        (5, last),
        (total // 2, (filters[0] // 2, *last[1:])),
        (total - 3, last),
    ):
        check_columns(x, convolution, 8, 24, first, 0, position)
    check_columns(x, convolution, 8, 8, 2, 4, last)  # channels beyond the last one are zeros


def test_im2col_swizzles_and_takes_halves():
    convolution = ((3, 3), (1, 1), (1, 1), (1, 1))
    x = values_of((2, 8, 8, 64), np.float16)
    check_columns(x, convolution, 64, 64, 17, 0, (2, 0), swizzle=128)
    check_columns(x, convolution, 32, 64, 60, 32, (0, 2), swizzle=64)
    check_columns(x, convolution, 16, 40, 100, 16, (1, 1), swizzle=32)


def test_a_wrong_corner_brings_wrong_pixels():
    convolution = ((3, 3), (1, 1), (1, 1), (1, 1))
    x = values_of((2, 6, 7, 8))
    right = convolution_map(x, *convolution, 8, 24)
    expected = im2col(x, *convolution, (0, 1))[5:29]
    for wrong in (
        {"upper": (1, 1)},
        {"upper": (-2, -1)},
        {"upper": (-1, -1), "lower": (0, -1)},
        {"traversal": (1, 2, 1, 1)},
    ):
        spec = TensorMap(**{**right.__dict__, **wrong})
        y = play_columns(x, spec, convolution, 5, 0, (0, 1))
        assert not np.array_equal(y.view(np.float32).reshape(24, 8), expected), wrong
    y = play_columns(x, right, convolution, 5, 0, (0, 1))
    np.testing.assert_array_equal(y.view(np.float32).reshape(24, 8), expected)


# Stores

STORE = (
    "/* write */ for (int k = t; k < n / 4; k += 64) s[k] = x[k];\n/* fence */ fence_proxy_async();\n__syncthreads();\n"
    "if (t == 0) {\n/* copy */ COPY;\n/* commit */ cp_async_bulk_commit_group();\n/* wait */ WAIT<0>();\n}\n"
    "/* after */\n"
)
BULK_STORE = STORE.replace("COPY", "cp_async_bulk_global_shared(y + at[0], s, n)")


def test_a_bulk_copy_out_of_shared_memory_for_swizzles():
    for wait in ("cp_async_bulk_wait_group", "cp_async_bulk_wait_group_read"):
        y = play(BULK_STORE.replace("WAIT", wait), words(64), np.full(80, -1, np.int32), at=(8,), n=256)
        np.testing.assert_array_equal(y, np.concatenate([[-1] * 8, words(64), [-1] * 8]))


def test_tensor_stores_leave_out_what_overhangs():
    data = floats(8 * 6 * 2)
    for start, span in (((0, 0, 0), 0), ((4, 2, 1), 0), ((8, 5, 3), 0), ((40, 0, 0), 0), ((4, 2, 1), 32)):
        y = np.full((4, 9, 12), -1, np.float32)
        spec = map_of(y, (8, 6, 2), role="out", swizzle=span, written=True)
        body = STORE.replace("COPY", f"cp_async_bulk_tensor_global_shared(out_map, s, {', '.join(map(str, start))})")
        values = {
            "x": swizzled(data, span).view(np.int32),
            "y": np.zeros(1, np.int32),
            "at": np.zeros(1, np.int32),
            "n": 384,
        }
        text = unit(body.replace("WAIT", "cp_async_bulk_wait_group"), (spec,))
        how = {"block": 64, "shared_bytes": SHARED + 64}
        run_source(text, "probe", (spec, *ARGUMENTS), {**values, "out": y}, **how)
        expected = np.full((4 + 4, 9 + 6, 12 + 40), -1, np.float32)
        w, h, d = start
        expected[d : d + 2, h : h + 6, w : w + 8] = data.reshape(2, 6, 8)
        np.testing.assert_array_equal(y, expected[:4, :9, :12])
    text = text.replace("(out_map, s, 4, 2, 1)", "(out_map, s, 4, 2, -1)")
    with pytest.raises(
        EmulatorError, match="coordinate -1 of axis 2 is negative, which only copies into shared memory"
    ):
        run_source(text, "probe", (spec, *ARGUMENTS), {**values, "out": y}, **how)


def store_body(body=BULK_STORE, wait="cp_async_bulk_wait_group", after=""):
    return body.replace("WAIT", wait).replace("/* after */", after)


READ = "cp_async_bulk_wait_group_read"
NOT_WAITED = "thread 0 leaves the kernel without having waited for its copy of shared bytes 0 to 256 .*\n  at unit.cu:"
NOT_FENCED = "cp_async_bulk_global_shared: shared byte .* has been written by a thread, and no fence_proxy_async"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (without(store_body(), "fence"), NOT_FENCED),
        (store_body().replace("fence_proxy_async();", "if (t < 32) fence_proxy_async();"), NOT_FENCED),
        (store_body().replace("/* copy */", "s[0] = 7;"), NOT_FENCED),
        (without(store_body(), "wait"), NOT_WAITED),
        (without(store_body(), "commit"), NOT_WAITED),
        (store_body(wait=READ).replace("<0>", "<1>"), NOT_WAITED),
        # the source is overwritten while it may still be read
        (store_body().replace("/* wait */", "s[5] = 7;"), "a race"),
        # what a copy writes is read when it has only read
        (store_body(wait=READ, after="if (t == 0) y[at[0]] = y[at[0]] + 1;"), "a race"),
        # the same by a copy that brings the next bytes
        (
            MAKE + store_body().replace("/* wait */", "cp_async_bulk_shared_global(s + 60, x, 16, full);"),
            "cp_async_bulk_shared_global: the copy at unit.cu:.* may still read shared bytes 240 to 256",
        ),
        (store_body().replace("s, n)", "s, n + 8)"), "264 bytes are no positive multiple of 16"),
        (store_body().replace("s, n)", "s, 0)"), "0 bytes are no positive multiple of 16"),
        (store_body().replace("s, n)", "s + 2, n)"), "shared byte 8 is misaligned, no multiple of 16"),
        (store_body().replace("y + at[0]", "y + 2"), "global address .* is misaligned"),
        (store_body().replace("y + at[0]", "y + 20"), "takes bytes 80 to 336 of argument 1, which has 320 bytes"),
        (store_body().replace("y + at[0]", "y - 4"), "takes bytes -16 to 240 of argument 1"),
        (store_body().replace("s, n)", "s + 4092, n)"), "takes shared bytes 16368 to 16624 of 16448"),
        (store_body().replace("y + at[0]", "const_cast<int*>(x)").replace("= x[k]", "= 5"), "takes as const"),
    ],
)
def test_rules_of_copies_out_of_shared_memory(body, message):
    with pytest.raises(EmulatorError, match=message):
        play(body, words(64), np.full(80, -1, np.int32), at=(8,), n=256)


def test_a_source_may_be_overwritten_when_it_has_been_read():
    body = store_body(wait="cp_async_bulk_wait_group_read", after="__syncthreads(); s[t] = 7;")
    y = play(body, words(64), np.full(80, -1, np.int32), at=(8,), n=256)
    np.testing.assert_array_equal(y[8:72], words(64))


def test_one_fence_of_the_thread_that_copies_will_do():
    body = without(store_body(), "fence").replace("/* copy */", "fence_proxy_async();")
    y = play(body, words(64), np.full(80, -1, np.int32), at=(8,), n=256)
    np.testing.assert_array_equal(y[8:72], words(64))


# The rules of copies into shared memory

SQUARE = map_of(values_of((8, 8)), (8, 4))
TILED = loader(2)
COLUMNS = convolution_map(values_of((1, 8, 8, 8)), (3, 3), (1, 1), (1, 1), (1, 1), 8, 16)


@pytest.mark.parametrize(
    ("body", "spec", "message"),
    [
        (TILED.replace("(s,", "(s + 16,"), SQUARE, "shared byte 64 is misaligned, no multiple of 128"),
        (TILED.replace("(s,", "(s + 4096 - 16,"), SQUARE, "shared byte 16320 is misaligned"),
        (TILED.replace("(s,", "(s + 4096,"), SQUARE, "takes shared bytes 16384 to 16512 of 16448"),
        (TILED.replace(", at[1])", ")"), SQUARE, "1 coordinates, and x_map has 2 axes"),
        (TILED.replace("at[1])", "0, 0)"), SQUARE, "3 coordinates, and x_map has 2 axes"),
        (TILED.replace("at[1])", "0, 0, 0)"), COLUMNS, "x_map is an im2col map"),
        (im2col_loader(3), TensorMap("x", "float32", (8, 4, 2), (32, 128), box=(8, 2, 2)), "x_map is a tiled map"),
        (
            TILED,
            TensorMap("x", "float32", (8, 9), (32,), box=(8, 9)),
            "x_map leads to byte 256 of its array, which has 2",
        ),
        (TILED, TensorMap("x", "float32", (9, 8), (32,), box=(12, 8)), "x_map leads to byte 256 of its array"),
        (
            TILED.replace("shared_global(s, x_map, full", "global_shared(x_map, s"),
            SQUARE,
            "x_map says that the kernel does not store through it",
        ),
        (
            TILED.replace("/* copy */", "prefetch_tensormap(*reinterpret_cast<const TensorMap*>(y));"),
            SQUARE,
            "prefetch_tensormap: there is no tensor map here",
        ),
        (BULK.replace("n, full)", "n + 8, full)"), SQUARE, "136 bytes are no positive multiple of 16"),
        (BULK.replace("x + at[0]", "x + 2"), SQUARE, "global address .* is misaligned"),
        (BULK.replace("(s, x", "(s + 2, x"), SQUARE, "shared byte 8 is misaligned, no multiple of 16"),
        (BULK.replace("x + at[0]", "x + 36"), SQUARE, "takes bytes 144 to 272 of argument 1, which has 256 bytes"),
        (BULK.replace("x + at[0]", "s + 64"), SQUARE, "global address .* lies in no argument"),
        (BULK.replace("(s, x", "(s + 4096 - 16, x"), SQUARE, "hold an mbarrier, made at unit.cu"),
        # two copies to one place
        (
            BULK.replace("/* copy */", "cp_async_bulk_shared_global(s + 4, x, 16, full);"),
            SQUARE,
            "are under way: no wait has seen",
        ),
        # what threads have written before may come later than the copy
        (BULK.replace("/* expect */", "s[3] = 5;"), SQUARE, "shared byte 12 has been written by a thread, and no"),
    ],
)
def test_rules_of_copies_into_shared_memory(body, spec, message):
    x = values_of((8, 8))
    with pytest.raises(EmulatorError, match=message + "[^$]*at unit.cu:"):
        play(body, x, np.zeros(64, np.int32), maps=(spec,), at=(0, 0, 0, 0, 0, 0), n=128)


def test_coordinates_and_offsets_of_an_im2col_map_have_their_ranges():
    x = values_of((2, 8, 8, 8))
    spec = convolution_map(x, (3, 3), (1, 1), (1, 1), (1, 1), 8, 16)
    n = spec.copy_bytes
    for at, message in (
        ((0, -2, 0, 0, 0, 0), "coordinate -2 of axis 1 is not between the corners of x_map, -1 to 6"),
        ((0, 0, 7, 0, 0, 0), "coordinate 7 of axis 2 is not between the corners of x_map, -1 to 6"),
        ((0, 0, 0, 0, 256, 0), "offset 256 along axis 1 is not among 0 to 255"),
        ((0, 0, 0, 0, 0, 300), "offset 300 along axis 2 is not among 0 to 255"),
    ):
        with pytest.raises(EmulatorError, match=message):
            play(im2col_loader(4), x, words(n // 4), maps=(spec,), at=at, n=n)
    y = play(im2col_loader(4), x, words(n // 4), maps=(spec,), at=(0, 6, 6, 1, 255, 0), n=n)
    np.testing.assert_array_equal(y, 0)


def test_a_map_needs_an_aligned_array_that_is_there():
    x = values_of((8, 8))
    for given, offsets in ((x, {"x": 8}), (None, None)):
        with pytest.raises(EmulatorError, match="x_map: its array is null, or not aligned to 16 bytes"):
            play(TILED, given, words(32), maps=(SQUARE,), at=(0, 0), n=128, offsets=offsets)
    y = play(TILED, x, words(32), maps=(SQUARE,), at=(0, 0), n=128, offsets={"x": 16})
    np.testing.assert_array_equal(y.view(np.float32), x.reshape(-1)[:32])
    with pytest.raises(ValueError, match="x_map cannot be made: strides=.24,. are not all multiples of 16"):
        play(TILED, x, words(32), maps=(TensorMap("x", "float32", (6, 8), (24,), box=(4, 2)),), n=128)


def test_the_compiler_takes_the_same_texts(nvrtc):
    rank3 = TensorMap("x", "float32", (8, 4, 2), (32, 128), box=(8, 2, 2))
    bodies = [loader(rank) for rank in range(1, 6)] + [im2col_loader(rank) for rank in (3, 4, 5)] + [BULK]
    for arch in ("sm_90a", "sm_100a", "sm_120"):
        scoped = "".join(f"{{ {body} }}\n" for body in bodies) + store_body()
        assert compile_source(unit(scoped, (rank3,)), "probe", arch).cubin
