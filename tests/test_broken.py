"""The test of the tests: kernels broken on purpose must fail the same check that proves the whole ones.

Each break is a textual patch, applied in a copy of the kernels' folder, in whichever header of the algorithm has the
text. A patch whose text is no longer there fails here: it would break nothing, and prove nothing.
"""

from __future__ import annotations

import itertools
import re
import shutil
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import emulator
import proof
import pytest
import selection
from cases import CASES, NARROW_CASES, TARGETS, TRANSFORM_CASES

from leanconv.algorithms import ALGORITHMS
from leanconv.algorithms.base import Config, GpuAlgorithm
from leanconv.problem import Problem
from leanconv.runtime.compile import KERNELS

#: How a break shows. Bad data may also be used as an address before it reaches the output.
FENCE = "use-after-poison|SEGV"
RACE = "a race: thread orders|misaligned|" + FENCE
WRONG = "error .* exceeds|between the rows|" + FENCE
GONE = "has left the kernel"
BARRIER = r"emulator: barrier \d"

PROBLEMS = {case.name: case.problem for case in (*CASES, *NARROW_CASES, *TRANSFORM_CASES)}


@dataclass(frozen=True)
class Break:
    """Replace ``text``, which is ``times`` times in the algorithm's headers, by ``by``: one of ``cases`` must tell
    ``how``.

    ``tuning``: values that the configuration has, where the best guess would not run the broken part.
    """

    name: str
    algorithm: str
    text: str
    by: str
    how: str
    cases: tuple[str, ...]
    times: int = 1
    tuning: tuple[tuple[str, Any], ...] = ()


def gemm(name: str, text: str, by: str, how: str, *cases: str, times: int = 1) -> Break:
    return Break(name, "implicit_gemm", text, by, how, cases, times)


def runs(name: str, text: str, by: str, how: str, *cases: str, times: int = 1, **tuning: Any) -> Break:
    return Break(name, "im2win_fused", text, by, how, cases, times, (("runs", True), *tuning.items()))


def win(name: str, text: str, by: str, how: str, *cases: str, times: int = 1) -> Break:
    return Break(name, "im2win", text, by, how, cases, times)


def wino(name: str, text: str, by: str, how: str, *cases: str, times: int = 1, **tuning: Any) -> Break:
    names = tuple(f"transform-{case}" for case in cases)
    return Break(name, "winograd1d", text, by, how, names, times, tuple(tuning.items()))


def cache(name: str, text: str, by: str, how: str, *cases: str, times: int = 1) -> Break:
    return Break(name, "register_cache", text, by, how, cases, times)


def flat(name: str, text: str, by: str, how: str, *cases: str, times: int = 1, **tuning: Any) -> Break:
    return Break(name, "winograd2d", text, by, how, cases, times, tuple(tuning.items()))


