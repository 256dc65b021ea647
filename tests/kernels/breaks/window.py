"""native_gemm_window, broken on purpose."""

from __future__ import annotations

from tests.kernels.breaks.base import FENCE, RACE, STUCK, UNDER_WAY, WRONG, breaks_of

tf32 = breaks_of("native_gemm_window_tf32", "{}-nhwc", filters=64, m_tiles=1, resident=False)
window = breaks_of("native_gemm_window", "{}-nhwc", filters=64, m_tiles=1, resident=False)

PLAIN, LONG, GRADIENT = "float16-copies", "float16-copies-long", "float16-gradient-copies"

BREAKS = (
    window(
        "a stage is freed while products read it",
        "multiply_windows",
        "{{wgmma_wait_group<1>();}}",
        UNDER_WAY,
        GRADIENT,
        stages=3,
    ),
    window(
        "products do not wait for the filters",
        "multiply_windows",
        "{{mbarrier_wait_parity(ring.full(_._), ...);}}",
        UNDER_WAY | RACE | "nobody has waited",
        PLAIN,
    ),
    window(
        "products do not wait for the windows",
        "multiply_windows",
        "{{mbarrier_wait_parity(ready, _._);}}",
        UNDER_WAY | RACE | "nobody has waited",
        PLAIN,
    ),
    window(
        "windows are copied over others that products read",
        "copy_windows",
        "{{mbarrier_wait_parity(ring.window_empty(_._), ...);}}",
        UNDER_WAY | RACE | WRONG,
        LONG,
        filters=32,
        m_tiles=2,
        stages=20,
    ),
    window(
        "a window is freed at the first stage of its own",
        "multiply_windows",
        "window_empty({{(window.stage + Tuning::windows - 1) % Tuning::windows => window.stage}})",
        UNDER_WAY | RACE | WRONG | "stuck",
        LONG,
    ),
    window(
        "filters that stay are waited for again",
        "multiply_windows",
        "{{Tuning::resident ? 0 : _.parity => place.parity}}",
        STUCK | UNDER_WAY,
        "float16-copies-many",
        resident=True,
    ),
    window(
        "sums are read before the products are done",
        "multiply_windows",
        "{{wgmma_wait_group<0>(_);}}",
        UNDER_WAY,
        PLAIN,
    ),
    window(
        "sums begin with what registers held",
        "multiply_windows",
        "{{_ > 0 || _ > 0 || _ > 0 || _ > 0 => true}}",
        RACE | WRONG,
        PLAIN,
    ),
    window("all taps read the pixels of the first", "multiply_windows", "{{+ Ring::tap_at(...)}}", WRONG, PLAIN),
    window("all steps of filters are the first", "multiply_windows", "{{+ Ring::filter_step * _}}", WRONG, GRADIENT),
    window(
        "all warpgroups have the first pixels",
        "multiply_windows",
        "first_block = {{warpgroup * Tuning::m_tiles => 0}}",
        WRONG | RACE,
        PLAIN,
        box_w=1,
        box_h=1,
    ),
    window(
        "windows begin at the first output",
        "copy_windows",
        "{{_._ - Problem::pad_left => from.q}}",
        WRONG,
        PLAIN,
    ),
    window(
        "boxes have the corner of the first",
        "copy_windows",
        "tiles.corner({{_ + _ => first_box}})",
        WRONG,
        PLAIN,
        box_w=1,
        box_h=1,
    ),
    window(
        "blocks of a box do not lie side by side",
        "WindowRing::block_at",
        "row * of_box_w + {{column => 2 * column}}",
        WRONG,
        PLAIN,
        box_w=2,
        box_h=1,
    ),
    window(
        "rows past the image are stored",
        "WindowTiles::place",
        "{{&& (Problem::p % (8 * Tuning::box_h) == 0 || p < Problem::p)}}",
        RACE | WRONG | FENCE,
        PLAIN,
    ),
    window(
        "columns past the image are stored",
        "WindowTiles::place",
        "{{&& (Problem::q % (8 * Tuning::box_w) == 0 || q < Problem::q)}}",
        RACE | WRONG | FENCE,
        PLAIN,
    ),
    window(
        "boxes past the last image are stored",
        "WindowTiles::place",
        "{{box < all => true}}",
        RACE | WRONG | FENCE,
        LONG,
        box_w=1,
        box_h=1,
    ),
    tf32(
        "products do not wait until pixels are rounded",
        "multiply_windows",
        "ready = {{Rounder::warps > 0 ? ring.window_rounded(window.stage) : => }} ring.window_full(window.stage)",
        UNDER_WAY | RACE | WRONG,
        "tf32-copies",
    ),
    tf32(
        "products may not see rounded pixels",
        "WindowRounder::round",
        "{{fence_proxy_async();}}",
        UNDER_WAY | RACE | WRONG | "fence",
        "tf32-copies",
    ),
)
