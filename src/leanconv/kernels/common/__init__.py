"""What several families have in common.

layers            limits that kernels of layers share, the ``Problem`` struct, the arguments of a kernel
input_gradient    the gradient of the input as forward convolutions of unit stride, one for each phase of the stride
bias_gradient     the gradient of the bias, in the same call as that of the filters
split_k           the launch that adds partial sums, in a fixed order
split_gemm        float32 split into two float16 for tensor cores: packed weights, and the plan of a call
squeeze_excite    means of channels, two layers of them, and the image times these gates, for fused networks
tensor_core_gemm  implicit GEMM on Hopper's tensor cores: registers, the tensor map of pixels
"""
