// The windows of some output pixels in shared memory, decoded once for all threads that load elements of them.
#pragma once

#include <device/index.cuh>
#include <device/window.cuh>

namespace leanconv {

// Of `count` pixels where each window begins, in bytes of x of 16 bits, and what of it lies inside the image.
template <class Problem, int count>
struct SharedWindows {
    using B = Bytes<Problem>;
    static constexpr int bytes = 24 * count;  // as the host counts
    static_assert(sizeof(B) + sizeof(Window<Problem>) <= 24, "a pixel has 24 bytes");
    unsigned char* shared;

    __device__ __forceinline__ B& begin(int i) const { return reinterpret_cast<B*>(shared)[i]; }
    __device__ __forceinline__ Window<Problem>& window(int i) const {
        return reinterpret_cast<Window<Problem>*>(shared + 8 * count)[i];
    }

    // Decodes the pixels from `first` on, from channel `channel` on, by all threads.
    template <int threads, class Places>
    __device__ __forceinline__ void find(const Places& places, Offset<Problem> first, int channel) const {
        for (int i = threadIdx.x; i < count; i += threads) {
            const Pixel<Problem> pixel = places.pixel(first + i);
            const Window<Problem> at(pixel, places.phase);
            window(i) = at;
            begin(i) = ((at.row(pixel.n) * Problem::w + at.w) * Problem::c + channel) * 2;
        }
    }
};

}  // namespace leanconv
