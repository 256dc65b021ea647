// squeeze_excite: each channel of an image times a gate, which depends on the means of all its channels; one launch.
//
//   mean[c] = sum over pixels of x[n, c, pixel] / pixels        h[j] = activation(sum over c of w1[j, c] * mean[c] + b1[j])
//   y[n, c, pixel] = x[n, c, pixel] * s[c]                      s[c] = gate(sum over j of w2[c, j] * h[j] + b2[c])
//
// Requires   dense images, NCHW or NHWC; in NHWC a pixel takes at most as many loads as a block has threads.
// Numerics   float32 sums in a fixed order: no atomics, the same bits in every run. 16 bits are rounded once.
// CTA tile   an image, which `split` blocks of a cluster share: pixels (NHWC) or channels (NCHW).
// One image  w1 and w2 to L2; sums of the block's share; cluster barrier; means; h and s, whose rows are dealt out to the
//            blocks, a cluster barrier behind each; the share again, last pixels first, if possible from L1; y.
// Work       x read once from memory and once from L1 or L2, y written once. Without this kernel: a mean, two layers of one
//            pixel and a product, in which x is read twice and the means pass memory three times.
// Explored   docs/layers.md (H200, 36415917): 237 us in EfficientNet-B0's 16 blocks, PyTorch's four launches 503; in one
//            block 0.34 to 0.67 of their time
#pragma once

#include <device/epilogue.cuh>

namespace leanconv {

struct Hardsigmoid {
    static __device__ __forceinline__ float of(float v) { return Relu6::of(v + 3.0f) * (1.0f / 6.0f); }
};

// `count` neighbours as one load brings them and one store writes them, aligned to all of them; zeros where they are not
// valid. Loops over them have as many rounds in every thread, so that the compiler has several loads in flight.
template <class T, int count>
struct Neighbours {
    static constexpr int words = ceil_div(count * static_cast<int>(sizeof(T)), 4);
    unsigned word[words] = {};

