// Products of matrices by the tensor cores: of a warp (ldmatrix, mma.sync), and of a warpgroup (wgmma).
#pragma once

#include <device/ptx/memory.cuh>

namespace leanconv {

// A warp at a time: ldmatrix and mma.sync, from compute capability 8.0 on.
//
// Fragments, for the lane with group g = lane / 4 and pair t = lane % 4; a register holds two neighbours, the lower half
// first:
//   a[i]: row g, or g + 8 where i is odd; columns 2 t and 2 t + 1, from i = 2 on 8 more       (16 x 16)
//   b[i]: reduction elements 2 t and 2 t + 1, for i = 1 8 more; column g                       (16 x 8)
//   sums[i]: row g, or g + 8 from i = 2 on; column 2 t, or one more where i is odd             (16 x 8)

// mma.sync.aligned.m16n8k16.row.col.f32: sums += a b. All lanes of the warp execute it.
// NOTE: the tensor core rounds its running sum toward zero, as it does for wgmma (below).
__device__ __forceinline__ void mma_f16(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};\n"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_bf16(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};\n"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// ldmatrix: as many matrices of 8 rows of 16 bytes as there are registers. Lane 8 m + i gives the address of row i of
// matrix m, a multiple of 16; what lanes beyond the last matrix give is not read. A lane gets from each matrix the
// elements 2 t and 2 t + 1 of row g; with .trans, of column g.
__device__ __forceinline__ void ldmatrix(unsigned (&to)[1], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];\n"
                 : "=r"(to[0]) : "r"(shared_address(row)) : "memory");
}
__device__ __forceinline__ void ldmatrix(unsigned (&to)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];\n"
                 : "=r"(to[0]), "=r"(to[1]) : "r"(shared_address(row)) : "memory");
}
__device__ __forceinline__ void ldmatrix(unsigned (&to)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(shared_address(row)) : "memory");
}
__device__ __forceinline__ void ldmatrix_trans(unsigned (&to)[1], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];\n"
                 : "=r"(to[0]) : "r"(shared_address(row)) : "memory");
}
__device__ __forceinline__ void ldmatrix_trans(unsigned (&to)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];\n"
                 : "=r"(to[0]), "=r"(to[1]) : "r"(shared_address(row)) : "memory");
}
__device__ __forceinline__ void ldmatrix_trans(unsigned (&to)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(shared_address(row)) : "memory");
}

// A warpgroup at a time, while the threads go on: wgmma, on sm_90a alone.
//
// A warpgroup is four neighbouring warps. One instruction adds to 64 rows of n sums the products of A, 64 x 16, and B,
// 16 x n. Warp w has rows 16 w to 16 w + 15; its lane with group g = lane / 4 and pair t = lane % 4 holds
//   sums[4 j + i]: row g, or g + 8 from i = 2 on; column 8 j + 2 t, or one more where i is odd
//   a[i]: two neighbours, the lower half first: row g, or g + 8 where i is odd; columns 2 t and 2 t + 1, from i = 2 on 8
//   more
// The order of calls:
//   wgmma_fence(sums, a);           what the threads wrote to these registers comes before the products
//   wgmma_f16(sums, a, b, true);    any number of them
//   wgmma_commit_group();
//   wgmma_wait_group<0>(sums, a);   they belong to the threads again
// NOTE: sums and fragments that registers hold are named at the fence and at the wait that ends their use: otherwise the
// compiler moves their other uses between the two, or has each product waited for. Those that products in flight still
// use are not named.
// NOTE: sums that are in flight at the end of a loop's body may be added to in the next iteration, but not read: the compiler
// has each product waited for then, and says so (Compiled.advice). Wait for all before the end of the body; the other
// warpgroup uses the tensor core meanwhile.
// NOTE: operands that threads stored to shared memory need a fence_proxy_async() and a barrier before.

// An operand in shared memory: start / 16 in bits 0 to 13, leading / 16 from bit 16, stride / 16 from bit 32 on, the kind
// of swizzle from bit 62 on. A line is one row of A or one column of B.
// transposed 0: the 16 reduction elements of a line lie next to each other (K-major)
// transposed 1: lines do, each reduction element is a row of shared memory (MN-major)
template <int transposed>
struct Descriptor {
    unsigned long long bits;

