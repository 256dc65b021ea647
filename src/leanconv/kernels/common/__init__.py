"""What several families launch beside their kernels: phases of a strided gradient, bias gradient, sums of split-K.

input_gradient  the gradient of the input as forward convolutions of unit stride, one for each phase of the stride
bias_gradient   the gradient of the bias, in the same call as that of the filters
split_k         the launch that adds partial sums, in a fixed order
"""
