"""The kernel for the filters' gradient of 16-bit elements of NCHW on tensor cores broken on purpose."""

from __future__ import annotations

from typing import Any

from tests.kernels.breaks import FENCE, RACE, WRONG, Break
from tests.kernels.breaks_tensor_narrow import UNDER_WAY


def weight(name: str, text: str, by: str, how: str, *cases: str, times: int = 1, **tuning: Any) -> Break:
    names = tuple(f"{case}-nchw" for case in cases)
    return Break(name, "tensor_window_weight", text, by, how, names, times, tuple(tuning.items()))


TENSOR_WINDOW_WEIGHT: tuple[Break, ...] = (
    Break("all parts write to the first one's place", "tensor_window_weight_parts", "dw + part * all", "dw",
          RACE + "|NaN|" + WRONG, ("float16-weight-windows-nchw",)),
    weight("products do not wait for the windows",
           "        mbarrier_wait_parity(windows.window_full(place.stage), place.parity);\n", "",
           UNDER_WAY + "|" + RACE + "|" + WRONG, "float16-weight-windows"),
    weight("windows are freed while products read them",
           "            wgmma_wait_group<1>(pixels[(step + 1) % 2]);\n", "            wgmma_wait_group<3>();\n",
           UNDER_WAY + "|" + RACE, "float16-weight-windows"),
    weight("fragments are loaded while products read them", "wgmma_wait_group<1>(pixels[(step + 1) % 2]);",
           "wgmma_wait_group<2>();", UNDER_WAY, "float16-weight-windows"),
    weight("sums take the place of windows that others read",
           "    barrier_sync(1, 128 * Windows::consumers);  // all windows have been read\n", "",
           UNDER_WAY + "|" + RACE, "float16-weight-windows"),
    weight("sums are stored before all are there", "    else __syncthreads();\n", "", RACE + "|" + WRONG,
           "float16-weight-windows", split=1),
    weight("a cluster does not meet", "if constexpr (Tuning::split > 1) cluster_barrier();\n    else",
           "if constexpr (Tuning::split > 1) __syncthreads();\n    else", RACE + "|" + WRONG, "float16-weight-windows",
           split=2),
    weight("a block leaves while others read its sums",
           "weights, windows);\n    if constexpr (Tuning::split > 1) cluster_barrier();", "weights, windows);",
           "has left the kernel|left", "float16-weight-windows", split=2),
    weight("all blocks of a cluster store the first filters", "static_cast<int>(cluster_rank()) * filters, lane",
           "0 * filters, lane", "NaN|" + RACE + "|" + WRONG, "float16-weight-windows", split=2),
    weight("the last block of a cluster has no pixels", "end = static_cast<int>(all * (number + 1) /",
           "end = static_cast<int>(all * number /", WRONG, "float16-weight-windows"),
    weight("all groups of channels multiply the first", "channels * (Tuning::channels / 8) * Input::pitch * 16",
           "0 * (Tuning::channels / 8) * Input::pitch * 16", WRONG, "float16-weight-windows", channel_groups=2),
    weight("all groups of filters multiply the first", "const int own = (filters * 8 +", "const int own = (0 * 8 +",
           WRONG, "float16-weight-windows", filter_groups=2),
    weight("all groups of taps multiply the first", "const int tap = first_tap + i;", "const int tap = i;", WRONG,
           "float16-weight-windows", tap_groups=2),
    weight("pixels of a fragment trade places", "lane / 16 * 8 + lane % 8;", "(1 - lane / 16) * 8 + lane % 8;", WRONG,
           "float16-weight-windows"),
    weight("filters of a fragment trade places", "warp * 2 + lane / 8 % 2)", "warp * 2 + 1 - lane / 8 % 2)", WRONG,
           "float16-weight-windows"),
    weight("steps multiply the first sixteen pixels", "(lines[tap] + step * 16) * 16", "lines[tap] * 16", WRONG,
           "float16-weight-windows"),
    weight("eights of channels trade places", "128, Input::pitch * 16, 0)", "Input::pitch * 16, 128, 0)",
           WRONG + "|" + UNDER_WAY + "|" + RACE, "float16-weight-windows", channels=32),
    weight("a thread's second filter is its first", "to[i / 2 % 2 * 8 * Windows::pitch +", "to[0 * Windows::pitch +",
           WRONG + "|" + RACE + "|NaN", "float16-weight-windows"),
    weight("outputs beside the image have another's gradient",
           "h = Problem::p, w = Problem::q, c = Problem::k,", "h = Problem::p, w = Problem::q + 1, c = Problem::k,",
           WRONG + "|" + FENCE + "|misaligned", "float16-weight-windows"),
    weight("weights past the last channel are stored",
           "if (weights.first_channel + channel >= Problem::group_c) continue;", "", WRONG + "|" + RACE + "|NaN",
           "float16-weight-windows", channels=16),
    weight("filters past the last are stored", "min(first + filters, Problem::group_k - weights.first_filter)",
           "first + filters", FENCE + "|" + WRONG, "float16-weight-windows"),
    weight("what the gradient holds is left out", "held_by<Problem>(at, true)", "held_by<Problem>(at, false)", WRONG,
           "bfloat16-weight-windows-accumulate"),
    weight("the gradient of the first group", "static_cast<int64>(weights.group) * Problem::group_k + weights",
           "weights", "NaN|" + RACE + "|" + WRONG, "bfloat16-weight-groups"),
)  # fmt: skip
