// The strip of separable_tensor, and its input rows: on their way to registers, and from there as float16 numbers to shared
// memory, where ldmatrix reads them.
#pragma once

#include <device/pipeline/split.cuh>
#include <device/ptx/memory.cuh>
#include <kernels/image_filter/image_rows.cuh>

namespace leanconv {

// 2^e where float has it, a subnormal too; zero for less.
__device__ __forceinline__ float exact_power(int e) {
    if (e < -126) return __uint_as_float(e < -149 ? 0u : 1u << (e + 149));
    return power_of_two(static_cast<unsigned>(min(e, 127) + 127));
}

// The sizes of a block, from Problem and Tuning (warps, tiles).
template <class Problem, class Tuning>
struct TensorStrip {
    using T = typename Arithmetic<typename Problem::sum>::type;
    using In = typename InMemory<typename Problem::element, T>::type;
    using Out = typename InMemory<typename Problem::result, T>::type;
    using Border = typename Problem::border;
    static constexpr int r = Problem::r, s = Problem::s, channels = Problem::channels, planes = Problem::planes;
    static constexpr int warps = Tuning::warps, tiles = Tuning::tiles, step = 16;
    static constexpr int before = Problem::anchor_x * channels, left = round_up(before, 4), lead = left - before;
    // What the taps of an output reach, in blocks of 16 elements and of 16 rows.
    static constexpr int x_span = lead + (s - 1) * channels, y_span = r - 1;
    static constexpr int x_blocks = ceil_div(x_span + 16, 16), y_blocks = ceil_div(y_span + 16, 16);
    static constexpr int width = 16 * tiles * warps, warp_width = 16 * tiles, input_width = width + 16 * (x_blocks - 1);
    // Pixels outside may have a value that their type has not.
    static constexpr bool as_float = same_type<In, float> || !Border::maps_inside;
    static constexpr bool fixed_scale = small_integer<In> && !as_float;
    static constexpr int pieces = as_float || (small_integer<In> && sizeof(In) == 2) ? 2 : 1;
    // Rows of 16 bytes, of which ldmatrix reads eight at once, lie an odd number of these apart.
    static constexpr int pitch = input_width + 8, piece = step * pitch, buffer = pieces * piece;
    static constexpr int output_pitch = warp_width + 4;
    static constexpr int rows = step / warps, vectors = input_width / 4, loads = ceil_div(rows * vectors, 32);

    static_assert(same_type<T, float>, "tensor cores sum in float32");
    static_assert(Problem::rank == 1, "one column and one row");
    static_assert(step % warps == 0, "warps load rows by turns");
    static_assert(channels == 1 || planes == 1, "channels are filtered side by side, or one by one");
};

// A warp's rows of a step on their way: loaded into registers, then split into halves in shared memory.
template <class Problem, class Tuning>
struct SplitRows : TensorStrip<Problem, Tuning> {
    using Base = TensorStrip<Problem, Tuning>;
    using In = typename Base::In;
    using View = Image<In, typename Base::Out, float>;
    using Border = typename Base::Border;

    struct Held {
        FourElements<In> elements;
        __device__ __forceinline__ void put(int e, In value) {
            constexpr int bits = 8 * sizeof(In), in_word = 32 / bits;
            unsigned word;
            if constexpr (half_type<In>) word = value.bits;
            else word = static_cast<unsigned>(value) & (0xffffffffu >> (32 - bits));
            unsigned& to = elements.words[e / in_word];
            to = (e % in_word ? to : 0u) | word << e % in_word * bits;
        }
        __device__ __forceinline__ void load(const In* from) { elements.load(from); }
        __device__ __forceinline__ void values(float (&v)[4]) const { elements.widen_to(v); }
    };
    struct HeldFloats {
        float v[4];
        __device__ __forceinline__ void put(int e, float value) { v[e] = value; }
        __device__ __forceinline__ void load(const In* from) {
            FourElements<In> four;
            four.load(from);
            four.widen_to(v);
        }
        __device__ __forceinline__ void values(float (&to)[4]) const {
#pragma unroll
            for (int e = 0; e < 4; ++e) to[e] = v[e];
        }
    };
    template <bool floats, class A, class B> struct Either { using type = A; };
    template <class A, class B> struct Either<false, A, B> { using type = B; };
    using Kept = typename Either<Base::as_float, HeldFloats, Held>::type;

