"""native_gemm_pointwise, broken on purpose."""

from __future__ import annotations

from tests.kernels.breaks.base import FENCE, GONE, RACE, RULE, STUCK, UNDER_WAY, WRONG, breaks_of

pointwise = breaks_of("native_gemm_pointwise", "{}-nchw")

TMA, LONG, FOURS, PAIRS = "bfloat16-blocks-tma", "float16-images-long", "float16-images-fours", "bfloat16-images-pairs"
ODD, GROUPS = "float16-images-odd", "bfloat16-images-groups"
GRADIENT, ODD_GRADIENT = "float16-gradient-images", "bfloat16-gradient-images-odd"
STRIDED, STRIDED_GRADIENT = "float16-images-strided", "bfloat16-gradient-images-strided-odd"
NARROW = {"channel_block": 32, "split": 1}

BREAKS = (
    pointwise(
        "products do not wait for the copies",
        "consume",
        "{{mbarrier_wait_parity(_.full(...), ...);}}",
        UNDER_WAY | RACE | WRONG | "nobody has waited",
        TMA,
    ),
    pointwise(
        "a stage is freed while products read it",
        "consume",
        "{{if constexpr (!_._) wgmma_wait_group<1>();}}",
        UNDER_WAY | RACE,
        LONG,
        **NARROW,
    ),
    pointwise(
        "copies do not wait for a free stage",
        "copy_by_tma",
        "{{mbarrier_wait_parity(_.empty(...), ...);}}",
        UNDER_WAY | RACE,
        LONG,
        **NARROW,
    ),
    pointwise(
        "lanes do not wait for a free stage",
        "copy_by_lanes",
        "{{mbarrier_wait_parity(_.empty(...), ...);}}",
        UNDER_WAY | RACE | RULE | "arrive in phase",
        ODD,
        **NARROW,
    ),
    pointwise(
        "sums are stored before the products are done", "finish", "else {{wgmma_wait_group<0>(sums);}}", UNDER_WAY, TMA
    ),
    pointwise(
        "sums of odd channels are added before they are complete",
        "finish",
        "if constexpr (in_registers) {{wgmma_wait_group<0>(...); => ;}}",
        UNDER_WAY | RULE,
        ODD,
    ),
    pointwise(
        "fragments change while products read them",
        "load_filters",
        "{{wgmma_wait_group<0>(...);}}",
        UNDER_WAY | RULE,
        ODD,
        **NARROW,
    ),
    pointwise("filters of the first group", "copy_filters", "full, c, filter, {{group => 0}}", WRONG, GROUPS),
    pointwise("pixels of the first group, by TMA", "copy_by_tma", "c, {{group => 0}}, at.image", WRONG, GROUPS),
    pointwise(
        "pixels of the first group, by lanes",
        "LanePixels::begin",
        "{{Tiles::group(tile) * Problem::group_c +}} c",
        WRONG,
        "float16-gradient-images-groups",
    ),
    pointwise(
        "lanes arrive before their copies have landed",
        "copy_by_lanes",
        "{{cp_async_mbarrier_arrive(full) => mbarrier_arrive(full)}}",
        RULE | RACE | WRONG,
        ODD,
        **NARROW,
    ),
    pointwise(
        "products do not see what lanes copied", "consume", "{{fence_proxy_async();}}", "fence_proxy_async", FOURS
    ),
    pointwise("lanes copy as if rows were not swizzled", "LanePixels::LanePixels", "{{^ _ % 8}}", WRONG, FOURS),
    pointwise(
        "lanes copy later rows as if they were not swizzled",
        "LanePixels::copy",
        "(at {{^ line_of(_) % 8 * 16}})",
        WRONG,
        PAIRS,
    ),
    pointwise(
        "all lines of lanes are the first channel",
        "LanePixels::copy",
        "{{static_cast<int64>(turn * rows) * Tiles::pixels => 0}} : _",
        WRONG,
        PAIRS,
    ),
    pointwise(
        "lanes copy the first stage's channels again",
        "LanePixels::copy",
        "{{_[_] += static_cast<int64>(Tuning::channel_block) * Tiles::pixels;}}",
        WRONG,
        ODD,
        **NARROW,
    ),
    pointwise(
        "odd channels are copied from their first pixel on",
        "LanePixels::begin",
        "{{- moved}}",
        WRONG | RULE | "misaligned",
        ODD,
    ),
    pointwise(
        "odd channels lie between even ones",
        "OddPixels::row",
        "{{channel / 2 + channel % 2 * (channels / 2) => channel}}",
        WRONG,
        ODD,
    ),
    pointwise(
        "at a stride every pixel",
        "StridedPixels::begin",
        "{{2 * q => q}} : 0",
        WRONG | RULE | "misaligned",
        STRIDED,
    ),
    pointwise(
        "at a stride pieces of eight pixels, behind the end of a channel",
        "StridedPixels",
        "piece = {{gcd(gcd(apart, Problem::stride_h * Problem::w), 8) => 8}}",
        WRONG | RULE | FENCE | "misaligned",
        "bfloat16-images-strided-odd",
    ),
    pointwise(
        "at a stride the pixels between",
        "StridedPixels::store_stage",
        "make_uint2(__byte_perm(w[0], w[1], {{0x5410 => 0x7632}}), ...)",
        WRONG,
        STRIDED,
    ),
    pointwise(
        "at a stride lanes do not wait for a free stage",
        "copy_strided",
        "{{mbarrier_wait_parity(_.empty(...), ...);}}",
        UNDER_WAY | RACE | RULE,
        "float16-images-strided-long",
        **NARROW,
    ),
    pointwise(
        "at a stride a stage is announced before all lanes have stored",
        "copy_strided",
        "{{__syncwarp();}}",
        UNDER_WAY | RACE | WRONG,
        STRIDED,
    ),
    pointwise("at a stride rows are not swizzled", "StridedPixels::StridedPixels", "{{^ row}}", WRONG, STRIDED),
    pointwise(
        "no zeros below a strided gradient",
        "PointwiseOutput::store_apart",
        "row < {{2 => 1}}",
        WRONG | RACE,
        STRIDED_GRADIENT,
    ),
    pointwise("odd sums are not moved", "add_moved", "+= odd[i {{+ 1}}]", WRONG, ODD),
    pointwise(
        "the last lane takes its own eight's first column", "add_moved", "? {{next_eight => odd[i]}} :", WRONG, ODD
    ),
    pointwise(
        "even and odd channels trade places", "sort", "even[_][_] = __byte_perm(..., {{0x5410 => 0x7632}})", WRONG, ODD
    ),
    pointwise("filters as if they were not swizzled", "OddFilters::load", "(unit {{^ swizzle}})", WRONG, ODD),
    pointwise(
        "a gradient's even and odd filters as they lie",
        "copy_filters",
        "{{c / 2 => c}}, 0, group",
        WRONG,
        ODD_GRADIENT,
        **NARROW,
    ),
    pointwise("all steps multiply the first channels", "multiply_stage", "+ {{Ring::filter_step *}} i", WRONG, TMA),
    pointwise(
        "all boxes of a gradient's filters are the first",
        "copy_filters",
        "full, filter {{+ i * 64}}, c, group",
        WRONG,
        GRADIENT,
    ),
    pointwise("all warpgroups multiply the first filters", "filter_operand", "{{+ number * m64}}", WRONG, TMA, FOURS),
    pointwise(
        "all boxes are the first one", "copy_by_tma", "tiles.place(tile, {{box * 64 => 0}})", WRONG, TMA, columns=128
    ),
    pointwise("all images are the first", "PointwiseTiles::place", "{{number / of_image => 0}}", WRONG | RACE, PAIRS),
    pointwise(
        "filters past the end are stored",
        "PointwiseOutput::for_units",
        "{{line >= filters ||}}",
        FENCE | WRONG | RACE,
        TMA,
    ),
    pointwise(
        "pixels past the end are stored",
        "PointwiseOutput::for_units",
        "{{|| place.pixel >= pixels}}",
        FENCE | WRONG | RACE,
        TMA,
    ),
    pointwise(
        "images past the end are stored",
        "PointwiseOutput::for_units",
        "{{|| place.image >= batch}}",
        FENCE | WRONG | RACE,
        TMA,
        columns=256,
    ),
    pointwise(
        "columns that are not complete are stored",
        "PointwiseOutput::for_units",
        "{{|| begin + column >= Tiles::step}}",
        WRONG | RACE,
        ODD_GRADIENT,
        columns=64,
    ),
    pointwise(
        "outputs are overwritten before they are stored",
        "PointwiseOutput::store",
        "{{__syncwarp();}}",
        RACE | WRONG,
        TMA,
        times=3,
        only=1,
        columns=128,
    ),
    pointwise(
        "residuals are read before they are there",
        "PointwiseOutput::store",
        "{{__syncwarp();}}",
        RACE | WRONG,
        FOURS,
        times=3,
        only=2,
    ),
    pointwise(
        "the next residuals replace these",
        "PointwiseOutput::store",
        "residuals[ahead ? {{1 - own => own}} : 0].load(...)",
        WRONG,
        FOURS,
        columns=256,
    ),
    pointwise(
        "outputs are stored before they are there",
        "PointwiseOutput::store",
        "{{__syncwarp();}}",
        RACE | WRONG,
        TMA,
        times=3,
        only=3,
    ),
    pointwise(
        "bias of the first group",
        "PointwiseOutput::store",
        "{{Tiles::group(tile) * Problem::group_k +}} k;",
        WRONG | RACE,
        GROUPS,
    ),
    pointwise(
        "sums lie where stages are still read",
        "PointwiseSums::store",
        "{{barrier_sync(...);}}",
        UNDER_WAY | RACE,
        LONG,
        split=2,
        channel_block=32,
    ),
    pointwise(
        "every block stores the first pixels",
        "PointwiseSums::store",
        "{{static_cast<int>(cluster_rank()) => 0}}",
        WRONG | RACE,
        LONG,
        split=2,
    ),
    pointwise(
        "a block leaves while others read its sums",
        "native_gemm_pointwise",
        "{{meet_in_cluster();}}",
        GONE | STUCK | RACE,
        LONG,
        times=2,
        only=2,
        split=2,
    ),
)
