// Two products of three: pixels are rounded to 11 bits, filters keep 22.
#pragma once

#define LEANCONV_TWO_PRODUCTS
#include "tensor_parts.cuh"
