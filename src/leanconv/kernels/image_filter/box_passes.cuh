// box_passes: what all pixels of a large box make (box.cuh), along columns from the image into the result, then along rows of
// the result, in place. Of float32 both passes are one launch, in which blocks of rows follow those of columns.
//
//   v[i, j] = op over u of x[i + u - anchor_y, j]                                                the column pass
//   y[i, j] = delta + w * op over z of v[i, j + z - anchor_x]                                    the row pass
//
// Requires   results of the type of the sums; one channel; boxes of 33 x 33 and more; a row fits into shared memory.
// Numerics   as box.cuh, no difference is taken: a sum of n along an axis is off by at most n / 16 + 32 roundings.
// Groups     as in line_groups.cuh: the sums of what enters are kept in shared memory, what leaves is read again.
// Column     A block marches down a strip of 32 * columns columns. A warp has 16 rows of a step: it copies those that enter,
// pass       loads those that leave, keeps the sums, and after a barrier stores 16 rows of results.
// Row pass   A block has a row in shared memory, extended by the border; a thread makes 16 neighbouring outputs of it.
// Order      A first launch marks the first result of each strip's chunk of rows as not there yet. The column pass writes it
//            after the rest of the chunk (publish), and the row pass waits for those of all strips: what it reads is in L2.
// Work       an output takes five operations along an axis and n / 256 shared loads of 32 bits. L2 moves 20 bytes for each of
//            float32: the pixel that enters, the one that leaves, v twice, the result; memory 8, where L2 holds the rows of
//            a box.
#pragma once

#include <kernels/image_filter/box.cuh>
#include <kernels/image_filter/line_groups.cuh>

namespace leanconv {

// A strip's rows in the registers of a warp, `columns` neighbours a lane.
template <class Problem, int columns>
struct StripRows {
    using T = typename Arithmetic<typename Problem::sum>::type;
    using In = typename InMemory<typename Problem::element, T>::type;
    using Border = typename Problem::border;

    const In* from;
    const int first_row, height, count;  // `count` of the lane's columns lie inside the image
    const int64 pitch;
    const T value;
    const bool vectors;

