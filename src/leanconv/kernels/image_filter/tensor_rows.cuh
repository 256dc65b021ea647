// Rows of tensor_filter: the numbers of a strip, and its input rows on their way to a warp's registers.
#pragma once

#include <device/ptx/predicated_copy.cuh>
#include <device/ptx/sync.cuh>
#include <kernels/image_filter/image_rows.cuh>
#include <kernels/image_filter/tensor_pixels.cuh>

namespace leanconv {

// The numbers of a strip: columns are pixels, each of `channels` elements.
template <class Problem, class Tuning>
struct TensorStrip {
    using In = typename Problem::element;
    using Out = typename Problem::result;
    using Pixels = TensorPixels<In>;
    static constexpr int r = Problem::r, s = Problem::s;
    // Of several channels a row is a line of elements, whose taps lie `apart`, where a window of that fits into one step.
    static constexpr int of_line = round_up(Problem::anchor_x * Problem::channels, 4) - Problem::anchor_x * Problem::channels;
    static constexpr bool line = of_line + 8 + (s - 1) * Problem::channels <= 16;
    // Two rows of outputs are made at a time, in blocks of 2 x 4, whose windows are r + 1 rows of 8 columns.
    static constexpr bool two = Tuning::two_rows;
    static constexpr int channels = line ? 1 : Problem::channels, apart = line ? Problem::channels : 1;
    static constexpr int width = 128 * Tuning::tiles;
    static constexpr int tiles = Tuning::tiles * channels * (two ? 2 : 1);  // of one channel each, of 128 outputs
    // Of float16 and bfloat16 a lane has two pairs of a window, as operand A has them by rule; of others four neighbours.
    static constexpr bool pairs = half_type<In> && channels == 1;
    static constexpr int before = Problem::anchor_x * apart, pad = round_up(before, pairs ? 2 : 4);
    static constexpr int lead = two ? 0 : pad - before;
    static constexpr int steps = two ? 1 : ceil_div(lead + 8 + (s - 1) * apart, 16);  // of k16, in a window
    // Rows of the filter, or pairs of rows of a window.
    static constexpr int rows = two ? r / 2 + 1 : r;
    // The first of a lane's elements in a window, from the window's first on, and element e from there.
    static __device__ __forceinline__ constexpr int first_of(int lane) { return (pairs ? 2 : 4) * (lane % 4); }
    static __device__ __forceinline__ constexpr int element(int e) { return pairs ? e % 2 + e / 2 * 8 : e; }
    static constexpr int pieces = same_type<In, bfloat16> ? 3 : 2;  // of a weight
    // A row of inputs in shared memory, in elements: whole vectors of 16 bytes, which begin at multiples of as many in the
    // image's row.
    static constexpr int in_vector = 16 / sizeof(In), left = round_up(pad * channels, in_vector);
    static constexpr int vectors = ceil_div(left + (two ? width + 8 : width - pad - 8 + 16 * steps) * channels, in_vector);
    static constexpr int row = vectors * in_vector;
    // From one row in shared memory to the next. Of bytes two rows are read at a time, from other banks.
    static constexpr int pitch = two && Pixels::bytes ? round_up(row - 64, 128) + 64 : row;
    // Whether products of one filter row are summed apart, and rounded to nearest when they are added to the others.
    static constexpr bool promoted = Pixels::split || (sizeof(Out) == 4 || (small_integer<Out> && sizeof(Out) == 2));
    // A result that is rounded anyway begins with delta.
    static constexpr bool begins_with_delta = !same_type<Out, float>;
    static constexpr int fragment_bytes = 8 * 32 * pieces * rows * steps;
    static_assert(!two || (!promoted && 4 + (s - 1) * apart <= 8), "results are rounded, and windows have 8 columns");
    static_assert(!two || Pixels::bytes || channels == 1, "pixels of one piece");
    static_assert(Problem::planes == 1, "channels are filtered side by side");
    static_assert(0 <= Problem::anchor_x && Problem::anchor_x < s, "the anchor lies inside the filter");
    static_assert(0 <= Problem::anchor_y && Problem::anchor_y < r, "the anchor lies inside the filter");
};

__device__ __forceinline__ constexpr int least_common_multiple(int a, int b) {
    int both = a;
    while (both % b != 0) both += a;
    return both;
}

// Input rows of a strip on their way to a warp's registers, by a ring of rows in shared memory. Vectors that lie inside the
// image are copied; elements before and behind them, the edges, are loaded one by one.
template <class Problem, class Tuning>
struct TensorRows {
    using Strip = TensorStrip<Problem, Tuning>;
    using In = typename Strip::In;
    using Border = typename Problem::border;
    using View = Image<In, typename Strip::Out, float>;
    // Of each block of 8 columns, a lane's four pixels of each step of its window.
    using Row = FourElements<In>[Strip::tiles / Strip::channels][Strip::steps][2][Strip::channels];
    static constexpr int depth = Tuning::depth, unroll = Tuning::unroll, in_vector = Strip::in_vector;
    static constexpr int ring_bytes = depth * Strip::pitch * static_cast<int>(sizeof(In)), bytes = ring_bytes + 4 * Strip::row;
    // Pairs of rows of an iteration, and rows of outputs that plain strips have a multiple of.
    static constexpr int pairs_unrolled = least_common_multiple(depth / 2, Strip::rows);
    static constexpr int rows_unrolled = Strip::two ? 2 * pairs_unrolled : 1;
    static_assert(depth >= 3, "an edge is stored an iteration after it was asked for");
    static_assert(depth % unroll == 0, "rows of an iteration are neighbours in the ring");

