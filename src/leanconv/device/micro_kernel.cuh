// The register-tiled product at the heart of a SIMT matrix multiplication: how a block's tile is divided among warps,
// lanes and registers, and the outer products that each thread accumulates.
//
// A thread owns thread_k x thread_pixels outputs and spends thread_k * thread_pixels FMAs per reduction step on
// (thread_k + thread_pixels) / 4 shared loads of 128 bits: 8x8 makes 16 FMAs a load, 8x12 makes 19.
#pragma once

namespace leanconv {

// Position in the tile of component i of a lane's fragment f, along one axis with `lanes` lanes.
// Fragments of four are adjacent (one 128-bit store) or interleaved lane by lane, so that the lanes of one scalar store
// write adjacent elements: the choice for a contiguous output axis whose rows are no multiple of four.
template <int lanes, bool interleaved>
__device__ __forceinline__ int position(int f, int lane, int i) {
    return f * lanes * 4 + (interleaved ? i * lanes + lane : lane * 4 + i);
}

// Where tile position p lies in a shared-memory row: fragments are always adjacent there. The inverse of position().
template <int lanes, bool interleaved>
__device__ __forceinline__ int slot_of(int p) {
    constexpr int group = lanes * 4;
    const int in = p % group;
    return interleaved ? p - in + (in % lanes) * 4 + in / lanes : p;
}

template <int lanes, bool interleaved>
__device__ __forceinline__ int position_of(int slot) {
    constexpr int group = lanes * 4;
    const int in = slot % group;
    return interleaved ? slot - in + (in % 4) * lanes + in / 4 : slot;
}

template <class Tuning>
struct Tiling {
    static constexpr int lanes_k = Tuning::lanes_k;
    static constexpr int lanes_pixels = 32 / lanes_k;
    static constexpr int warp_k = lanes_k * Tuning::thread_k;
    static constexpr int warp_pixels = lanes_pixels * Tuning::thread_pixels;
    static constexpr int warps_k = Tuning::tile_k / warp_k;
    static constexpr int warps_pixels = Tuning::tile_pixels / warp_pixels;
    static constexpr int threads = 32 * warps_k * warps_pixels;

    static_assert(32 % lanes_k == 0, "the lanes of a warp form a lanes_k x (32 / lanes_k) grid");
    static_assert(Tuning::thread_k % 4 == 0 && Tuning::thread_pixels % 4 == 0, "fragments are read four at a time");
    static_assert(Tuning::tile_k % warp_k == 0 && Tuning::tile_pixels % warp_pixels == 0, "warps divide the tile");

    int k, pixel;  // first tile position of this thread's warp
    int lane_k, lane_pixel;

    __device__ __forceinline__ Tiling() {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        k = warp / warps_pixels * warp_k;
        pixel = warp % warps_pixels * warp_pixels;
        // NOTE: the lowest lane bit goes to k, the next ones to pixels. A 128-bit shared load of a warp takes two
        // cycles where lanes that differ in bit 0, or in bit 1, read the same address, and four otherwise (measured on
        // an H200): so either fragment takes two.
        lane_k = lanes_k == 1 ? 0 : lane % 2 + lane / (2 * lanes_pixels) * 2;
        lane_pixel = lanes_k == 1 ? lane : lane / 2 % lanes_pixels;
    }
};

// `count` floats of one shared-memory row, four adjacent ones every `step`.
template <int step, int count>
__device__ __forceinline__ void load_fragments(float (&fragment)[count], const float* row) {
#pragma unroll
    for (int f = 0; f < count / 4; ++f) {
        const float4 v = *reinterpret_cast<const float4*>(row + f * step);
        fragment[4 * f] = v.x, fragment[4 * f + 1] = v.y, fragment[4 * f + 2] = v.z, fragment[4 * f + 3] = v.w;
    }
}

}  // namespace leanconv
