"""Depthwise convolution: each channel has its own filters, so memory bounds the time and each pixel is read once.

Kernels     depthwise (strategies ``window``: a window slides down in registers; ``large``: large filters, a band of
            rows of each plane in shared memory; ``row``: short filters of one row), depthwise_input, depthwise_weight
            (its gradients; its strategy ``large``: tiles of taps); of volumes too, but ``large`` and ``row``
Papers      X. Chen et al., Optimizing Memory Efficiency for Convolution Kernels on Kepler GPUs (2017), special case
Requires    sm_80 or newer; groups = channels
Memory      no workspace; depthwise_weight may split the reduction (split-K) and then keeps partial sums
Precision   ``ieee``
``auto``    the least predicted time, for most such layers; small forward ones go to ``direct``
"""
