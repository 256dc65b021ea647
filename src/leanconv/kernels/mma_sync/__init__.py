"""Tensor cores of every GPU from sm_80 on in float32's accuracy, by warps (mma.sync) and without TMA.

Kernels     tensor_gemm_sync (forward, gradient of the input)
Papers      S. Markidis et al., NVIDIA Tensor Core Programmability, Performance & Precision (2018)
Requires    sm_80 or newer; float32, in every layout
Memory      packed weights, which are kept between calls
Precision   ``fp32``, as in hopper_fp32
``auto``    the least predicted time on GPUs without wgmma
"""
