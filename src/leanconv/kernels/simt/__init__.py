"""FP32 cores of any GPU: y = x * w as one matrix product of pixels and filters, or by Winograd's transforms.

Kernels     implicit_gemm (forward, gradient of the input; strategies ``dp4a`` for 8-bit integers, ``patches`` for the
            gradient of volumes whose filters do not overlap), implicit_gemm_weight (gradient of the filters),
            im2win_fused, winograd1d (one axis, alpha 4, 8 or 16), winograd2d (F(2x2, 3x3) and F(4x4, 3x3))
Papers      im2win_fused: S. Lu et al., im2win (2023); winograd1d: Z. Zhang et al., Im2col-Winograd (2024);
            winograd2d: R. L. Castro et al., OpenCNN (2021)
Requires    sm_80 or newer; dp4a: int8 or uint8
Memory      no workspace; the gradient of the filters may split the reduction (split-K) and then keeps partial sums
Precision   ``ieee``, where a transform does not round more: F(2x2, 3x3) and alpha up to 8 keep ``fp32``, F(4x4, 3x3),
            alpha 8 of seven outputs and 16 ``relaxed``
``auto``    the least predicted time: for ``ieee``, on GPUs whose tensor cores are slow in float32's accuracy (8.6,
            8.9 and 12.0, GeForce most), for few channels, small layers, or groups that leave tensor cores idle
"""
