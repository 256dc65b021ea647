// TMA: bulk copies (cp.async.bulk) and copies of boxes of tensors (cp.async.bulk.tensor), from compute capability 9.0 on.
#pragma once

#include <device/ptx/sync.cuh>

namespace leanconv {

// How copies walk over an array: encoded by the driver (TensorMap of the host half), opaque here. A kernel takes it as
// `const __grid_constant__ TensorMap` and hands on references: the machine reads it where it lies.
struct alignas(64) TensorMap {
    unsigned char bytes[128];
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// fence.proxy.async: what this thread wrote to shared memory, or has observed, is visible to copies that are issued after
// it. Without it a copy out of shared memory reads what lay there before.
__device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}
// The same for global memory: before a thread signals what it wrote, and after it has learned of what others wrote.
__device__ __forceinline__ void fence_proxy_async_global() {
    asm volatile("fence.proxy.async.global;\n" ::: "memory");
}

// prefetch.tensormap: brings a map close before the first copy needs it.
__device__ __forceinline__ void prefetch_tensormap(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];\n" :: "l"(&map) : "memory");
}

// cp.async.bulk, global -> shared: `bytes` bytes, which count for the phase of `barrier` when they have landed. Both
// addresses and the count are multiples of 16.
__device__ __forceinline__ void cp_async_bulk_shared_global(void* shared, const void* global, unsigned bytes,
                                                            Mbarrier* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n"
                 :: "r"(shared_address(shared)), "l"(global), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}

// Multicast: the same to all blocks of the cluster in the mask of ranks `destinations`: to the place that each has where this
// one has `shared`, counted by the barrier that it has where this one has `barrier`.
// NOTE: the stage must be free in every destination, and none of them may leave the kernel before the bytes have landed.
__device__ __forceinline__ void cp_async_bulk_multicast_shared_global(void* shared, const void* global, unsigned bytes,
                                                                      Mbarrier* barrier, unsigned short destinations) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1], %2, [%3], %4;\n"
                 :: "r"(shared_address(shared)), "l"(global), "r"(bytes), "r"(shared_address(barrier)), "h"(destinations)
                 : "memory");
}

// cp.async.bulk, shared -> global, in the open bulk group of this thread. Multiples of 16 as well.
__device__ __forceinline__ void cp_async_bulk_global_shared(void* global, const void* shared, unsigned bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
                 :: "l"(global), "r"(shared_address(shared)), "r"(bytes) : "memory");
}

// cp.async.bulk.commit_group: closes the group of this thread's copies out of shared memory issued so far.
__device__ __forceinline__ void cp_async_bulk_commit_group() {
    asm volatile("cp.async.bulk.commit_group;\n" ::: "memory");
}

// cp.async.bulk.wait_group: waits until at most `pending` of this thread's latest groups are still in flight.
template <int pending>
__device__ __forceinline__ void cp_async_bulk_wait_group() {
    static_assert(pending >= 0, "cp.async.bulk.wait_group takes a number of groups");
    asm volatile("cp.async.bulk.wait_group %0;\n" :: "n"(pending) : "memory");
}

// cp.async.bulk.wait_group.read: waits until at most `pending` of them still read shared memory, which may then be
// overwritten; what they write may not be there yet.
template <int pending>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
    static_assert(pending >= 0, "cp.async.bulk.wait_group takes a number of groups");
    asm volatile("cp.async.bulk.wait_group.read %0;\n" :: "n"(pending) : "memory");
}

// cp.async.bulk.tensor, global -> shared: the box of a tiled map that begins at (c0, c1, ...), innermost axis first, in
// elements; coordinates may lie outside the array, where zeros are read. All bytes of the box count for `barrier`.
// NOTE: the innermost coordinate is a multiple of 16 bytes, inside and outside. No manual says so; an H200 calls anything
// else an illegal instruction.
// NOTE: `shared` is a multiple of 128. With a swizzle, units of 16 bytes trade places by the bits of their own address
// in shared memory: bit 4 ^= bit 7 for 32 bytes, bits 4-5 ^= bits 7-8 for 64, bits 4-6 ^= bits 7-9 for 128. So the
// pattern begins anew at multiples of 256, 512 and 1024 bytes; a stage that shall begin with it begins there.
#define LEANCONV_TENSOR_LOAD(rank, places, ...) \
    asm volatile("cp.async.bulk.tensor." rank ".shared::cluster.global.tile.mbarrier::complete_tx::bytes " \
                 "[%0], [%1, {" places "}], [%2];\n" \
                 :: "r"(shared_address(shared)), "l"(&map), "r"(shared_address(barrier)), __VA_ARGS__ : "memory")
