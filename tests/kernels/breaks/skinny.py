"""native_gemm_skinny, broken on purpose."""

from __future__ import annotations

from tests.kernels.breaks.base import FENCE, RACE, RULE, UNDER_WAY, WRONG, breaks_of

skinny = breaks_of("native_gemm_skinny", "{}-nhwc", warps=4, m_tiles=1, stages=2)

RESIDUAL, PAIRS, GRADIENT = "float16-skinny", "bfloat16-skinny-pairs", "float16-gradient-skinny"

BREAKS = (
    skinny(
        "products do not wait for the pixels",
        "native_gemm_skinny",
        "{{mbarrier_wait_parity(tile.full(_._), ...);}}",
        UNDER_WAY | RACE | "nobody has waited",
        GRADIENT,
    ),
    skinny(
        "filters are read before they have come",
        "native_gemm_skinny",
        "{{mbarrier_wait_parity(tile.arrived(), 0);}}",
        UNDER_WAY | RACE | "nobody has waited",
        GRADIENT,
    ),
    skinny(
        "what is added is not there yet",
        "native_gemm_skinny",
        "{{mbarrier_wait_parity(tile.arrived(), held);}}",
        UNDER_WAY | RACE | "nobody has waited",
        RESIDUAL,
    ),
    skinny(
        "what is added comes where filters are still read",
        "native_gemm_skinny",
        "{{__syncthreads();}}",
        UNDER_WAY | RACE | RULE | WRONG,
        RESIDUAL,
        PAIRS,
        times=4,
        only=2,
    ),
    skinny(
        "outputs are stored before they are there",
        "native_gemm_skinny",
        "{{__syncthreads();}}",
        RACE | RULE | WRONG,
        GRADIENT,
        times=4,
        only=4,
    ),
    skinny(
        "copies do not see the outputs",
        "native_gemm_skinny",
        "{{fence_proxy_async();}}",
        "fence_proxy_async",
        GRADIENT,
        times=2,
        only=2,
    ),
    skinny(
        "a thread leaves before its copies have read",
        "native_gemm_skinny",
        "if (copies) {{cp_async_bulk_wait_group_read<0>(); => ;}}",
        "without having waited for its copy",
        GRADIENT,
    ),
    skinny(
        "filters past whole units are what lay there",
        "share_skinny_filters",
        "{{at < W::copied_filters ? filters[at] : w[at] => filters[at]}}",
        WRONG,
        PAIRS,
    ),
    skinny(
        "a gradient's filters as a layer reads them",
        "share_skinny_filters",
        "{{Tuning::mirrored ? c * W::k + k :}} k * W::c + c",
        WRONG,
        GRADIENT,
    ),
    skinny(
        "pixels past the end are stored",
        "native_gemm_skinny",
        "cp_async_bulk_global_shared(..., tile.outputs(), {{count(first) => W::pixels}} * (W::k * 2))",
        FENCE | WRONG | RULE,
        GRADIENT,
    ),
    skinny(
        "every tile has the first pixels",
        "native_gemm_skinny",
        "cp_async_bulk_shared_global(..., {{x + first * W::c => x}}, bytes, ...)",
        WRONG,
        RESIDUAL,
    ),
    skinny("all steps multiply the first channels", "multiply_skinny", "{{step * 16 +}} i * 8", WRONG, GRADIENT),
    skinny(
        "all filters are the first",
        "multiply_skinny",
        "{{step * W::n16s + first + n => step * W::n16s + n}}",
        WRONG,
        RESIDUAL,
    ),
    skinny(
        "outputs of a thread the other way round", "stage_skinny", "{{2 * half + i => 2 * half + 1 - i}}", WRONG, PAIRS
    ),
)