    __device__ __forceinline__ void load(T (&to)[columns], int n) const {
        const int i = border_index<Border>(first_row + n, height);
#pragma unroll
        for (int c = 0; c < columns; ++c) to[c] = value;
        if (!Border::maps_inside && i < 0) return;
        const In* const at = from + i * pitch;
        if (vectors) {
            if constexpr (columns == 4) {
                FourElements<In> four;
                four.load(at);
                four.widen_to(to);
            } else if constexpr (columns == 2 && same_type<In, float>) {
                load_adjacent(to, at);
            } else {
#pragma unroll
                for (int c = 0; c < columns; ++c) to[c] = widen<T>(at[c]);
            }
        } else {
#pragma unroll
            for (int c = 0; c < columns; ++c)
                if (c < count) to[c] = widen<T>(at[c]);
        }
    }
};

// A lane's neighbours in shared memory, and as results.
template <class T, int columns>
__device__ __forceinline__ void load_columns(T (&to)[columns], const T* from) {
    if constexpr (columns == 4) {
        load_vector(to, from);
    } else if constexpr (columns == 2 && same_type<T, float>) {
        load_adjacent(to, from);
    } else {
#pragma unroll
        for (int c = 0; c < columns; ++c) to[c] = from[c];
    }
}
template <class T, int columns>
__device__ __forceinline__ void keep_columns(T* to, const T (&v)[columns]) {
    if constexpr (columns == 2 && same_type<T, float>) {
        store_adjacent(to, v);
    } else {
#pragma unroll
        for (int c = 0; c < columns; ++c) to[c] = v[c];
    }
}
template <class T, int columns>
__device__ __forceinline__ void store_columns(T* to, const T (&v)[columns]) {
    if constexpr (columns == 4) {
        store_vector(to, v);
    } else if constexpr (columns == 2 && same_type<T, float>) {
        store_adjacent(to, v);
    } else {
#pragma unroll
        for (int c = 0; c < columns; ++c) to[c] = v[c];
    }
}

// What a result of the column pass is before it is there. No operation makes this NaN, and where it is copied from the image
// it becomes another one.
constexpr unsigned not_yet = 0x7fbadbadu;

// Writes it when what this block has written before is visible to all. The caller has seen a barrier since.
template <class T>
__device__ __forceinline__ void publish(T* to, T value) {
    if constexpr (sizeof(T) == 4) {
        unsigned bits;
        if constexpr (same_type<T, float>) bits = __float_as_uint(value);
        else bits = value;
        __threadfence();
        *reinterpret_cast<volatile unsigned*>(to) = bits == not_yet ? 0x7fffffffu : bits;
    }
}

// Results of the column pass come in chunks, the steps of its blocks. The first of a strip's chunk is written when all others
// of the chunk are visible; until then it is `not_yet`.
template <class Problem, class Tuning, class T>
__device__ __forceinline__ void box_columns(const Image<typename InMemory<typename Problem::element, T>::type, T, T>& image,
                                            int strip, int top, int rows) {
    using G = Groups<Problem::r>;
    using Op = typename Problem::op;
    using In = typename InMemory<typename Problem::element, T>::type;
    constexpr int columns = Tuning::columns, warps = Tuning::warps, slots = G::whole + 2 * warps, width = 32 * columns;
    constexpr bool copied = same_type<In, T> && sizeof(T) == 4, followed = Problem::followed;
    const int warp = warp_number(), lane = threadIdx.x % 32, j = strip * width + lane * columns;
    const bool vectors = (strip + 1) * width <= image.width && aligned(image.x, image.x_pitch) &&
                         aligned(image.y, image.y_pitch);
    const int count = min(columns, image.width - j), first_row = top - Problem::anchor_y;
    const StripRows<Problem, columns> source{image.x + j, first_row, image.height, count, image.x_pitch, image.value, vectors};
    // Of group k, counted from the first that is kept, slot k % slots.
    T* const kept_all = reinterpret_cast<T*>(shared_memory()) + lane * columns;
    T* const kept_last = kept_all + slots * width;
    // A warp's 16 rows that enter, on their way and until its results are stored.
    T* const stage = reinterpret_cast<T*>(shared_memory()) + 2 * slots * width + warp * 16 * width;
    const int groups = ceil_div(rows, 16);
    const auto begin = [&](int group) {
        if (copied && vectors && group >= -G::whole && group < groups) {
#pragma unroll
            for (int k = 0; k < 4 * columns; ++k) {
                const int e = (32 * k + lane) / (8 * columns), at = (32 * k + lane) % (8 * columns) * 4;
                const int i = border_index<typename Problem::border>(first_row + 16 * group + Problem::r - 1 + e, image.height);
                if (Problem::border::maps_inside || i >= 0) {
                    cp_async_16(stage + e * width + at, image.x + i * image.x_pitch + (strip * width + at), true);
                } else {
                    const T four[4] = {image.value, image.value, image.value, image.value};
                    store_vector(stage + e * width + at, four);
                }
            }
        }
        cp_async_commit_group();
    };
    T* const mine = stage + lane * columns;
    const int start = -ceil_div(G::whole, warps) * warps;  // chunks begin at multiples of as many groups
    begin(start + warp);
    int slot = warp;
    T withheld{};
#pragma unroll 1
    for (int first = start; first < groups; first += warps) {
        const int group = first + warp;
        T leaves[16][columns];
        if (group >= 0 && group < groups) {
#pragma unroll
            for (int e = 0; e < 16; ++e) source.load(leaves[e], 16 * group + e);
        }
        cp_async_wait_group<0>();
        __syncwarp();
        if (group >= -G::whole && group < groups) {
            T all[columns], last[columns];
#pragma unroll
            for (int e = 0; e < 16; ++e) {
                T enters[columns];
                if (copied && vectors) {
                    load_columns(enters, mine + e * width);
                } else {
                    source.load(enters, 16 * group + Problem::r - 1 + e);
                    keep_columns(mine + e * width, enters);
                }
#pragma unroll
                for (int c = 0; c < columns; ++c) {
                    all[c] = e == 0 ? enters[c] : Op::of(all[c], enters[c]);
                    if (e >= 16 - G::rest) last[c] = e == 16 - G::rest ? enters[c] : Op::of(last[c], enters[c]);
                }
            }
            keep_columns(kept_all + slot * width, all);
            if (G::begins) keep_columns(kept_last + slot * width, last);
        }
        __syncthreads();  // the step's sums are there, and the last step's results are written
        if (followed && first - warps >= 0 && threadIdx.x == 0)
            publish(image.y + (top + 16 * (first - warps)) * image.y_pitch + j, withheld);
        if (group >= 0 && group < groups) {
            T middle[columns];
            int from = slot + slots - G::whole + G::first;  // of the oldest group in reach
            from -= from >= slots ? slots : 0;
            load_columns(middle, (G::begins ? kept_last : kept_all) + from * width);
#pragma unroll 8
            for (int k = G::first + 1; k < G::whole; ++k) {
                from = from + 1 == slots ? 0 : from + 1;
                T more[columns];
                load_columns(more, kept_all + from * width);
#pragma unroll
                for (int c = 0; c < columns; ++c) middle[c] = Op::of(middle[c], more[c]);
            }
#pragma unroll
            for (int c = 0; c < columns; ++c) {
                leaves[15][c] = Op::of(leaves[15][c], middle[c]);
#pragma unroll
                for (int e = 14; e >= 0; --e) leaves[e][c] = Op::of(leaves[e][c], leaves[e + 1][c]);
            }
            const bool withholds = followed && threadIdx.x == 0;
            T* to = image.y + (top + 16 * group) * image.y_pitch + j;
            T enters[columns];
#pragma unroll
            for (int e = 0; e < 16; ++e, to += image.y_pitch) {
                T next[columns];
                load_columns(next, mine + e * width);
#pragma unroll
                for (int c = 0; c < columns; ++c) {
                    enters[c] = e == 0 ? next[c] : Op::of(enters[c], next[c]);
                    leaves[e][c] = Op::of(leaves[e][c], enters[c]);
                }
                if (e == 0) withheld = leaves[0][0];
                if (16 * group + e >= rows) continue;
                if (vectors && !(e == 0 && withholds)) {
                    store_columns(to, leaves[e]);
                } else {
#pragma unroll
                    for (int c = 0; c < columns; ++c)
                        if (c < count && !(e == 0 && c == 0 && withholds)) to[c] = leaves[e][c];
                }
            }
        }
        __syncwarp();  // all lanes have read the stage
        begin(group + warps);
        slot = slot + warps < slots ? slot + warps : slot + warps - slots;
    }
    if (!followed) return;
    __syncthreads();  // all results are written
    if (threadIdx.x == 0) publish(image.y + (top + (groups - 1) / warps * warps * 16) * image.y_pitch + j, withheld);
}

// A row in shared memory: groups of 16 lie 20 words apart, so that threads that read a group each meet all banks.
template <class Problem, class T>
struct ExtendedRow {
    static constexpr int pitch = sizeof(T) == 4 ? 20 : 18;
    static __device__ __forceinline__ int place(int q) { return q / 16 * pitch + q % 16; }

