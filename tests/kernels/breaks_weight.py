"""Kernels of the filters' gradient as a matrix product, broken on purpose (see breaks.py)."""

from __future__ import annotations

from typing import Any

from tests.kernels.breaks import FENCE, GONE, RACE, WRONG, Break
from tests.kernels.breaks_tensor import RULE


def tensor(name: str, text: str, by: str, how: str, *cases: str, times: int = 1, **tuning: Any) -> Break:
    names = tuple(f"filters-{case}" for case in cases)
    return Break(name, "tensor_weight", text, by, how, names, times, tuple(({"taps": 1} | tuning).items()))


def plain(name: str, text: str, by: str, how: str, *cases: str, times: int = 1, **tuning: Any) -> Break:
    names = tuple(f"filters-{case}" for case in cases)
    return Break(name, "implicit_gemm_weight", text, by, how, names, times, tuple(tuning.items()))


def parts(name: str, algorithm: str, text: str, by: str, how: str, *cases: str) -> Break:
    return Break(name, f"{algorithm}_parts", text, by, how, tuple(f"filters-{case}" for case in cases))


def images(name: str, text: str, by: str, how: str, *cases: str, times: int = 1, **tuning: Any) -> Break:
    names = tuple(f"images-{case}-nhwc" for case in cases)
    return Break(name, "tensor_weight_images", text, by, how, names, times, tuple(tuning.items()))


