// native_gemm_planes: 1x1 convolution on Hopper tensor cores (wgmma) of images of 16 to 64 pixels; float16 or bfloat16 in NCHW, sums
// in float32.
//
//   y[n, k, p] = sum over c of x[n, c, p] * w[k, c]        p: pixel of an image
//
// Pixels are the rows of a product and filters its columns: whole images, as many as 64 rows take. So all channels of a stage of an
// image lie behind one another, whatever the number of pixels: a stage is one bulk copy an image. Nothing packs filters.
//
// Requires   sm_90a; NCHW; filters of one tap, no padding, stride 1; 16 to 64 pixels; channels and filters of a group in eights, so
//            that what is copied begins at multiples of 16 bytes.
// Gradient   of an input: w is read as it lies too, an operand that is MN-major.
// Numerics   as native_gemm_16bit: exact products, sums stay in the tensor core over the whole reduction.
// CTA tile   64 / pixels images of each warpgroup x `columns` filters; a stage has 64 channels of both. One tile a CTA. A cluster of
//            `split` CTAs shares the reduction of a tile (split-K).
// Roles      warpgroups 0..n-1  consumers: operand A from registers, epilogue, a thread that copies the outputs
//            warpgroup n        producer: one thread
// Pipelines  stages   full: bytes of the copies -> consumers
//                     empty: a lane of each consumer warp -> producer
// One stage  wait full; load operand A, 16 rows of 64 channels a warp, an element at a time; wait for the wgmma of the stage before
//            and release that one; four wgmma; commit. While a warpgroup loads, the other one multiplies.
// Rows       that are no pixel hold what lay there before; they are multiplied and not stored.
// Residuals  lie as outputs do: they are brought to the L2 cache while the products are computed, and come by one bulk copy an image
//            to where the outputs are staged.
// Registers  columns / 2 sums, 16 of operand A and the 32 elements of the next; of 232.
// Work       2 C/g flops an output, and 64 / (pixels * (64 / pixels)) times as many are done, 64 / pixels rounded down; peak 4096
//            flops a cycle and multiprocessor. Of two warpgroups and 256 filters a stage takes 1024 cycles; it reads 32 KB of filters
//            and up to 8 KB of pixels a warpgroup from the L2 cache. Shared memory is busy for as long: 354
//            cycles with what is copied (7 x 7 pixels), 512 with operand B, which each warpgroup reads, 256 with loads of operand A.
// Explored (H200, 09387bb0): 512 to 2048 channels, 7 x 7 pixels, 32 images 11.2 us, native_gemm_pointwise 21.2; a stage of 256 filters
//            0.6, a tile 2.2 besides its stages, a call 2.0 (fitted). Where two CTAs of a cluster copied filters to each other (multicast)
//            0.6 to 1.5 longer. Where the lanes of a load had neighbouring pixels, and all consumers met before the outputs, 12.2.
#pragma once

#include <device/element.cuh>
#include <device/epilogue.cuh>
#include <device/index.cuh>
#include <device/pipeline/rings.cuh>
#include <device/ptx/memory.cuh>
#include <device/ptx/mma.cuh>
#include <device/ptx/sync.cuh>
#include <device/ptx/tma.cuh>
#include <kernels/hopper_native/accumulators.cuh>

namespace leanconv {

// The tile of this CTA. Filters change fastest, so that clusters side by side read the same pixels.
template <class Problem, class Tuning>
struct PlaneTile {
    static constexpr int pixels = output_pixels<Problem>, of_rows = 64 / pixels, images = Tuning::warpgroups * of_rows;
    static constexpr int filters = Tuning::columns, of_filters = ceil_div(Problem::group_k, filters);
    static constexpr int split = Tuning::split;
    static_assert(of_rows > 0, "64 rows take an image");
    int part, group, filter;  // of the reduction; the group and its first filter
    int64 image;              // the first of `count`
    int count;