    // 16 neighbours from 16 * group + offset on; four beyond them lie in the row too.
    template <int offset>
    static __device__ __forceinline__ void load(T (&v)[16][1], const T* row, int group) {
        constexpr int lead = offset % 4, vectors = lead == 0 ? 4 : 5;
#pragma unroll
        for (int k = 0; k < vectors; ++k) {
            T four[4];
            const int q = offset - lead + 4 * k;
            load_vector(four, row + (group + q / 16) * pitch + q % 16);
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (4 * k + e >= lead && 4 * k + e - lead < 16) v[4 * k + e - lead][0] = four[e];
        }
    }
};

template <class Problem, int threads, class T>
__device__ __forceinline__ void box_row(T* y, T weight, T delta, T value, int width, bool vectors) {
    using G = Groups<Problem::s>;
    using Op = typename Problem::op;
    using Border = typename Problem::border;
    using Row = ExtendedRow<Problem, T>;
    constexpr int s = Problem::s, anchor = Problem::anchor_x;
    // Places before the row, in whole vectors.
    constexpr int left = round_up(anchor, 4), lead = left - anchor;
    const int groups = ceil_div(width, 16);
    T* const row = reinterpret_cast<T*>(shared_memory());
    T* const kept_all = row + (groups + G::whole + 3) * Row::pitch;  // of group -whole on
    T* const kept_last = kept_all + groups + G::whole;
    T* const kept_eight = kept_last + groups + G::whole;  // of eight groups from one on
    constexpr bool eights = G::whole > 16;
    // The value of a column outside: of a sum, so many pixels'.
    if (!Border::maps_inside && Problem::weighted) value *= static_cast<T>(Problem::r);
    if constexpr (sizeof(T) == 4) {
        if (vectors) {
#pragma unroll 1
            for (int k = threadIdx.x; k < width / 4; k += threads)
                cp_async_16(row + Row::place(left + 4 * k), y + 4 * k, true);
        }
    }
    // What is not copied: all places, or those beside the image.
    const int copied = vectors && sizeof(T) == 4 ? width : 0, places = (groups + G::whole + 3) * 16 - copied;
#pragma unroll 1
    for (int k = threadIdx.x; k < places; k += threads) {
        const int q = k < left ? k : k + copied, j = border_index<Border>(q - left, width);
        row[Row::place(q)] = q < left + width + s && (Border::maps_inside || j >= 0) ? y[j] : value;
    }
    cp_async_commit_group();
    cp_async_wait_group<0>();
    __syncthreads();  // the row is there
#pragma unroll 1
    for (int k = threadIdx.x; k < groups + G::whole; k += threads) {
        T enters[16][1], all[1], last[1];
        // group k - whole, of which group 0 is entered by 16 * whole + rest ...
        Row::template load<lead + G::rest>(enters, row, k);
        sums_of<Op, G::rest>(all, last, enters);
        kept_all[k] = all[0];
        if (G::rest > 0) kept_last[k] = last[0];
    }
    __syncthreads();  // all sums are there
    if (eights) {
#pragma unroll 1
        for (int k = threadIdx.x; k < groups + G::whole - 8; k += threads) {
            T eight = kept_all[k];
#pragma unroll
            for (int b = 1; b < 8; ++b) eight = Op::of(eight, kept_all[k + b]);
            kept_eight[k] = eight;
        }
        __syncthreads();
    }
#pragma unroll 1
    for (int k = threadIdx.x; k < round_up(groups, 32); k += threads) {
        T enters[16][1] = {}, leaves[16][1], middle[1];
        if (k < groups) {
            Row::template load<lead + G::rest>(enters, row, k + G::whole);
            Row::template load<lead>(leaves, row, k);
            middle[0] = (G::begins ? kept_last : kept_all)[k + G::first];
            int b = G::first + 1;
            if (eights) {
#pragma unroll 8
                for (; b + 8 <= G::whole; b += 8) middle[0] = Op::of(middle[0], kept_eight[k + b]);
            }
#pragma unroll 8
            for (; b < G::whole; ++b) middle[0] = Op::of(middle[0], kept_all[k + b]);
            join<Op, G::middle>(enters, leaves, middle);
#pragma unroll
            for (int e = 0; e < 16; ++e) {
                T result = enters[e][0];
                if constexpr (Problem::weighted) result *= weight;
                enters[e][0] = result + delta;
            }
        }
        // Two lanes exchange vectors, so that a store has both halves of 32 bytes.
        const int odd = threadIdx.x % 2;
#pragma unroll
        for (int e = 0; e < 16; e += 8) {
            T own[4], other[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                own[i] = odd ? enters[e + 4 + i][0] : enters[e + i][0];
                other[i] = __shfl_xor_sync(0xffffffffu, odd ? enters[e + i][0] : enters[e + 4 + i][0], 1);
            }
            const int at = 16 * k + e + 4 * odd, at_other = at + (odd ? -16 : 16);
            if (vectors) {
                if (at < width) stream_sums(y + at, own);
                if (at_other < width) stream_sums(y + at_other, other);
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (at + i < width) y[at + i] = own[i];
                    if (at_other + i < width) y[at_other + i] = other[i];
                }
            }
        }
    }
}

