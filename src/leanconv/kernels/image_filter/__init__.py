"""Image filters: each pixel is read once, and its neighbours share it in registers.

Kernels     register_cache (``filter2d``, ``filter3d`` and what `leanconv.ndimage` makes of them), separable (filters
            that are given as products of a column and a row: those with names, and what ``filter2d`` finds to be such
            products; separable_tensor multiplies on tensor cores), tensor_filter (``filter2d`` on tensor cores: each
            row of the filter as a band matrix), fourier_lines and fourier_tiles (large filters), box (``box_blur``,
            ``erode``, ``dilate``; box_passes for large ones), median (``median_blur``)
Papers      P. Chen et al., Pushing the Limits for 2D Convolution Computation on CUDA-enabled GPUs (2018); M. van Herk,
            A fast algorithm for local minimum and maximum filters (1992)
Requires    sm_80 or newer; int8 to int32, uint8, uint16, float16, bfloat16, float32 and float64
Memory      no workspace: borders are computed in the kernel; fourier's takes one, strip by strip or tile by tile
Precision   ``ieee``; tensor_filter, separable_tensor, fourier_lines and fourier_tiles ``fp32``
``auto``    always: the only kernels for image filters
"""
