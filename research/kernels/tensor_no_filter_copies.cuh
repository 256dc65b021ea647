// No copies of filters into shared memory.
#pragma once

#define LEANCONV_NO_FILTER_COPIES
#include "tensor_parts.cuh"
