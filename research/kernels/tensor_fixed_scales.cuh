// One scale for all pixels.
#pragma once

#define LEANCONV_FIXED_SCALES
#include "tensor_parts.cuh"
