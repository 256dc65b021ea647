"""Kernels broken on purpose: one halo, barrier or bound at a time, and how each must show (see test_broken.py)."""

from tests.kernels.breaks import (
    depthwise,
    direct,
    fourier,
    hopper_fp32,
    hopper_native,
    hopper_winograd,
    image_filter,
    kmajor,
    mma_sync,
    papers,
    planes,
    pointwise,
    simt,
    skinny,
    volumes,
    window,
    winograd,
)

BREAKS = (
    *(
        *simt.BREAKS,
        *winograd.BREAKS,
        *direct.BREAKS,
        *depthwise.BREAKS,
        *image_filter.BREAKS,
        *fourier.BREAKS,
        *papers.BREAKS,
    ),
    *(*mma_sync.BREAKS, *hopper_fp32.BREAKS, *hopper_winograd.BREAKS, *hopper_native.BREAKS, *kmajor.BREAKS),
    *planes.BREAKS,
    *pointwise.BREAKS,
    *skinny.BREAKS,
    *window.BREAKS,
    *volumes.BREAKS,
)