    __device__ __forceinline__ explicit PlaneTile(long long batch) : part(split > 1 ? static_cast<int>(cluster_rank()) : 0) {
        const int number = blockIdx.x / split, of_images = number / (of_filters * Problem::groups);
        group = number / of_filters % Problem::groups;
        filter = number % of_filters * filters;
        image = static_cast<int64>(of_images) * images;
        const int64 left = batch - image;
        count = left < 0 ? 0 : left < images ? static_cast<int>(left) : images;
    }
};

// Shared memory: a ring of stages, each a tile's filters and pixels of 64 channels; later the sums of a tile, or its outputs; the
// barriers.
template <class Problem, class Tuning>
struct PlaneRing {
    using Tile = PlaneTile<Problem, Tuning>;
    static constexpr int channels = 64, plane_bytes = 2 * Tile::pixels, piece_bytes = channels * plane_bytes;
    static constexpr int box_bytes = 64 * 128, filter_bytes = 128 * Tile::filters;
    // Rows that are no pixel read up to 64 pixels of the last channel.
    static constexpr int pixel_bytes = Tile::images * piece_bytes + 128 - plane_bytes;
    static constexpr int stage_bytes = filter_bytes + ceil_div(pixel_bytes, 1024) * 1024;
    static constexpr int all = ceil_div(Problem::group_c, channels), share = ceil_div(all, Tile::split);
    static_assert(share * (Tile::split - 1) < all, "each CTA of a cluster has stages");
    static_assert(Tuning::stages * stage_bytes == Tuning::barriers_at, "the host counts as many bytes");
    static constexpr int threads = 128 * Tuning::warpgroups, columns = Tile::filters / Tile::split;
    static_assert(Tile::split == 1 || Tile::filters * threads * 2 <= Tuning::barriers_at, "the ring takes the sums of a tile");
    static_assert(Tile::of_rows * Tile::filters * plane_bytes <= stage_bytes && Tuning::stages > Tuning::warpgroups && columns % 8 == 0,
                  "a stage takes the outputs of a warpgroup, beside the last one");
    unsigned char* base;
    int first, end;

    __device__ __forceinline__ explicit PlaneRing(int part)
        : base(shared_memory_for_swizzles()), first(part * share), end(min(first + share, all)) {}
    __device__ __forceinline__ unsigned char* filters_of(int stage) const { return base + stage * stage_bytes; }
    __device__ __forceinline__ unsigned char* pixels_of(int stage) const { return filters_of(stage) + filter_bytes; }
    // Operand B, and bytes from it to that of the next 16 channels.
    static constexpr int step = Tuning::mirrored ? 16 * 128 : 32;
    __device__ __forceinline__ Descriptor<Tuning::mirrored> filter_operand(int stage) const {
        if constexpr (Tuning::mirrored) return transposed_descriptor(filters_of(stage), box_bytes, 1024, 128);
        else return matrix_descriptor(filters_of(stage), 0, 1024, 128);
    }
    __device__ __forceinline__ Mbarrier* full(int stage) const {
        return reinterpret_cast<Mbarrier*>(base + Tuning::barriers_at) + stage;
    }
    __device__ __forceinline__ Mbarrier* empty(int stage) const { return full(Tuning::stages) + stage; }
    __device__ __forceinline__ Mbarrier* residuals(int warpgroup) const { return full(2 * Tuning::stages) + warpgroup; }
    // By one thread, before a barrier of the cluster.
    __device__ __forceinline__ void init() const {
        for (int i = 0; i < Tuning::stages; ++i) {
            mbarrier_init(full(i), 1);
            mbarrier_init(empty(i), 4 * Tuning::warpgroups);
        }
        if constexpr (adds<Problem>)
            for (int i = 0; i < Tuning::warpgroups; ++i) mbarrier_init(residuals(i), 1);
        fence_mbarrier_init();
    }
    // A stage that nobody reads or fills any more after `count` of them, the last one but `back`: all warps have released it.
    __device__ __forceinline__ unsigned char* released(int count, int back) const {
        const int stage = (count + back) % Tuning::stages, uses = (count - stage + Tuning::stages - 1) / Tuning::stages;
        mbarrier_wait_parity(empty(stage), (uses - 1) & 1);
        return filters_of(stage);
    }
};

// By one thread: filters by TMA, the channels of an image by a bulk copy.
template <class Problem, class Tuning>
__device__ __forceinline__ void produce_planes(const typename Problem::element* x, const TensorMap& w,
                                               const PlaneTile<Problem, Tuning>& tile, const PlaneRing<Problem, Tuning>& ring) {
    using Ring = PlaneRing<Problem, Tuning>;
    using Tile = PlaneTile<Problem, Tuning>;
    constexpr int boxes = Tuning::mirrored ? Tile::filters / 64 : 1;
    static_assert(!Tuning::mirrored || Tile::filters % 64 == 0, "filters are whole boxes");
    if (threadIdx.x % 128 > 0) return;
    RingPlace<Tuning::stages> place;
    for (int stage = ring.first; stage < ring.end; ++stage, place.advance()) {
        const int c = stage * Ring::channels, bytes = min(Ring::channels, Problem::group_c - c) * Ring::plane_bytes;
        Mbarrier* const full = ring.full(place.stage);
        mbarrier_wait_parity(ring.empty(place.stage), place.parity ^ 1);
        mbarrier_arrive_expect_tx(full, Ring::filter_bytes + tile.count * bytes);
#pragma unroll
        for (int box = 0; box < boxes; ++box) {
            const int filter = tile.filter + box * 64;
            const int c0 = Tuning::mirrored ? filter : c, c1 = Tuning::mirrored ? c : filter;
            cp_async_bulk_tensor_shared_global(ring.filters_of(place.stage) + box * Ring::box_bytes, w, full, c0, c1, tile.group);
        }
        for (int i = 0; i < tile.count; ++i) {
            const int64 channel = (tile.image + i) * Problem::c + tile.group * Problem::group_c + c;
            cp_async_bulk_shared_global(ring.pixels_of(place.stage) + i * Ring::piece_bytes, x + channel * Tile::pixels, bytes, full);
        }
    }
}

// The two rows of operand A, or of sums, that a lane has: pixels of the tile's images. Of planes of an odd number the lanes of an
// instruction have every eighth pixel: four channels, each an odd number of words from the one before, are in all banks then
// where 64 rows have one image.
template <class Problem, class Tuning>
struct PlaneRows {
    using Tile = PlaneTile<Problem, Tuning>;
    using Ring = PlaneRing<Problem, Tuning>;
    static constexpr bool spread = Tile::pixels % 2 == 1;
    int image[2], pixel[2];  // of the warpgroup's images
    bool exists[2];
    int at[2];  // bytes from a stage's pixels to those of the lane's first channel

