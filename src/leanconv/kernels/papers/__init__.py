"""Run by name, never by ``auto``: what papers describe and other families beat, kept to study and compare.

Kernels     im2win (the transform as a tensor of its own, then a tiled product), im2win_basic (the same without tiles),
            direct_weight (gradient of the filters by its definition, one warp a weight)
Papers      S. Lu et al., im2win (2023)
Requires    sm_80 or newer
Memory      im2win and im2win_basic: a workspace of the transformed image
Precision   ``ieee``
``auto``    never; ``conv2d(..., algorithm="im2win")`` runs it
"""
