// The main loop of the fused Winograd kernels. Step by step (a chunk of channels, a filter row) transformed filters and
// raw pixels arrive in shared memory; warps transform raw pixels of the chunk to come into tiles, and multiply the tiles
// of this chunk with the filters. Tiles are transformed from shared to shared memory one chunk ahead of their use, a
// part of them in every step, so that transforms and products of different warps overlap; or producers, warps of their
// own, bring and transform them.
#pragma once

#include <device/ptx/memory.cuh>
#include <device/ptx/sync.cuh>
#include <kernels/simt/tile.cuh>
#include <kernels/simt/winograd_tiles.cuh>

namespace leanconv {

// `Transform::input(state, pixel)` makes the states of one tile from its pixels.
template <class Problem, class Tuning, class Transform>
struct WinogradProduct {
    using Tiles = WinogradTiles<Problem, Tuning>;
    using Source = WinogradSource<Problem>;
    using B = Bytes<Problem>;
    static constexpr int stages = Tuning::stages, taps = Tiles::taps, channels = Tiles::channels;
    static constexpr int states = Tiles::states;
    // Steps are counted from the first transform: the products begin `taps` steps later. High filters have all chunks
    // of channels several times, each time with other rows; wide ones, each time with other columns; those of volumes,
    // with other slices.
    static constexpr int steps = (Tiles::chunks * Tiles::tap_blocks + 1) * taps;
    static_assert(stages >= 2, "one stage is computed on while others are under way");

    using Sums = float[Tuning::thread_k][Tuning::thread_tiles];

    const Tiles& tiles;
    const Source* sources;  // table
    float* ring;            // stages: filters, then raw pixels
    float* transformed;     // two chunks of tiles
    const float* x;
    InputStrides<Problem> strides;
    const float* u;         // transformed filters: [r][column block][c][state][k] of this group and block
    int filters_at, tiles_at;
    float a[2][Tuning::thread_k], b[2][Tuning::thread_tiles];

    __device__ __forceinline__ WinogradProduct(const Tiles& tiles, const Source* sources, float* shared, const float* x,
                                               long long batch, const float* prepared, int group, int tile_k)
        : tiles(tiles), sources(sources), ring(shared), transformed(shared + stages * Tuning::stage_floats), x(x),
          strides(batch) {
        u = prepared + Problem::prepared_offset +
            static_cast<int64>(group) * (taps * Tiles::tap_blocks) * Problem::padded_c * (states * Problem::padded_k) +
            tile_k * Tuning::tile_k;
        filters_at = tiles.state * Tuning::tile_k + Tiles::swapped(tiles.state, tiles.lane_k * 4);
        tiles_at = tiles.state * Tuning::plane + tiles.lane_tile * 4;
    }

    __device__ __forceinline__ float* stage(int step) { return ring + step % stages * Tuning::stage_floats; }
    __device__ __forceinline__ float* chunk(int number) { return transformed + number % 2 * Tiles::tile_floats; }

    // Copies and transforms are the work of `threads` threads, of which this one is number `thread`.
    template <int threads>
    __device__ __forceinline__ void load(int step, int thread) {
        if (step >= taps && step < steps) load_filters<threads>(step, thread);
        if (step < steps - taps) load_pixels<threads>(step, thread);
        cp_async_commit_group();
    }

    template <int threads>
    __device__ __forceinline__ void load_filters(int step, int thread) {
        constexpr int a_row = Tuning::tile_k / 4, copies = Tiles::filter_floats / 4;  // of four floats
        static_assert(a_row >= threads ? a_row % threads == 0 : threads % a_row == 0,
                      "a thread's copies lie at a constant distance");
        const int number = step - taps, block = number / taps / Tiles::chunks;
        const int row = block / Tiles::column_blocks * taps + number % taps, c = number / taps % Tiles::chunks * channels;
        const int tap = row * Tiles::column_blocks + block % Tiles::column_blocks;
        const float* const from = u + static_cast<int64>(tap * Problem::padded_c + c) * (states * Problem::padded_k) +
            thread / a_row * Problem::padded_k + thread % a_row * 4;
        // A thread's rows are an even number apart: all of even states, or all of odd ones.
        static_assert(Tiles::lane_states == 1 || threads / a_row % 2 == 0, "see swapped()");
        const int state = thread / a_row, k = thread % a_row * 4;
        float* const to = stage(step) + state * Tuning::tile_k + Tiles::swapped(state, k);
#pragma unroll
        for (int i = 0; i < ceil_div(copies, threads); ++i)
            if (copies % threads == 0 || thread + i * threads < copies)
                cp_async_16(to + i * threads * 4, from + i * (threads / a_row) * Problem::padded_k, true);
    }