    __device__ __forceinline__ void load(const T* from, bool valid) {
        if (!valid) return;
        if constexpr (count * sizeof(T) == 2) word[0] = load_read_only(from).bits;
        else load_read_only(word, reinterpret_cast<const unsigned*>(from));
    }
    __device__ __forceinline__ float operator[](int i) const {
        if constexpr (sizeof(T) == 4) return __uint_as_float(word[i]);
        else return to_float(T{static_cast<unsigned short>(word[i / 2] >> i % 2 * 16)});
    }
    // To `to`, each times `factor(i)`.
    template <class Factor>
    __device__ __forceinline__ void store(T* to, Factor factor) const {
        T v[count];
#pragma unroll
        for (int i = 0; i < count; ++i) v[i] = from_float<T>((*this)[i] * factor(i));
        if constexpr (count == 8) {
            unsigned packed[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) packed[i] = v[2 * i].bits | v[2 * i + 1].bits << 16;
            store_vector(reinterpret_cast<unsigned*>(to), packed);
        } else {
            store_adjacent(to, v);
        }
    }
};

// The most of `count` neighbours that one load of 16 bytes at most brings, such that whole loads bring all.
template <class T>
__host__ __device__ constexpr int at_once(int count) {
    return gcd(count, 16 / static_cast<int>(sizeof(T)));
}
// Lanes that share `count` loads: a power of two, so that each has one of them, or all of a warp have as many.
__host__ __device__ constexpr int lanes_of(int count) {
    int lanes = 1;
    while (lanes < 32 && lanes < count) lanes *= 2;
    return lanes;
}

// The sum over `lanes` neighbouring lanes, in all of them.
template <int lanes>
__device__ __forceinline__ float sum_of_lanes(float sum) {
#pragma unroll
    for (int apart = lanes / 2; apart > 0; apart /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, apart);
    return sum;
}

// Waits for all blocks of the image; what they wrote to shared memory is visible then.
template <int split>
__device__ __forceinline__ void meet() {
    if constexpr (split > 1) cluster_barrier();
    else __syncthreads();
}

// Rows rank, rank + split, ... of activation(matrix * v + bias), to the block's own `to`.
template <class Activation, bool biased, int rows, int columns, int threads, int split, class T>
__device__ __forceinline__ void dense_rows(float* to, const T* matrix, const T* bias, const float* v, int rank) {
    constexpr int count = at_once<T>(columns), loads = columns / count, lanes = lanes_of(loads);
    constexpr int each = ceil_div(loads, lanes), ahead = each < 4 ? each : 4;
    const int lane = static_cast<int>(threadIdx.x) % lanes;
#pragma unroll (4 / ahead)
    for (int first = 0; first < rows; first += threads / lanes * split) {
        const int row = first + static_cast<int>(threadIdx.x) / lanes * split + rank;
        float sum = 0.0f;
#pragma unroll
        for (int begin = 0; begin < loads; begin += ahead * lanes) {
            Neighbours<T, count> w[ahead];
#pragma unroll
            for (int i = 0; i < ahead; ++i) {
                const int at = begin + i * lanes + lane;
                w[i].load(matrix + static_cast<int64>(row) * columns + at * count, row < rows && at < loads);
            }
#pragma unroll
            for (int i = 0; i < ahead; ++i) {
                const int at = begin + i * lanes + lane;
                if (at >= loads) continue;
#pragma unroll
                for (int e = 0; e < count; ++e) sum = fmaf(w[i][e], v[at * count + e], sum);
            }
        }
        sum = sum_of_lanes<lanes>(sum);
        if (row < rows && lane == 0) to[row] = Activation::of(biased ? sum + to_float(bias[row]) : sum);
    }
}

// All rows of `dense_rows`, from the blocks that have them.
template <int rows, int threads, int split>
__device__ __forceinline__ void gather_rows(float* all, const float* own) {
    for (int i = threadIdx.x; i < rows; i += threads) {
        if constexpr (split > 1) all[i] = cluster_load(own + i, i % split);
        else all[i] = own[i];
    }
}

template <class Problem, class Tuning>
__device__ __forceinline__ void squeeze_excite(ElementsIn<Problem> x, ElementsIn<Problem> w1, ElementsIn<Problem> b1,
                                               ElementsIn<Problem> w2, ElementsIn<Problem> b2, ElementsOut<Problem> y) {
    using T = typename Problem::element;
    constexpr int threads = Tuning::threads, split = Tuning::split, c = Problem::c, squeezed = Problem::squeezed;
    constexpr int pixels = Problem::pixels, count = at_once<T>(Problem::nhwc ? c : pixels);
    // NHWC: a thread has `count` channels of every `workers`-th pixel; NCHW: a warp has every `workers`-th channel.
    constexpr int columns = c / count, workers = Problem::nhwc ? threads / columns : threads / 32;
    constexpr int share = ceil_div(Problem::nhwc ? pixels : c, split);
    static_assert(workers > 0, "a thread has no more than one place of a pixel");
    const int tid = static_cast<int>(threadIdx.x), rank = static_cast<int>(blockIdx.x) % split;
    const int lane = Problem::nhwc ? tid % columns : tid % 32, worker = Problem::nhwc ? tid / columns : tid / 32;
    const int end = worker < workers ? min(Problem::nhwc ? pixels : c, (rank + 1) * share) : 0;
    constexpr int steps = ceil_div(share, workers);
    const int begin = rank * share + worker;
    const int64 image = static_cast<int64>(blockIdx.x / split) * c * pixels + lane * count;

    float* const all = reinterpret_cast<float*>(shared_memory());
    float *const own = all + c, *const all_h = own + c, *const own_h = all_h + squeezed, *const partial = own_h + squeezed;

    // The layers come to the L2 cache meanwhile, a line of 128 bytes by each thread of the cluster.
    constexpr int line = 128 / static_cast<int>(sizeof(T));
#pragma unroll 1
    for (int i = (rank * threads + tid) * line; i < c * squeezed; i += split * threads * line) {
        prefetch_l2(w1 + i);
        prefetch_l2(w2 + i);
    }

    // The sums of the block's share.
    if constexpr (Problem::nhwc) {
        float sum[count] = {};
#pragma unroll 8
        for (int i = 0; i < steps; ++i) {
            Neighbours<T, count> v;
            v.load(x + image + (begin + i * workers) * c, begin + i * workers < end);
#pragma unroll
            for (int e = 0; e < count; ++e) sum[e] += v[e];
        }
#pragma unroll
        for (int e = 0; e < count; ++e) partial[e * threads + tid] = sum[e];
#pragma unroll
        for (int half = 512; half > 0; half /= 2) {
            if (half >= workers) continue;
            __syncthreads();
            if (worker < half && worker + half < workers) {
#pragma unroll
                for (int e = 0; e < count; ++e) partial[e * threads + tid] += partial[e * threads + tid + half * columns];
            }
        }
        if (worker == 0) {
#pragma unroll
            for (int e = 0; e < count; ++e) own[tid * count + e] = partial[e * threads + tid];
        }
    } else {
        // Sums are added over all blocks: of the channels of others this one has none.
        for (int i = tid; i < c; i += threads)
            if (i / share != rank) own[i] = 0.0f;
#pragma unroll 4
        for (int i = 0; i < steps; ++i) {
            const int k = begin + i * workers;
            float sum = 0.0f;
#pragma unroll 4
            for (int at = 0; at < pixels; at += 32 * count) {
                Neighbours<T, count> v;
                v.load(x + image + k * pixels + at, k < end && at + lane * count < pixels);
#pragma unroll
                for (int e = 0; e < count; ++e) sum += v[e];
            }
            sum = sum_of_lanes<32>(sum);
            if (k < end && lane == 0) own[k] = sum;
        }
    }
    meet<split>();

    for (int i = tid; i < c; i += threads) {
        float sum;
        if constexpr (split > 1) sum = cluster_sum<split>(own + i);
        else sum = own[i];
        all[i] = sum / static_cast<float>(pixels);
    }
    __syncthreads();
    dense_rows<typename Problem::activation, Problem::bias1, squeezed, c, threads, split>(own_h, w1, b1, all, rank);
    meet<split>();  // from here on nobody reads the sums of others, nor the means
    gather_rows<squeezed, threads, split>(all_h, own_h);
    __syncthreads();
    dense_rows<typename Problem::gate, Problem::bias2, c, squeezed, threads, split>(own, w2, b2, all_h, rank);
    meet<split>();
    gather_rows<c, threads, split>(all, own);
    meet<split>();  // no block leaves while another reads from it

    // The last pixels first, which L1 has still.
    if constexpr (Problem::nhwc) {
        float gates[count];
#pragma unroll
        for (int e = 0; e < count; ++e) gates[e] = all[lane * count + e];
#pragma unroll 4
        for (int i = steps - 1; i >= 0; --i) {
            const bool exists = begin + i * workers < end;
            const int64 at = image + (begin + i * workers) * c;
            Neighbours<T, count> v;
            v.load(x + at, exists);
            if (exists) v.store(y + at, [&](int e) { return gates[e]; });
        }
    } else {
#pragma unroll 2
        for (int i = steps - 1; i >= 0; --i) {
            const int k = begin + i * workers;
            const float gate = k < end ? all[k] : 0.0f;
#pragma unroll 4
            for (int pixel = 0; pixel < pixels; pixel += 32 * count) {
                const bool exists = k < end && pixel + lane * count < pixels;
                const int64 at = image + k * pixels + pixel;
                Neighbours<T, count> v;
                v.load(x + at, exists);
                if (exists) v.store(y + at, [&](int) { return gate; });
            }
        }
    }
}

}  // namespace leanconv