    // The same `bytes` further: where swizzled, the next 16 reduction elements are 32 bytes further, transposed two strides.
    __device__ __forceinline__ Descriptor operator+(int bytes) const {
        return {bits + static_cast<unsigned long long>(bytes / 16)};
    }
    // The same by one addition of 32 bits: shared memory ends before the start's 14 bits do.
    __device__ __forceinline__ Descriptor further(int bytes) const {
        const unsigned low = static_cast<unsigned>(bits) + static_cast<unsigned>(bytes / 16);
        return {bits >> 32 << 32 | low};
    }
};
using MatrixDescriptor = Descriptor<0>;
using TransposedDescriptor = Descriptor<1>;

// All numbers are bytes and multiples of 16. Swizzles are 32, 64 or 128 as tensor copies make them, or 0.
// With a swizzle, rows have so many bytes, and eight of them are one pattern:
//   K-major: a row is a line, `stride` lies between every 8 lines, `leading` is not read
//   MN-major: a row is one reduction element of as many lines as fit, `leading` lies between so many lines, `stride` between
//   every 8 reduction elements
// Without, 8 rows of 16 bytes lie behind each other, of 8 lines or (MN-major) of 8 reduction elements:
//   `leading` lies between every 8 reduction elements, `stride` between every 8 lines
// NOTE: a swizzled operand may begin at any row: an H200 adds the bytes up and swizzles by the bits of the address itself, for which
// the descriptor's base offset stays zero. K-major `stride` is then any multiple of a row too. MN-major patterns lie behind each
// other, and `stride` is a whole one.
template <int transposed>
__device__ __forceinline__ Descriptor<transposed> make_descriptor(const void* start, int leading, int stride, int swizzle) {
    const unsigned kind = swizzle == 128 ? 1 : swizzle == 64 ? 2 : swizzle == 32 ? 3 : 0;
    const unsigned low = (shared_address(start) & 0x3ffff) >> 4 | static_cast<unsigned>(leading >> 4) << 16;
    const unsigned high = static_cast<unsigned>(stride >> 4) | kind << 30;
    return {static_cast<unsigned long long>(high) << 32 | low};
}
__device__ __forceinline__ MatrixDescriptor matrix_descriptor(const void* start, int leading, int stride, int swizzle) {
    return make_descriptor<0>(start, leading, stride, swizzle);
}
__device__ __forceinline__ TransposedDescriptor transposed_descriptor(const void* start, int leading, int stride,
                                                                      int swizzle) {
    return make_descriptor<1>(start, leading, stride, swizzle);
}

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Tells the compiler that these registers change here, where others than the threads read or write them.
__device__ __forceinline__ void hold_registers() {}
__device__ __forceinline__ void hold_registers(float& value) { asm volatile("" : "+f"(value)); }
__device__ __forceinline__ void hold_registers(unsigned& value) { asm volatile("" : "+r"(value)); }
template <class T, int count>
__device__ __forceinline__ void hold_registers(T (&values)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) hold_registers(values[i]);
}

// wgmma.fence: what the threads of the warpgroup did to these registers comes before the products that follow.
template <class... Registers>
__device__ __forceinline__ void wgmma_fence(Registers&... registers) {
    (hold_registers(registers), ...);
    asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}

// No instruction: the next wgmma_fence, whichever registers it names, comes after what the threads did to these.
// NOTE: where a branch changes sums, a fence inside of it would have each product waited for.
template <class... Registers>
__device__ __forceinline__ void wgmma_before_fence(Registers&... registers) {
    (hold_registers(registers), ...);
}

// wgmma.commit_group: closes the group of products issued so far.
__device__ __forceinline__ void wgmma_commit_group() {
    asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}

// wgmma.wait_group: waits until at most `pending` of the latest groups are in flight. The registers are those that the
// groups waited for have used and no later one uses.
template <int pending, class... Registers>
__device__ __forceinline__ void wgmma_wait_group(Registers&... registers) {
    static_assert(pending >= 0 && pending < 8, "wgmma.wait_group takes 0 to 7");
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" :: "n"(pending) : "memory");
    (hold_registers(registers), ...);
}

