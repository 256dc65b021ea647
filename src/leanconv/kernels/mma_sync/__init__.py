"""Tensor cores of every GPU from sm_80 on, by warps (mma.sync) and but for one without TMA.

Kernels     tensor_gemm_sync (float32's accuracy; forward, gradient of the input; strategy ``col2im``: gradients of the
            input of few channels, in every type), native_gemm_sync and native_weight_sync (16 bits, NHWC, and its
            gradients), native_gemm_groups and native_weight_groups (groups of few channels in 16 bits and TF32, and
            their gradients), native_gemm_rows and native_weight_rows (few channels in 16 bits; the gradient of
            the filters in NHWC), native_gemm_skinny (1x1 layers of few channels and few filters in 16 bits, NHWC, and
            the gradient of their input)
Papers      S. Markidis et al., NVIDIA Tensor Core Programmability, Performance & Precision (2018)
Requires    sm_80 or newer; float32 in every layout; groups in NHWC or NCHW, in TF32 from sm_90 on;
            native_gemm_skinny from sm_90 on: bulk copies
Memory      packed weights of tensor_gemm_sync, which are kept between calls; partial sums of gradients of the filters
Precision   ``fp32``: float32 as in hopper_fp32; products of 16-bit elements are exact, their sums float32. ``tf32``:
            one product of scaled float16; in groups, float32 rounded to TF32
``auto``    the least predicted time: float32 and 16 bits on GPUs without wgmma; groups of few channels, first layers,
            and channels that are no multiple of 8 (16 bits) everywhere
"""
