"""`tensor_winograd` broken on purpose (see breaks.py)."""

from __future__ import annotations

from typing import Any

from tests.kernels.breaks import GONE, RACE, WRONG, Break
from tests.kernels.breaks_tensor import RULE

STUCK = "the cluster is stuck"


def pairs(name: str, text: str, by: str, how: str, *cases: str, times: int = 1, **tuning: Any) -> Break:
    names = tuple(f"pairs-{case}-nhwc" for case in cases)
    return Break(name, "tensor_winograd", text, by, how, names, times, tuple(tuning.items()))


def flat(name: str, text: str, by: str, how: str, *cases: str, times: int = 1, **tuning: Any) -> Break:
    names = tuple(f"pairs-{case}-nchw" for case in cases)
    return Break(name, "tensor_winograd", text, by, how, names, times, tuple(tuning.items()))


def received(name: str, text: str, by: str, how: str, case: str = "odd") -> Break:
    """Of filters that pairs of blocks receive together."""
    return pairs(name, text, by, how, case, split=1, receivers=2, turns=True)


TENSOR_WINOGRAD = (
    flat("pixels beyond the sides of the image are seen", "d[j] = inside[j] ?", "d[j] = true ?", WRONG, "same"),
    flat("all pairs begin with an even pixel", "if (first % 2 == 0)", "if (true)", WRONG, "same", times=2),
    flat("pixels near the middle are never inside", "least == 0 || least == 1", "least < 2", WRONG, "same"),
    flat(
        "the halves of the filters change places",
        "tiles.numbers.odd * (F::filters / 2)",
        "0",
        WRONG + "|" + RACE,
        "same",
    ),
    flat("flat channels are in the order of rows", "column_at(place) : place", "place : place", WRONG, "same"),
    flat(
        "what rounds an image up is stored",
        "number < count && in_image < Pixels::image",
        "number < count",
        WRONG + "|" + RACE,
        "images",
    ),
    flat(
        "flat copies begin a tile at the first image", "n[i] = Problem::chwn ? 0 :", "n[i] = true ? 0 :", WRONG, "same"
    ),
    flat(
        "planes begin with the image",
        "i == 0 ? begin : flat_begin<Problem>(), c,",
        "0, c,",
        WRONG,
        "planes",
        spacing=2,
    ),
    flat(
        "pairs of planes are those of the first image",
        "static_cast<int>(n - first_n) * 32",
        "0",
        WRONG,
        "planes",
        spacing=2,
    ),
    flat(
        "planes of every image begin with the same pixel",
        "(n == first_n ? moved : 0)",
        "moved",
        WRONG,
        "planes-images",
        spacing=2,
    ),
    flat(
        "planes are free when their last segment begins",
        "(now == taps - 1 || is_last)",
        "(now == 0 || is_last)",
        RULE + "|" + RACE,
        "one-product-planes",
        spacing=1,
        split=1,
    ),
    pairs(
        "the exchanged sums are overwritten before they are read",
        "+ others[(i ^ 2) * 128];\n        }\n        barrier_sync(14, 256);",
        "+ others[(i ^ 2) * 128];\n        }",
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
        "        load_states<scaled>(x, pixels, rings.base",
        "        if (lane == 0) mbarrier_arrive(rings.pixels_free(pixel_place.stage));\n"
        "        load_states<scaled>(x, pixels, rings.base",
        RULE + "|" + RACE,
        "same",
    ),
    pairs(
        "filters are free while products read them",
        "        end_products(partial, states, filters);",
        "        if (lane == 0) mbarrier_arrive(rings.filters_free(place));\n"
        "        end_products(partial, states, filters);",
        RULE + "|" + RACE,
        "same",
    ),
    pairs(
        "rows of outputs do not end",
        " + (in_row + number) / P::q * 2",
        "",
        WRONG,
        "odd",
    ),
    pairs(
        "the first pair of a tile begins a row", "static_cast<int>(tiles.first_pixel(tile) % P::q)", "0", WRONG, "wide"
    ),
    pairs("the last of an odd row is stored", "number < count && q < Problem::q", "number < count", WRONG, "odd"),
    pairs(
        "a warpgroup takes the filters of the other",
        "OwnFilters(int warpgroup) : warpgroup(warpgroup)",
        "OwnFilters(int warpgroup) : warpgroup(1 - warpgroup)",
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
        "the pairs of the other warpgroup are in the same order",
        "others[(i ^ 2) * 128]",
        "others[i * 128]",
        WRONG,
        "same",
    ),
    pairs("a row's swizzled pixels are a line apart", "next * (128 + 16)", "next * 128", WRONG, "same"),
    pairs(
        "two rows of outputs see the same filter rows",
        "place.stage ^ static_cast<int>(before)",
        "place.stage ^ 0",
        WRONG + "|" + RULE + "|" + RACE,
        "two-segments",
        heights=2,
    ),
    pairs(
        "filters are let go before the second row of outputs has met them",
        "if ((!kept || part > 0) && lane == 0)",
        "if (lane == 0)",
        WRONG + "|" + RULE + "|" + RACE,
        "heights",
        times=2,
        heights=2,
    ),
    pairs(
        "filters of a row are not waited for",
        "if (!kept || part == 0) mbarrier_wait_parity(rings.filters_full",
        "if (!kept) mbarrier_wait_parity(rings.filters_full",
        WRONG + "|" + RULE + "|" + RACE,
        "heights",
        times=2,
        heights=2,
    ),
    pairs(
        "segments come before rows of pixels",
        "stage % seen_rows * row_stages + stage / seen_rows",
        "stage",
        WRONG + "|" + RULE,
        "two-segments",
        heights=2,
    ),
    pairs(
        "a row of outputs past the last is stored",
        "exists && p < Problem::p",
        "exists",
        WRONG + "|" + RACE,
        "heights",
        heights=2,
    ),
    pairs(
        "a row of outputs leaves out a row of filters that it sees",
        "const int outside = above > 0 ? ceil_div(above, Problem::dilation_h) : 0;",
        "const int outside = above > 0 ? ceil_div(above, Problem::dilation_h) + 2 : 2;",
        WRONG + "|" + RULE,
        "one-row-of-images",
        one_row=True,
    ),
    pairs(
        "every row of outputs sees the pixels of the first",
        "down = tiles.row(tile) * Problem::stride_h;",
        "down = 0;",
        WRONG,
        "one-row-of-images",
        one_row=True,
    ),
    pairs(
        "the blocks of a cluster share all stages where a tile has fewer",
        "end = first + (rank + 1) * stages / split;",
        "end = first + (rank + 1) * all / split;",
        WRONG + "|" + RULE,
        "same",
        one_row=True,
        split=2,
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
        "return segment_begin(segment, Problem::s) + column >= 3 * segment;",
        "return true;",
        WRONG,
        "two-segments",
    ),
    pairs(
        "the column that segments leave sees their pixels",
        "if constexpr (F::rest > 0) return 3 * of_row;",
        "if constexpr (F::rest > 0) return 0;",
        WRONG,
        "one-column",
    ),
    pairs(
        "both outputs see the pixel that a column leaves to the first",
        "where(place, pair, 2, sixteen)",
        "where(place, pair, 0, sixteen)",
        WRONG,
        "one-column",
    ),
    flat(
        "state 3 of a flat column has the sign of state 0",
        "const float sign = sharer == 0 ? 1.0f : -1.0f;",
        "const float sign = 1.0f;",
        WRONG,
        "one-column",
    ),
    flat(
        "a column beyond the sides of the image is seen",
        "inside ? sign * __uint_as_float",
        "true ? sign * __uint_as_float",
        WRONG,
        "one-column",
    ),
    pairs(
        "pixels of a column in the last row but one meet no filters",
        "if (number >= seen_whole) return number - (seen_whole - whole_stages);",
        "if (number >= seen_whole) return number;",
        WRONG + "|" + RULE + "|" + RACE,
        "one-column",
        heights=2,
    ),
    pairs(
        "filters of a column stay in the ring like those of a segment",
        "before ? all / 2 - states : 0",
        "before ? all / 2 - 2 : 0",
        WRONG + "|" + RULE + "|" + RACE,
        "one-column",
        heights=2,
    ),
    pairs(
        "filters of columns lie as far apart as those of segments",
        "of_tile + stage * stage_chunks - less + chunk_of_tile",
        "of_tile + stage * stage_chunks + chunk_of_tile",
        WRONG + "|" + RACE + "|" + RULE,
        "one-column",
    ),
    pairs(
        "filter rows of a dilated filter are neighbours",
        "F::row_of(tap, F::seen_rows) * Problem::dilation_h;",
        "F::row_of(tap, F::seen_rows);",
        WRONG,
        "tall",
    ),
    received(
        "a block asks for filters that the other one of the pair has no room for",
        "rings.filters_wanted(place.stage), first + i)",
        "rings.filters_wanted(place.stage), cluster_rank())",
        STUCK + "|" + RULE + "|" + RACE,
    ),
    received(
        "filters are copied when one of the pair wants them",
        "mbarrier_init(filters_wanted(i), receivers)",
        "mbarrier_init(filters_wanted(i), 1)",
        STUCK + "|" + RULE + "|" + RACE,
    ),
    received(
        "each block of a pair copies to itself alone",
        "((1 << receivers) - 1) << first",
        "1 << cluster_rank()",
        STUCK,
    ),
    received(
        "both blocks of a pair copy the first half", "cluster_rank() - first) * part", "0) * part", RULE + "|" + WRONG
    ),
    received(
        "blocks of a pair have the same tile",
        "tile % receivers) * F::tiles",
        "0) * F::tiles",
        WRONG + "|" + RACE,
        "wide",
    ),
    received(
        "a warpgroup gives its turn to itself",
        "barrier_arrive(1 + next, 256)",
        "barrier_arrive(1 + warpgroup, 256)",
        STUCK + "|" + RULE,
    ),
    received(
        "a block leaves while the other one of the pair sends it filters",
        "__syncwarp();\n        meet_in_cluster();\n    }\n}",
        "__syncwarp();\n    }\n}",
        GONE,
    ),
)
