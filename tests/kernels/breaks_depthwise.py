"""Kernels of depthwise layers broken on purpose: small filters, large ones, and those of one row."""

from __future__ import annotations

from typing import Any

from tests.kernels.breaks import FENCE, RACE, WRONG, Break


def deep(name: str, text: str, by: str, how: str, *cases: str, times: int = 1, **tuning: Any) -> Break:
    return Break(name, "depthwise", text, by, how, cases, times, tuple(tuning.items()))


def wide(name: str, text: str, by: str, how: str, *cases: str, times: int = 1, **tuning: Any) -> Break:
    return Break(name, "depthwise_wide", text, by, how, cases, times, tuple(tuning.items()))


def along(name: str, text: str, by: str, how: str, *cases: str, times: int = 1) -> Break:
    return Break(name, "depthwise_row", text, by, how, cases, times)


DEPTHWISE: tuple[Break, ...] = (
    deep("no barrier after the filters", "        __syncthreads();\n    }\n    if (!exists) return;",
         "    }\n    if (!exists) return;", RACE + "|" + WRONG, "depthwise-nhwc"),
    deep("columns outside the image are read", "inside && exists ?", "inside ?",
         WRONG, "depthwise-nchw", "depthwise-nhwc"),
    deep("rows outside the image are read", "static_cast<unsigned>(i) < static_cast<unsigned>(Problem::h)", "true",
         WRONG, "depthwise-nhwc", "one-channel-nchw"),
    deep("threads beyond the last image load", "exists && static_cast<unsigned>(i)", "static_cast<unsigned>(i)",
         FENCE, "depthwise-nchw", "one-channel-nchw"),
    deep("the gradient takes the filter as it is", "Problem::reversed ? taps - 1 - r * Problem::s - s : ", "",
         WRONG, "gradient-depthwise-nchw", "gradient-depthwise-nhwc"),
    deep("a row is stored before it is complete", "store(t - span, sum[turn])", "store(t - span, sum[turn + 1])",
         WRONG, "depthwise-nchw", whole=False),
    deep("columns past the end are stored", "if (q + e < columns && first_q + q + e < Problem::q) to",
         "if (q + e < columns) to", WRONG, "one-channel-nchw", "one-channel-nhwc"),
    deep("rows past the end are stored", "Problem::p % Tuning::rows == 0 || first_p + p < Problem::p", "true",
         WRONG, "depthwise-nchw", whole=True, rows=4),
    deep("every band begins at the top", "first_p * Problem::stride_h - Problem::pad_top", "-Problem::pad_top",
         WRONG, "depthwise-nchw", rows=4),
    deep("bands forget the rows above", "Problem::p - first_p) + span", "Problem::p - first_p)",
         WRONG, "depthwise-nhwc", whole=False, rows=4),
    deep("every filter has a channel of its own", "k / Problem::group_k", "k",
         WRONG, "depthwise-multiplier-nchw", "depthwise-multiplier-nhwc"),
    deep("the window forgets the stride", "[q * Problem::stride_w +", "[q +",
         WRONG, "depthwise-multiplier-nchw", times=2),
    deep("all at once forgets the stride", "window[p * Problem::stride_h +", "window[p +",
         WRONG, "depthwise-multiplier-nchw", whole=True, rows=2),
    deep("the windows stay where they are", "old[(i + moved) % windows][k]", "old[i][k]",
         WRONG, "depthwise-nchw", whole=False),
    deep("a window begins with its fours", "column + v", "column + v + Window::lead", "misaligned",
         "depthwise-nchw", times=2),
    wide("no barrier after the tile", "cp_async_wait_group<0>();\n    __syncthreads();", "cp_async_wait_group<0>();",
         RACE + "|" + WRONG, "depthwise-nchw", "depthwise-nhwc"),
    wide("never waits for the tile", "cp_async_wait_group<0>();", "", RACE + "|" + WRONG, "depthwise-nchw"),
    wide("results lie where the tile is still read", "__syncthreads();  // the tile has been read", "",
         RACE + "|" + WRONG, "depthwise-nchw", "depthwise-nhwc"),
    wide("results are stored before they are there", "__syncthreads();\n    store_results", "store_results",
         RACE + "|" + WRONG, "depthwise-nchw", "depthwise-nhwc"),
    wide("columns outside the image are copied",
         "exists && static_cast<unsigned>(j) < static_cast<unsigned>(Problem::w)", "exists",
         WRONG, "depthwise-nchw", "depthwise-wide-nhwc", fixed=False),
    wide("columns outside the image are summed", "at >= 0 && at < Problem::w", "at >= -4 && at < Problem::w + 4",
         WRONG, "depthwise-nchw", "depthwise-nhwc", fixed=True),
    wide("rows below the image are copied", " && n < batch && i < Problem::h;", " && n < batch;",
         FENCE + "|" + WRONG, "depthwise-nchw", "depthwise-nhwc", rows=5),
    wide("rows above the image are summed", "low = i >= 0 ? 0 : ceil_div(-i, Problem::dilation_h)", "low = 0",
         RACE + "|" + WRONG, "depthwise-nchw", "depthwise-nhwc"),
    wide("rows below the image are summed", "min(Problem::r, ceil_div(Problem::h - i, Problem::dilation_h))",
         "Problem::r", RACE + "|" + WRONG, "depthwise-nchw", "depthwise-nhwc"),
    wide("planes past the end are copied", "k < Problem::k && n < batch && i < Problem::h", "i < Problem::h",
         FENCE, "depthwise-nchw", "depthwise-nhwc", filters=8),
    wide("planes past the end are stored",
         "if (k >= Problem::k || n >= batch || p >= Problem::p || q >= Problem::q) continue;",
         "if (p >= Problem::p || q >= Problem::q) continue;", FENCE, "depthwise-nchw", "depthwise-nhwc", filters=8),
    wide("every filter has a channel of its own", "k / Problem::group_k", "k",
         WRONG, "depthwise-multiplier-nchw", "depthwise-multiplier-nhwc"),
    wide("the gradient takes the filter as it is", "Problem::reversed ? taps - 1 - i % taps : i % taps", "i % taps",
         WRONG, "gradient-depthwise-nchw", "gradient-depthwise-nhwc"),
    wide("windows begin where the tile does", "Problem::stride_w - Problem::pad_left : lead;",
         "Problem::stride_w - Problem::pad_left : 0;", WRONG, "depthwise-nchw", fixed=False),
    wide("the first segment is left out", "first_segment = j + reach >= 0 ? 0", "first_segment = j + reach >= 0 ? 1",
         WRONG, "depthwise-wide-nchw", "depthwise-wide-nhwc"),
    wide("the rest of a row lies one segment off", "taps + Tile::segments * Tile::segment);", "taps);",
         WRONG, "depthwise-wide-nchw"),
    wide("the window forgets the stride", "first + q * stride + (s + t)", "first + q + (s + t)",
         WRONG, "depthwise-multiplier-nchw"),
    along("samples past the end of the row are read",
          "inside && static_cast<unsigned>(at) < static_cast<unsigned>(Problem::w));", "inside);",
          WRONG, "depthwise-row-nchw", "gradient-depthwise-row-nchw"),
    along("windows begin at fours", "Shape::lead + e + s", "e + s", WRONG, "depthwise-row-nchw"),
    along("outputs past the end of the row are stored", "if (q >= Problem::q) return;", "",
          WRONG, "depthwise-row-nchw"),
    along("every filter has a channel of its own", "k / Problem::group_k", "k", WRONG, "depthwise-row-nchw"),
    along("the gradient takes the filter as it is", "Problem::reversed ? taps - 1 - s : s", "s",
          WRONG, "gradient-depthwise-row-nchw"),
    along("a block for each row of the image, not of its outputs", "row / Problem::p % Problem::k", "row % Problem::k",
          WRONG, "gradient-depthwise-row-nchw"),
)  # fmt: skip
