"""filter_file: band by band what the whole image gives, from files and arrays to files and arrays."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import tempfile
import threading
import time
import types
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import leanconv
from leanconv.images import stream
from leanconv.images.borders import BORDERS
from leanconv.images.stream import filter_file
from leanconv.runtime.launch import why_no_gpu

KERNELS = [((3, 3), None), ((4, 2), (0, 1)), ((2, 5), (1, 0)), ((1, 1), None), ((25, 3), None), ((3, 3), (2, 2))]


def whole_numbers(rng: np.random.Generator, *shape: int, dtype: str = "float32") -> np.ndarray:
    """Their sums are exact in any order."""
    return rng.integers(0, 100, shape).astype(dtype)


@pytest.fixture(autouse=True)
def _three_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEANCONV_THREADS", "3")


@pytest.mark.parametrize("border", [*BORDERS])
@pytest.mark.parametrize("taps", KERNELS, ids=str)
def test_bands_are_seamless(border: Any, taps: Any, rng: np.random.Generator) -> None:
    size, anchor = taps
    image, kernel = whole_numbers(rng, 11, 7), rng.integers(-3, 4, size).astype(np.float32)
    options = {"border": border, "anchor": anchor, "value": 7, "delta": 2}
    expected = leanconv.filter2d(image, kernel, **options)
    for rows in (1, 2, 5, 11, None):
        result = np.full_like(image, np.nan)
        filter_file(image, result, kernel, band_rows=rows, **options)
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize(
    ("shape", "dtype", "result"),
    [
        ((9, 8), "uint8", None), ((2, 3, 9, 8), ">u2", "float32"), ((9, 8, 3), "int16", "uint8"),
        ((2, 9, 8, 2), "float64", None), ((1, 1), "float16", "float64"),
    ],
)  # fmt: skip
def test_files(shape: Any, dtype: str, result: Any, tmp_path: Path, rng: np.random.Generator) -> None:
    image = whole_numbers(rng, *shape, dtype=dtype)
    np.save(tmp_path / "in.npy", image)
    options = {"dtype": result, "channels_last": len(shape) > 2 and shape[-1] < 4}
    filter_file(tmp_path / "in.npy", str(tmp_path / "out.npy"), [[1, 2, 0], [0, 1, -1]], band_rows=2, **options)
    expected = leanconv.filter2d(image.astype(image.dtype.newbyteorder("=")), [[1, 2, 0], [0, 1, -1]], **options)
    written = np.load(tmp_path / "out.npy")
    assert written.dtype == expected.dtype
    np.testing.assert_array_equal(written, expected)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["in.npy", "out.npy"]


@pytest.mark.parametrize("border", ["reflect", "wrap", "replicate"])
def test_calls_may_read_and_write_less_than_was_asked(
    border: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    image, kernel = whole_numbers(rng, 2, 17, 9, dtype="int16"), rng.integers(-3, 4, (5, 3))
    np.save(tmp_path / "in.npy", image)
    read, write, calls = os.preadv, os.pwrite, [0, 0]

    def preadv(file: int, buffers: list[Any], place: int) -> int:
        calls[0] += 1
        return read(file, [buffers[0][:7]], place)

    def pwrite(file: int, memory: Any, place: int) -> int:
        calls[1] += 1
        return write(file, memory[:11], place)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os, "pwrite", pwrite)
    filter_file(tmp_path / "in.npy", tmp_path / "out.npy", kernel, band_rows=4, border=border)
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), leanconv.filter2d(image, kernel, border=border))
    assert calls[0] > image.nbytes / 7 and calls[1] > image.nbytes / 11


def test_a_file_in_fortrans_order_is_mapped(tmp_path: Path, rng: np.random.Generator) -> None:
    image = whole_numbers(rng, 11, 6)
    np.save(tmp_path / "in.npy", np.asfortranarray(image))
    filter_file(tmp_path / "in.npy", tmp_path / "out.npy", np.ones((3, 3)), band_rows=2)
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), leanconv.filter2d(image, np.ones((3, 3))))


def test_what_finds_another_one_writing_goes_through_the_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    image, path = whole_numbers(rng, 2, 6, 1000), tmp_path / "out.npy"
    mapped = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=image.shape)
    called = []
    monkeypatch.setattr(os, "pwrite", lambda file, memory, place: called.append(place) or len(memory))
    rows = stream.FileRows(path.open("r+b", buffering=0), mapped)
    with rows._writing:
        for each in range(2):
            for top in (0, 3):
                rows[each, top : top + 3] = image[each, top : top + 3]
    np.testing.assert_array_equal(np.load(path), image)
    assert not called
    rows[1, 3:6] = image[1, 3:6]
    assert called == [mapped.offset + 9 * 4000]

    def full(start: Any, size: Any, advice: int) -> int:
        ctypes.set_errno(errno.EFAULT)
        return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: types.SimpleNamespace(madvise=full))
    with rows._writing, pytest.raises(OSError, match="No space left"):
        rows[0, 0:3] = image[0, 0:3]


@pytest.mark.parametrize("few", [0, 4])
def test_writers_wait_for_each_other_on_few_cores_alone(
    few: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Of three that come at once one writes by a call at a time; the others wait, or go through the map."""
    write, inside, most, together = os.pwrite, [0], [0], threading.Barrier(3, timeout=20)
    mapped = []

    class AtOnce(stream.HostLane):
        def filtered(self, rows: int) -> Any:
            together.wait()
            return super().filtered(rows)

    def pwrite(*given: Any) -> int:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.05)
        inside[0] -= 1
        return write(*given)

    monkeypatch.setattr(stream, "FEW", few)
    monkeypatch.setattr(stream, "HostLane", AtOnce)
    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(stream.FileRows, "_populate", lambda self, rows: mapped.append(rows))
    image = whole_numbers(rng, 9, 5)
    filter_file(image, tmp_path / "out.npy", [[2]], band_rows=1)
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), 2 * image)
    assert most == [1] and bool(mapped) == (few == 0)


