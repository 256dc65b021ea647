"""Direct convolution, without a matrix product: by its definition, in tiles, or for images of one channel.

Kernels     direct (one thread an output), direct_tiled (a tile of filters x pixels a thread), single_channel
Papers      X. Chen et al., Optimizing Memory Efficiency for Convolution Kernels on Kepler GPUs (2017); direct is the
            baseline of S. Lu et al., im2win (2023)
Requires    sm_80 or newer
Memory      no workspace
Precision   ``ieee``
``auto``    the least predicted time: few input channels (direct_tiled, single_channel), very small layers (direct)
"""
