"""native_weight_kmajor, broken on purpose."""

from __future__ import annotations

from tests.kernels.breaks.base import FENCE, GONE, RACE, STUCK, UNDER_WAY, WRONG, breaks_of

weight = breaks_of("native_weight_kmajor", "{}-nchw")
split_k = breaks_of("native_weight_kmajor_split_k", "{}-nchw")

ROWS, GROUPS = "bfloat16-weight-copied-rows", "float16-weight-copied-rows-groups"
TAP_ROWS = "float16-weight-copied-rows-of-taps"

BREAKS = (
    weight(
        "products do not wait for the copies",
        "sum_stages",
        "{{mbarrier_wait_parity(_.full(...), ...);}}",
        UNDER_WAY | RACE | WRONG,
        ROWS,
    ),
    weight(
        "a stage is freed while products read it",
        "sum_stages",
        "{{wgmma_wait_group<1>(...) => wgmma_wait_group<3>()}}",
        UNDER_WAY | RACE,
        ROWS,
    ),
    weight(
        "fragments are loaded while products read them",
        "sum_stages",
        "{{wgmma_wait_group<1>(...) => wgmma_wait_group<2>()}}",
        UNDER_WAY,
        ROWS,
    ),
    weight(
        "copies do not wait for a free stage",
        "copy_stages",
        "{{mbarrier_wait_parity(_.empty(...), ...);}}",
        UNDER_WAY | RACE,
        ROWS,
        stages=3,
        rows=2,
        split=1,
    ),
    weight(
        "sums are stored before the products are done", "sum_stages", "{{wgmma_wait_group<0>(...);}}", UNDER_WAY, ROWS
    ),
    weight(
        "sums take the place of stages that others read",
        "sum_tile",
        "{{barrier_sync(...);}} float",
        UNDER_WAY | RACE,
        ROWS,
        rows=2,
        stages=3,
        split=1,
    ),
    weight(
        "sums are stored before all are there",
        "sum_tile",
        "{{else barrier_sync(...);}}",
        RACE | WRONG | "NaN",
        ROWS,
        split=1,
    ),
    weight(
        "a block leaves while others read its sums",
        "sum_tile, native_weight_kmajor",
        "{{if constexpr (Tuning::split > 1) meet_in_cluster();}}",
        GONE | STUCK | "left|deadlock",
        ROWS,
        times=2,
        only=2,
        split=2,
    ),
    weight(
        "the last block of a cluster has no pixels",
        "StageShare::StageShare",
        "* {{(}} _ {{+ 1)}}",
        WRONG,
        ROWS,
        split=2,
    ),
    weight(
        "all blocks of a cluster store the first filters",
        "store_sums",
        "{{static_cast<int>(cluster_rank()) => 0}} * _",
        RACE | "NaN" | WRONG,
        ROWS,
        split=2,
    ),
    weight(
        "all taps of a row read the same pixels",
        "sum_tile",
        "- (_.s + {{_ => 0}}) * Problem::dilation_w",
        WRONG,
        ROWS,
        column_groups=3,
    ),
    weight(
        "odd columns move by whole words", "MovedPixels::load", "{{half(_) ?}} __byte_perm(...) {{: _}}", WRONG, ROWS
    ),
    weight(
        "odd columns take the halves of one word",
        "MovedPixels::load",
        "high = _[_][word(_) {{+ half(_)}} - _]",
        WRONG,
        ROWS,
    ),
    weight(
        "a lane's second filter is its first", "MovedPixels::load", "_ % 2 * {{8 => 0}} * Ring::dy_row", WRONG, ROWS
    ),
    weight("pixels of a fragment are the first eight", "MovedPixels::load", "_ / 2 * {{16 => 0}} +", WRONG, ROWS),
    weight(
        "the window begins a unit later",
        "WeightTile::window_begin",
        "* Problem::dilation_w {{=> + 8}}",
        WRONG | FENCE,
        ROWS,
    ),
    weight(
        "all rows of a stage are multiplied with the first",
        "sum_stages",
        "{{_ * Tuning::row_step * Ring::x_tile +}} _ * 32",
        WRONG,
        ROWS,
    ),
    weight("steps multiply the first sixteen pixels", "sum_stages", "Ring::x_tile + {{_ => 0}} * 32", WRONG, GROUPS),
    weight(
        "all groups of filters multiply the first",
        "sum_tile",
        "{{_ % Tuning::filter_groups => 0}} * 64",
        WRONG | RACE | "NaN",
        ROWS,
        filter_groups=2,
    ),
    weight(
        "output rows follow each other at once",
        "copy_stages",
        "row = _ {{* Problem::stride_h}} + _",
        WRONG,
        GROUPS,
    ),
    weight(
        "output rows of a stage are neighbours",
        "copy_stages",
        "{{_ / Share::spacing * (...) + _ % Share::spacing => rows * Tuning::rows}}",
        WRONG,
        GROUPS,
    ),
    weight("pixels of the first group", "copy_stages", "{{_.group => 0}} * Problem::group_c", WRONG, GROUPS),
    weight(
        "rows of x begin at the first of the image",
        "copy_stages",
        "_.r * Problem::dilation_h {{- Problem::pad_top}}",
        WRONG,
        ROWS,
    ),
    weight(
        "every tile begins with the first row of taps",
        "copy_stages",
        "{{_.r * Problem::dilation_h => 0}} - Problem::pad_top",
        WRONG,
        TAP_ROWS,
    ),
    weight(
        "the gradient of the first group",
        "store_sums",
        "(static_cast<int64>({{_.group => 0}}) * Problem::group_k",
        RACE | "NaN" | WRONG,
        GROUPS,
    ),
    weight(
        "what the gradient holds is left out", "store_sums", "held_by<Problem>(_, {{true => false}})", WRONG, GROUPS
    ),
    weight(
        "filters past the last are stored",
        "store_sums",
        "min(min(...), {{Problem::group_k => 1000}} -",
        FENCE | WRONG,
        ROWS,
    ),
    weight(
        "channels past the last are stored",
        "store_sums",
        "{{if (_.first_channel + _ >= Problem::group_c) continue;}}",
        FENCE | WRONG | RACE | "NaN",
        ROWS,
    ),
    weight(
        "rows of taps past the last are stored",
        "store_sums",
        "{{if (Problem::r % Tile::tap_rows != 0 && ...) continue;}}",
        FENCE | WRONG | RACE | "NaN",
        TAP_ROWS,
    ),
    weight(
        "columns of taps past the last are stored",
        "store_sums",
        "{{if (Problem::s % Tile::tap_columns != 0 && ...) continue;}}",
        FENCE | WRONG | RACE | "NaN",
        GROUPS,
        column_groups=3,
    ),
    split_k("all partial sums in one place", "native_weight_kmajor", "dw {{+ _ * _}}", RACE | "NaN" | WRONG, ROWS),
)