    __device__ __forceinline__ explicit PlaneRows(const Tile& tile) {
        const int lane = threadIdx.x % 32, eight = threadIdx.x / 32 % 4 * 2, first = threadIdx.x / 128 * Tile::of_rows;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = spread ? lane / 4 * 8 + eight + i : (eight + i) * 8 + lane / 4;
            image[i] = row / Tile::pixels;
            pixel[i] = row % Tile::pixels;
            exists[i] = image[i] < Tile::of_rows && first + image[i] < tile.count;
            const bool lies = image[i] < Tile::of_rows;
            at[i] = (first + (lies ? image[i] : 0)) * Ring::piece_bytes + lane % 4 * 2 * Ring::plane_bytes + 2 * (lies ? pixel[i] : row);
        }
    }
    // The elements of operand A of a stage.
    __device__ __forceinline__ void load(unsigned (&to)[4][4][2], const unsigned char* from) const {
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 2; ++j)
                    to[k][i][j] = ld_shared_u16(from + at[i % 2] + (k * 16 + i / 2 * 8 + j) * Ring::plane_bytes);
    }
    // The operand itself, of which `left` channels exist: past the last one lies what lay there before, and filters are zeros.
    static __device__ __forceinline__ void pair(unsigned (&a)[4][4], const unsigned (&from)[4][4][2], int left) {
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const bool exists = Problem::group_c % Ring::channels == 0 || k * 16 + i / 2 * 8 < left;
                a[k][i] = exists ? __byte_perm(from[k][i][0], from[k][i][1], 0x5410) : 0;
            }
    }
};

// The outputs of a warpgroup: of each of `count` images `filters` planes that lie behind one another, from `at` on.
template <class Problem, class Tuning>
struct PlaneOutputs {
    using Tile = PlaneTile<Problem, Tuning>;
    using Ring = PlaneRing<Problem, Tuning>;
    using T = typename Problem::result;
    static constexpr int64 apart = static_cast<int64>(Problem::k) * Tile::pixels;  // images
    int filter, filters, count;  // the first filter, of all groups
    T* at;

