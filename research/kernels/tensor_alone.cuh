// The products alone: no copies, no conversion, no sums of partial sums. What power leaves the tensor cores.
#pragma once

#define LEANCONV_UNCONVERTED
#define LEANCONV_NO_FILTER_COPIES
#define LEANCONV_NO_PIXEL_COPIES
#include "tensor_unpromoted.cuh"
