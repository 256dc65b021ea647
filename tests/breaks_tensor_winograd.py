"""`tensor_winograd` broken on purpose (see breaks.py)."""

from __future__ import annotations

from typing import Any

from breaks import RACE, WRONG, Break
from breaks_tensor import RULE


def pairs(name: str, text: str, by: str, how: str, *cases: str, times: int = 1, **tuning: Any) -> Break:
    names = tuple(f"pairs-{case}-nhwc" for case in cases)
    return Break(name, "tensor_winograd", text, by, how, names, times, tuple(tuning.items()))


TENSOR_WINOGRAD = (
    pairs(
        "the exchanged sums are overwritten before they are read",
        "            sum = warpgroup == 0 ? both + other : other - both;\n        }\n        barrier_sync(14, 256);",
        "            sum = warpgroup == 0 ? both + other : other - both;\n        }",
        RACE + "|" + WRONG,
        "same",
    ),
    pairs(
        "sums are read before the other warpgroup has written them",
        "sums[1][(first + i) / count][(first + i) % count];\n        barrier_sync(14, 256);",
        "sums[1][(first + i) / count][(first + i) % count];",
        RACE + "|" + WRONG,
        "same",
    ),
    pairs(
        "pixels are free before the products have taken them",
        "            load_states<scaled>(fragments",
        "            if (lane == 0) mbarrier_arrive(rings.pixels_free(pixel_place.stage));\n"
        "            load_states<scaled>(fragments",
        RULE + "|" + RACE,
        "same",
    ),
    pairs(
        "filters are free while products read them",
        "                end_products(partial, states, filters);",
        "                if (lane == 0) mbarrier_arrive(rings.filters_free(filter_place.stage));\n"
        "                end_products(partial, states, filters);",
        RULE + "|" + RACE,
        "same",
    ),
    pairs(
        "rows of outputs do not end",
        " + (in_row + pair + i) / P::q * 2 + sharer",
        " + sharer",
        WRONG,
        "odd",
    ),
    pairs(
        "the first pair of a tile begins a row", "static_cast<int>(tiles.first_pixel(tile) % P::q)", "0", WRONG, "wide"
    ),
    pairs("the last of an odd row is stored", "number < count && q < Problem::q", "number < count", WRONG, "odd"),
    pairs(
        "a warpgroup takes the filters of the other",
        "filter_place.stage = warpgroup",
        "filter_place.stage = 1 - warpgroup",
        WRONG + "|" + RULE,
        "same",
    ),
    pairs(
        "states of filters are in another order",
        "(own * chunks + chunk) * 2 + sharer",
        "(own * chunks + chunk) * 2 + 1 - sharer",
        WRONG,
        "same",
    ),
    pairs(
        "the middle states of filters are alike",
        "state == 1 ? outer + inner : outer - inner",
        "outer + inner",
        WRONG,
        "same",
    ),
    pairs(
        "all segments of a row see the same pixels",
        "F::states > 1 ? segment_begin(of_row, Problem::s)",
        "F::states > 1 ? 0",
        WRONG,
        "two-segments",
    ),
    pairs(
        "columns count twice where segments overlap",
        "begin + s < 3 * segment ? 0.0f : ",
        "",
        WRONG,
        "two-segments",
    ),
    pairs(
        "filter rows of a dilated filter are neighbours",
        "tap / F::of_row * Problem::dilation_h;",
        "tap / F::of_row;",
        WRONG,
        "tall",
    ),
)
