// The CPU twin of ptx/movmatrix.cuh: same names, same signatures, the rules of the PTX manual checked at each call.
#pragma once

namespace leanconv {

inline unsigned movmatrix_trans(unsigned row, EMULATOR_SITE) {
    const int lane = static_cast<int>(threadIdx.x) % 32, from = lane % 4 * 8 + lane / 8, shift = lane / 4 % 2 * 16;
    const unsigned first = __shfl_sync(~0u, row, from, 32, site), second = __shfl_sync(~0u, row, from + 4, 32, site);
    return (first >> shift & 0xffff) | (second >> shift & 0xffff) << 16;
}

}  // namespace leanconv
