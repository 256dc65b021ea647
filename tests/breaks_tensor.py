"""`tensor_gemm` broken on purpose (see breaks.py)."""

from __future__ import annotations

from typing import Any

from breaks import FENCE, RACE, WRONG, Break

#: What the emulator says of a product, a copy or a barrier that is used against its rules.
RULE = "wgmma|bulk|mbarrier|cp_async|barrier|ld_shared|deadlock|fence"


def tensor(name: str, text: str, by: str, how: str, *cases: str, times: int = 1, **tuning: Any) -> Break:
    names = tuple(f"tensor-{case}" for case in cases)
    return Break(name, "tensor_gemm", text, by, how, names, times, tuple(tuning.items()))


TENSOR = (
    tensor(
        "pixels are free before the products have taken them",
        "            float partial[partials][count];",
        "            if (lane == 0) mbarrier_arrive(rings.pixels_free(pixel_place.stage));\n"
        "            float partial[partials][count];",
        RULE + "|" + RACE,
        "same-nhwc",
    ),
    tensor(
        "filters are free while products read them",
        "                end_products(now, pixels, filters);",
        "                if (lane == 0) mbarrier_arrive(rings.filters_free(filter_place.stage));\n"
        "                end_products(now, pixels, filters);",
        RULE,
        "same-nhwc",
        filter_stages=2,
        pixel_stages=2,
    ),
    tensor(
        "filters are copied a phase too early",
        "mbarrier_wait_parity(rings.filters_free(place.stage), place.parity ^ 1)",
        "mbarrier_wait_parity(rings.filters_free(place.stage), place.parity)",
        RULE,
        "same-nhwc",
    ),
    tensor(
        "pixels are read a phase too early",
        "mbarrier_wait_parity(rings.pixels_full(pixel_place.stage), pixel_place.parity)",
        "mbarrier_wait_parity(rings.pixels_full(pixel_place.stage), pixel_place.parity ^ 1)",
        RULE + "|" + RACE,
        "same-nhwc",
        times=2,
    ),
    tensor("no fence before the next sums", "else wgmma_fence(now);", "", RULE, "same-nhwc", chunks=2, partials=2),
    tensor(
        "sums are added before the wait",
        "wgmma_wait_group<1>(partial[(chunk - 1) % 2]);",
        "",
        RULE + "|use-after-poison",
        "same-nhwc",
        chunks=2,
        partials=2,
    ),
    tensor(
        "copies count too few bytes",
        "mbarrier_arrive_expect_tx(rings.pixels_full(place.stage), Rings::pixel_bytes)",
        "mbarrier_arrive_expect_tx(rings.pixels_full(place.stage), Rings::pixel_bytes / 2)",
        RULE + "|" + RACE,
        "same-nhwc",
    ),
    tensor(
        "columns are full before they have landed",
        "cp_async_wait_group<1>();",
        "cp_async_wait_group<2>();",
        RULE + "|" + RACE,
        "odd-nchw",
        flat=False,
    ),
    tensor("both rows are scaled back as the first", "down[i / 2 % 2]", "down[0]", WRONG, "same-nhwc"),
    tensor(
        "low halves of filters are those of the high ones",
        "matrix_descriptor(filters + chunk * split_depth * 2, 0, 1024, 128)",
        "high",
        WRONG,
        "same-nhwc",
    ),
    tensor(
        "low halves of pixels lie in another order",
        "return cvt_rn_f16x2_f32(fmaf(a, up, -first), fmaf(b, up, -second));",
        "return cvt_rn_f16x2_f32(fmaf(b, up, -second), fmaf(a, up, -first));",
        WRONG,
        "same-nhwc",
    ),
    tensor(
        "filters are in the order of memory",
        "of_chunk / 16 * 16 + place_of(of_chunk % 16)",
        "of_chunk",
        WRONG,
        "same-nhwc",
    ),
    tensor(
        "the reduction is in the order of memory",
        "return element_at(place);",
        "return place;",
        WRONG,
        "same-nhwc",
    ),
    tensor("filters are not swizzled", "(unit ^ row % 8) * 16", "unit * 16", WRONG, "same-nhwc"),
    tensor(
        "filters past the last are stored",
        "if (in_group + j < Problem::group_k) to[j * step] = result[j];",
        "to[j * step] = result[j];",
        FENCE + "|" + WRONG,
        "same-nchw",
    ),
    tensor(
        "a piece's channels past the group's are read",
        "Problem::group_c % F::piece == 0 || first_c + c < Problem::group_c",
        "true",
        FENCE + "|" + WRONG,
        "few-channels-nhwc",
        piece=2,
        flat=False,
    ),
    tensor(
        "pixels beside the image are those of other rows",
        "inside ? value : 0.0f",
        "value",
        WRONG,
        "same-nchw",
        flat=True,
        piece=32,
    ),
    tensor(
        "flat pixels begin where the box does",
        "of_tap, apart) & 3 : 0",
        "of_tap, apart) & 0 : 0",
        WRONG,
        "same-nchw",
        flat=True,
        piece=32,
    ),
    tensor(
        "the box of flat pixels begins anywhere",
        "(tap, apart) & ~3",
        "(tap, apart)",
        RULE,
        "same-nchw",
        flat=True,
        piece=32,
    ),
    tensor(
        "columns outside the image are read",
        "static_cast<unsigned>(w[i] + right) < Problem::w",
        "true",
        WRONG,
        "odd-nchw",
        flat=False,
    ),
    tensor(
        "taps are dilated as the other axis",
        ": of_row * Problem::dilation_w;",
        ": of_row;",
        WRONG,
        "dilation-nhwc",
    ),
    tensor(
        "the second half of a stage is the first",
        "const int number = 2 * F::seen(stage) + half;",
        "const int number = 2 * F::seen(stage);",
        WRONG,
        "same-nhwc",
    ),
    tensor(
        "sums of the first block alone",
        "sums[i][j] += cluster_load(at, other)",
        "sums[i][j] += 0",
        WRONG,
        "same-nhwc",
        split=2,
    ),
    tensor(
        "a block leaves before others have read its sums",
        "    share.gather(mine, at);\n    meet_in_cluster();",
        "    share.gather(mine, at);",
        RACE + "|" + RULE,
        "same-nhwc",
        split=2,
    ),
    tensor(
        "each block of a cluster has all stages",
        "tile = left + blockIdx.x / split;\n            first = static_cast<int>(cluster_rank()) * share",
        "tile = left + blockIdx.x / split;\n            first = 0",
        WRONG,
        "same-nhwc",
        split=2,
    ),
    tensor(
        "the second group has the first one's pixels",
        "first_c(tiles.group(tile) * Problem::group_c)",
        "first_c(0)",
        WRONG,
        "groups-nhwc",
        times=2,
    ),
    tensor(
        "pixels are free before the products of one product have taken them",
        "            if (tap == F::tap_stages - 1) pixel_place.advance();",
        "            if (lane == 0) mbarrier_arrive(rings.pixels_free(pixel_place.stage));\n"
        "            if (tap == F::tap_stages - 1) pixel_place.advance();",
        RULE + "|" + RACE,
        "one-product-nhwc",
    ),
    tensor(
        "filters are free while the one product reads them",
        "            before = here;",
        "            before = here;\n            if (lane == 0) mbarrier_arrive(rings.filters_free(here));",
        RULE,
        "one-product-nhwc",
        filter_stages=2,
        pixel_stages=2,
    ),
    tensor(
        "fragments are overwritten under way",
        "            wgmma_wait_group<1>(next);",
        "            wgmma_wait_group<2>();",
        RULE,
        "one-product-nhwc",
    ),
    tensor(
        "rows of outputs do not end for a row of taps",
        "(in_row + lines[i]) / Problem::q * (Problem::s - 1)",
        "0",
        WRONG,
        "rows-of-taps-nhwc",
        row_lines=168,
    ),
    tensor(
        "all taps of a row see the same pixels",
        "{lines[0] + tap, lines[1] + tap}",
        "{lines[0], lines[1]}",
        WRONG,
        "rows-of-taps-nhwc",
        row_lines=168,
    ),
    tensor(
        "blocks share the taps of a row",
        "ceil_div(all / F::tap_stages, split) * F::tap_stages",
        "ceil_div(all, split)",
        WRONG + "|" + RULE,
        "rows-of-taps-nhwc",
        row_lines=168,
        split=4,
    ),
)