BREAKS = (
    gemm("no barrier after the table of taps", "__syncthreads();  // the pixel loader's table", "",
         RACE, "plain-nchw", "tails-nchw"),
    gemm("no barrier before the first step", "    __syncthreads();\n        read(0, 0);",
         "    read(0, 0);", RACE, "plain-nchw", "plain-nhwc"),
    gemm("no barrier between steps", "    __syncthreads();\n                    read(step + 1, 0);",
         "    read(step + 1, 0);", RACE, "plain-nchw", "tails-nchw"),
    gemm("waits for one group too few", "cp_async_wait_group<stages - 2>();",
         "cp_async_wait_group<stages - 1>();", RACE, "plain-nchw", "tails-nchw", times=4),
    gemm("never waits", "cp_async_wait_group<stages - 2>();", ";", RACE, "plain-nchw", "tails-nchw", times=4),
    gemm("halo one column too wide", "column < Problem::w", "column <= Problem::w",
         WRONG, "plain-nchw", times=2),
    gemm("halo one row too high", "row >= 0 && row < Problem::h", "row >= -1 && row < Problem::h",
         WRONG, "plain-nhwc", times=2),
    gemm("filters past the end are read", "if (k >= Problem::group_k) k = Problem::group_k - 1;", "",
         FENCE, "tails-nchw", "odd-nchw", times=2),
    gemm("filters of 16 bits past the end are read",
         "if (k >= Problem::group_k) k = Problem::group_k - 1;\n                    from = at_byte(w, offset +",
         "from = at_byte(w, offset +", FENCE, "bfloat16-tails-nchw"),
    gemm("pixels of 16 bits outside the image", "words[0] = valid ? from->bits : 0;", "words[0] = from->bits;",
         WRONG, "float16-odd-nchw"),
    gemm("pairs of 16 bits outside the image", "words[0] = valid ? *reinterpret_cast<const unsigned*>(from) : 0;",
         "words[0] = *reinterpret_cast<const unsigned*>(from);", WRONG, "float16-pairs-nhwc"),
    gemm("fours of 16 bits outside the image", "if (valid) v =", "v =", WRONG, "bfloat16-fours-nhwc"),
    gemm("a pair's first element twice", "words[i / 2] >> i % 2 * 16", "words[i / 2]", WRONG, "float16-pairs-nhwc"),
    Break("pairs of 16 bits where filters begin at odd elements", "implicit_gemm",
          "Problem::first_weight % count == 0 && ", "", "misaligned", ("bfloat16-gradient-odd-phases-nchw",),
          tuning=(("tile_k", 64), ("tile_pixels", 64))),
    Break("filters of 16 bits turned around into one row", "implicit_gemm", "(row + e) * pitch + slot",
          "row * pitch + slot", WRONG + "|" + RACE, ("bfloat16-fours-nchw",),
          tuning=(("tile_k", 64), ("tile_pixels", 64))),
    gemm("elements of 16 bits put where they are still read", "if (held && row == store_row) store(step + stages - 1);",
         "if (held && row == store_row) store(step);",
         WRONG + "|" + RACE, "float16-odd-nchw"),
    gemm("elements of 16 bits read before they are there",
         "    __syncthreads();\n                    read(step + 1, 0);", "    read(step + 1, 0);", RACE,
         "float16-odd-nchw", "bfloat16-fours-nhwc"),
    gemm("first elements of 16 bits read before they are there", "    __syncthreads();\n        read(0, 0);",
         "    read(0, 0);", RACE, "float16-odd-nchw", "bfloat16-fours-nhwc"),
    gemm("results of 16 bits cut off", "return {cvt_rn_bf16_f32(value)};",
         "return {static_cast<unsigned short>(__float_as_uint(value) >> 16)};", WRONG, "bfloat16-fours-nhwc"),
    gemm("results of 16 bits rounded twice", "value += bias;",
         "value = to_float(from_float<typename Problem::element>(value)) + bias;", WRONG, "bfloat16-tails-nchw"),
    gemm("four results of 16 bits in the wrong order", "v[0].bits | v[1].bits << 16", "v[1].bits | v[0].bits << 16",
         WRONG, "bfloat16-fours-nhwc"),
    gemm("pixels past the end are read", "number < count ? number : count - (images_in_fours<Problem> ? 4 : 1)",
         "number", FENCE, "tails-nchw", "odd-nchw"),
    gemm("ragged reduction unchecked", "size % depth == 0 || index < size", "true",
         WRONG, "tails-nchw", "odd-nchw"),
    gemm("pixels past the end are stored", "pixel < count ? 4 : 0", "4",
         FENCE, "odd-nchw", "tails-nchw", times=2),
    gemm("filters past the end are stored", "if (k >= Problem::group_k) continue;", "",
         FENCE, "odd-nchw", "tails-nchw"),
    gemm("bias of another filter", "bias[filter]", "bias[k]", WRONG, "groups-nchw"),
    gemm("a gradient's filters are not turned around", "position = of_each - 1 - tap / apart", "position = tap / apart",
         WRONG, "gradient-plain-nchw"),
    gemm("a gradient's filters are the first group's", "filter = static_cast<int64>(group) * Problem::group_k + k;",
         "filter = k;", WRONG, "gradient-groups-nhwc"),
    gemm("turned around without a barrier", "__syncthreads();\n#pragma unroll\n    for (int i = 0; i < side",
         "#pragma unroll\n    for (int i = 0; i < side", RACE, "gradient-plain-nhwc"),
    gemm("filters past the end are turned around", "if (k >= Problem::group_k || element >= size) continue;", "",
         FENCE, "gradient-odd-nchw"),
    gemm("filters past the end are read on the way", "if (k < Problem::group_k && element < size)", "",
         FENCE, "gradient-odd-nchw"),
    gemm("every part has the first one's filters", "w += first_weight +", "w +=", WRONG, "gradient-stride-nchw"),
    gemm("every phase has the first one's filters",
         "static_cast<int64>(phase.number) * Problem::k * Reduction<Problem>::size", "0",
         WRONG, "gradient-stride-equal-phases-nhwc"),
    gemm("phases with one tap more are not counted", "before = first ? 0 : more * (fewer_taps + 1)", "before = 0",
         WRONG + "|" + RACE, "gradient-stride-nchw"),
    gemm("a phase's windows are not moved", "pad_left += column / Problem::step_q, ", "",
         WRONG, "gradient-stride-equal-phases-nchw"),
    gemm("a phase begins where the first does", "first_p = row % Problem::step_p", "first_p = Problem::first_p",
         WRONG + "|" + RACE, "gradient-stride-equal-phases-nchw"),
    gemm("a phase's outputs side by side", "phase.first_q + at.q * Problem::step_q", "phase.first_q + at.q",
         WRONG, "gradient-stride-nhwc"),
    gemm("a phase stores past the last row", "row < Problem::out_h && column", "column",
         FENCE, "gradient-stride-eleven-nchw"),
    gemm("a phase stores past the last column", " && column < Problem::out_w", "", WRONG + "|" + RACE,
         "gradient-stride-patches-odd-nhwc"),
    gemm("a pixel outside every phase is left as it was",
         "if (!met) y[at] = from_float<typename Problem::element>(0.0f);", "", WRONG,
         "gradient-stride-over-filter-nchw"),
    gemm("pixels are counted from the padding's begin", "static_cast<int64>(at) + pad", "static_cast<int64>(at)",
         WRONG, "gradient-stride-over-filter-nhwc"),
    gemm("taps that a stride shared with the dilation leaves out", "rest % common == 0 && ", "",
         WRONG, "gradient-stride-shares-dilation-nchw"),
    gemm("steps of a dilated filter are not undone", "static_cast<int64>(rest / common) * inverse", "rest / common",
         WRONG, "gradient-stride-sparse-nchw"),
    gemm("the first image for all", "n = number - rest * static_cast<Offset<Problem>>(batch)", "n = 0",
         WRONG, "odd-chwn", "images-8-chwn"),
    gemm("of images past the end the last four are not whole", "count - (images_in_fours<Problem> ? 4 : 1)",
         "count - 1", "misaligned", "images-4-chwn"),
    gemm("a filter's outputs follow those of one image", "image *= pixels.batch", "image *= 1",
         WRONG + "|" + RACE, "plain-chwn"),
    gemm("adjacent filters past the end are read",
         "(Problem::group_k % Tuning::tile_k == 0 || first_k + k < Problem::group_k)", "true", FENCE, "odd-chwn"),
    gemm("adjacent filters of the first group for all", "group * Problem::group_k + first_k + column",
         "first_k + column", WRONG, "groups-chwn"),
    gemm("rows of adjacent filters past the last are read", "(size % depth == 0 || next + row + i < size)", "true",
         FENCE, "odd-chwn"),
    gemm("a gradient's adjacent filters as another layout counts them", "element % Problem::group_c * taps",
         "element % Problem::group_c", WRONG, "gradient-plain-chwn"),
    gemm("a gradient's adjacent channels are the first group's", "* channels + channel", "* channels + c",
         WRONG + "|" + RACE, "gradient-groups-chwn"),
    gemm("a phase's outputs lie as those of one image", "in_image * batch + at.n", "in_image + at.n",
         WRONG + "|" + RACE, "gradient-stride-chwn"),
    gemm("zeros where another image's pixels are", "Problem::chwn ? element / images", "Problem::chwn ? element",
         WRONG, "gradient-stride-over-filter-chwn"),
    runs("a run one pixel short", "(Problem::s - 1) * Problem::dilation_w + 1;",
         "(Problem::s - 1) * Problem::dilation_w;",
         WRONG, "odd-nchw"),
    runs("a run's left halo unchecked", "j + at >= 0 && j + at < Problem::w", "j + at < Problem::w", WRONG, "odd-nchw"),
    runs("a piece beside the image unchecked", "j + at >= 0 && j + at < Problem::w", "j + at < Problem::w",
         WRONG, "plain-nchw"),
    runs("a run's right halo one pixel too wide", "j + at >= 0 && j + at < Problem::w",
         "j + at >= 0 && j + at <= Problem::w",
         WRONG, "odd-nchw"),
    runs("a line below the image unchecked",
         "static_cast<unsigned>(h[c] + line_row[i]) < static_cast<unsigned>(Problem::h)",
         "static_cast<unsigned>(h[c] + line_row[i]) <= static_cast<unsigned>(Problem::h)", WRONG, "plain-nchw"),
    runs("runs past the end are read", " && fragment * 4 < places.count", "", FENCE, "odd-nchw"),
    runs("lines past the end are read", "total_lines % R::lines == 0 || next + line_of(i) < total_lines", "true",
         FENCE, "odd-nchw"),
    runs("pieces of four start where the run does", "Problem::pad_left - R::shift + in_chunk",
         "Problem::pad_left + in_chunk", "misaligned", "plain-nchw"),
    runs("outputs past a row's end are stored", "Problem::q - q < 4 ? Problem::q - q : 4", "4", RACE + "|" + WRONG,
         "odd-nchw"),
    runs("no step to the next channels", "offset[c] += static_cast<B>(period / Problem::r)",
         "offset[c] += 0 * static_cast<B>(period)",
         WRONG, "plain-nchw"),
    runs("one buffer where there should be two", "x[line % buffers][f]", "x[0][f]", WRONG, "plain-nchw"),
    runs("the only buffer overwritten early", "if (buffers == 2 && row % Problem::s == 0)",
         "if (row % Problem::s == 0)",
         WRONG, "plain-nchw", thread_pixels=12),
    runs("a part of the reduction begins at the first channel", "next / period * (period / Problem::r)", "0",
         WRONG, "long-reduction-nchw", split=4),
    runs("no cluster barrier before the sum", "cluster_barrier();\n        const int rank", "const int rank",
         RACE + "|" + WRONG, "long-reduction-nchw", split=2),
    runs("no cluster barrier after the sum", "cluster_barrier();\n#else", "\n#else", GONE, "long-reduction-nchw",
         split=2),
    runs("one block's part is not added", "other < Tuning::split; ++other", "other < Tuning::split - 1; ++other",
         WRONG, "long-reduction-nchw", split=4),
    runs("every block stores the first share", "Problem::nhwc ? 0 : rank * rows", "0", RACE + "|" + WRONG,
         "long-reduction-nchw", split=8),
    runs("a part of the reduction ends early", "Pixels::steps * (part + 1) / split",
         "first_step + Pixels::steps / split",
         WRONG, "long-reduction-nchw", split=8),
    runs("no barrier before a step without prefetch", "cp_async_wait_group<0>();\n            __syncthreads();",
         "cp_async_wait_group<0>();", RACE, "plain-nchw", prefetch=False),
    runs("no barrier after a step without prefetch", "            __syncthreads();\n        }", "        }",
         RACE, "plain-nchw", prefetch=False),
    runs("a fragment's words read from one place", "static_cast<const volatile float*>(row + f * step + i)",
         "static_cast<const volatile float*>(row + f * step)", WRONG, "plain-nchw", vector_loads=False),
    Break("columns are not shared out in NHWC", "im2win_fused", "column = Problem::nhwc ? rank * columns : 0",
          "column = 0", RACE + "|" + WRONG, ("long-reduction-nhwc",), tuning=(("split", 4),)),
    win("filters in their own order", "tap % Problem::r * Problem::s + tap / Problem::r", "tap", WRONG, "plain-nchw"),
    win("filters in their own order, channels last", "natural * Problem::group_c +", "tap * Problem::group_c +",
        WRONG, "plain-nhwc"),
    win("a window begins at its output's column", "static_cast<B>(pixel.q) * Problem::stride_w",
        "static_cast<B>(pixel.q)",
        WRONG, "stride-nchw"),
    win("a window's columns are not dilated", "column = number % Problem::s * Problem::dilation_w",
        "column = number % Problem::s", WRONG, "dilation-nchw"),
    win("the transform reads a row above the image", "i >= 0 && i < Problem::h && j >= 0",
        "i >= -1 && i < Problem::h && j >= 0",
        WRONG, "plain-nchw"),
    win("the transform reads a column beside the image", "j >= 0 && j < Problem::w);", "j >= 0 && j <= Problem::w);",
        WRONG, "plain-nhwc"),
    win("the transform writes past its end", "if (threadIdx.x + e * threads < left) to[", "to[",
        FENCE, "odd-nchw"),
    win("the transform reads past the end", "(number < left ? number : 0)", "number", FENCE, "odd-nchw"),
    win("the transform stays in the block's first plane", "next_plane = (first_p + below) / Problem::p",
        "next_plane = 0",
        WRONG, "odd-nchw"),
    win("the transform forgets the dilation", "tap % Problem::r * Problem::dilation_h", "tap % Problem::r",
        WRONG, "dilation-nhwc"),
    wino("no barrier after the table of columns", "__syncthreads();\n    for (int i = threadIdx.x; i < Tiles::sources",
         "for (int i = threadIdx.x; i < Tiles::sources", RACE, "width-4-nchw", "width-5-one-row-nhwc"),
    wino("no barrier after the table of sources", "const Tiles tiles;\n    __syncthreads();", "const Tiles tiles;",
         RACE + "|" + WRONG, "width-9-nhwc"),
    wino("no barrier between steps", "cp_async_wait_group<stages - 2>();\n        __syncthreads();",
         "cp_async_wait_group<stages - 2>();", RACE + "|" + WRONG, "width-4-nchw", "width-9-nhwc", producers=0),
    wino("waits for one group too few", "cp_async_wait_group<stages - 2>();\n        __syncthreads();",
         "cp_async_wait_group<stages - 1>();\n        __syncthreads();", RACE, "width-4-nchw", "width-9-nhwc",
         producers=0),
    wino("waits for one group of four too few", "cp_async_wait_group<stages - 2>();\n        __syncthreads();",
         "cp_async_wait_group<stages - 1>();\n        __syncthreads();", RACE, "width-3-nhwc", states=8, stages=4),
    wino("producers wait for one group too few", "cp_async_wait_group<stages - 2>();\n            barrier_arrive",
         "cp_async_wait_group<stages - 1>();\n            barrier_arrive", RACE, "width-3-nchw", producers=4),
    wino("producers wait for nobody", "if (step > taps) barrier_sync(empty(step - 1), Tiles::all_threads);", "",
         BARRIER, "width-3-nchw", producers=4),
    wino("nobody waits for producers", "if (step < steps - 1) barrier_sync(full(step + 1), Tiles::all_threads);", "",
         BARRIER, "width-3-nchw", producers=4),
    wino("steps take no turns at their barriers", "return 1 + step % 2;", "return 1;", BARRIER, "width-3-nchw",
         producers=4),
    wino("sums overwritten before they are read", "Tiles::barrier();  // the buffer has been read", "",
         RACE, "width-8-nhwc", thread_k=8),
    wino("sums read before they are there", "put(sums, round);\n            Tiles::barrier();", "put(sums, round);",
         RACE, "width-4-nhwc"),
    wino("outputs read before they are there",
         "if constexpr (staged) {\n                    Tiles::barrier();",
         "if constexpr (staged) {", RACE, "width-4-nchw", staged=True),
    wino("a tile's halo one column too wide", "(column.w + aside) < Problem::w", "(column.w + aside) <= Problem::w",
         WRONG, "width-4-nchw"),
    wino("a tile's halo one row too low", "(source.h + below) < Problem::h", "(source.h + below) <= Problem::h",
         WRONG, "width-4-nhwc"),
    wino("an output past a row's end is stored", "at.w + aside >= Problem::last_q", "at.w + aside > Problem::last_q",
         WRONG + "|" + RACE, "width-4-nhwc", times=4),
    wino("an output past a staged row's end is stored", "at.w + aside >= Problem::last_q",
         "at.w + aside > Problem::last_q", WRONG + "|" + RACE, "width-4-nchw", times=4, staged=True),
    wino("rows past the last are stored", "at.h + below >= Problem::p || ", "at.h < 0 || ", WRONG + "|" + RACE,
         "width-4-nchw", times=4, staged=True),
    wino("filters past the end are stored", "k >= Problem::group_k || at.h + below", "at.h + below",
         FENCE, "width-4-nchw", staged=True),
    wino("filters past the end are stored, channels last", "if (k + j < Problem::group_k) to[j]", "to[j]",
         WRONG + "|" + RACE, "width-4-nhwc"),
    wino("tiles of neighbouring rows in one piece", "Problem::row_tiles % width == 0 ? width : 1", "width",
         WRONG + "|" + RACE, "width-4-nchw", staged=False),
    wino("one filter row for all", "number % taps * Tiles::columns", "0 * number", WRONG, "width-3-nchw", "high-nhwc"),
    wino("one chunk of tiles where there should be two", "transformed + number % 2 * Tiles::tile_floats", "transformed",
         RACE + "|" + WRONG, "width-4-nchw"),
    wino("short sums are not added up", "total[k][t] = next;", "total[k][t] = sums[k][t];",
         WRONG, "width-8-nchw", "width-9-nhwc"),
    wino("a state takes its neighbour's sign", "M::mirrored_row(i) > 0 ? even - odd : odd - even", "even + odd",
         WRONG, "width-4-nchw"),
    wino("back from the states with one sign", "halves[j + 1] = x[j] - x[j + 1];", "halves[j + 1] = x[j] + x[j + 1];",
         WRONG, "width-9-nhwc"),
    wino("two states in a warp read the same half", "(filters_at ^ (apart & half)) + (apart & ~half)",
         "filters_at + apart", WRONG, "width-8-nchw", lanes_k=4),
    wino("a gradient's filters are not turned around", "Problem::rotated ? weights - 1 - weight : weight", "weight",
         WRONG, "gradient-width-3-nchw"),
    wino("a gradient's filter rows from the begin", "Problem::rotated ? all - first_row * width - weights :", "",
         WRONG, "gradient-high-dilated-nhwc"),
    wino("filters past the end are transformed", "first_outer + o < group_outer && ", "", FENCE, "width-4-nchw"),
    wino("filters transformed before they are there",
         "__syncthreads();\n\n    for (int e = threadIdx.x; e < filters * channels * rows",
         "for (int e = threadIdx.x; e < filters * channels * rows", RACE, "width-4-nhwc"),
    wino("the first group's filters for all", "static_cast<int64>(group) * (taps * Tiles::tap_blocks)",
         "0 * static_cast<int64>(group) * (taps * Tiles::tap_blocks)", WRONG, "groups-nchw"),
    wino("bias of another filter", "bias[group * Problem::group_k + k] : 0.0f", "bias[k] : 0.0f",
         WRONG, "groups-nchw"),
    wino("bias of another filter, channels last", "bias[group * Problem::group_k + k + j]", "bias[k + j]",
         WRONG, "groups-nhwc"),
    wino("channels past the end are read", "inside && (whole || c + j < Problem::group_c)", "inside",
         FENCE, "width-4-nhwc"),
    wino("images past the batch", "(Problem::chwn ? beyond > 0 : n >= batch) || ", "", FENCE, "width-4-nhwc"),
    wino("every segment begins with the row", "Problem::first_q + at * Problem::out_w", "at * Problem::out_w",
         WRONG, "width-3-nchw", states=8, segments=True),
    wino("every segment has the first one's filters", "u = prepared + Problem::prepared_offset +", "u = prepared +",
         WRONG, "width-3-nhwc", states=8, segments=True),
    wino("every part of a high filter begins at its first row",
         "step / taps / Tiles::chunks * taps * Problem::dilation_h", "0", WRONG, "high-nhwc", "higher-dilated-nchw"),
    wino("every part of a high filter has the first one's weights", "tap = block * taps + number % taps",
         "tap = number % taps", WRONG, "high-nchw"),
    wino("dilated rows one below the other", "position / Tiles::columns * Problem::dilation_h",
         "position / Tiles::columns", WRONG, "dilated-twice-nchw"),
    wino("tiles past the last are transformed",
         "if (Tiles::slice * taps != Tiles::positions && position >= Tiles::positions) continue;", "",
         RACE + "|" + WRONG, "short-row-nhwc", states=8, rows=8),
    wino("the first image for all", "number - of_image * static_cast<Offset<Problem>>(batch)", "0",
         WRONG, "images-8-chwn"),
    wino("four images from the place of one", "number % (runs / at_once) * at_once", "number % (runs / at_once)",
         WRONG + "|misaligned", "images-8-chwn"),
    wino("an output of four images past a row's end is stored", "at[0].w + aside >= Problem::last_q",
         "at[0].w + aside > Problem::last_q", WRONG + "|" + RACE, "images-4-chwn"),
    wino("an output of one image past a row's end is stored", "tile_at.w + aside >= Problem::last_q",
         "tile_at.w + aside > Problem::last_q", WRONG + "|" + RACE, "width-4-chwn"),
    wino("adjacent filters of one group", "* (Problem::groups * group_outer)", "* group_outer", WRONG, "groups-chwn"),
    Break("the first group's windows for all", "im2win_basic", "Window<Problem>(), k / Problem::group_k)",
          "Window<Problem>(), 0)", WRONG, ("groups-nchw",)),
    Break("outputs past the end are made", "im2win_basic", "if (at >= batch * Problem::k * image) return;", "",
          FENCE, ("odd-nchw",)),
    Break("halo one column too wide", "direct", "j >= Problem::w) continue", "j > Problem::w) continue",
          WRONG, ("plain-nchw",)),
    Break("products summed in 16 bits", "direct", "sum = fmaf(to_float(weight), to_float(pixel), sum);",
          "sum = to_float(from_float<typename Problem::element>(fmaf(to_float(weight), to_float(pixel), sum)));",
          WRONG, ("bfloat16-tails-nchw",)),
    Break("the first group's channels for all", "direct", "first_c = k / Problem::group_k * Problem::group_c",
          "first_c = 0", WRONG, ("groups-nhwc",)),
    Break("the first image for all", "direct", "Problem::chwn ? number % images", "Problem::chwn ? 0 * images",
          WRONG, ("odd-chwn",)),
    Break("a pixel's neighbour is another image", "direct", "* batch + n]", "+ n]", WRONG, ("plain-chwn",)),
    Break("adjacent filters of one group", "direct", "* Problem::k + k]", "* Problem::group_k + k]",
          WRONG, ("groups-chwn",)),
    flat("four images at once where the last are fewer", "Problem::chwn && Problem::vector_store", "Problem::chwn",
         "misaligned", "odd-chwn"),
    flat("channels follow a pixel of one image", "static_cast<int64>(j) * strides.channel", "static_cast<int64>(j)",
         WRONG + "|misaligned", "plain-chwn", "images-8-chwn"),
    flat("outputs follow those of one image", "(below * Problem::q + aside) * strides.pixel",
         "(below * Problem::q + aside)", WRONG + "|misaligned|" + RACE, "plain-chwn", "images-8-chwn"),
    flat("outputs of four images below the last row are stored", "at[0].h + below >= Problem::p || ", "",
         WRONG + "|" + RACE, "images-8-chwn"),
    flat("every row of a tile is made of the first one", "multiply_pairs<M>(to, half[i]);",
         "multiply_pairs<M>(to, half[0]);", WRONG, "plain-nchw"),
    flat("a tile's rows are those of the tile above", "Tuning::rows * Problem::out_h * Problem::dilation_h);",
         "Tuning::rows * Problem::dilation_h);", WRONG + "|" + RACE, "plain-nchw"),
    flat("filters of odd states are not exchanged", "Tiles::swapped(row, k)", "k", WRONG, "tails-nchw"),
    flat("a gradient's filters are not turned around", "Problem::rotated ? weights - 1 - weight : weight", "weight",
         WRONG, "gradient-plain-nhwc"),
    flat("outputs below the image are stored", "at.h + below >= Problem::p || at.w", "at.w",
         WRONG + "|" + RACE, "odd-nchw", "odd-nhwc", times=3),
    flat("tiles of different rows stored as one row", "Problem::row_tiles % width == 0 ? width : 1", "width",
         WRONG + "|" + RACE, "tails-nchw"),
    flat("filters past the end are stored", "if (!staged && k >= Problem::group_k) continue;", "",
         FENCE, "odd-nchw"),
    flat("a pair of sums in one place", "store_pair(to + 2, v[2], v[3]);", "store_pair(to, v[2], v[3]);",
         WRONG, "plain-nchw", wide_exchange=False),
    flat("four states of a warp in two planes", "state = threadIdx.x / lanes;", "state = threadIdx.x / lanes / 2 * 2;",
         WRONG, "transform-tiles-relaxed-nchw", states=36, lane_states=4, thread_tiles=8, lanes_k=4),
    cache("input rows and filter read before they are there",
          "cp_async_wait_group<0>();\n    __syncthreads();\n\n", "cp_async_wait_group<0>();\n\n",
          RACE, "border-constant"),
    cache("input rows not waited for", "cp_async_wait_group<0>();\n    __syncthreads();\n\n", "__syncthreads();\n\n",
          RACE, "border-constant"),
    cache("outputs staged over rows still in use", "__syncthreads();  // the input rows have been read", "//",
          RACE, "shape-7x7", "border-wrap-large"),
    cache("outputs staged without a barrier", "__syncwarp();", "", RACE, "border-constant", times=2),
    cache("inside test forgets the right halo", "j + Base::width + Base::right <= plane.width", "true",
          WRONG, "border-constant", "shape-7x7"),
    cache("inside test forgets the left halo", "j >= Base::left &&", "", WRONG, "shape-7x7"),
    cache("inside test one row too high", "first_row >= 0", "first_row >= -1", WRONG, "shape-2x2", "shape-7x7"),
    cache("inside test one row too low", "first_row + rows <= plane.height",
          "first_row + rows <= plane.height + 1", WRONG, "shape-4x4", "shape-7x7", "shape-5x3", "shape-3x5"),
    cache("inside test forgets alignment", "return reinterpret_cast<unsigned long long>(pointer) % 16 == 0",
          "return true || pitch == 0", "misaligned|aligned", "pitch-odd"),
    cache("columns past the end are stored", "if (32 * k + lane < count)", "", WRONG, "border-constant"),
    cache("rows past the end are stored", "if (i + p < height) writer", "writer", FENCE, "border-constant"),
    cache("reflect off by one", "2 * extent - 1 - m", "2 * extent - 2 - m", WRONG, "border-reflect"),
    cache("reflect101 off by one", ": 2 * extent - 2 - m", ": 2 * extent - 3 - m", WRONG, "border-reflect101"),
    cache("wrap without the modulo", "return positive_modulo(i, extent);",
          "return i < 0 ? i + extent : i - extent;", FENCE, "border-wrap-over-image"),
    cache("constant border reads the image", "int map(int, int) { return -1; }",
          "int map(int, int) { return 0; }", WRONG, "border-constant"),
    cache("filter shifted by one weight", "* ring[(turn + p) % depth][k + e + c]",
          "* ring[(turn + p) % depth][k + e + c - (e > 0)]", WRONG, "border-constant"),
)  # fmt: skip