    __device__ __forceinline__ PlaneOutputs(T* y, const Tile& tile, int warpgroup) {
        const int first = tile.filter + tile.part * Ring::columns;
        filter = tile.group * Problem::group_k + first;
        filters = max(min(Ring::columns, Problem::group_k - first), 0);
        count = min(Tile::of_rows, tile.count - warpgroup * Tile::of_rows);
        at = y + ((tile.image + warpgroup * Tile::of_rows) * Problem::k + filter) * Tile::pixels;
    }
    // What is added to the outputs of an image.
    __device__ __forceinline__ const T* held(Bias<Problem> bias, int image) const {
        if constexpr (Problem::add) return residual_of(bias, at + image * apart);
        else return at + image * apart;
    }
    __device__ __forceinline__ void fetch_held(Bias<Problem> bias, int thread) const {
        const int lines = ceil_div(filters * Ring::plane_bytes, 128);
        for (int i = thread; i < count * lines; i += 128) prefetch_l2(held(bias, i / lines) + i % lines * (128 / sizeof(T)));
    }
    // By all threads of the warpgroup: to shared memory, where nobody reads or writes any more.
    __device__ __forceinline__ void load_held(Bias<Problem> bias, T* staging, Mbarrier* arrived, int thread) const {
        if (thread == 0) {
            const int bytes = filters * Ring::plane_bytes;
            mbarrier_arrive_expect_tx(arrived, max(count, 0) * bytes);
            for (int i = 0; i < count; ++i)
                cp_async_bulk_shared_global(staging + i * Ring::columns * Tile::pixels, held(bias, i), bytes, arrived);
        }
        mbarrier_wait_parity(arrived, 0);
    }
};

// Stages the outputs of a warpgroup in shared memory as they lie in an image, and copies them from there, a half while the next one
// is staged.
template <class Problem, class Tuning>
__device__ __forceinline__ void store_planes(const float (&sums)[Tuning::columns / 2 / Tuning::split], Bias<Problem> bias,
                                             const PlaneOutputs<Problem, Tuning>& outputs,
                                             const PlaneRing<Problem, Tuning>& ring, const PlaneRows<Problem, Tuning>& rows,
                                             unsigned char* stage) {
    using Ring = PlaneRing<Problem, Tuning>;
    using Tile = PlaneTile<Problem, Tuning>;
    using T = typename Problem::result;
    constexpr int columns = Ring::columns, halves = columns >= 128 ? 2 : 1, half = columns / halves;
    const int filters = outputs.filters, filter = outputs.filter;
    if (filters <= 0) return;
    const int thread = threadIdx.x % 128, warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32;
    T* const staging = reinterpret_cast<T*>(stage);
    if constexpr (adds<Problem>) outputs.load_held(bias, staging, ring.residuals(warpgroup), thread);
#pragma unroll
    for (int j = 0; j < columns / 8; ++j) {
        const int column = 8 * j + lane % 4 * 2;
        Term<Problem> terms[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) terms[i] = term_of<Problem>(bias, filter + column + i, column + i < filters);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            if (!rows.exists[row] || column >= filters) continue;
            T* const to = staging + (rows.image[row] * columns + column) * Tile::pixels + rows.pixel[row];
            float v[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float held = adds<Problem> ? to_float(to[i * Tile::pixels]) : 0.0f;
                v[i] = finish<Problem>(sums[4 * j + 2 * row + i], terms[i], held);
            }
            const unsigned pair = rounded_pair(T{}, v);
            to[0] = T{static_cast<unsigned short>(pair)};
            to[Tile::pixels] = T{static_cast<unsigned short>(pair >> 16)};
        }
        if ((j + 1) * 8 % half == 0) {
            const int begin = (j + 1) * 8 - half, bytes = min(half, filters - begin) * Ring::plane_bytes;
            fence_proxy_async();
            barrier_sync(1 + warpgroup, 128);
            if (thread == 0 && bytes > 0) {
                for (int i = 0; i < outputs.count; ++i) {
                    T* const to = outputs.at + i * outputs.apart + begin * Tile::pixels;
                    cp_async_bulk_global_shared(to, staging + (i * columns + begin) * Tile::pixels, bytes);
                }
                cp_async_bulk_commit_group();
            }
        }
    }
    if (thread == 0) cp_async_bulk_wait_group_read<0>();
}

