"""The kernel for 16-bit elements of NCHW on tensor cores broken on purpose."""

from __future__ import annotations

from typing import Any

from tests.kernels.breaks import FENCE, RACE, WRONG, Break
from tests.kernels.breaks_tensor_narrow import UNDER_WAY


def window(name: str, text: str, by: str, how: str, *cases: str, times: int = 1, **tuning: Any) -> Break:
    names = tuple(f"{case}-nchw" for case in cases)
    return Break(name, "tensor_window", text, by, how, names, times, tuple(tuning.items()))


TENSOR_WINDOW: tuple[Break, ...] = (
    window("a window is freed while products read it", "                    wgmma_wait_group<1>();\n", "",
           UNDER_WAY + "|" + RACE, "float16-windows"),
    window("products do not wait for the window",
           "            mbarrier_wait_parity(rings.window_full(window.stage), window.parity);\n", "",
           UNDER_WAY + "|" + RACE + "|" + WRONG, "float16-windows"),
    window("pixels do not wait for a free window",
           "load(next);\n        mbarrier_wait_parity(rings.window_free(place.stage), place.parity ^ 1);",
           "load(next);", UNDER_WAY + "|" + RACE + "|" + WRONG, "float16-windows"),
    window("copies do not wait for a free stage",
           "                mbarrier_wait_parity(rings.filters_free(place.stage), place.parity ^ 1);\n", "",
           UNDER_WAY + "|" + RACE, "float16-windows"),
    window("products do not see what threads stored", "            fence_proxy_async();\n", "", "fence_proxy_async",
           "float16-windows"),
    window("sums are read before the products are done", "        wgmma_wait_group<0>(sums);\n", "", UNDER_WAY,
           "float16-windows"),
    window("sums begin with what registers held", "!first || i > 0", "true", RACE + "|" + WRONG, "float16-windows"),
    window("all warpgroups multiply the first pixels", "lines[tap] + first_row)", "lines[tap])", WRONG,
           "float16-windows"),
    window("all blocks multiply the first pixels", " + block * Operand::block", "", WRONG, "float16-windows",
           blocks=2),
    window("pixels beside the image are those of other rows", "h < Source::h && w < Source::w", "h < Source::h",
           WRONG + "|" + RACE, "float16-windows"),
    window("pixels below the image are those of the next channel", "h < Source::h && w < Source::w", "w < Source::w",
           WRONG + "|" + RACE, "float16-windows"),
    window("pixels past the last image are loaded", "n < batch && h", "h", FENCE + "|" + WRONG, "float16-windows"),
    window("channels of the next group",
           "const int exist = Source::whole ? 8 : Source::group_c - c - i * 8;", "const int exist = 8;",
           FENCE + "|" + WRONG, "float16-odd"),
    window("a stride's planes trade places", "+ Right::number_of(right);",
           "+ Right::planes() - 1 - Right::number_of(right);", WRONG, "float16-windows-stride"),
    window("pixels of a unit trade places", "const int pixel = (own + j) % count,", "const int pixel = j,", WRONG,
           "float16-windows"),
    window("channels of a pair trade places", "(a & 0xffffu) | b << 16", "(b & 0xffffu) | a << 16", WRONG,
           "float16-windows"),
    window("a line that no window has is stored beyond", "seen ? plane * Source::lines + place : Source::all_lines",
           "plane * Source::lines + place", UNDER_WAY + "|" + RACE + "|" + WRONG, "float16-windows"),
    window("filters of the first group", "filter * filter_of + eight", "0 * filter_of + eight", WRONG,
           "float16-windows"),
    window("filters of a gradient lie forwards", "Problem::last_column - column * Problem::apart_w",
           "column * Problem::apart_w", WRONG, "float16-gradient-tails"),
    window("channels past the end are those of the next filter", "eight * 8 + c < Problem::group_c", "true",
           FENCE + "|" + WRONG, "float16-odd"),
    window("bias of the first group", "bias[group * Problem::group_k + k]", "bias[k]", WRONG, "float16-groups"),
    window("outputs are overwritten before they are stored",
           "if (whole) barrier_sync(1 + warpgroup, 128);  // the part", "//", RACE + "|" + WRONG, "float16-windows",
           filters=128),
    window("outputs are stored before they are there",
           "            if (!whole) continue;\n            barrier_sync(1 + warpgroup, 128);\n",
           "            if (!whole) continue;\n", RACE + "|" + WRONG, "float16-windows"),
    window("outputs past the last whole unit are left out", "if (!first && !last) edge_filter = part;",
           "if (!first) edge_filter = part;", "NaN|" + WRONG, "float16-windows"),
    window("filters past the end are stored", "min(part, Problem::group_k - first_k - of_part)", "part",
           FENCE + "|" + WRONG + "|" + RACE, "float16-odd"),
    window("copied channels overlap", "int sixteen = 16 * 128,", "int sixteen = 8 * 128,", WRONG,
           "bfloat16-windows-copied", copied=True),
    window("a copied window is taken before it is there", "mbarrier_arrive_expect_tx(full, Rings::window_bytes);",
           "mbarrier_arrive_expect_tx(full, Rings::window_bytes / 2);", UNDER_WAY + "|expects|" + RACE,
           "bfloat16-windows-copied", copied=True),
    window("all images' windows are copied of the first", "chunk * Tuning::chunk, n);", "chunk * Tuning::chunk, 0);",
           WRONG, "bfloat16-windows-copied", copied=True),
)  # fmt: skip