WEIGHT: tuple[Break, ...] = (
    images(
        "columns of dy are free while taps still see them",
        "free_until(tile.first_seen(w));",
        "free_until(columns.q_end);",
        RULE + "|" + RACE + "|" + WRONG,
        "many",
        blocks=3,
    ),
    images(
        "tiles begin with sums of the one before",
        "sums[tap][i] = 0.0f;",
        "if (unit == first) sums[tap][i] = 0.0f;",
        WRONG,
        "same",
        blocks=3,
    ),
    images("all blocks have one slot", ": block + run.number;", ": run.number;", RACE + "|" + WRONG, "many"),
    images("a tile's first slot is its block's first", "(i == 0 && second)", "0", WRONG, "many", blocks=2, direct=True),
    images(
        "all tiles are added",
        "if (Tuning::direct && each > 0 && first == last) return;",
        "",
        WRONG,
        "many",
        blocks=5,
        direct=True,
    ),
    images("the first slot alone is added", "i < last - first + 1;", "i < 1;", WRONG, "many"),
    images(
        "segments see no column of the next",
        "tile.last_seen(w_end - 1) + 1",
        "tile.last_seen(w_end - 1)",
        RULE + "|" + WRONG + "|" + RACE,
        "same",
        segments=2,
    ),
    images(
        "x is free before it has been read",
        "                if (!anew) load_unscaled(weights, x, fresh, t);",
        "                if (lane == 0) mbarrier_arrive(rings.x_free(x_place.stage));\n"
        "                if (!anew) load_unscaled(weights, x, fresh, t);",
        RULE + "|" + RACE,
        "many",
        blocks=2,
    ),
    tensor(
        "parts of a row of taps see x where the first one does",
        "return tap % of_row * (Tuning::taps * Problem::dilation_w);",
        "return tap % of_row * (Tuning::taps == 1 ? Problem::dilation_w : 0);",
        WRONG,
        "five-columns-nhwc",
        taps=3,
        split=1,
    ),
    tensor(
        "x is free before it has been read",
        "            weights.load(rings.x(x_place.stage), factors, fresh, t);",
        "            if (lane == 0) mbarrier_arrive(rings.x_free(x_place.stage));\n"
        "            weights.load(rings.x(x_place.stage), factors, fresh, t);",
        RULE + "|" + RACE,
        "many-pixels-nhwc",
        split=1,
    ),
    tensor(
        "dy is converted before it has landed",
        "mbarrier_wait_parity(rings.dy_full(dy_place.stage), dy_place.parity)",
        "mbarrier_wait_parity(rings.dy_full(dy_place.stage), dy_place.parity ^ 1)",
        RULE + "|" + RACE,
        "many-pixels-nhwc",
        split=1,
    ),
    tensor(
        "what is converted is free before it is multiplied",
        "                multiply_weights(now, weights, rings.split(place.stage));",
        "                if (lane == 0) mbarrier_arrive(rings.split_free(place.stage));\n"
        "                multiply_weights(now, weights, rings.split(place.stage));",
        RULE + "|" + RACE + "|" + WRONG,
        "many-pixels-nhwc",
        split=1,
    ),
    tensor(
        "products do not see what threads have stored",
        "            fence_proxy_async();\n            __syncwarp();",
        "            __syncwarp();",
        RULE,
        "same-nhwc",
    ),
    tensor(
        "factors of pixels are read before they are there",
        "        mbarrier_wait_parity(rings.codes_full(place.stage), place.parity);\n",
        "",
        RACE + "|" + WRONG,
        "many-pixels-nhwc",
        split=1,
    ),
    tensor(
        "dy is free before its largest has been found",
        "        find_codes(rings, tile, place, stage, batch, to.stage, thread);\n"
        "        for (int chunk = 0; chunk < Tuning::chunks; ++chunk, place.advance())\n"
        "            if (thread % 32 == 0) mbarrier_arrive(rings.dy_free(place.stage));",
        "        for (int chunk = 0; chunk < Tuning::chunks; ++chunk)\n"
        "            if (thread % 32 == 0) mbarrier_arrive(rings.dy_free((place.stage + chunk) % Tuning::dy_stages));\n"
        "        find_codes(rings, tile, place, stage, batch, to.stage, thread);\n"
        "        for (int chunk = 0; chunk < Tuning::chunks; ++chunk) place.advance();",
        RULE + "|" + RACE,
        "many-pixels-nhwc",
        split=1,
    ),
    tensor(
        "pieces of rows are not swizzled",
        "(channel / 4 ^ pixel) * 16",
        "(channel / 4) * 16",
        WRONG,
        "same-nhwc",
    ),
    tensor(
        "rows of dy lie in other places",
        "const int unit = (warp % 2 * 4 + t) ^ row;",
        "const int unit = warp % 2 * 4 + t;",
        WRONG,
        "same-nhwc",
    ),
    tensor(
        "columns are not swizzled",
        "const int unit = (4 * half + i) ^ filter % 8;",
        "const int unit = 4 * half + i;",
        WRONG,
        "same-nchw",
    ),
    tensor(
        "low halves lie in another order", "lows[j] = split_low(a, b,", "lows[j] = split_low(b, a,", WRONG, "same-nchw"
    ),
    tensor(
        "columns beside the image are read",
        "static_cast<unsigned>(w[half] + row.right()) < Problem::w",
        "true",
        WRONG,
        "odd-nchw",
    ),
    tensor(
        "channels past the group's are summed", "channel >= Problem::group_c ||", "", WRONG + "|" + FENCE, "odd-nhwc"
    ),
    tensor(
        "filters past the last are stored",
        " || in_group >= Problem::group_k) continue",
        ") continue",
        WRONG + "|" + FENCE,
        "same-nhwc",
    ),
    tensor(
        "the second group has the first one's filters",
        "tile.group * Problem::group_k + tile.first_filter",
        "tile.first_filter",
        WRONG,
        "groups-nhwc",
    ),
    tensor(
        "columns are there before they have landed",
        "cp_async_wait_group<depth>();",
        "cp_async_wait_group<depth + 1>();",
        RULE + "|" + RACE,
        "many-pixels-nchw",
        split=1,
    ),
    tensor(
        "sums of the first block alone",
        "total[i] += cluster_load(mine + (first + i) * threads, other)",
        "total[i] += 0",
        WRONG,
        "many-pixels-nhwc",
        split=2,
    ),
    tensor(
        "a block leaves before others have read its sums",
        "        meet_in_cluster();\n        store_weights",
        "        store_weights",
        RACE + "|" + RULE + "|" + GONE,
        "many-pixels-nhwc",
        split=2,
    ),
    tensor(
        "taps see dy moved the other way",
        "reach - s * Problem::dilation_w",
        "s * Problem::dilation_w",
        WRONG,
        "same-nhwc",
        "odd-nchw",
        taps=3,
    ),
    tensor(
        "rows have no zeros between them",
        "!shared ? Problem::q : right_of_x > right_of_dy ? right_of_x : right_of_dy;",
        "Problem::w;",
        WRONG,
        "odd-nchw",
        taps=3,
    ),
    tensor(
        "pixels behind the 64 are not copied",
        "half < StagePixels<Problem, Tuning>::count",
        "half < 2",
        RACE + "|" + WRONG,
        "odd-nchw",
        taps=3,
    ),
    parts(
        "all parts in one place", "tensor_weight", "dw + part * weights", "dw", RACE + "|" + WRONG, "many-pixels-nhwc"
    ),
    parts(
        "each warp adds the first part", "tensor_weight", "int part = warp;", "int part = 0;", WRONG, "many-pixels-nhwc"
    ),
    plain(
        "pixels past the last are summed",
        "number < count && static_cast<unsigned>(h + down[i])",
        "static_cast<unsigned>(h + down[i])",
        WRONG + "|" + FENCE,
        "odd-nchw",
    ),
    plain(
        "rows beside the image are read",
        "static_cast<unsigned>(h + down[i]) < Problem::h &&",
        "",
        WRONG + "|" + FENCE,
        "odd-nchw",
        "odd-nhwc",
    ),
    plain("filters past the last are read", "number < count && i * apart < left", "number < count", FENCE, "odd-nchw"),
    plain(
        "weights past the last are stored",
        "if (weight + j < weights) to[",
        "to[",
        WRONG + "|" + FENCE,
        "few-channels-nchw",
    ),
    plain(
        "the second group has the first one's channels",
        "group * Problem::group_c + weight.channel",
        "weight.channel",
        WRONG,
        "groups-nhwc",
    ),
    plain(
        "sums of the first block alone",
        "total[i] += cluster_load(at, other)",
        "total[i] += 0",
        WRONG,
        "many-pixels-nhwc",
        split=2,
    ),
    plain(
        "a block leaves before others have read its sums",
        "        cluster_barrier();\n        store_gradient",
        "        store_gradient",
        GONE + "|" + RACE,
        "many-pixels-nhwc",
        split=4,
    ),
    parts(
        "sums of warps read before they are there",
        "implicit_gemm_weight",
        "        __syncthreads();\n        if (warp > 0) return;",
        "        if (warp > 0) return;",
        RACE + "|" + WRONG,
        "many-pixels-nhwc",
    ),
    parts(
        "all parts in one place",
        "implicit_gemm_weight",
        "dw += part *",
        "dw += 0 *",
        RACE + "|" + WRONG,
        "many-pixels-nchw",
    ),
)