    const View& image;
    const int first_row, lane;
    In* const ring;
    int* const column;       // of each element of a row, where there are edges
    int begin, end;          // vectors from number `begin` to before `end` are copied
    unsigned next;           // this lane's first vector in the first row, of plain rows in the next: bytes from the image's
                             // first element on
    const unsigned pitch;    // in bytes
    const char* behind;      // this lane's first vector in the first row that `start` leaves
    In one[Strip::two ? 2 : 1];  // elements of an edge on their way

    __device__ __forceinline__ TensorRows(const View& image_, int first_row_, int j, int lane_, unsigned char* shared)
        : image(image_), first_row(first_row_), lane(lane_), ring(reinterpret_cast<In*>(shared)),
          column(reinterpret_cast<int*>(shared + ring_bytes)),
          pitch(static_cast<unsigned>(image.x_pitch) * static_cast<unsigned>(sizeof(In))) {
        const int first = j - Strip::left;
        begin = first < 0 ? -first / in_vector : 0;
        end = max(begin, min(Strip::vectors, (image.width - first) / in_vector));
        if (image.x_pitch % in_vector != 0 || reinterpret_cast<unsigned long long>(image.x) % 16 != 0) begin = end = 0;
        next = static_cast<unsigned>(first_row) * pitch + (first + lane * in_vector) * static_cast<int>(sizeof(In));
        behind = reinterpret_cast<const char*>(image.x) + next + static_cast<int64>(depth) * pitch;
        if (whole()) return;
#pragma unroll 1
        for (int k = lane; k < Strip::row; k += 32)
            column[k] = border_element<Border, Problem::channels>(first + k, image.width);
        __syncwarp();
    }

    // Whether there are no edges.
    __device__ __forceinline__ bool whole() const { return begin == 0 && end == Strip::vectors; }
    // And `inputs` rows lie inside the image.
    __device__ __forceinline__ bool plain(int inputs) const {
        return whole() && first_row >= 0 && first_row + inputs <= image.height;
    }

    // Issues the copies of the first rows.
    template <bool plain>
    __device__ __forceinline__ void start(int inputs) {
#pragma unroll
        for (int n = 0; n < depth; ++n) {
            In* const to = ring + n * Strip::pitch;
            copy<plain>(to, n, inputs);
            if constexpr (!plain) store_one(to);
            if (!Strip::two || n % 2 == 1) cp_async_commit_group();
        }
    }
    // Issues the copies of row n, the one after the last. Behind the end the last row comes again. Of the edges, which
    // `plain` rows have not, the first element of each lane is left in `one`.
    template <bool plain>
    __device__ __forceinline__ void copy(In* to, int n, int inputs, int which = 0) {
        if constexpr (plain) {
            copy_vectors(to, next, 0, Strip::vectors);
            if (n + 1 < inputs) next += pitch;
        } else {
            const int row = first_row + min(n, inputs - 1), i = border_index<Border>(row, image.height);
            if (Border::maps_inside || i >= 0) {
                copy_vectors(to, next + static_cast<unsigned>(i - first_row) * pitch, begin, end);
            } else {
#pragma unroll 1
                for (int k = lane; k < Strip::row; k += 32) to[k] = narrow_sum<In>(image.value);
            }
            const int edges = Strip::row - (end - begin) * in_vector;
#pragma unroll 1
            for (int k = lane + 32; k < edges; k += 32) to[place(k)] = element(i, place(k));
            if (lane < edges) one[which] = element(i, place(lane));
        }
    }
    // Issues the copies of two plain rows, as far as there are so `many`, and closes their group.
    __device__ __forceinline__ void copy_pair(In* to, const char*& from, int many) const {
#pragma unroll
        for (int n = 0; n < 2; ++n, from += pitch)
#pragma unroll
            for (int k = 0; k < Strip::vectors; k += 32)
                cp_async_16_if(k + lane < Strip::vectors && n < many, to + n * Strip::pitch + (k + lane) * in_vector,
                               from + 16 * k);
        cp_async_commit_group();
    }