// wgmma.mma_async.sync.aligned.m64nNk16: sums = a b, plus what sums held if `add`. N is twice the number of sums. A comes
// from registers or from shared memory, of float16 (wgmma_f16) or bfloat16 (wgmma_bf16) as B; sums are float.
// NOTE: the tensor core rounds its running sum toward zero. The error of long sums of one sign grows with their length:
// add partial sums of some 64 reduction elements in ordinary registers where float32's accuracy is meant.
#define LEANCONV_TEN(tens) \
    "%" #tens "0, %" #tens "1, %" #tens "2, %" #tens "3, %" #tens "4, " \
    "%" #tens "5, %" #tens "6, %" #tens "7, %" #tens "8, %" #tens "9"
#define LEANCONV_NAMES_4 "%0, %1, %2, %3"
#define LEANCONV_NAMES_8 LEANCONV_NAMES_4 ", %4, %5, %6, %7"
#define LEANCONV_NAMES_16 LEANCONV_TEN() ", %10, %11, %12, %13, %14, %15"
#define LEANCONV_NAMES_30 LEANCONV_TEN() ", " LEANCONV_TEN(1) ", " LEANCONV_TEN(2)
#define LEANCONV_NAMES_60 LEANCONV_NAMES_30 ", " LEANCONV_TEN(3) ", " LEANCONV_TEN(4) ", " LEANCONV_TEN(5)
#define LEANCONV_NAMES_90 LEANCONV_NAMES_60 ", " LEANCONV_TEN(6) ", " LEANCONV_TEN(7) ", " LEANCONV_TEN(8)
#define LEANCONV_NAMES_32 LEANCONV_NAMES_30 ", %30, %31"
#define LEANCONV_NAMES_48 LEANCONV_NAMES_30 ", " LEANCONV_TEN(3) ", %40, %41, %42, %43, %44, %45, %46, %47"
#define LEANCONV_NAMES_64 LEANCONV_NAMES_60 ", %60, %61, %62, %63"
#define LEANCONV_NAMES_96 LEANCONV_NAMES_90 ", %90, %91, %92, %93, %94, %95"
#define LEANCONV_NAMES_128 \
    LEANCONV_NAMES_90 ", " LEANCONV_TEN(9) ", " LEANCONV_TEN(10) ", " LEANCONV_TEN(11) \
    ", %120, %121, %122, %123, %124, %125, %126, %127"
#define LEANCONV_FOUR(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define LEANCONV_SUMS_4(i) LEANCONV_FOUR(i)
#define LEANCONV_SUMS_8(i) LEANCONV_FOUR(i), LEANCONV_FOUR(i + 4)
#define LEANCONV_SUMS_16(i) LEANCONV_FOUR(i), LEANCONV_FOUR(i + 4), LEANCONV_FOUR(i + 8), LEANCONV_FOUR(i + 12)
#define LEANCONV_SUMS_32(i) LEANCONV_SUMS_16(i), LEANCONV_SUMS_16(i + 16)
#define LEANCONV_SUMS_48(i) LEANCONV_SUMS_32(i), LEANCONV_SUMS_16(i + 32)
#define LEANCONV_SUMS_64(i) LEANCONV_SUMS_32(i), LEANCONV_SUMS_32(i + 32)
#define LEANCONV_SUMS_96(i) LEANCONV_SUMS_64(i), LEANCONV_SUMS_32(i + 64)
#define LEANCONV_SUMS_128(i) LEANCONV_SUMS_64(i), LEANCONV_SUMS_64(i + 64)

