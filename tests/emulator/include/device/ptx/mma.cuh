// The CPU twin of ptx/mma.cuh: same names, same signatures, the rules of the PTX manual checked at each call.
#pragma once

#include <device/ptx/memory.cuh>

namespace leanconv {

inline void mma_f16(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2], EMULATOR_SITE) {
    emulator::mma(emulator::Factors::float16, sums, a, b, site);
}
inline void mma_bf16(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2], EMULATOR_SITE) {
    emulator::mma(emulator::Factors::bfloat16, sums, a, b, site);
}

template <int count>
inline void ldmatrix(unsigned (&to)[count], const void* row, EMULATOR_SITE) {
    static_assert(count == 1 || count == 2 || count == 4, "ldmatrix loads one, two or four matrices");
    emulator::ldmatrix(to, count, row, false, site);
}
template <int count>
inline void ldmatrix_trans(unsigned (&to)[count], const void* row, EMULATOR_SITE) {
    static_assert(count == 1 || count == 2 || count == 4, "ldmatrix loads one, two or four matrices");
    emulator::ldmatrix(to, count, row, true, site);
}

template <int transposed>
struct Descriptor {
    unsigned long long bits;
    Descriptor operator+(int bytes) const { return {bits + static_cast<unsigned long long>(bytes / 16)}; }
    Descriptor further(int bytes) const { return *this + bytes; }
};
using MatrixDescriptor = Descriptor<0>;
using TransposedDescriptor = Descriptor<1>;

inline MatrixDescriptor matrix_descriptor(const void* start, int leading, int stride, int swizzle, EMULATOR_SITE) {
    return {emulator::matrix_descriptor(start, leading, stride, swizzle, site)};
}
inline TransposedDescriptor transposed_descriptor(const void* start, int leading, int stride, int swizzle, EMULATOR_SITE) {
    return {emulator::matrix_descriptor(start, leading, stride, swizzle, site)};
}

// NOTE: as many overloads as kernels need: no argument may follow a pack, and the line does.
inline void wgmma_fence(EMULATOR_SITE) { emulator::wgmma_fence(emulator::Named<>().list, site); }
template <class A>
inline void wgmma_fence(A& a, EMULATOR_SITE) { emulator::wgmma_fence(emulator::Named<A>(a).list, site); }
template <class A, class B>
inline void wgmma_fence(A& a, B& b, EMULATOR_SITE) { emulator::wgmma_fence(emulator::Named<A, B>(a, b).list, site); }
template <class A, class B, class C>
inline void wgmma_fence(A& a, B& b, C& c, EMULATOR_SITE) {
    emulator::wgmma_fence(emulator::Named<A, B, C>(a, b, c).list, site);
}

template <class A, class B, class C, class D>
inline void wgmma_fence(A& a, B& b, C& c, D& d, EMULATOR_SITE) {
    emulator::wgmma_fence(emulator::Named<A, B, C, D>(a, b, c, d).list, site);
}

template <class A>
inline void wgmma_before_fence(A& a, EMULATOR_SITE) { emulator::wgmma_fence(emulator::Named<A>(a).list, site); }

inline void wgmma_commit_group() { emulator::wgmma_commit_group(); }

template <int pending>
inline void wgmma_wait_group(EMULATOR_SITE) {
    static_assert(pending >= 0 && pending < 8, "wgmma.wait_group takes 0 to 7");
    emulator::wgmma_wait_group(pending, emulator::Named<>().list, site);
}
template <int pending, class A>
inline void wgmma_wait_group(A& a, EMULATOR_SITE) {
    static_assert(pending >= 0 && pending < 8, "wgmma.wait_group takes 0 to 7");
    emulator::wgmma_wait_group(pending, emulator::Named<A>(a).list, site);
}
template <int pending, class A, class B>
inline void wgmma_wait_group(A& a, B& b, EMULATOR_SITE) {
    static_assert(pending >= 0 && pending < 8, "wgmma.wait_group takes 0 to 7");
    emulator::wgmma_wait_group(pending, emulator::Named<A, B>(a, b).list, site);
}
template <int pending, class A, class B, class C>
inline void wgmma_wait_group(A& a, B& b, C& c, EMULATOR_SITE) {
    static_assert(pending >= 0 && pending < 8, "wgmma.wait_group takes 0 to 7");
    emulator::wgmma_wait_group(pending, emulator::Named<A, B, C>(a, b, c).list, site);
}

