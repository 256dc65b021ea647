"""native_gemm_swapped, broken on purpose."""

from __future__ import annotations

from tests.kernels.breaks.base import FENCE, RACE, UNDER_WAY, WRONG, breaks_of

swapped = breaks_of("native_gemm_swapped", "{}-nhwc", filters=64)

ONE, GRADIENT = "float16-copies-one-by-one", "float16-gradient-copies"

BREAKS = (
    swapped(
        "a stage is freed while products read it",
        "SwappedConsumer::consume",
        "{{wgmma_wait_group<1>();}}",
        UNDER_WAY,
        GRADIENT,
        stages=3,
    ),
    swapped(
        "products do not wait for the copies",
        "SwappedConsumer::consume",
        "{{mbarrier_wait_parity(_.full(...), ...);}}",
        UNDER_WAY | RACE | "nobody has waited",
        ONE,
    ),
    swapped(
        "sums are read before the products are done",
        "SwappedConsumer::consume",
        "{{wgmma_wait_group<0>(_);}}",
        UNDER_WAY,
        ONE,
    ),
    swapped(
        "sums begin with what registers held",
        "SwappedConsumer::consume",
        "{{_ > _.first || _ > 0 || _ > 0 => true}}",
        RACE | WRONG,
        ONE,
    ),
    swapped(
        "all steps of filters are the first", "SwappedConsumer::consume", "{{+ Ring::filter_step * _}}", WRONG, GRADIENT
    ),
    swapped(
        "all warpgroups have the first pixels",
        "SwappedConsumer::consume",
        "{{alike ? 0 : warpgroup * pixels => 0}}",
        WRONG | RACE,
        GRADIENT,
        m_tiles=1,
    ),
    swapped(
        "both warpgroups have the first filters",
        "SwappedConsumer::consume",
        "{{warpgroup *}} (Tuning::mirrored ? Ring::box_bytes : 64 * Ring::row_bytes)",
        WRONG,
        ONE,
        filters=128,
    ),
    swapped(
        "outputs are stored before they are there",
        "SwappedConsumer::store",
        "{{barrier_sync(...);}}",
        RACE | WRONG,
        ONE,
        times=2,
        only=2,
    ),
    swapped(
        "outputs are overwritten before they are stored",
        "SwappedConsumer::store",
        "{{barrier_sync(...);}}",
        RACE | WRONG,
        ONE,
        times=2,
        only=1,
    ),
    swapped(
        "pairs of pixels are stored as pairs of filters",
        "SwappedConsumer::store",
        "{{movmatrix_trans(rounded_pair(T{}, v)) => rounded_pair(T{}, v)}};",
        WRONG,
        ONE,
    ),
    swapped(
        "pixels past the end are stored", "SwappedConsumer::store", "{{place.count > 0 &&}}", RACE | WRONG | FENCE, ONE
    ),
    swapped("filters past the end are stored", "SwappedConsumer::store", "{{&& exist > 0}}", RACE | WRONG | FENCE, ONE),
)
