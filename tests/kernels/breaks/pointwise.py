"""native_gemm_pointwise, broken on purpose."""

from __future__ import annotations

from tests.kernels.breaks.base import FENCE, GONE, RACE, RULE, STUCK, UNDER_WAY, WRONG, breaks_of

pointwise = breaks_of("native_gemm_pointwise", "{}-nchw")

TMA, LONG, FOURS, PAIRS = "bfloat16-blocks-tma", "float16-images-long", "float16-images-fours", "bfloat16-images-pairs"
ODD, GROUPS = "float16-images-odd", "bfloat16-images-groups"
GRADIENT, ODD_GRADIENT = "float16-gradient-images", "bfloat16-gradient-images-odd"
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
        "produce",
        "{{mbarrier_wait_parity(_.empty(...), ...);}}",
        UNDER_WAY | RACE,
        LONG,
        times=2,
        only=1,
        **NARROW,
    ),
    pointwise(
        "lanes do not wait for a free stage",
        "produce",
        "{{mbarrier_wait_parity(_.empty(...), ...);}}",
        UNDER_WAY | RACE | RULE,
        ODD,
        times=2,
        only=2,
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
    pointwise("pixels of the first group, by TMA", "produce", "c, {{group => 0}}, tiles.image(...)", WRONG, GROUPS),
    pointwise(
        "pixels of the first group, by lanes",
        "LanePixels::copy",
        "{{group * Problem::group_c +}} c",
        WRONG,
        "float16-gradient-images-groups",
    ),
    pointwise(
        "lanes announce a stage before its copies have landed",
        "produce",
        "{{cp_async_wait_group<Lanes::late>();}}",
        RULE | RACE | WRONG,
        ODD,
        **NARROW,
    ),
    pointwise(
        "lanes announce the last stages before their copies have landed",
        "produce",
        "{{cp_async_wait_group<0>();}}",
        RULE | RACE | WRONG,
        FOURS,
    ),
    pointwise(
        "products do not see what lanes copied", "produce", "{{fence_proxy_async();}}", "fence_proxy_async", FOURS
    ),
    pointwise("lanes copy as if rows were not swizzled", "LanePixels::copy", "{{^ _ % 8}}", WRONG, FOURS),
    pointwise(
        "all lines of lanes are the first channel",
        "LanePixels::copy",
        "{{static_cast<int64>(_) * Tiles::pixels => 0}} - _",
        WRONG,
        PAIRS,
    ),
    pointwise(
        "odd channels are copied from their first pixel on",
        "LanePixels::copy",
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
        "the pixels behind the last box are those of the first",
        "multiply_stage",
        "{{whole / 64 => 0}}",
        WRONG,
        FOURS,
        columns=200,
    ),
    pointwise(
        "all boxes are the first one",
        "produce",
        "tiles.first_pixel(tile, segment) {{+ box * 64}}",
        WRONG,
        TMA,
        columns=128,
    ),
    pointwise(
        "all segments are the first image", "PointwiseTiles::image", "{{+ segment}}", WRONG | RACE, PAIRS, segments=2
    ),
    pointwise(
        "filters past the end are stored",
        "PointwiseOutput::for_units",
        "{{filter < filters &&}}",
        FENCE | WRONG | RACE,
        TMA,
    ),
    pointwise(
        "pixels past the end are stored", "PointwiseOutput::for_units", "{{&& pixel < left}}", FENCE | WRONG | RACE, TMA
    ),
    pointwise(
        "columns that are not complete are stored",
        "PointwiseOutput::store",
        "{{min(pixels - from, Tiles::step) => pixels - from}}",
        WRONG | RACE,
        ODD_GRADIENT,
        columns=64,
    ),
    pointwise(
        "outputs are overwritten before they are stored",
        "PointwiseOutput::store",
        "{{__syncwarp();}}",
        RACE | WRONG,
        FOURS,
        times=3,
        only=1,
        columns=200,
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
