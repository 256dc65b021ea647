"""Tensor cores of every GPU from sm_80 on, by warps (mma.sync) and without TMA.

Kernels     tensor_gemm_sync (float32's accuracy; forward, gradient of the input), native_gemm_groups and
            native_weight_groups (groups of few channels in 16 bits, and their gradients)
Papers      S. Markidis et al., NVIDIA Tensor Core Programmability, Performance & Precision (2018)
Requires    sm_80 or newer; float32 in every layout, or 16-bit elements in groups, in NHWC or NCHW
Memory      packed weights of tensor_gemm_sync, which are kept between calls; partial sums of native_weight_groups
Precision   ``fp32``: float32 as in hopper_fp32; products of 16-bit elements are exact, their sums float32
``auto``    the least predicted time: float32 on GPUs without wgmma, groups of few channels everywhere
"""
