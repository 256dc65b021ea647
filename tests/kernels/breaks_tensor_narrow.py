"""Kernels for 16-bit elements and for TF32 on tensor cores broken on purpose."""

from __future__ import annotations

from typing import Any

from tests.kernels.breaks import FENCE, RACE, WRONG, Break

#: How the emulator's machines complain: products, copies and barriers under way at the wrong time.
UNDER_WAY = "wgmma|mbarrier|cp.async.bulk|is stuck"


def narrow(name: str, text: str, by: str, how: str, *cases: str, times: int = 1, **tuning: Any) -> Break:
    names = tuple(f"{case}-nhwc" for case in cases)
    return Break(name, "tensor_gemm_narrow", text, by, how, names, times, tuple(tuning.items()))


def tf32(name: str, text: str, by: str, how: str, *cases: str, **tuning: Any) -> Break:
    names = tuple(f"tf32-{case}-nhwc" for case in cases)
    return Break(name, "tensor_gemm_tf32", text, by, how, names, 1, tuple(tuning.items()))


TENSOR_NARROW: tuple[Break, ...] = (
    narrow("a stage is freed while products read it", "                wgmma_wait_group<1>();\n", "", UNDER_WAY,
           "float16-copies-long"),
    narrow("products do not wait for the copies", "mbarrier_wait_parity(ring.full(place.stage), place.parity);", "",
           UNDER_WAY + "|" + RACE, "float16-copies-long"),
    narrow("copies do not wait for a free stage", "mbarrier_wait_parity(ring.free(place.stage), place.parity ^ 1);", "",
           UNDER_WAY + "|" + RACE, "float16-copies-long"),
    narrow("sums are read before the products are done", "        wgmma_wait_group<0>(sums);\n", "", UNDER_WAY,
           "float16-copies"),
    narrow("sums begin with what registers held", "stage > ring.first || piece > 0 || i > 0", "true", WRONG,
           "float16-copies"),
    narrow("products of one piece only", "stage > ring.first || piece > 0 || i > 0", "stage > ring.first || i > 0",
           WRONG, "float16-copies"),
    narrow("all warpgroups multiply the first pixels", "piece) + first_row * Ring::row_bytes", "piece)", WRONG,
           "float16-copies"),
    narrow("all blocks multiply the first pixels", "a + (block * 64 * Ring::row_bytes + 32 * i)", "a + 32 * i", WRONG,
           "float16-copies", blocks=2),
    narrow("filters of the first group", "first_k = tiles.group(tile) * Problem::group_k +", "first_k =", WRONG,
           "float16-copies-groups"),
    narrow("every part of a gradient has the first one's filters", "full, c, first_row + tap, first_k);",
           "full, c, tap, first_k);", WRONG, "bfloat16-gradient-copies-stride"),
    narrow("filters past the end are stored", "place[i].count == 0 || unit_k >= Problem::group_k",
           "place[i].count == 0", FENCE + "|" + WRONG, "bfloat16-copies-more", "float16-copies-groups", filters=64),
    narrow("pixels past the end are stored", "place[i].count == 0 || unit_k >= Problem::group_k",
           "unit_k >= Problem::group_k", RACE + "|" + WRONG, "float16-copies"),
    narrow("outputs are overwritten before they are stored", "__syncwarp();  // the part before has been read", "",
           RACE + "|" + WRONG, "float16-copies-long", filters=192),
    narrow("outputs are stored before they are there", "__syncwarp();\n#pragma", "\n#pragma", RACE + "|" + WRONG,
           "float16-copies-long"),
    narrow("sums lie where stages are still read", "barrier_sync(1, Ring::threads);  // the stages of this block", "//",
           UNDER_WAY + "|" + RACE, "float16-copies-long", filters=128, split=4),
    narrow("every block adds up the first one's sums", "sum += cluster_load(at, other)", "sum += cluster_load(at, 0)",
           WRONG, "float16-copies-long", filters=128, split=4),
    narrow("every block stores the first filters", "first_k + static_cast<int>(cluster_rank()) *", "first_k + 0 *",
           WRONG + "|" + RACE, "float16-copies-long", filters=128, split=4),
    narrow("bias of the first group", "to_float(bias[filter + i])", "to_float(bias[k + i])", WRONG,
           "float16-copies-groups"),
    narrow("pairs in the wrong order", "return cvt_rn_f16x2_f32(first, second);",
           "return cvt_rn_f16x2_f32(second, first);", WRONG, "float16-copies-long"),
    tf32("a stage is freed while products read it", "wgmma_wait_group<0>(sums, now);\n                if (lane",
         "if (lane", UNDER_WAY, "copies-long"),
    tf32("pixels are read before they are there",
         "        mbarrier_wait_parity(ring.full(place.stage), place.parity);\n#pragma", "#pragma",
         UNDER_WAY + "|" + RACE, "copies-long"),
    tf32("pixels change while products read them", "load(next, ring, place, first_row)",
         "load(now, ring, place, first_row)", UNDER_WAY + "|asan|sanitizer|" + WRONG, "copies-long"),
    tf32("rows of pixels as if they were not swizzled", " ^ row * units / 8 % units", "", WRONG, "copies-long"),
    tf32("units of the wrong rows", "lane % 16;\n    const unsigned char* const from",
         "lane % 8;\n    const unsigned char* const from", WRONG, "copies-long"),
    tf32("all warpgroups multiply the first pixels", "first_row + i / Tuning::pieces * 64", "i / Tuning::pieces * 64",
         WRONG, "copies"),
    tf32("all blocks multiply the first pixels", "first_row + i / Tuning::pieces * 64", "first_row", WRONG, "copies",
         blocks=2),
    tf32("products of the first eight channels only", "b + 32 * j,", "b,", WRONG, "copies-long"),
    tf32("the last filters are left out", "if (at < Problem::elements)", "if (at < Problem::elements - 1)", WRONG,
         "copies-long"),
    tf32("filters past the end are stored", "if (k < Problem::group_k) store_unit(to, v);", "store_unit(to, v);",
         FENCE + "|" + WRONG + "|" + RACE, "copies-long", filters=128),
    tf32("odd filters past the end are stored", "if (k + i < Problem::group_k) to[i] = v[i];", "to[i] = v[i];",
         FENCE + "|" + WRONG + "|" + RACE, "copies"),
    tf32("pixels past the end are stored", "if (places[half].count == 0) continue;\n                float", "float",
         FENCE + "|" + WRONG + "|" + RACE, "copies"),
)  # fmt: skip