// Where both passes are one launch, blocks of rows follow those of columns. These come first and wait for nobody, so that
// the others do not wait for ever: blocks start in the order of their numbers.
template <class Problem, class Tuning>
__device__ __forceinline__ void box_passes(const typename Problem::element* x, const typename Problem::sum* w,
                                           typename Problem::result* y, typename Problem::sum value,
                                           typename Problem::sum delta, int height, int width, int64 x_pitch, int64 x_step,
                                           int64 y_pitch, int64 y_step, int strips, int bands, int band_rows, int images) {
    using T = typename Arithmetic<typename Problem::sum>::type;
    using In = typename InMemory<typename Problem::element, T>::type;
    constexpr int chunk = 16 * Tuning::warps, threads = 32 * Tuning::warps;
    static_assert(same_type<typename Problem::result, typename Problem::sum>, "sums wait in the result");
    static_assert(Problem::channels == 1 && Problem::planes == 1 && !Problem::valid, "a row of sums is one of results");
    static_assert(0 <= Problem::anchor_y && Problem::anchor_y < Problem::r, "the anchor lies inside the box");
    static_assert(0 <= Problem::anchor_x && Problem::anchor_x < Problem::s, "the anchor lies inside the box");
    T* const results = reinterpret_cast<T*>(y);
    const int chunks = ceil_div(band_rows, chunk), of_columns = strips * bands * images;
    int block = blockIdx.x;
    if constexpr (Problem::marks) {
        // Strip k % strips of chunk k / strips % chunks of band k / strips / chunks % bands.
        const int k = block * threads + threadIdx.x, band = k / strips / chunks % bands, image = k / strips / chunks / bands;
        const int row = k / strips % chunks * chunk;
        if (image >= images || row >= band_rows || band * band_rows + row >= height) return;
        const int64 at = image * y_step + (band * band_rows + row) * y_pitch + k % strips * (32 * Tuning::columns);
        reinterpret_cast<unsigned*>(y)[at] = not_yet;
        return;
    }
    if (Problem::along_columns && (!Problem::along_rows || block < of_columns)) {
        const int rest = block / strips, image = rest / bands, top = rest % bands * band_rows;
        const int rows = min(band_rows, height - top);
        if (rows <= 0) return;
        const Image<In, T, T> view{reinterpret_cast<const In*>(x) + image * x_step, results + image * y_step,
                                   height, width, height, width, x_pitch, y_pitch, static_cast<T>(value)};
        box_columns<Problem, Tuning, T>(view, block % strips, top, rows);
    } else if (Problem::along_rows) {
        // Rows in the order in which the column pass makes them; those of a launch of their own in the opposite one.
        if (Problem::along_columns) block -= of_columns;
        else block = gridDim.x - 1 - block;
        const int rest = block / chunk, first = rest / bands % chunks * chunk, band = rest % bands;
        const int image = rest / bands / chunks, in_band = first + block % chunk, row = band * band_rows + in_band;
        if (in_band >= band_rows || row >= height) return;
        T* const of_image = results + image * y_step;
        if constexpr (Problem::along_columns) {
            const T* const flags = of_image + (band * band_rows + first) * y_pitch;
            const auto wait_for = [&](int strip) {
                while (ld_acquire(reinterpret_cast<const unsigned*>(flags + strip * (32 * Tuning::columns))) == not_yet) {}
            };
            // One thread looks for one strip's, and all for all when that is there: fewer looks disturb less.
            if (threadIdx.x == 0) wait_for(row % strips);
            __syncthreads();
            for (int k = threadIdx.x; k < strips; k += threads) wait_for(k);
            __syncthreads();  // the chunk is there
        }
        T* const to = of_image + row * y_pitch;
        box_row<Problem, threads>(to, reinterpret_cast<const T*>(w)[0], static_cast<T>(delta), static_cast<T>(value), width,
                                  width % 4 == 0 && aligned(to, 0));
    }
}

}  // namespace leanconv
