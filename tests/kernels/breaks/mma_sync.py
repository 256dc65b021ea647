"""`tensor_gemm_sync` broken on purpose."""

from __future__ import annotations

from tests.kernels.breaks.base import FENCE, RACE, WRONG, breaks_of

sync = breaks_of("tensor_gemm_sync", "tensor-{}")

BREAKS = (
    sync("no barrier before a chunk of filters", "tensor_gemm_sync", "{{__syncthreads();}}",
         RACE, "same-nhwc", n_tiles=2),
    sync("a stage of pixels is copied before it has been read", "tensor_gemm_sync",
         "{{=> if (stage + 1 < F::stages) pixels.copy(stage + 1);}} WarpFragments", RACE | WRONG, "same-nhwc"),
    sync("pixels are read before they are there", "tensor_gemm_sync", "{{cp_async_wait_group<(...)>();}}",
         RACE | WRONG, "same-nhwc", n_tiles=1),
    sync("the last chunks of filters are multiplied with before they are there", "tensor_gemm_sync",
         "cp_async_wait_group<Ring::stages - {{2 => 1}}>", RACE | WRONG, "same-nhwc", n_tiles=4),
    sync("filters are copied into the slot that is multiplied with", "FilterRing::copy_next", "copy(_ {{== 0 ? ...}})",
         RACE | WRONG, "same-nhwc", n_tiles=2),
    sync("odd pixels do not exchange their halves", "WarpPixels::copy_rows", "{{(}} _ % 8 {{^ _ / 8 % 2 * 4)}}",
         WRONG, "same-nhwc"),
    sync("lanes copy their own pixel's place", "WarpPixels::copy_rows", "__shfl_sync(..., {{4 * _ +}} _ {{/ 8}})",
         WRONG, "same-nhwc"),
    sync("a unit's channels past the group's are read", "WarpPixels::copy_rows",
         "{{Problem::group_c % F::channel_block == 0 || _ < Problem::group_c => true}}", FENCE, "odd-nhwc"),
    sync("a column's channels past the group's are read", "WarpPixels::copy_columns",
         "{{Problem::group_c % F::channel_block == 0 || _ + _ < Problem::group_c => true}}",
         FENCE, "few-channels-nhwc"),
    sync("pixels outside the image are those of other rows", "WarpPixels::block_offset",
         "{{static_cast<unsigned>(...) < Problem::w => true}}", WRONG, "same-nchw"),
    sync("taps of a dilated row are neighbours", "WarpPixels::block_offset", "{{* Problem::dilation_w}}",
         WRONG, "dilation-nchw", "dilation-nhwc"),
    sync("the second group has the first one's pixels", "WarpPixels::WarpPixels",
         "{{static_cast<int64>(_) * Problem::group_c * _.channel => 0}}", WRONG, "groups-nhwc"),
    sync("both rows are scaled back as the first", "multiply", "[{{_ / 2 % 2 => 0}}]", WRONG, "same-nhwc"),
    sync("low halves of filters are those of the high ones", "multiply", "{{+ F::half_bytes}}", WRONG, "same-nhwc"),
    sync("units of filters are in order", "load_filters", "{{(}} (4 * _ + _ / 8) {{^ _ % 8)}} * 16",
         WRONG, "same-nhwc"),
)  # fmt: skip
