// Words of four 8-bit integers where four does not divide a filter's channels (a first layer has three): bytes are loaded
// into registers and made into words there, and a tap's last word ends with zeros.
#pragma once

#include <kernels/simt/pixel_loader.cuh>

namespace leanconv {

// A loose word as it is loaded: in as large pieces as lie aligned, without what is no channel of its tap.
template <class Problem>
struct LooseWord {
    static constexpr int piece_bytes = gcd(gcd(Problem::channel_bytes, Problem::group_bytes), 2);
    unsigned pieces[4 / piece_bytes];

    // Word number `in_tap` of a tap; zeros where it is not valid.
    __device__ __forceinline__ void load(const void* from, bool valid, int in_tap) {
        using Piece = typename Select<piece_bytes == 2, unsigned short, unsigned char>::type;
#pragma unroll
        for (int i = 0; i < 4 / piece_bytes; ++i) {
            const bool exists = valid && 4 * in_tap + i * piece_bytes < Problem::group_bytes;
            pieces[i] = exists ? static_cast<const Piece*>(from)[i] : 0;
        }
    }
    __device__ __forceinline__ float value(int = 0) const {
        unsigned word = 0;
#pragma unroll
        for (int i = 0; i < 4 / piece_bytes; ++i) word |= pieces[i] << i * piece_bytes * 8;
        return __uint_as_float(word);
    }
};

}  // namespace leanconv
