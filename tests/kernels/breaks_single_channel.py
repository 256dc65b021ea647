"""`single_channel`, and `register_cache` with several filters, broken on purpose (see breaks.py)."""

from __future__ import annotations

from typing import Any

from tests.kernels.breaks import FENCE, RACE, WRONG, Break, cache


def single(name: str, text: str, by: str, how: str, *cases: str, times: int = 1, **tuning: Any) -> Break:
    return Break(name, "single_channel", text, by, how, cases, times, tuple(tuning.items()))


SEVERAL_FILTERS = (
    cache("every result goes to the first filter's place", "plane.y += y_step", "plane.y += 0", WRONG, "filters"),
    cache("every filter has the weights of the first", "weights + filter * r * weight_pitch", "weights",
          WRONG, "filters"),
    cache("every part has the first one's filters", "const int from = first_filter * r * s + k", "const int from = k",
          WRONG, "filters-in-parts"),
    cache("the last part has as many filters as the others",
          "min(Problem::filters, Problem::all_filters - first_filter)", "Problem::filters", FENCE, "filters-in-parts"),
    cache("several filters stage outputs over rows still in use", "Problem::filters > 1 ? inputs +",
          "Problem::filters > 1 ? 0 * inputs +", RACE + "|" + WRONG, "filters-odd-rows"),
    single("no barrier after the filters", "__syncthreads();\n    if (!active)", "if (!active)",
           RACE + "|" + WRONG, "depthwise-multiplier-nchw", "one-channel-nhwc"),
    single("columns outside the image are read",
           "inside && (!Shape::checked || static_cast<unsigned>(column + first) < static_cast<unsigned>(Problem::w))",
           "inside", WRONG, "one-channel-nchw", "depthwise-multiplier-nhwc"),
    single("rows outside the image are read", "static_cast<unsigned>(i) < static_cast<unsigned>(Problem::h)", "true",
           WRONG, "one-channel-nchw", "one-channel-nhwc"),
    single("rows past the end are stored", "if (at_once > 1 && p + t >= last_p) continue;", "",
           WRONG, "one-channel-nchw", at_once=4, rows=4),
    single("every band begins at the top", "first_p = band * Tuning::rows", "first_p = 0",
           WRONG, "one-channel-nhwc", rows=4, at_once=2),
    single("the window stays where it is", "i < kept ? window[i + Shape::step][k]", "i < kept ? window[i][k]",
           WRONG, "one-channel-nchw", at_once=2, rows=6),
    single("new rows are those of this step", "load(next[i], p + at_once, kept + i,", "load(next[i], p, kept + i,",
           WRONG, "one-channel-nhwc", at_once=2, rows=8),
    single("a window forgets its stride", "[u * Problem::stride_w + s", "[u + s",
           WRONG, "depthwise-multiplier-nchw"),
    single("vectors begin at the window", "k * Shape::vector - Shape::lead", "k * Shape::vector",
           WRONG + "|misaligned", "float16-several-filters-nchw"),
    single("every filter has the weights of the first", "Shape::weight(turn, i)", "Shape::weight(0, i)",
           WRONG, "one-channel-nchw"),
    single("adjacent filters have the weights of the first", "Shape::weight(turn * Shape::side + mine, i)",
           "Shape::weight(0, i)", WRONG, "one-channel-nhwc"),
    single("every part has the first one's filters", "c * Problem::group_k + part * Shape::in_block",
           "c * Problem::group_k", WRONG, "one-channel-nchw", turns=4),
    single("a last part has as many filters as the others",
           "min(Shape::in_block, Problem::group_k - part * Shape::in_block)", "Shape::in_block", FENCE,
           "one-channel-nchw", turns=4),
    single("parts of rows leave a seam", "Problem::q + seam, part)", "Problem::q, part)", WRONG,
           "float16-several-filters-nchw", whole_sectors=True),
    single("parts of rows end too early", ">= static_cast<unsigned>(Shape::part)",
           ">= static_cast<unsigned>(Shape::part - Shape::seam)", WRONG,
           "float16-several-filters-nchw", whole_sectors=True),
    single("every turn stores the first one's place", "to += Shape::side * out_filter", "to += 0", WRONG,
           "one-channel-nchw"),
    single("threads left over store", "n < batch && mine < wanted", "mine < wanted", FENCE, "one-channel-nhwc"),
    single("bias of another filter", "to_float(bias[first_k + i])", "to_float(bias[i])", WRONG,
           "float16-several-filters-nchw"),
)  # fmt: skip