    // The pixels of one slice of the positions of chunk step / taps. A thread copies four channels of one pixel, in
    // CHWN of that pixel of four images if it can.
    template <int threads>
    __device__ __forceinline__ void load_pixels(int step, int thread) {
        constexpr int quads = channels / 4, pixels = Tuning::step_sources, elements = pixels * quads;
        constexpr bool vector = Problem::nhwc && Problem::group_c % 4 == 0;
        constexpr bool whole = Problem::group_c % channels == 0;
        const int first_c = step / taps % Tiles::chunks * channels;
        // Where this step's row block and column block of the filters begin: 0 unless they have several. `ahead` are rows, of
        // volumes slices; `right` are columns.
        using Axis = BlockAxis<Problem>;
        const int ahead = step / taps / (Tiles::chunks * Tiles::column_blocks) * Axis::taps * Axis::dilation;
        const int right = step / taps / Tiles::chunks % Tiles::column_blocks * FilterBlocks<Problem>::width;
        const Source* const from = sources + step % taps * pixels;
        float* const raw = stage(step) + Tiles::filter_floats;
#pragma unroll
        for (int i = 0; i < ceil_div(elements, threads); ++i) {
            const int e = thread + i * threads;
            if (elements % threads != 0 && e >= elements) break;
            const int quad = Problem::nhwc ? e % quads : e / pixels, number = Problem::nhwc ? e / quads : e % pixels;
            const int c = first_c + quad * 4;
            const Source source = from[number];
            const bool inside = source.place.inside(ahead, right);
            const B at = source.x + ((static_cast<B>(ahead) * Axis::pixels + right) * strides.pixel +
                                     static_cast<B>(c) * strides.channel) * 4;
            float* const to = raw + Tiles::source_run(number) * Tuning::run_pitch +
                Tiles::source_pixel(number) * Tuning::pixel_pitch + quad * 4 * Tuning::channel_pitch;
            if constexpr (vector) {
                cp_async_16(to, at_byte(x, at), inside && (whole || c < Problem::group_c));
            } else {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const bool exists = inside && (whole || c + j < Problem::group_c);
                    const float* const pixel = at_byte(x, at) + static_cast<int64>(j) * strides.channel;
                    if constexpr (Tiles::at_once == 4) cp_async_16(to + j * Tuning::channel_pitch, pixel, exists);
                    else cp_async_4(to + j * Tuning::channel_pitch, pixel, exists);
                }
            }
        }
    }

    // Transform the slice that arrived with `step`: a thread makes all states of one tile of one channel.
    template <int threads>
    __device__ __forceinline__ void transform(int step, int thread) {
        constexpr int lanes = Tuning::side_by_side, items = Tuning::slice * channels;
        if (step >= steps - taps) return;
        const int first = step % taps * Tuning::slice;
        const float* const raw = stage(step) + Tiles::filter_floats;
        float* const to = chunk(step / taps);
#pragma unroll
        for (int i = 0; i < ceil_div(items, threads); ++i) {
            const int e = thread + i * threads;
            if (items % threads != 0 && e >= items) break;
            const int local = e / lanes % Tuning::slice, c = e % lanes + e / (lanes * Tuning::slice) * lanes;
            const int position = first + local;
            if (Tuning::slice * taps != Tuning::positions && position >= Tuning::positions) continue;
            const float* const from = raw + local / Tiles::run * Tuning::run_pitch +
                local % Tiles::run * Problem::out_w * Tuning::pixel_pitch + c * Tuning::channel_pitch;
            float pixel[states], state[states];
#pragma unroll
            for (int s = 0; s < states; ++s) {
                const int at = s / Problem::tile_w * Tuning::run_width + s % Problem::tile_w;
                pixel[s] = from[at * Tuning::pixel_pitch];
            }
            Transform::input(state, pixel);
#pragma unroll
            for (int s = 0; s < states; ++s) to[c * Tuning::channel_floats + s * Tuning::plane + position] = state[s];
        }
    }

    __device__ __forceinline__ void read(int step, int c) {
        const int number = step - taps;
        const float* const filters = stage(step) + c * states * Tuning::tile_k;
        if constexpr (Tiles::lane_states == 1) {
            load_fragments<Tiles::lanes_k * 4>(a[c % 2], filters + filters_at);
        } else {
#pragma unroll
            for (int f = 0; f < Tuning::thread_k; f += 4) {
                constexpr int half = 16;
                const int apart = f * Tiles::lanes_k;
                float v[4];
                load_vector(v, filters + (filters_at ^ (apart & half)) + (apart & ~half));
#pragma unroll
                for (int i = 0; i < 4; ++i) a[c % 2][f + i] = v[i];
            }
        }
        load_fragments<Tiles::lanes_tiles * 4>(
            b[c % 2], chunk(number / taps) + tiles_at + number % taps * Tiles::columns + c * Tuning::channel_floats);
    }