def headers_of(broken: Break, kernels: Path) -> list[Path]:
    """What the launches for the break's cases include."""
    algorithm = next(a for a in ALGORITHMS if a.name == broken.algorithm)
    problems = [PROBLEMS[name] for name in broken.cases]
    plans = [algorithm.plan(problem, tuned(broken, algorithm, problem), TARGETS[0]) for problem in problems]
    ahead = [kernels / launch.header for plan in plans for launch in plan.every_launch]
    found: list[Path] = []
    while ahead:
        if (path := ahead.pop()) not in found:
            found.append(path)
            names = re.findall(r"#include <(.+)>", path.read_text())
            ahead += [kernels / name for name in names if (kernels / name).exists()]
    return found


def broken_kernels(broken: Break, folder: Path) -> Path:
    """A copy of the kernels with the patch applied."""
    copy = folder / "kernels"
    shutil.copytree(KERNELS, copy)
    headers = {header: header.read_text() for header in headers_of(broken, copy)}
    found = sum(text.count(broken.text) for text in headers.values())
    assert found == broken.times, (
        f"{broken.text!r} is in the headers of {broken.algorithm} {found} times, not {broken.times}: adapt the patch"
    )
    for header, text in headers.items():
        header.write_text(text.replace(broken.text, broken.by))
    return copy


