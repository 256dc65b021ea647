// One scale for all pixels.
#pragma once

#define LEANCONV_FIXED_SCALES
#include <studies/tensor_parts.cuh>
