// The arithmetic of the tensor cores, and the instructions of a warp: ldmatrix, mma.sync.
//
// The model of a sum. Products are exact. The products and the sum so far are aligned to the largest exponent and cut
// off, toward zero, at so many bits below float32's last bit there as `guard` says; they are added exactly, and the
// result is cut off to float32, toward zero. A product's exponent is the sum of its factors', though the product may be
// twice as large. wgmma adds 16 products at once with two such bits: equal to an H200 in each of 128 sums of 2,304 and
// 9,216 products (2 differ if products are normalised first). mma.sync, as on sm_80, adds eight and eight with one, of TF32 four and
// four.
// Subnormals are kept; what is too large becomes infinity; each NaN is 7fffffff.
#include <runtime.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

using namespace machine;
using emulator::Factors;

namespace {

constexpr int float_digits = 23, exponent_bias = 1023, least_exponent = -126;
constexpr unsigned not_a_number = 0x7fffffff;

struct Fragments {
    float* sums;
    const unsigned *a, *b;
    Factors factors;
};

struct Matrices {
    unsigned* to;
    int count;
    const unsigned char* row;
    bool transposed;
};

template <class T>
T& posted(int thread) { return *reinterpret_cast<T*>(fibres[thread].posted); }

// A load of 16 bytes, which may take its time until something uses the value. NOTE: any product that the thread makes
// counts as the use of all that it has loaded.
void load(const void* from, const char* what, Site site) {
    const size_t at = shared_range(from, 16, 16, what, site);
    check_free(at, 16, false, what, site);
    fibres[current].products.loaded.push_back({at, site});
}

double power_of_two(int exponent) { return emulator::bit_cast<double>(static_cast<uint64_t>(exponent + exponent_bias) << 52); }

// The power of two in it.
inline double leading(double value) {
    return emulator::bit_cast<double>(emulator::bit_cast<uint64_t>(value) & 0x7ff0'0000'0000'0000);
}

// What is cut off to float32.
inline float toward_zero(double value) {
    const auto near = static_cast<float>(value);
    const bool beyond = std::fabs(static_cast<double>(near)) > std::fabs(value);
    return emulator::bit_cast<float>(emulator::bit_cast<int>(near) - (beyond & (std::fabs(near) <= FLT_MAX)));
}

// Where a factor or the sum is infinite or no number.
float plain_sum(float sum, int count, int lines, const double* a, const double* b) {
    double total = 0;
    for (int k = 0; k < count; ++k) total += a[k] * b[k * lines];
    total += sum;
    return std::isnan(total) ? emulator::bit_cast<float>(not_a_number) : static_cast<float>(total);
}

#if defined(__x86_64__)
#define WIDEST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDEST
#endif

// Adds the products of `count` elements of a row of A with each of `lines` lines of B, whose elements lie in b[k][line].
// NOTE: most of the time of a kernel that multiplies. The loops over lines call nothing and are vectorised.
template <int count>
WIDEST void add_products(float* sums, int lines, const double* a, const double* b, int guard) {
    double largest[most_lines], inverse[most_lines], total[most_lines];
    for (int j = 0; j < lines; ++j) largest[j] = leading(sums[j]);
    for (int k = 0; k < count; ++k) {
        const double size = leading(a[k]);
        for (int j = 0; j < lines; ++j) {
            const double other = size * leading(b[k * lines + j]);
            largest[j] = largest[j] < other ? other : largest[j];
        }
    }
    for (int j = 0; j < lines; ++j) {
        // exponents with their bias; float32's own last bit has no less than 2^-149
        const int64_t exponent = std::max<int64_t>(emulator::bit_cast<int64_t>(largest[j]) >> 52, exponent_bias + least_exponent);
        const int64_t last = exponent - float_digits - guard;
        largest[j] = emulator::bit_cast<double>(last << 52);
        inverse[j] = emulator::bit_cast<double>((2 * exponent_bias - last) << 52);
        total[j] = std::trunc(sums[j] * inverse[j]);  // parts are below 2^28
    }
    for (int k = 0; k < count; ++k) {
        for (int j = 0; j < lines; ++j) total[j] += std::trunc(a[k] * b[k * lines + j] * inverse[j]);
    }
    float found[most_lines];
    for (int j = 0; j < lines; ++j) found[j] = toward_zero(total[j] * largest[j]);
    for (int j = 0; j < lines; ++j) {
        if (!(std::fabs(total[j]) <= DBL_MAX)) found[j] = plain_sum(sums[j], count, lines, a, b + j);
    }
    for (int j = 0; j < lines; ++j) sums[j] = found[j];
}

// The sums of a warp, of which a thread has four: to `rows` or back.
template <class Move>
void each_sum(int first, float (&rows)[16][8], Move move) {
    for (int lane = 0; lane < 32; ++lane) {
        for (int i = 0; i < 4; ++i) {
            move(posted<Fragments>(first + lane).sums[i], rows[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]);
        }
    }
}

// In two halves, one after the other.
template <int half>
void multiply_halves(int first, const double (&a)[16][2 * half], const double (&b)[2 * half][8]) {
    float rows[16][8];
    each_sum(first, rows, [](float mine, float& there) { there = mine; });
    for (int row = 0; row < 16; ++row) {
        for (int from = 0; from < 2 * half; from += half) add_products<half>(rows[row], 8, a[row] + from, b[from], 1);
    }
    each_sum(first, rows, [](float& mine, float there) { mine = there; });
}

}  // namespace

namespace machine {

double widen(unsigned short bits, bool bfloat16) {
    const int digits = bfloat16 ? 7 : 10, bias = bfloat16 ? 127 : 15, top = bfloat16 ? 255 : 31;
    const int exponent = bits >> digits & top, rest = bits & ((1 << digits) - 1);
    const int whole = exponent ? rest + (1 << digits) : rest;
    double size = whole * power_of_two(std::max(exponent, 1) - bias - digits);
    if (exponent == top) size = rest ? NAN : INFINITY;
    return bits >> 15 ? -size : size;
}

// The last 13 of float32's 23 digits are not read.
double widen_tf32(unsigned bits) { return emulator::bit_cast<float>(bits & ~0x1fffu); }

void add_row(float* sums, int lines, const double* a, const double* b, Factors factors) {
    if (factors == Factors::tf32) add_products<depth / 2>(sums, lines, a, b, 2);
    else add_products<depth>(sums, lines, a, b, 2);
}

void check_loads_used(size_t at, size_t bytes, const char* what, Site site) {
    for (const Fibre& fibre : own->fibres) {
        for (const Loaded& loaded : fibre.products.loaded) {
            if (loaded.at >= at + bytes || at >= loaded.at + 16) continue;
            emulator::fail(site, "%s: what thread %ld loads at %s:%d from shared bytes %zu to %zu may not have come: no product "
                           "has used it", what, static_cast<long>(&fibre - own->fibres.data()),
                           base_name(loaded.site.file), loaded.site.line, loaded.at, loaded.at + 16);
        }
    }
}

void give_matrices(int first) {
    for (int lane = 0; lane < 32; ++lane) {
        const auto& mine = posted<Matrices>(first + lane);
        for (int m = 0; m < mine.count; ++m) {
            unsigned short pair[2];
            for (int i = 0; i < 2; ++i) {
                int row = lane / 4, column = lane % 4 * 2 + i;
                if (mine.transposed) std::swap(row, column);
                memcpy(&pair[i], posted<Matrices>(first + 8 * m + row).row + 2 * column, sizeof pair[i]);
            }
            mine.to[m] = pair[0] | static_cast<unsigned>(pair[1]) << 16;
        }
    }
}

// Of TF32 a register holds one element.
void multiply_tf32_matrices(int first) {
    constexpr int half = depth / 4;
    double a[16][2 * half], b[2 * half][8];
    for (int lane = 0; lane < 32; ++lane) {
        const auto& mine = posted<Fragments>(first + lane);
        for (int i = 0; i < 4; ++i) a[lane / 4 + i % 2 * 8][lane % 4 + i / 2 * half] = widen_tf32(mine.a[i]);
        for (int i = 0; i < 2; ++i) b[lane % 4 + i * half][lane / 4] = widen_tf32(mine.b[i]);
    }
    multiply_halves<half>(first, a, b);
}

void multiply_matrices(int first) {
    const Factors factors = posted<Fragments>(first).factors;
    if (factors == Factors::tf32) return multiply_tf32_matrices(first);
    const bool bfloat16 = factors == Factors::bfloat16;
    double a[16][depth], b[depth][8];
    for (int lane = 0; lane < 32; ++lane) {
        const auto& mine = posted<Fragments>(first + lane);
        const int group = lane / 4, pair = lane % 4;
        for (int i = 0; i < 8; ++i) {
            const int column = 2 * pair + i % 2 + i / 4 * 8;
            a[group + i / 2 % 2 * 8][column] = widen(static_cast<unsigned short>(mine.a[i / 2] >> i % 2 * 16), bfloat16);
        }
        for (int i = 0; i < 4; ++i) {
            const int k = 2 * pair + i % 2 + i / 2 * 8;
            b[k][group] = widen(static_cast<unsigned short>(mine.b[i / 2] >> i % 2 * 16), bfloat16);
        }
    }
    multiply_halves<depth / 2>(first, a, b);
}

}  // namespace machine

namespace emulator {

void ld_shared_v4(void* to, const void* from, Site site) {
    load(from, "ld_shared_v4", site);
    memcpy(to, from, 16);
}

void ldmatrix(unsigned* to, int count, const void* row, bool transposed, Site site) {
    if (current % 32 < 8 * count) load(row, "ldmatrix", site);
    Matrices mine{to, count, static_cast<const unsigned char*>(row), transposed};
    warp_exchange(load_matrices, ~0u, reinterpret_cast<uintptr_t>(&mine), 0, 32, site);
}

void mma(Factors factors, float* sums, const unsigned* a, const unsigned* b, Site site) {
    fibres[current].products.loaded.clear();
    Fragments mine{sums, a, b, factors};
    warp_exchange(multiply, ~0u, reinterpret_cast<uintptr_t>(&mine), 0, 32, site);
}

}  // namespace emulator
