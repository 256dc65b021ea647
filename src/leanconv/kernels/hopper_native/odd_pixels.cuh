// Images with an odd number of pixels in NCHW, for native_gemm_pointwise: rows of odd channels begin at odd elements, where no copy
// of two elements can begin.
//
// So a row of an odd channel is copied from one pixel before on: its column j has pixel j - 1. Of a stage the even channels come
// first, then the odd ones. They are multiplied apart, into two sets of sums, which are added at the end: column j of the even ones
// and column j + 1 of the odd ones.
#pragma once

#include <device/ptx/memory.cuh>
#include <device/ptx/mma.cuh>

namespace leanconv {

template <int channels>
struct OddPixels {
    static_assert(channels % 32 == 0, "even and odd channels are whole k16 steps each");
    static constexpr int pairs = channels / 32;  // of k16 steps, one of even channels and one of odd ones
    // Which row of a stage a channel is.
    static __device__ __forceinline__ int row(int channel) { return channel / 2 + channel % 2 * (channels / 2); }
};

// Operand A of 64 filters, in registers: of a filter's row, as it lies, a lane loads four neighbouring channels at a time, and
// sorts them by bytes.
template <int channels>
struct OddFilters {
    static constexpr int pairs = OddPixels<channels>::pairs, row_bytes = 2 * channels;
    unsigned words[pairs][4][2];
    // `from`: 64 rows in shared memory as a tensor copy swizzles them. Lane with group g and pair t: of rows g and g + 8 of the
    // warp's 16 the channels 4 t to 4 t + 3, and 16 further.
    __device__ __forceinline__ void load(const unsigned char* from, int warp, int lane) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int line = warp * 16 + e % 2 * 8 + lane / 4, swizzle = line * row_bytes / 128 % (row_bytes / 16);
#pragma unroll
            for (int pair = 0; pair < pairs; ++pair) {
                const int unit = pair * 4 + e / 2 * 2 + lane % 4 / 2;
                ld_shared_v2_u32(words[pair][e], from + line * row_bytes + (unit ^ swizzle) * 16 + lane % 2 * 8);
            }
        }
    }
    __device__ __forceinline__ void sort(unsigned (&even)[pairs][4], unsigned (&odd)[pairs][4]) const {
#pragma unroll
        for (int pair = 0; pair < pairs; ++pair)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                even[pair][e] = __byte_perm(words[pair][e][0], words[pair][e][1], 0x5410);
                odd[pair][e] = __byte_perm(words[pair][e][0], words[pair][e][1], 0x7632);
            }
    }
};

// Adds the sums of odd channels to those of even ones, a column to the left. The last column is not complete, so a segment has
// eight fewer: a multiple of eight, as its stores begin.
template <int count>
__device__ __forceinline__ void add_moved(float (&even)[count], const float (&odd)[count], int lane) {
    const int next = lane / 4 * 4 + (lane + 1) % 4;
#pragma unroll
    for (int i = 0; i < count; i += 2) {
        // A lane has columns 2 t and 2 t + 1 of each eight, t = lane % 4. The second one takes the next lane's first; where
        // t is 3, the first of the next eight, which lane t = 0 has.
        const float next_eight = odd[i + 4 < count ? i + 4 : i];
        even[i] += odd[i + 1];
        even[i + 1] += __shfl_sync(0xffffffffu, lane % 4 == 0 ? next_eight : odd[i], next);
    }
}

}  // namespace leanconv