    __device__ __forceinline__ void copy_vectors(In* to, unsigned from, int first, int last) const {
#pragma unroll
        for (int k = 0; k < Strip::vectors; k += 32)
            cp_async_16_if(k + lane >= first && k + lane < last, to + (k + lane) * in_vector,
                           reinterpret_cast<const char*>(image.x) + (from + 16u * k));
    }

    // Stores it, where it has come meanwhile.
    __device__ __forceinline__ void store_one(In* to, int which = 0) const {
        if (lane < Strip::row - (end - begin) * in_vector) to[place(lane)] = one[which];
    }

    // Where element k of the edges lies in a row.
    __device__ __forceinline__ int place(int k) const { return k < begin * in_vector ? k : k + (end - begin) * in_vector; }

    __device__ __forceinline__ In element(int i, int at) const {
        const int c = column[at];
        if (!Border::maps_inside && (i < 0 || c < 0)) return narrow_sum<In>(image.value);
        return image.x[i * image.x_pitch + c];
    }

    // Of two neighbouring rows what this lane has of blocks of 2 x 4 outputs. Windows begin anywhere: of bytes and of pairs
    // two words are read, which `ready` joins.
    static constexpr int shifted = (Strip::left - Strip::before * Strip::channels) % (4 / static_cast<int>(sizeof(In)));
    using Pair = unsigned[Strip::tiles / Strip::channels][2][Strip::pairs ? 4 : Strip::channels + (shifted != 0)];
    __device__ __forceinline__ void read_pair(Pair& to, const In* row) const {
        constexpr int channels = Strip::channels, words = sizeof(to[0][0]) / 4;
        const int t = lane % 4;
        row += (Strip::pairs ? 0 : t / 2 * Strip::pitch) + Strip::left - Strip::before * channels - shifted;
        row += (4 * (lane / 4) + (Strip::pairs ? 2 * t : 4 * (t % 2))) * channels;
#pragma unroll
        for (int k = 0; k < 2 * Strip::tiles / channels; ++k) {
            const In* const from = row + 32 * k * channels;
#pragma unroll
            for (int e = 0; e < words; ++e) {
                if (Strip::pairs && shifted == 0 && e % 2 == 1) continue;
                const In* const at = Strip::pairs ? from + e / 2 * Strip::pitch + e % 2 * 2 : from + 4 * e;
                to[k / 2][k % 2][e] = *reinterpret_cast<const unsigned*>(at);
            }
        }
    }
    template <class Pixels>
    static __device__ __forceinline__ void ready(Pixels (&to)[Strip::tiles], const Pair& raw, float up) {
#pragma unroll
        for (int i = 0; i < Strip::tiles; ++i)
#pragma unroll
            for (int block = 0; block < 2; ++block)
                to[i].template of_words<shifted, Strip::channels>(raw[i / Strip::channels][block], block, i % Strip::channels, up);
    }

    // The windows of this lane's blocks.
    __device__ __forceinline__ void read(Row& to, const In* row) const {
        constexpr int channels = Strip::channels;
        row += Strip::left + (8 * (lane / 4) + Strip::first_of(lane) - Strip::pad) * channels;
#pragma unroll
        for (int k = 0; k < 2 * Strip::steps * Tuning::tiles; ++k) {
            const int tile = k / 2 / Strip::steps, step = k / 2 % Strip::steps;
#pragma unroll
            for (int c = 0; c < channels; ++c) {
                const In* const from = row + (128 * tile + 16 * step + 64 * (k % 2)) * channels + 4 * c;
                if constexpr (Strip::pairs) {
#pragma unroll
                    for (int e = 0; e < 4; e += 2)
                        to[tile][step][k % 2][c].words[e / 2] = *reinterpret_cast<const unsigned*>(from + Strip::element(e));
                } else {
                    to[tile][step][k % 2][c].load(from);
                }
            }
        }
    }
};

}  // namespace leanconv
