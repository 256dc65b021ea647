"""Kernels of the gradients of filters, and of the input of depthwise layers, broken on purpose."""

from __future__ import annotations

from typing import Any

from tests.kernels.breaks import FENCE, GONE, RACE, WRONG, Break


def dw(name: str, text: str, by: str, how: str, *cases: str, times: int = 1, **tuning: Any) -> Break:
    names = tuple(f"weight-{case}" for case in cases)
    return Break(name, "depthwise_weight", text, by, how, names, times, tuple(tuning.items()))


def parts(name: str, text: str, by: str, how: str, *cases: str) -> Break:
    return Break(name, "depthwise_weight_parts", text, by, how, tuple(f"weight-{case}" for case in cases))


def dx(name: str, text: str, by: str, how: str, *cases: str, times: int = 1, **tuning: Any) -> Break:
    names = tuple(f"gradient-{case}" for case in cases)
    return Break(name, "depthwise_input", text, by, how, names, times, tuple(tuning.items()))


GRADIENTS: tuple[Break, ...] = (
    dw("lanes of one filter are not added", "sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], apart);", "",
       WRONG, "depthwise-nchw", "depthwise-nhwc"),
    dw("warps are added without a barrier", "__syncthreads();\n#pragma unroll 1\n    for", "#pragma unroll 1\n    for",
       RACE + "|" + WRONG, "depthwise-nchw"),
    dw("sums of other blocks read before they are there", "cluster_barrier();\n#pragma unroll 1", "#pragma unroll 1",
       RACE + "|" + WRONG, "depthwise-nhwc", split=4),
    dw("a block leaves while others read its sums", "        cluster_barrier();\n    }\n#else", "    }\n#else",
       GONE, "depthwise-nchw", split=4),
    dw("one block's sum for all of the cluster", "cluster_load(shared + at, other)", "cluster_load(shared + at, 0)",
       WRONG, "depthwise-nhwc", split=4),
    dw("filters past the last are stored", "if (at >= (Problem::k - first_k) * taps) return;", "",
       FENCE, "depthwise-nhwc"),
    dw("rows below the band are taken twice", "first_q, t < rows);", "first_q, first_p + t < Problem::p);",
       WRONG, "depthwise-nchw", rows=4),
    dw("every band begins at the top", "in_image / Window::strips * most_rows", "0", WRONG, "depthwise-nhwc", rows=4),
    dw("columns past the end of a row", "strip[q] = exists && inside ?", "strip[q] = exists ?",
       WRONG + "|" + FENCE, "depthwise-stride-nchw", "depthwise-dilation-nhwc"),
    dw("a tap row meets the dy row of another", "turn - r * Problem::dilation_h / stride", "turn - r / stride",
       WRONG, "depthwise-dilation-nchw", "depthwise-dilation-nhwc"),
    dw("x forgets the stride", "window[now][q * Problem::stride_w +", "window[now][q +",
       WRONG, "depthwise-stride-nchw"),
    dw("rows fetched ahead beyond the image", "if (t < steps && inside(at))", "if (t < steps)",
       FENCE, "depthwise-nchw"),
    dw("every filter has a channel of its own", "const int c = k / Problem::group_k;", "const int c = k;",
       WRONG + "|" + FENCE, "depthwise-multiplier-nchw"),
    parts("each warp adds the first part", "int part = warp;", "int part = 0;", WRONG, "depthwise-nchw"),
    parts("sums of warps read before they are there", "        __syncthreads();\n        if (warp > 0) return;",
          "        if (warp > 0) return;", RACE + "|" + WRONG, "depthwise-nhwc"),
    parts("weights past the last are stored", "if (at + 32 * i >= weights) return;", "", FENCE, "depthwise-nhwc"),
    parts("all parts in one place", "(static_cast<int64>(rank) * Problem::k + first_k)", "first_k",
          RACE + "|" + WRONG, "depthwise-nchw"),
    parts("filters past the last go to the next part", "at < sums && at < (Problem::k - first_k) * taps", "at < sums",
          RACE + "|" + WRONG, "depthwise-nhwc"),
    dx("no barrier after the filters", "__syncthreads();\n        // blocks have", "// blocks have",
       RACE + "|" + WRONG, "stride-depthwise-nhwc"),
    dx("groups of rows are stored before they are complete", "if (t < span || i < 0", "if (i < 0",
       WRONG + "|" + RACE, "stride-depthwise-nchw", rows=2),
    dx("rows above the image are stored", "i < 0 || i >= Problem::h", "i >= Problem::h",
       WRONG + "|" + FENCE, "stride-depthwise-nchw"),
    dx("columns past the end are stored", "if (j + e < columns && first_j + j + e < Problem::w) to",
       "if (j + e < columns) to",
       WRONG + "|" + FENCE, "stride-depthwise-nchw", "stride-depthwise-nhwc"),
    dx("bands forget the rows of dy above", "band * Tuning::rows - span", "band * Tuning::rows",
       WRONG, "stride-depthwise-nhwc", rows=2),
    dx("a tap row goes to the group of another", "sum[(turn + down / stride) % live]", "sum[(turn + r) % live]",
       WRONG, "stride-depthwise-nchw"),
    dx("every filter gets the first one's gradient", "last ? 0 : m + 1", "0", WRONG, "depthwise-multiplier-nchw"),
    dx("the first filter for all", "if constexpr (multiplier > 1) read_filter(m);",
       "if constexpr (multiplier > 1) read_filter(0);",
       WRONG, "depthwise-multiplier-nhwc"),
    dx("sums are not set to zero", "done[o][e] = 0.0f;", "done[o][e] += 0.0f;", WRONG, "stride-depthwise-nchw"),
    Break("the last column twice", "direct_weight", "j >= Problem::w) continue", "j > Problem::w) continue",
          WRONG + "|" + FENCE, ("weight-plain-nchw",)),
    Break("the first group's channels for all", "direct_weight", "k / Problem::group_k * Problem::group_c + own", "own",
          WRONG, ("weight-groups-nchw",)),
    Break("half of the lanes are forgotten", "direct_weight", "int apart = 16;", "int apart = 8;",
          WRONG, ("weight-odd-nhwc",)),
    Break("the first image for all", "direct_weight", "const int64 n = out.n;", "const int64 n = 0 * out.n;",
          WRONG, ("weight-plain-chwn",)),
)  # fmt: skip