    const View& image;
    const int first_row, j, warp, lane;
    const bool whole;  // all elements of a row lie inside the image and on vector edges
    const int* const columns;
    Kept kept[Base::loads];

    // Row 0 of the band's input is row `first_row` of the image; `columns` has a place for each element of a row.
    __device__ __forceinline__ SplitRows(const View& image_, int first_row_, int j_, int warp_, int lane_, int* columns_)
        : image(image_), first_row(first_row_), j(j_), warp(warp_), lane(lane_),
          whole(Base::planes == 1 && j_ >= Base::left && j_ - Base::left + Base::input_width <= image_.width &&
                aligned(image_.x, image_.x_pitch)),
          columns(columns_) {
        if (whole) return;
        for (int k = threadIdx.x; k < Base::input_width; k += 32 * Base::warps)
            columns_[k] = border_element<Border, Base::channels>(j - Base::left + k, image.width);
    }

    // The vectors of a warp's rows, one row after the other: lane + 32 * k is vector `of_row` of row `row`.
    struct Place {
        int row, of_row;
        bool exists;
        __device__ __forceinline__ Place(int lane, int k)
            : row((lane + 32 * k) / Base::vectors), of_row((lane + 32 * k) % Base::vectors),
              exists(32 * k + 32 <= Base::rows * Base::vectors || lane + 32 * k < Base::rows * Base::vectors) {}
    };

    // Issues the loads of this warp's rows of the step whose first input row is `first`.
    __device__ __forceinline__ void load(int first) {
        const int top = first_row + first + warp * Base::rows;
        if (whole && top >= 0 && top + Base::rows <= image.height) {
            const In* const from = image.x + top * image.x_pitch + (j - Base::left);
#pragma unroll
            for (int k = 0; k < Base::loads; ++k) {
                const Place at(lane, k);
                if (at.exists) kept[k].load(from + (at.row * image.x_pitch + 4 * at.of_row));
            }
            return;
        }
#pragma unroll
        for (int k = 0; k < Base::loads; ++k) {
            const Place at(lane, k);
            if (!at.exists) continue;
            const int i = border_index<Border>(top + at.row, image.height);
            const In* const from = image.x + i * image.x_pitch;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int column = whole ? j - Base::left + 4 * at.of_row + e : columns[4 * at.of_row + e];
                if constexpr (Base::as_float) {
                    const bool inside = Border::maps_inside || (i >= 0 && column >= 0);
                    kept[k].put(e, inside ? widen<float>(from[column * Base::planes]) : image.value);
                } else {
                    kept[k].put(e, from[column * Base::planes]);
                }
            }
        }
    }

    // Splits what was loaded, and writes the biased exponent of the warp's rows: 2^15 > x * 2^(141 - exponent).
    __device__ __forceinline__ void store(unsigned short* to, int* exponents) const {
        float v[Base::loads][4];
        float scale = sizeof(In) == 2 ? 0.5f : 1.0f;
#pragma unroll
        for (int k = 0; k < Base::loads; ++k) kept[k].values(v[k]);
        if constexpr (!Base::fixed_scale) {
            float largest = 0.0f;
#pragma unroll
            for (int k = 0; k < Base::loads; ++k) {
                if (!Place(lane, k).exists) continue;
#pragma unroll
                for (int e = 0; e < 4; ++e) largest = max_nan_f32(largest, fabsf(v[k][e]));
            }
            const unsigned exponent = max(16u, __reduce_max_sync(0xffffffffu, __float_as_uint(largest)) >> 23);
            if (lane < Base::rows) exponents[warp * Base::rows + lane] = static_cast<int>(exponent);
            scale = power_of_two(268 - exponent);
        }
#pragma unroll
        for (int k = 0; k < Base::loads; ++k) {
            const Place place(lane, k);
            if (!place.exists) continue;
            const float (&x)[4] = v[k];
            const unsigned high[2] = {split_high(x[0], x[1], scale), split_high(x[2], x[3], scale)};
            unsigned short* const at = to + (warp * Base::rows + place.row) * Base::pitch + 4 * place.of_row;
            *reinterpret_cast<uint2*>(at) = make_uint2(high[0], high[1]);
            if constexpr (Base::pieces == 2)
                *reinterpret_cast<uint2*>(at + Base::piece) =
                    make_uint2(split_low(x[0], x[1], scale, high[0]), split_low(x[2], x[3], scale, high[1]));
        }
    }
};

}  // namespace leanconv