def tuned(broken: Break, algorithm: GpuAlgorithm, problem: Problem) -> Config:
    """The best guess among the configurations with the break's tuning; switches that none has are set by hand."""
    wishes = dict(broken.tuning)
    configs = list(algorithm.configs(problem, TARGETS[0]))

    def granted(config: Config) -> int:
        return sum(getattr(config, name) == value for name, value in wishes.items())

    best = max(configs, key=granted)
    return replace(best, **wishes)


def every_third() -> list[Any]:
    """All breaks; ``make test`` plays every third of each algorithm, for they prove the checks, not the kernels."""
    turn = {name: itertools.count() for name in {b.algorithm for b in BREAKS}}
    chosen = [b for b in BREAKS if next(turn[b.algorithm]) % 3 == 0]
    return selection.marked(BREAKS, chosen, lambda b: ((b,), f"{b.algorithm}: {b.name}"))


@pytest.mark.parametrize("broken", every_third())
def test_broken_kernel_is_caught(broken, tmp_path):
    algorithm = next(a for a in ALGORITHMS if a.name == broken.algorithm)
    kernels = broken_kernels(broken, tmp_path)

    def check() -> None:
        for name in broken.cases:
            run = partial(emulator.run_plan, kernels=kernels)
            proof.check(algorithm, PROBLEMS[name], tuned(broken, algorithm, PROBLEMS[name]), run=run)

    with pytest.raises((emulator.EmulatorError, proof.WrongAnswer), match=broken.how):
        check()


def test_every_algorithm_is_broken_on_purpose():
    assert {b.algorithm for b in BREAKS} == {a.name for a in ALGORITHMS}


def test_a_patch_that_finds_nothing_fails(tmp_path):
    stale = gemm("stale", "text that is not there", "", RACE, "plain-nchw")
    with pytest.raises(AssertionError, match="adapt the patch"):
        broken_kernels(stale, tmp_path)