// o0 to o6: the numbers of the operands that follow the sums.
#define LEANCONV_WGMMA(type, n, count, o0, o1, o2, o3, o4, o5, o6) \
    template <int transposed> \
    __device__ __forceinline__ void wgmma_##type(float (&sums)[count], const unsigned (&a)[4], Descriptor<transposed> b, \
                                                 bool add) { \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #o5 ", 0;\n" \
                     "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." #type "." #type " {" LEANCONV_NAMES_##count "}, " \
                     "{%" #o0 ", %" #o1 ", %" #o2 ", %" #o3 "}, %" #o4 ", p, 1, 1, %" #o6 ";\n}\n" \
                     : LEANCONV_SUMS_##count(0) \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "r"(static_cast<int>(add)), \
                       "n"(transposed)); \
    } \
    template <int a_transposed, int b_transposed> \
    __device__ __forceinline__ void wgmma_##type(float (&sums)[count], Descriptor<a_transposed> a, \
                                                 Descriptor<b_transposed> b, bool add) { \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #o2 ", 0;\n" \
                     "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." #type "." #type " {" LEANCONV_NAMES_##count "}, " \
                     "%" #o0 ", %" #o1 ", p, 1, 1, %" #o3 ", %" #o4 ";\n}\n" \
                     : LEANCONV_SUMS_##count(0) \
                     : "l"(a.bits), "l"(b.bits), "r"(static_cast<int>(add)), "n"(a_transposed), "n"(b_transposed)); \
    }
#define LEANCONV_WGMMAS(n, count, ...) \
    LEANCONV_WGMMA(f16, n, count, __VA_ARGS__) \
    LEANCONV_WGMMA(bf16, n, count, __VA_ARGS__)
// m64nNk8 of TF32: A comes from registers, one element each: a[i] is row g, or g + 8 where i is odd; column t, from i = 2 on
// t + 4; or from shared memory. There operands are K-major, 32 bytes a line.
// NOTE: the tensor core reads 10 digits of each and drops the others: round before (cvt_rn_tf32_f32).
#define LEANCONV_WGMMA_TF32(n, count, o0, o1, o2, o3, o4, o5) \
    __device__ __forceinline__ void wgmma_tf32(float (&sums)[count], const unsigned (&a)[4], MatrixDescriptor b, bool add) { \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #o5 ", 0;\n" \
                     "wgmma.mma_async.sync.aligned.m64n" #n "k8.f32.tf32.tf32 {" LEANCONV_NAMES_##count "}, " \
                     "{%" #o0 ", %" #o1 ", %" #o2 ", %" #o3 "}, %" #o4 ", p, 1, 1;\n}\n" \
                     : LEANCONV_SUMS_##count(0) \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "r"(static_cast<int>(add))); \
    } \
    __device__ __forceinline__ void wgmma_tf32(float (&sums)[count], MatrixDescriptor a, MatrixDescriptor b, bool add) { \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #o2 ", 0;\n" \
                     "wgmma.mma_async.sync.aligned.m64n" #n "k8.f32.tf32.tf32 {" LEANCONV_NAMES_##count "}, " \
                     "%" #o0 ", %" #o1 ", p, 1, 1;\n}\n" \
                     : LEANCONV_SUMS_##count(0) \
                     : "l"(a.bits), "l"(b.bits), "r"(static_cast<int>(add))); \
    }
LEANCONV_WGMMA_TF32(32, 16, 16, 17, 18, 19, 20, 21)
LEANCONV_WGMMA_TF32(64, 32, 32, 33, 34, 35, 36, 37)
LEANCONV_WGMMA_TF32(96, 48, 48, 49, 50, 51, 52, 53)
LEANCONV_WGMMA_TF32(128, 64, 64, 65, 66, 67, 68, 69)
LEANCONV_WGMMA_TF32(192, 96, 96, 97, 98, 99, 100, 101)
LEANCONV_WGMMA_TF32(256, 128, 128, 129, 130, 131, 132, 133)
LEANCONV_WGMMAS(8, 4, 4, 5, 6, 7, 8, 9, 10)
LEANCONV_WGMMAS(16, 8, 8, 9, 10, 11, 12, 13, 14)
LEANCONV_WGMMAS(32, 16, 16, 17, 18, 19, 20, 21, 22)
LEANCONV_WGMMAS(64, 32, 32, 33, 34, 35, 36, 37, 38)
LEANCONV_WGMMAS(96, 48, 48, 49, 50, 51, 52, 53, 54)
LEANCONV_WGMMAS(128, 64, 64, 65, 66, 67, 68, 69, 70)
LEANCONV_WGMMAS(192, 96, 96, 97, 98, 99, 100, 101, 102)
LEANCONV_WGMMAS(256, 128, 128, 129, 130, 131, 132, 133, 134)
#endif

}  // namespace leanconv
