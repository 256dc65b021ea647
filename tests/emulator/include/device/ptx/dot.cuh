// The CPU twin of ptx/dot.cuh: same names, same signatures, sums that wrap around as the machine's do.
#pragma once

namespace leanconv {

template <class A>
inline int dp4a(unsigned a, unsigned b, int sum) {
    unsigned result = static_cast<unsigned>(sum);
    for (int i = 0; i < 4; ++i)
        result += static_cast<unsigned>(static_cast<A>(a >> 8 * i) * static_cast<signed char>(b >> 8 * i));
    return static_cast<int>(result);
}

inline int dp4a_s32_s32(int a, int b, int sum) { return dp4a<signed char>(a, b, sum); }

inline int dp4a_u32_s32(unsigned a, int b, int sum) { return dp4a<unsigned char>(a, b, sum); }

}  // namespace leanconv
