// What a CUDA kernel finds in its language, for g++: qualifiers, indices, barriers, warp intrinsics, arithmetic.
// Included in front of every emulated unit. No standard C++ header: they cost more to compile than most kernels.
#pragma once

#include <vector_types.h>
#include <vector_functions.h>

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __launch_bounds__
#undef __cluster_dims__
#undef __forceinline__
#undef __noinline__
#undef __align__
#undef __grid_constant__
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
// NOTE: static shared memory would be one fenceless global here, so kernels take theirs from leanconv::shared_memory().
#define __shared__ emulator_has_no_static_shared_memory

extern "C" {
float fmaf(float, float, float) noexcept;
double fma(double, double, double) noexcept;
float sqrtf(float) noexcept;
float expf(float) noexcept;
float expm1f(float) noexcept;
float tanhf(float) noexcept;
float erff(float) noexcept;
float fabsf(float) noexcept;
double fabs(double) noexcept;
float floorf(float) noexcept;
float ceilf(float) noexcept;
float rintf(float) noexcept;
float fminf(float, float) noexcept;
float fmaxf(float, float) noexcept;
double fmin(double, double) noexcept;
double fmax(double, double) noexcept;
double rint(double) noexcept;
void sincos(double, double*, double*) noexcept;
int printf(const char*, ...);
int abs(int) noexcept;
}

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
constexpr int warpSize = 32;

namespace emulator {

// Where in the kernel a call stands. As a default argument it is evaluated at the caller's line.
struct Site {
    const char* file;
    int line;
};
#define EMULATOR_SITE emulator::Site site = {__builtin_FILE(), __builtin_LINE()}

enum WarpOperation { warp_sync, shuffle_index, shuffle_up, shuffle_down, shuffle_xor, ballot, load_matrices, multiply };

[[noreturn]] void fail(Site site, const char* format, ...) __attribute__((format(printf, 2, 3)));
void block_barrier(Site site);
void named_barrier(bool waits, int number, int threads, Site site);
void set_registers(bool up, int count, Site site);
unsigned cluster_rank();
void cluster_barrier(Site site);
float cluster_load(const float* shared, unsigned rank, Site site);
void check_cluster_vector(const float* shared, Site site);
unsigned long long warp_exchange(WarpOperation, unsigned mask, unsigned long long value, unsigned lane, int width, Site);
unsigned running_lanes();
unsigned char* shared_memory();
unsigned shared_address(const void* pointer, Site site);
void cp_async(void* shared, const void* global, int bytes, bool valid, Site site);
void cp_async_commit_group();
void cp_async_wait_group(int pending);
void mbarrier_init(void* barrier, int count, Site site);
void mbarrier_inval(void* barrier, Site site);
void fence_mbarrier_init();
void mbarrier_expect_tx(void* barrier, unsigned bytes, Site site);
void mbarrier_arrive(void* barrier, Site site);
void cp_async_mbarrier_arrive(void* barrier, Site site);
void mbarrier_arrive_cluster(void* barrier, unsigned rank, Site site);
void look_later(Site site);  // lets all others go on as far as they can
bool mbarrier_test_wait(void* barrier, unsigned parity, Site site);
void mbarrier_wait(void* barrier, unsigned parity, Site site);
void fence_proxy_async();
void wait_for_launches();  // until all launches before this one have ended
void bulk_load(void* shared, const void* global, unsigned bytes, void* barrier, unsigned receivers, Site site);
void bulk_store(void* global, const void* shared, unsigned bytes, Site site);
void bulk_commit_group();
void bulk_wait_group(int pending, bool only_read);
void check_tensor_map(const void* map, Site site);
void tensor_load(void* shared, const void* map, void* barrier, int rank, const int* coordinates,
                 const unsigned short* offsets, Site site);  // offsets: of an im2col map
void tensor_store(const void* map, const void* shared, int rank, const int* coordinates, Site site);

// Registers of a thread that a kernel names at a fence or a wait.
struct Registers {
    const void* at;
    unsigned long long bytes;
};
template <typename... Arrays>
struct Named {
    Registers list[sizeof...(Arrays) + 1];
    explicit Named(Arrays&... arrays) : list{{&arrays, sizeof arrays}..., {nullptr, 0}} {}
};
void wgmma_fence(const Registers* named, Site site);  // up to one without bytes
// An operand in shared memory.
struct Matrix {
    unsigned long long descriptor;
    int transposed;
};
enum class Factors { float16, bfloat16, tf32 };
// `a` is null where `a_matrix` counts.
void wgmma(Factors factors, float* sums, int count, const unsigned* a, Matrix a_matrix, Matrix b_matrix, bool add, Site site);
void wgmma_commit_group();
void wgmma_wait_group(int pending, const Registers* named, Site site);
unsigned long long matrix_descriptor(const void* start, int leading, int stride, int swizzle, Site site);
void ld_shared_v4(void* to, const void* from, Site site);
void ldmatrix(unsigned* to, int count, const void* row, bool transposed, Site site);
void mma(Factors factors, float* sums, const unsigned* a, const unsigned* b, Site site);

template <typename T>
inline T shuffle(WarpOperation operation, unsigned mask, T value, unsigned lane, int width, Site site) {
    static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8, "CUDA shuffles values of 2, 4 or 8 bytes");
    unsigned long long bits = 0;
    __builtin_memcpy(&bits, &value, sizeof(T));
    bits = warp_exchange(operation, mask, bits, lane, width, site);
    __builtin_memcpy(&value, &bits, sizeof(T));
    return value;
}