// One warpgroup's products of the tile.
template <class Problem, class Tuning>
__device__ __forceinline__ void consume_planes(Bias<Problem> bias, typename Problem::result* y,
                                               const PlaneTile<Problem, Tuning>& tile, const PlaneRing<Problem, Tuning>& ring) {
    using Ring = PlaneRing<Problem, Tuning>;
    constexpr int count = Tuning::columns / 2, split = Tuning::split;
    const int lane = threadIdx.x % 32, warpgroup = threadIdx.x / 128;
    const PlaneRows<Problem, Tuning> rows(tile);
    if constexpr (adds<Problem>) PlaneOutputs<Problem, Tuning>(y, tile, warpgroup).fetch_held(bias, threadIdx.x % 128);
    float sums[count];
    unsigned a[4][4];
    RingPlace<Tuning::stages> place;
    int before = 0;
    for (int stage = ring.first; stage < ring.end; ++stage) {
        mbarrier_wait_parity(ring.full(place.stage), place.parity);
        unsigned loaded[4][4][2];
        rows.load(loaded, ring.pixels_of(place.stage));
        // NOTE: in the first stage too, where there is nothing to wait for: under a condition the compiler (NVRTC 13.5) lets what
        // is loaded next lie in the registers that the products under way read.
        wgmma_wait_group<0>(sums, a);
        if (stage > ring.first) mbarrier_arrive_warp(ring.empty(before), lane);
        rows.pair(a, loaded, Problem::group_c - stage * Ring::channels);
        wgmma_fence(sums, a);
#pragma unroll
        for (int k = 0; k < 4; ++k)
            multiply(typename Problem::element{}, sums, a[k], ring.filter_operand(place.stage) + Ring::step * k,
                     stage > ring.first || k > 0);
        wgmma_commit_group();
        before = place.stage;
        place.advance();
    }
    wgmma_wait_group<0>(sums, a);
    mbarrier_arrive_warp(ring.empty(before), lane);
    const PlaneOutputs<Problem, Tuning> outputs(y, tile, warpgroup);
    if constexpr (split == 1) {
        store_planes(sums, bias, outputs, ring, rows, ring.released(ring.end - ring.first, warpgroup));
    } else {
        barrier_sync(1, Ring::threads);  // the stages of this CTA have been read
        float* const own = reinterpret_cast<float*>(ring.base);
#pragma unroll
        for (int i = 0; i < count; ++i) own[i * Ring::threads + threadIdx.x] = sums[i];
        meet_in_cluster();
        float added[count / split];
#pragma unroll
        for (int i = 0; i < count / split; ++i) {
            const float* const at = own + (tile.part * (count / split) + i) * Ring::threads + threadIdx.x;
            added[i] = 0.0f;
#pragma unroll
            for (int part = 0; part < split; ++part) added[i] += cluster_load(at, static_cast<unsigned>(part));
        }
        if constexpr (adds<Problem>) fence_proxy_async();  // residuals are copied to where sums lie
        meet_in_cluster();
        store_planes(added, bias, outputs, ring, rows, ring.filters_of(warpgroup));
    }
}

template <class Problem, class Tuning>
__device__ __forceinline__ void native_gemm_planes(const typename Problem::element* x, const TensorMap& w, Bias<Problem> bias,
                                                   typename Problem::result* y, long long batch) {
    static_assert(!Problem::nhwc && !Problem::chwn, "the pixels of a channel are neighbours");
    using Tile = PlaneTile<Problem, Tuning>;
    const Tile tile(batch);
    using Ring = PlaneRing<Problem, Tuning>;
    const Ring ring(tile.part);
    if (threadIdx.x == 0) ring.init();
    if (threadIdx.x == Ring::threads) prefetch_tensormap(w);
    if constexpr (Tile::split > 1) meet_in_cluster();
    else __syncthreads();
    if (threadIdx.x / 128 == Tuning::warpgroups) {
        set_registers_down<Tuning::producer_registers>();
        produce_planes(x, w, tile, ring);
        if constexpr (Tile::split > 1) {
            __syncwarp();  // the warp of the thread that copied converges before the barriers that all threads take part in
            meet_in_cluster();
            meet_in_cluster();
        }
    } else {
        set_registers_up<Tuning::consumer_registers>();
        consume_planes(bias, y, tile, ring);
    }
}

}  // namespace leanconv