def test_a_file_that_becomes_shorter_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "in.npy", np.ones((100, 1000), np.float32))

    class Cutting(stream.HostLane):
        def filtered(self, rows: int) -> Any:
            os.truncate(tmp_path / "in.npy", 40_000)
            return super().filtered(rows)

    monkeypatch.setattr(stream, "HostLane", Cutting)
    with pytest.raises(OSError, match="the file became shorter while it was read: .*in.npy"):
        filter_file(tmp_path / "in.npy", tmp_path / "out.npy", [[2]], band_rows=1)
    assert [each.name for each in tmp_path.iterdir()] == ["in.npy"]


def test_a_disk_that_others_fill_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left on device: .*out.npy"):
        filter_file(np.ones((90, 4), np.uint8), tmp_path / "out.npy", [[2]], band_rows=1)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 4, 5)])
def test_nothing_to_do(shape: Any) -> None:
    filter_file(np.zeros(shape, np.float32), np.zeros(shape, np.float32), [[1]], channels_last=False)


def test_a_file_may_take_its_own_place(tmp_path: Path, rng: np.random.Generator) -> None:
    image = whole_numbers(rng, 20, 5)
    np.save(tmp_path / "a.npy", image)
    filter_file(tmp_path / "a.npy", tmp_path / "a.npy", np.ones((5, 1)), band_rows=3)
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), leanconv.filter2d(image, np.ones((5, 1))))