template <int pending, class A, class B, class C, class D>
inline void wgmma_wait_group(A& a, B& b, C& c, D& d, EMULATOR_SITE) {
    static_assert(pending >= 0 && pending < 8, "wgmma.wait_group takes 0 to 7");
    emulator::wgmma_wait_group(pending, emulator::Named<A, B, C, D>(a, b, c, d).list, site);
}

constexpr bool is_count_of_sums(int count) {
    return count == 4 || count == 8 || count == 16 || count == 32 || count == 48 || count == 64 || count == 96 || count == 128;
}

template <int count, int transposed>
inline void wgmma_f16(float (&sums)[count], const unsigned (&a)[4], Descriptor<transposed> b, bool add, EMULATOR_SITE) {
    static_assert(is_count_of_sums(count), "wgmma of 8, 16, 32, 64, 96, 128, 192 or 256 columns");
    emulator::wgmma(emulator::Factors::float16, sums, count, a, {}, {b.bits, transposed}, add, site);
}
template <int count, int a_transposed, int b_transposed>
inline void wgmma_f16(float (&sums)[count], Descriptor<a_transposed> a, Descriptor<b_transposed> b, bool add,
                      EMULATOR_SITE) {
    static_assert(is_count_of_sums(count), "wgmma of 8, 16, 32, 64, 96, 128, 192 or 256 columns");
    emulator::wgmma(emulator::Factors::float16, sums, count, nullptr, {a.bits, a_transposed}, {b.bits, b_transposed}, add, site);
}
template <int count, int transposed>
inline void wgmma_bf16(float (&sums)[count], const unsigned (&a)[4], Descriptor<transposed> b, bool add, EMULATOR_SITE) {
    static_assert(is_count_of_sums(count), "wgmma of 8, 16, 32, 64, 96, 128, 192 or 256 columns");
    emulator::wgmma(emulator::Factors::bfloat16, sums, count, a, {}, {b.bits, transposed}, add, site);
}
template <int count, int a_transposed, int b_transposed>
inline void wgmma_bf16(float (&sums)[count], Descriptor<a_transposed> a, Descriptor<b_transposed> b, bool add,
                      EMULATOR_SITE) {
    static_assert(is_count_of_sums(count), "wgmma of 8, 16, 32, 64, 96, 128, 192 or 256 columns");
    emulator::wgmma(emulator::Factors::bfloat16, sums, count, nullptr, {a.bits, a_transposed}, {b.bits, b_transposed}, add, site);
}
template <int count>
inline void wgmma_tf32(float (&sums)[count], const unsigned (&a)[4], MatrixDescriptor b, bool add, EMULATOR_SITE) {
    static_assert(is_count_of_sums(count) && count >= 16, "wgmma of 32, 64, 96, 128, 192 or 256 columns");
    emulator::wgmma(emulator::Factors::tf32, sums, count, a, {}, {b.bits, 0}, add, site);
}
template <int count>
inline void wgmma_tf32(float (&sums)[count], MatrixDescriptor a, MatrixDescriptor b, bool add, EMULATOR_SITE) {
    static_assert(is_count_of_sums(count) && count >= 16, "wgmma of 32, 64, 96, 128, 192 or 256 columns");
    emulator::wgmma(emulator::Factors::tf32, sums, count, nullptr, {a.bits, 0}, {b.bits, 0}, add, site);
}

}  // namespace leanconv
