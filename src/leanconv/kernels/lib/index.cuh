// Index arithmetic that kernels share. Divisors are compile-time constants: a division is a multiply and a shift.
#pragma once

namespace leanconv {

using int64 = long long;

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int gcd(int a, int b) { return b == 0 ? a : gcd(b, a % b); }

template <bool condition, class A, class B> struct Select { using type = A; };
template <class A, class B> struct Select<false, A, B> { using type = B; };

// Numbers of pixels and elements, and offsets in bytes. A problem whose largest tensor stays under 4 GiB counts bytes
// in 32 unsigned bits: one register and one addition, and the load adds the tensor's base by itself.
template <class Problem> using Offset = typename Select<Problem::wide, int64, int>::type;
template <class Problem> using Bytes = typename Select<Problem::wide, int64, unsigned>::type;

template <class T, class B>
__device__ __forceinline__ const T* at_byte(const T* base, B bytes) {
    return reinterpret_cast<const T*>(reinterpret_cast<const char*>(base) + bytes);
}

// An output position (n, p, q) from its number in n-p-q order.
template <class Problem>
struct Pixel {
    Offset<Problem> n;
    int p, q;
    __device__ __forceinline__ explicit Pixel(Offset<Problem> number) {
        n = number / (Problem::p * Problem::q);
        const int rest = static_cast<int>(number - n * (Problem::p * Problem::q));
        p = rest / Problem::q;
        q = rest % Problem::q;
    }
};

}  // namespace leanconv