def test_bands_pass_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three at a time; memory is that of three."""
    together, made = threading.Barrier(3, timeout=20), []

    class Slow(stream.HostLane):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

        def filtered(self, rows: int) -> Any:
            together.wait()
            return super().filtered(rows)

    monkeypatch.setattr(stream, "HostLane", Slow)
    monkeypatch.setattr("leanconv.runtime.threads.cores", lambda: 3)
    image, result = np.ones((9, 4), np.uint8), np.zeros((9, 4), np.uint8)
    filter_file(image, result, [[2]], band_rows=1)
    assert len(made) == 3 and (result == 2).all()


def test_an_error_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(stream.HostLane):
        def filtered(self, rows: int) -> Any:
            raise RuntimeError("a kernel failed")

    class TooLarge:
        def __init__(self, *given: Any) -> None:
            raise MemoryError("no page-locked memory")

    for lane, error in ((Broken, "a kernel failed"), (TooLarge, "no page-locked memory")):
        monkeypatch.setattr(stream, "HostLane", lane)
        with pytest.raises((RuntimeError, MemoryError), match=error):
            filter_file(np.ones((90, 4), np.uint8), tmp_path / "out.npy", [[2]], band_rows=1)
        assert not [*tmp_path.iterdir()]


def test_what_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image, out = np.ones((4, 5), np.uint8), tmp_path / "out.npy"
    (tmp_path / "text.npy").write_text("no array")
    for error, match, given, options in (
        (ValueError, r"text.npy is no .npy file", (tmp_path / "text.npy", out, [[1]]), {}),
        (OSError, "none.npy", (tmp_path / "none.npy", out, [[1]]), {}),
        (ValueError, r"kernel has shape \(1, 1, 1\)", (image, out, [[[1]]]), {}),
        (ValueError, "value=300 is no uint8", (image, out, [[1]]), {"value": 300}),
        (ValueError, "band_rows=0 is below 1", (image, out, [[1]]), {"band_rows": 0}),
        (TypeError, "image has dtype complex64", (image.astype("c8"), out, [[1]]), {}),
        (ValueError, r"target has shape \(4, 4\)", (image, image[:, :4].copy(), [[1]]), {}),
        (ValueError, "target overlaps source", (image, image, [[1]]), {}),
        (ValueError, "device='gpu' is not known", (image, out, [[1]]), {"device": "gpu"}),
        (ValueError, "kernel is a list whose rows are not alike", (image, out, [[1], [1, 2]]), {}),
        (TypeError, "source is of type list", (image.tolist(), out, [[1]]), {}),
        (TypeError, "target is of type NoneType", (image, None, [[1]]), {}),
        (OSError, "missing", (image, tmp_path / "missing" / "out.npy", [[1]]), {}),
    ):
        with pytest.raises(error, match=match):
            filter_file(*given, **options)
    monkeypatch.setattr(stream.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=19))
    with pytest.raises(OSError, match="the result has 20 bytes, and the disk has room for 19"):
        filter_file(image, out, [[1]])
    assert [each.name for each in tmp_path.iterdir()] == ["text.npy"]


def test_a_target_may_not_lie_in_the_sources_file(tmp_path: Path, rng: np.random.Generator) -> None:
    image, kernel = whole_numbers(rng, 40, 30), np.ones((5, 5))
    path, link = tmp_path / "a.npy", tmp_path / "link.npy"
    np.save(path, image)
    link.symlink_to(path)
    target = np.load(path, mmap_mode="r+")
    for source in (path, str(link), np.load(path, mmap_mode="r"), np.asarray(np.load(link, mmap_mode="r"))[::-1]):
        for written in (target, np.asarray(target)):
            with pytest.raises(ValueError, match="target overlaps source in memory or in a file"):
                filter_file(source, written, kernel, band_rows=20, progress_bar=False)
    fortran = np.asfortranarray(image)
    np.save(tmp_path / "f.npy", fortran)
    with pytest.raises(ValueError, match="target overlaps source"):
        filter_file(tmp_path / "f.npy", np.load(tmp_path / "f.npy", mmap_mode="r+"), kernel, band_rows=20)
    np.testing.assert_array_equal(np.load(path), image)


def test_source_and_target_may_lie_apart_in_one_file(tmp_path: Path, rng: np.random.Generator) -> None:
    images, kernel = whole_numbers(rng, 2, 20, 30), np.ones((5, 5))
    np.save(tmp_path / "a.npy", images)
    source, target = (np.load(tmp_path / "a.npy", mmap_mode=mode)[i] for i, mode in enumerate(("r", "r+")))
    filter_file(source, target, kernel, band_rows=7)
    expected = images[0], leanconv.filter2d(images[0], kernel)
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), expected)
    # another file of the same contents, and a copy in memory of a map
    np.save(tmp_path / "b.npy", images[0])
    np.save(tmp_path / "c.npy", images[0])
    filter_file(tmp_path / "b.npy", np.load(tmp_path / "c.npy", mmap_mode="r+"), kernel, band_rows=7)
    np.testing.assert_array_equal(np.load(tmp_path / "c.npy"), expected[1])
    target = np.load(tmp_path / "b.npy", mmap_mode="r+")
    filter_file(target.copy(), target, kernel, band_rows=7)
    np.testing.assert_array_equal(np.load(tmp_path / "b.npy"), expected[1])


def test_what_is_like_an_array_may_not_be_its_own_target() -> None:
    class Stored:
        shape, dtype = (4, 5), np.dtype("uint8")

    stored = Stored()
    with pytest.raises(ValueError, match="target overlaps source"):
        filter_file(stored, stored, [[1]])


def test_arrays_that_bands_would_misread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is refused by its argument's name, before a band is filtered."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(stream, "HostLane", None)
    image, result = np.ones((4, 5), np.float32), np.zeros((4, 5), np.float32)
    masked, fixed = np.ma.masked_equal(np.eye(4, 5, dtype=np.float32), 1), np.zeros((4, 5), np.float32)
    fixed.flags.writeable = False

    class Strange:
        shape, dtype = (4, 5), torch.float32

    for error, match, source, target in (
        (TypeError, "source is a masked array, and what its mask hides would count", masked, result),
        (TypeError, "target is a masked array, and what its mask hides would count", image, masked),
        (TypeError, "source is an array of PyTorch; give one of NumPy", torch.from_numpy(image), result),
        (TypeError, "target is an array of PyTorch; give one of NumPy", image, torch.from_numpy(result)),
        (TypeError, "source has dtype torch.float32, which is none of NumPy", Strange(), result),
        (ValueError, "target is read-only", image, fixed),
    ):
        with pytest.raises(error, match=match):
            filter_file(source, target, [[1]])


@pytest.mark.parametrize("shape", [(0, 30), (30, 0), (0, 30, 30), (30, 30)])
def test_no_shape_makes_a_kernel_separable(shape: Any, tmp_path: Path, rng: np.random.Generator) -> None:
    image, kernel = np.zeros(shape, np.float32), np.eye(5)
    for target in (np.zeros_like(image), tmp_path / "out.npy"):
        with pytest.raises(ValueError, match="separable=True: the 5x5 kernel is not the sum of at most 3 products"):
            filter_file(image, target, kernel, channels_last=False, separable=True)
    assert not [*tmp_path.iterdir()]


@pytest.mark.skipif(why_no_gpu() is None, reason="there is a GPU")
def test_a_gpu_is_missed_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(leanconv.CudaUnavailableError):
        filter_file(np.ones((4, 5), np.uint8), tmp_path / "out.npy", [[1]], device="cuda")
    assert not [*tmp_path.iterdir()]


class FakeCuda:
    """PyTorch's streams without a GPU: work is kept, and done when a stream is waited for, or memory is read."""

    def __init__(self, torch: Any) -> None:
        self.torch, self.cuda, self.streams, self.pinned = torch, self, [], 0
        self.here = threading.local()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.torch, name)

    def Stream(self, index: int) -> Any:  # noqa: N802
        made = types.SimpleNamespace(work=[], index=index)
        self.streams.append(made)
        return made

    def Event(self, blocking: bool) -> Any:  # noqa: N802
        assert blocking
        made = types.SimpleNamespace()

        def record() -> None:
            made.work, self.here.stream.work = self.here.stream.work, []

        def synchronize() -> None:
            for each in made.work:
                each()

        made.record, made.synchronize = record, synchronize
        return made

    @contextmanager
    def stream(self, chosen: Any) -> Any:
        self.here.stream = chosen
        yield
        self.here.stream = None

    def empty(self, shape: Any, dtype: Any, device: Any = None, pin_memory: bool = False) -> Any:
        assert pin_memory or device == "cuda:0"
        self.pinned += pin_memory
        fake = self
        plain = self.torch.zeros(shape, dtype=dtype)

        class Later(self.torch.Tensor):  # type: ignore[misc, name-defined]
            def copy_(self, other: Any, non_blocking: bool = False) -> Any:
                assert non_blocking
                mine, theirs = (each.as_subclass(fake.torch.Tensor) for each in (self, other))
                fake.here.stream.work.append(lambda: mine.copy_(theirs))
                return self

        return plain.as_subclass(Later)


