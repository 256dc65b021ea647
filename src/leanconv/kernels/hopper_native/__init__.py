"""Tensor cores of Hopper for the types that they multiply themselves: float16, bfloat16, and TF32.

Kernels     native_gemm (channels last; strategies ``16bit`` and ``tf32``, and ``window`` and ``window_tf32``, where one
            copy of the pixels serves all taps; channels first ``pointwise`` and, of small images, ``planes``, for 1x1
            filters), native_gemm_nchw (channels first), native_weight (gradient of the filters; strategies ``nhwc``,
            ``nchw`` and ``kmajor``)
Papers      S. Markidis et al., NVIDIA Tensor Core Programmability, Performance & Precision (2018); as an
            implicit GEMM with TMA and wgmma, as cuDNN and CUTLASS have it
Requires    sm_90a; 16-byte aligned tensors; 16-bit elements, or float32 with precision="tf32"
Memory      packed weights of native_gemm_nchw, in TF32, and of gradients of channels that are no multiple of 8,
            which are kept between calls; partial sums of split-K in native_weight
Precision   products are exact, sums are float32: ``fp32`` for 16-bit elements, ``tf32`` for float32
``auto``    the least predicted time among those that the type allows
"""
