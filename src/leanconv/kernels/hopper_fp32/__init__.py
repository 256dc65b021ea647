"""Tensor cores of Hopper in float32's accuracy: a float32 is the sum of two scaled float16, one product is three.

Kernels     tensor_gemm (forward, gradient of the input), tensor_winograd (F(2, 3) along rows; wider
            filters in segments of three), tensor_weight (gradient of the filters; strategy ``images``: for many small
            images, a stage is a pixel of each)
Papers      S. Markidis et al., NVIDIA Tensor Core Programmability, Performance & Precision (2018)
Requires    sm_90a; float32; 16-byte aligned tensors
Memory      packed weights, which are kept between calls; tensor_weight may split the reduction (split-K)
Precision   ``fp32``: sums are promoted to float32 every 64 products; ``tf32``: one product of scaled float16
``auto``    the least predicted time: on this GPU mostly from some 32 channels on, nearly always from 128 on, but for
            small layers
"""
