// No copies of pixels into shared memory.
#pragma once

#define LEANCONV_NO_PIXEL_COPIES
#include "tensor_parts.cuh"