__device__ __forceinline__ void cp_async_bulk_tensor_shared_global(
    void* shared, const TensorMap& map, Mbarrier* barrier, int c0) {
    LEANCONV_TENSOR_LOAD("1d", "%3", "r"(c0));
}
__device__ __forceinline__ void cp_async_bulk_tensor_shared_global(
    void* shared, const TensorMap& map, Mbarrier* barrier, int c0, int c1) {
    LEANCONV_TENSOR_LOAD("2d", "%3, %4", "r"(c0), "r"(c1));
}
__device__ __forceinline__ void cp_async_bulk_tensor_shared_global(
    void* shared, const TensorMap& map, Mbarrier* barrier, int c0, int c1, int c2) {
    LEANCONV_TENSOR_LOAD("3d", "%3, %4, %5", "r"(c0), "r"(c1), "r"(c2));
}
__device__ __forceinline__ void cp_async_bulk_tensor_shared_global(
    void* shared, const TensorMap& map, Mbarrier* barrier, int c0, int c1, int c2, int c3) {
    LEANCONV_TENSOR_LOAD("4d", "%3, %4, %5, %6", "r"(c0), "r"(c1), "r"(c2), "r"(c3));
}
__device__ __forceinline__ void cp_async_bulk_tensor_shared_global(
    void* shared, const TensorMap& map, Mbarrier* barrier, int c0, int c1, int c2, int c3, int c4) {
    LEANCONV_TENSOR_LOAD("5d", "%3, %4, %5, %6, %7", "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4));
}

// The same of an im2col map: from the position (w, h, d) of image n on, which lies between the map's corners, the
// channels from c on of as many positions as the map says; what is read lies (ow, oh, od) further. Offsets go to 65535
// for 3 axes, to 255 for 4, to 31 for 5.
#define LEANCONV_IM2COL_LOAD(rank, places, offsets, ...) \
    asm volatile("cp.async.bulk.tensor." rank ".shared::cluster.global.im2col.mbarrier::complete_tx::bytes " \
                 "[%0], [%1, {" places "}], [%2], {" offsets "};\n" \
                 :: "r"(shared_address(shared)), "l"(&map), "r"(shared_address(barrier)), __VA_ARGS__ : "memory")
__device__ __forceinline__ void cp_async_bulk_tensor_im2col_shared_global(
    void* shared, const TensorMap& map, Mbarrier* barrier, int c, int w, int n,
    unsigned short ow) {
    LEANCONV_IM2COL_LOAD("3d", "%3, %4, %5", "%6", "r"(c), "r"(w), "r"(n), "h"(ow));
}
__device__ __forceinline__ void cp_async_bulk_tensor_im2col_shared_global(
    void* shared, const TensorMap& map, Mbarrier* barrier, int c, int w, int h, int n,
    unsigned short ow, unsigned short oh) {
    LEANCONV_IM2COL_LOAD("4d", "%3, %4, %5, %6", "%7, %8", "r"(c), "r"(w), "r"(h), "r"(n), "h"(ow), "h"(oh));
}
__device__ __forceinline__ void cp_async_bulk_tensor_im2col_shared_global(
    void* shared, const TensorMap& map, Mbarrier* barrier, int c, int w, int h, int d, int n,
    unsigned short ow, unsigned short oh, unsigned short od) {
    LEANCONV_IM2COL_LOAD("5d", "%3, %4, %5, %6, %7", "%8, %9, %10", "r"(c), "r"(w), "r"(h), "r"(d), "r"(n), "h"(ow), "h"(oh), "h"(od));
}

// cp.async.bulk.tensor, shared -> global, in the open bulk group of this thread: the box of a tiled map; what lies
// outside the array is not written. NOTE: here coordinates are not negative.
#define LEANCONV_TENSOR_STORE(rank, places, ...) \
    asm volatile("cp.async.bulk.tensor." rank ".global.shared::cta.tile.bulk_group [%0, {" places "}], [%1];\n" \
                 :: "l"(&map), "r"(shared_address(shared)), __VA_ARGS__ : "memory")
__device__ __forceinline__ void cp_async_bulk_tensor_global_shared(
    const TensorMap& map, const void* shared, int c0) {
    LEANCONV_TENSOR_STORE("1d", "%2", "r"(c0));
}
__device__ __forceinline__ void cp_async_bulk_tensor_global_shared(
    const TensorMap& map, const void* shared, int c0, int c1) {
    LEANCONV_TENSOR_STORE("2d", "%2, %3", "r"(c0), "r"(c1));
}
__device__ __forceinline__ void cp_async_bulk_tensor_global_shared(
    const TensorMap& map, const void* shared, int c0, int c1, int c2) {
    LEANCONV_TENSOR_STORE("3d", "%2, %3, %4", "r"(c0), "r"(c1), "r"(c2));
}
__device__ __forceinline__ void cp_async_bulk_tensor_global_shared(
    const TensorMap& map, const void* shared, int c0, int c1, int c2, int c3) {
    LEANCONV_TENSOR_STORE("4d", "%2, %3, %4, %5", "r"(c0), "r"(c1), "r"(c2), "r"(c3));
}
__device__ __forceinline__ void cp_async_bulk_tensor_global_shared(
    const TensorMap& map, const void* shared, int c0, int c1, int c2, int c3, int c4) {
    LEANCONV_TENSOR_STORE("5d", "%2, %3, %4, %5, %6", "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4));
}
#else
// NOTE: a call that depends on no template parameter counts as a use where it is discarded too (NVRTC 13.5).
__device__ __forceinline__ void fence_proxy_async() { asm volatile("trap;\n"); }
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("trap;\n"); }
#endif

}  // namespace leanconv
