// Pixels are not split: their bits are multiplied as they are.
#pragma once

#define LEANCONV_UNCONVERTED
#include "tensor_parts.cuh"