def test_a_gpus_lane_waits_for_its_stream(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    fake = FakeCuda(torch)
    monkeypatch.setitem(sys.modules, "torch", fake)

    def later(image: Any, out: Any, **options: Any) -> None:
        image, out = image.as_subclass(torch.Tensor), out.as_subclass(torch.Tensor)
        fake.here.stream.work.append(lambda: out.copy_(torch.from_numpy(leanconv.filter2d(image.numpy(), **options))))

    monkeypatch.setattr(stream.api, "filter2d", later)
    monkeypatch.setattr(stream, "_gpu", lambda device: 0)
    image, kernel = whole_numbers(rng, 2, 19, 6, dtype="uint8"), rng.integers(-1, 3, (4, 3))
    result = np.zeros_like(image, np.int16)
    filter_file(image, result, kernel, band_rows=2, dtype="int16", device="cuda", border="wrap")
    np.testing.assert_array_equal(result, leanconv.filter2d(image, kernel, dtype="int16", border="wrap"))
    assert len(fake.streams) == 6 and fake.pinned == 12, "two lanes for each core"


@pytest.mark.gpu
@pytest.mark.parametrize(("border", "dtype"), [("wrap", "uint8"), ("reflect101", "float32")])
def test_a_gpu_gives_the_whole_images_bits(border: Any, dtype: str, rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    image, kernel = whole_numbers(rng, 1001, 333, dtype=dtype), rng.standard_normal((5, 7))
    result = np.zeros_like(image)
    filter_file(image, result, kernel, band_rows=37, device="cuda", border=border)
    expected = leanconv.filter2d(torch.from_numpy(image).cuda(), kernel, border=border)
    np.testing.assert_array_equal(result, expected.cpu().numpy())


def test_bfloat16_is_written_to_arrays_alone(tmp_path: Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    image, path = np.arange(30, dtype=np.float32).reshape(5, 6), tmp_path / "out.npy"
    wide = image.astype(ml_dtypes.bfloat16)
    for source, given in ((image, {"dtype": "bfloat16"}), (wide, {})):
        with pytest.raises(TypeError, match="npy file holds none; dtype='float32' holds every"):
            filter_file(source, path, [[1]], **given)
        with pytest.raises(TypeError, match="device='cuda' takes no bfloat16"):
            filter_file(source, np.empty_like(wide), [[1]], device="cuda", **given)
    assert not path.exists()
    result = np.empty_like(wide)
    filter_file(image, result, [[1, 2]], dtype="bfloat16")
    assert (result == leanconv.filter2d(image, [[1, 2]], dtype="bfloat16")).all()
    filter_file(wide, path, [[1]], dtype="float32")
    assert (np.load(path) == image).all()


def test_room_is_asked_for_where_the_bytes_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image, asked = np.ones((5, 6), np.float32), []
    (tmp_path / "there").mkdir()
    (tmp_path / "link.npy").symlink_to(tmp_path / "there" / "out.npy")
    usual = stream.shutil.disk_usage
    monkeypatch.setattr(stream.shutil, "disk_usage", lambda path: (asked.append(Path(path)), usual(path))[1])
    for target in (tmp_path / "link.npy", "/dev/null"):
        filter_file(image, target, [[1]])
    assert asked == [(tmp_path / "there").resolve(), Path(tempfile.gettempdir())]
    assert (np.load(tmp_path / "there" / "out.npy") == image).all()
