// No copies into shared memory.
#pragma once

#define LEANCONV_NO_FILTER_COPIES
#define LEANCONV_NO_PIXEL_COPIES
#include "tensor_parts.cuh"
