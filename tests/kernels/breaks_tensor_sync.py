"""`tensor_gemm_sync` broken on purpose (see breaks.py)."""

from __future__ import annotations

from typing import Any

from tests.kernels.breaks import FENCE, RACE, WRONG, Break


def sync(name: str, text: str, by: str, how: str, *cases: str, times: int = 1, **tuning: Any) -> Break:
    names = tuple(f"tensor-{case}" for case in cases)
    return Break(name, "tensor_gemm_sync", text, by, how, names, times, tuple(tuning.items()))


TENSOR_SYNC = (
    sync(
        "no barrier before a chunk of filters",
        "            __syncthreads();\n            ring.copy_next();",
        "            ring.copy_next();",
        RACE,
        "same-nhwc",
        chunks=2,
    ),
    sync(
        "a stage of pixels is copied before it has been read",
        "        WarpFragments<Problem, Tuning> fragments[2];",
        "        if (stage + 1 < F::stages) pixels.copy(stage + 1);\n"
        "        WarpFragments<Problem, Tuning> fragments[2];",
        RACE + "|" + WRONG,
        "same-nhwc",
    ),
    sync(
        "pixels are read before they are there",
        "cp_async_wait_group<(F::chunks < Ring::stages - 1 ? F::chunks : Ring::stages - 1)>();",
        "",
        RACE + "|" + WRONG,
        "same-nhwc",
        chunks=1,
    ),
    sync(
        "the last chunks of filters are multiplied with before they are there",
        "else cp_async_wait_group<Ring::stages - 2>();",
        "else cp_async_wait_group<Ring::stages - 1>();",
        RACE + "|" + WRONG,
        "same-nhwc",
        chunks=4,
    ),
    sync(
        "filters are copied into the slot that is multiplied with",
        "copy(slot == 0 ? stages - 1 : slot - 1)",
        "copy(slot)",
        RACE + "|" + WRONG,
        "same-nhwc",
        chunks=2,
    ),
    sync(
        "odd pixels do not exchange their halves",
        "(lane % 8 ^ lane / 8 % 2 * 4) * 16",
        "lane % 8 * 16",
        WRONG,
        "same-nhwc",
    ),
    sync(
        "lanes copy their own pixel's place",
        "__shfl_sync(0xffffffffu, place[j], 4 * i + lane / 8)",
        "__shfl_sync(0xffffffffu, place[j], lane)",
        WRONG,
        "same-nhwc",
    ),
    sync(
        "a unit's channels past the group's are read",
        "Problem::group_c % F::piece == 0 || c < Problem::group_c",
        "true",
        FENCE,
        "odd-nhwc",
    ),
    sync(
        "a column's channels past the group's are read",
        "Problem::group_c % F::piece == 0 || c + j < Problem::group_c",
        "true",
        FENCE,
        "few-channels-nhwc",
    ),
    sync(
        "pixels beside the image are those of other rows",
        "static_cast<unsigned>(w + right) < Problem::w",
        "true",
        WRONG,
        "same-nchw",
    ),
    sync(
        "taps of a dilated row are neighbours",
        ", right = tap % Problem::s * Problem::dilation_w",
        ", right = tap % Problem::s",
        WRONG,
        "dilation-nchw",
        "dilation-nhwc",
    ),
    sync(
        "the second group has the first one's pixels",
        "static_cast<int64>(group) * Problem::group_c * stride.channel",
        "0",
        WRONG,
        "groups-nhwc",
    ),
    sync(
        "both rows are scaled back as the first", "pixels[j].down[i / 2 % 2]", "pixels[j].down[0]", WRONG, "same-nhwc"
    ),
    sync(
        "low halves of filters are those of the high ones",
        "filters + F::half_bytes + n * 1024",
        "filters + n * 1024",
        WRONG,
        "same-nhwc",
    ),
    sync(
        "units of filters are in order",
        "((4 * half + lane / 8) ^ lane % 8) * 16",
        "(4 * half + lane / 8) * 16",
        WRONG,
        "same-nhwc",
    ),
)
