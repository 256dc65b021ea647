// How an image is read outside itself: each rule maps any index to one in [0, extent), or to -1 for "no pixel".
// The maps are exact for indices any distance outside, so a filter may be larger than the image.
// Written for the pixels a b c d. Extents are at most 2^30, so that 2 * extent is an int.
#pragma once

namespace leanconv {

__device__ __forceinline__ int positive_modulo(int i, int n) {
    const int rest = i % n;
    return rest < 0 ? rest + n : rest;
}

// v|abcd|v
struct ConstantBorder {
    static constexpr bool maps_inside = false;
    static __device__ __forceinline__ int map(int, int) { return -1; }
};

// a|abcd|d
struct ReplicateBorder {
    static constexpr bool maps_inside = true;
    static __device__ __forceinline__ int map(int i, int extent) { return i < 0 ? 0 : extent - 1; }
};

// ba|abcd|dc
struct ReflectBorder {
    static constexpr bool maps_inside = true;
    static __device__ __forceinline__ int map(int i, int extent) {
        const int m = positive_modulo(i, 2 * extent);
        return m < extent ? m : 2 * extent - 1 - m;
    }
};

// cb|abcd|cb
struct Reflect101Border {
    static constexpr bool maps_inside = true;
    static __device__ __forceinline__ int map(int i, int extent) {
        if (extent == 1) return 0;
        const int m = positive_modulo(i, 2 * extent - 2);
        return m < extent ? m : 2 * extent - 2 - m;
    }
};

// cd|abcd|ab
struct WrapBorder {
    static constexpr bool maps_inside = true;
    static __device__ __forceinline__ int map(int i, int extent) { return positive_modulo(i, extent); }
};

// The index to read for i: i itself inside the image, else what the rule says.
template <class Border>
__device__ __forceinline__ int border_index(int i, int extent) {
    return static_cast<unsigned>(i) < static_cast<unsigned>(extent) ? i : Border::map(i, extent);
}

}  // namespace leanconv