    // To and fro along the axis that exchanged sums are adjacent in, where put() gives sum and fragment different banks.
    __device__ __forceinline__ void multiply(Sums& sums, int c) {
        outer_product<Problem::nhwc, Tuning::thread_k, Tuning::thread_tiles>(
            [&](int k, int t) { sums[k][t] = fmaf(a[c % 2][k], b[c % 2][t], sums[k][t]); });
    }

    // Long sums are made of short ones, as the error of a sum grows with its length. What an addition rounds away stays
    // in the short sum. NOTE: the compiler keeps the order of these operations as long as fast-math is off.
    __device__ __forceinline__ void promote(Sums& total, Sums& sums) {
#pragma unroll
        for (int k = 0; k < Tuning::thread_k; ++k)
#pragma unroll
            for (int t = 0; t < Tuning::thread_tiles; ++t) {
                const float next = total[k][t] + sums[k][t];
                sums[k][t] -= next - total[k][t];
                total[k][t] = next;
            }
    }

    __device__ __forceinline__ void arrive() {
        // The step has landed for everybody, and everybody has finished the one before.
        cp_async_wait_group<stages - 2>();
        __syncthreads();
    }

    // The first chunk of tiles, by all threads. The caller has put a barrier after the table of sources.
    __device__ __forceinline__ void begin() {
        // No stage is in use yet: one step more is under way than in the loop.
#pragma unroll 1
        for (int step = 0; step < stages; ++step) load<Tiles::all_threads>(step, threadIdx.x);
        cp_async_wait_group<stages - 1>();
        __syncthreads();
        transform<Tiles::all_threads>(0, threadIdx.x);
#pragma unroll 1
        for (int step = 1; step < taps; ++step) {
            arrive();
            load<Tiles::all_threads>(step + stages - 1, threadIdx.x);
            transform<Tiles::all_threads>(step, threadIdx.x);
        }
        if constexpr (Tiles::producers > 0) cp_async_wait_group<0>();  // from here on producers wait for their own copies
        arrive();
    }

    // Barriers between producers and the others: what a step reads is there; what it read may be overwritten. Two of
    // each alternate, as either side may be a step ahead.
    static __device__ __forceinline__ int full(int step) { return 1 + step % 2; }
    static __device__ __forceinline__ int empty(int step) { return 3 + step % 2; }

    // What the producers do while the others multiply: in each step the copies of one to come, and the transforms.
    __device__ __forceinline__ void produce() {
        const int thread = threadIdx.x - Tiles::threads;
#pragma unroll 1
        for (int step = taps; step < steps - 1; ++step) {
            if (step > taps) barrier_sync(empty(step - 1), Tiles::all_threads);
            load<Tiles::producers>(step + stages - 1, thread);
            transform<Tiles::producers>(step, thread);
            cp_async_wait_group<stages - 2>();
            barrier_arrive(full(step + 1), Tiles::all_threads);
        }
    }

    // From step to the next one: all but the last row of its fragments have been multiplied.
    __device__ __forceinline__ void next_step(int step) {
        if constexpr (Tiles::producers == 0) {
            arrive();
        } else {
            if (step < steps - 2) barrier_arrive(empty(step), Tiles::all_threads);
            if (step < steps - 1) barrier_sync(full(step + 1), Tiles::all_threads);
        }
    }

    // Where there are no producers, loads and transforms lie between the products.
    __device__ __forceinline__ void run(Sums& total) {
        Sums partial = {};
        Sums& sums = Tuning::promoted ? partial : total;
        read(taps, 0);
#pragma unroll 1
        for (int step = taps; step < steps; ++step) {
#pragma unroll
            for (int c = 0; c < channels; ++c) {
                if (c < channels - 1) {
                    read(step, c + 1);
                } else {
                    next_step(step);
                    if (step + 1 < steps) read(step + 1, 0);
                }
                if constexpr (Tiles::producers == 0) {
                    // The stage of the step before this one is free: see arrive().
                    if (c == 0) load<Tiles::threads>(step + stages - 1, threadIdx.x);
                    if (c == 1) transform<Tiles::threads>(step, threadIdx.x);
                }
                multiply(sums, c);
            }
            if (Tuning::promoted && step % taps == taps - 1) promote(total, sums);
        }
        if constexpr (Tuning::promoted) {
#pragma unroll
            for (int k = 0; k < Tuning::thread_k; ++k)
#pragma unroll
                for (int t = 0; t < Tuning::thread_tiles; ++t) total[k][t] += sums[k][t];
        }
    }
};

}  // namespace leanconv