template <typename To, typename From>
inline To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
    To to;
    __builtin_memcpy(&to, &from, sizeof(To));
    return to;
}

}  // namespace emulator

inline void __syncthreads(EMULATOR_SITE) { emulator::block_barrier(site); }
inline void __syncwarp(unsigned mask = 0xffffffffu, EMULATOR_SITE) {
    emulator::warp_exchange(emulator::warp_sync, mask, 0, 0, 32, site);
}
template <typename T>
inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32, EMULATOR_SITE) {
    return emulator::shuffle(emulator::shuffle_index, mask, value, static_cast<unsigned>(lane), width, site);
}
template <typename T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATOR_SITE) {
    return emulator::shuffle(emulator::shuffle_up, mask, value, delta, width, site);
}
template <typename T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATOR_SITE) {
    return emulator::shuffle(emulator::shuffle_down, mask, value, delta, width, site);
}
template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, EMULATOR_SITE) {
    return emulator::shuffle(emulator::shuffle_xor, mask, value, static_cast<unsigned>(lane_mask), width, site);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, EMULATOR_SITE) {
    return static_cast<unsigned>(emulator::warp_exchange(emulator::ballot, mask, predicate != 0, 0, 32, site));
}
inline int __any_sync(unsigned mask, int predicate, EMULATOR_SITE) {
    return __ballot_sync(mask, predicate, site) != 0;
}
inline int __all_sync(unsigned mask, int predicate, EMULATOR_SITE) {
    return __ballot_sync(mask, predicate, site) == mask;
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value, EMULATOR_SITE) {
    for (int apart = 1; apart < 32; apart *= 2) {
        const unsigned other = __shfl_xor_sync(mask, value, apart, 32, site);
        value = value > other ? value : other;
    }
    return value;
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned value, EMULATOR_SITE) {
    return ~__reduce_max_sync(mask, ~value, site);
}
// NOTE: on the machine any subset of the warp may answer; here it is every lane that has not left the kernel.
inline unsigned __activemask() { return emulator::running_lanes(); }

inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __builtin_assume(bool fact, EMULATOR_SITE) {
    if (!fact) emulator::fail(site, "__builtin_assume of something false");
}
[[noreturn]] inline void __trap(EMULATOR_SITE) { emulator::fail(site, "__trap"); }

template <typename T>
inline T __ldg(const T* pointer) { return *pointer; }
template <typename T>
inline T __ldcs(const T* pointer) { return *pointer; }
template <typename T>
inline T __ldcg(const T* pointer) { return *pointer; }
template <typename T>
inline T __ldca(const T* pointer) { return *pointer; }
template <typename T>
inline void __stcs(T* pointer, T value) { *pointer = value; }
template <typename T>
inline void __stcg(T* pointer, T value) { *pointer = value; }

inline void sincospi(double x, double* sine, double* cosine) { sincos(3.14159265358979323846 * x, sine, cosine); }

inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdividef(float a, float b) { return a / b; }
inline int __float_as_int(float value) { return emulator::bit_cast<int>(value); }
inline unsigned __float_as_uint(float value) { return emulator::bit_cast<unsigned>(value); }
inline float __int_as_float(int value) { return emulator::bit_cast<float>(value); }
inline float __uint_as_float(unsigned value) { return emulator::bit_cast<float>(value); }
inline double __hiloint2double(int high, int low) {
    const unsigned long long bits = static_cast<unsigned long long>(static_cast<unsigned>(high)) << 32;
    return emulator::bit_cast<double>(bits | static_cast<unsigned>(low));
}
// NOTE: NaN is 0 of a float and the smallest int of a double.
inline int __double2int_rn(double value) {
    if (value != value) return -2147483647 - 1;
    const double whole = rint(value);
    return whole < -2147483648.0 ? -2147483647 - 1 : whole > 2147483647.0 ? 2147483647 : static_cast<int>(whole);
}
inline int __float2int_rn(float value) { return value != value ? 0 : __double2int_rn(value); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const unsigned long long bytes = static_cast<unsigned long long>(high) << 32 | low;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}
inline unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>((static_cast<unsigned long long>(a) * b) >> 32);
}
inline int __mulhi(int a, int b) { return static_cast<int>((static_cast<long long>(a) * b) >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __clz(int value) { return value == 0 ? 32 : __builtin_clz(static_cast<unsigned>(value)); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline unsigned __brev(unsigned value) {
    unsigned reversed = 0;
    for (int i = 0; i < 32; ++i) reversed |= ((value >> i) & 1u) << (31 - i);
    return reversed;
}

#define EMULATOR_MIN_MAX(type) \
    inline type min(type a, type b) { return b < a ? b : a; } \
    inline type max(type a, type b) { return a < b ? b : a; }
EMULATOR_MIN_MAX(int)
EMULATOR_MIN_MAX(unsigned)
EMULATOR_MIN_MAX(long)
EMULATOR_MIN_MAX(unsigned long)
EMULATOR_MIN_MAX(long long)
EMULATOR_MIN_MAX(unsigned long long)
#undef EMULATOR_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
