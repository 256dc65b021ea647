// Index arithmetic that kernels share. All divisors are compile-time constants, so a division is a multiply and a shift.
#pragma once

namespace leanconv {

using int64 = long long;

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int gcd(int a, int b) { return b == 0 ? a : gcd(b, a % b); }

template <bool condition, class A, class B> struct Select { using type = A; };
template <class A, class B> struct Select<false, A, B> { using type = B; };

// Offsets within a tensor: 32 bits suffice unless the problem says its tensors are wide (2^31 elements or more).
template <bool wide> struct OffsetOf { using type = int; };
template <> struct OffsetOf<true> { using type = int64; };
template <class Problem> using Offset = typename OffsetOf<Problem::wide>::type;

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
