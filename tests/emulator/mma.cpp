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

namespace {

constexpr int float_digits = 23;
constexpr unsigned not_a_number = 0x7fffffff;

struct Fragments {
    float* sums;
    const unsigned *a, *b;
    emulator::Factors factors;
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

double power_of_two(int exponent) { return emulator::bit_cast<double>(static_cast<uint64_t>(exponent + 1023) << 52); }

// The power of two in it.
double leading(double value) {
    return emulator::bit_cast<double>(emulator::bit_cast<uint64_t>(value) & 0x7ff0'0000'0000'0000);
}

float toward_zero(double value) {
    const auto near = static_cast<float>(value);
    const bool beyond = std::fabs(near) <= FLT_MAX && std::fabs(static_cast<double>(near)) > std::fabs(value);
    return beyond ? std::nextafterf(near, 0.0f) : near;
}

#if defined(__x86_64__)
#define WIDEST __attribute__((optimize("O3"), target_clones("avx2", "default")))
#else
#define WIDEST
#endif

// NOTE: most of the time of a kernel that multiplies; it calls nothing in its loops, which are vectorised.
template <int count>
WIDEST float add_products(float sum, const double* a, const double* b, int guard) {
    double terms[count + 1], sizes[count];
    bool finite = std::isfinite(sum);
    for (int i = 0; i < count; ++i) {
        terms[i] = a[i] * b[i];
        sizes[i] = leading(a[i]) * leading(b[i]);
    }
    for (int i = 0; i < count; ++i) finite &= std::fabs(terms[i]) <= DBL_MAX;
    terms[count] = sum;
    if (!finite) {
        double plain = 0;
        for (const double term : terms) plain += term;
        return std::isnan(plain) ? emulator::bit_cast<float>(not_a_number) : static_cast<float>(plain);
    }
    double largest = leading(sum);
    for (int i = 0; i < count; ++i) largest = std::max(largest, sizes[i]);
    if (largest == 0) return 0;
    // largest is 2^exponent; float32's own last bit has no less than 2^-149
    const int exponent = std::max(static_cast<int>(emulator::bit_cast<uint64_t>(largest) >> 52) - 1023, -126);
    const int last = exponent - float_digits - guard;
    const double inverse = power_of_two(-last);
    int parts[count + 1];  // below 2^28
    for (int i = 0; i <= count; ++i) parts[i] = static_cast<int>(terms[i] * inverse);
    int64_t total = 0;
    for (const int part : parts) total += part;
    return toward_zero(static_cast<double>(total) * power_of_two(last));
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

float dot(float sum, const double* a, const double* b, Core core) {
    if (core == Core::whole) return add_products<depth>(sum, a, b, 2);
    constexpr int half = depth / 2;
    return add_products<half>(add_products<half>(sum, a, b, 1), a + half, b + half, 1);
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
    double a[16][2 * half], b[8][2 * half];
    for (int lane = 0; lane < 32; ++lane) {
        const auto& mine = posted<Fragments>(first + lane);
        for (int i = 0; i < 4; ++i) a[lane / 4 + i % 2 * 8][lane % 4 + i / 2 * half] = widen_tf32(mine.a[i]);
        for (int i = 0; i < 2; ++i) b[lane / 4][lane % 4 + i * half] = widen_tf32(mine.b[i]);
    }
    for (int lane = 0; lane < 32; ++lane) {
        const auto& mine = posted<Fragments>(first + lane);
        for (int i = 0; i < 4; ++i) {
            const double *x = a[lane / 4 + i / 2 * 8], *w = b[lane % 4 * 2 + i % 2];
            mine.sums[i] = add_products<half>(add_products<half>(mine.sums[i], x, w, 1), x + half, w + half, 1);
        }
    }
}

void multiply_matrices(int first) {
    const emulator::Factors factors = posted<Fragments>(first).factors;
    if (factors == emulator::Factors::tf32) return multiply_tf32_matrices(first);
    const bool bfloat16 = factors == emulator::Factors::bfloat16;
    double a[16][depth], b[8][depth];
    for (int lane = 0; lane < 32; ++lane) {
        const auto& mine = posted<Fragments>(first + lane);
        const int group = lane / 4, pair = lane % 4;
        for (int i = 0; i < 8; ++i) {
            const int column = 2 * pair + i % 2 + i / 4 * 8;
            a[group + i / 2 % 2 * 8][column] = widen(static_cast<unsigned short>(mine.a[i / 2] >> i % 2 * 16), bfloat16);
        }
        for (int i = 0; i < 4; ++i) {
            const int k = 2 * pair + i % 2 + i / 2 * 8;
            b[group][k] = widen(static_cast<unsigned short>(mine.b[i / 2] >> i % 2 * 16), bfloat16);
        }
    }
    for (int lane = 0; lane < 32; ++lane) {
        const auto& mine = posted<Fragments>(first + lane);
        for (int i = 0; i < 4; ++i) {
            mine.sums[i] = dot(mine.sums[i], a[lane / 4 + i / 2 * 8], b[lane % 4 * 2 + i % 2], Core::halves);
        }
    }
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
