// Fourier transforms of lines of 2^m complex numbers, a block each, by Stockham's and Sande's radix: a thread holds
// `elements` of them in registers, transforms these, and gives them to others by way of shared memory.
//
// A transform of `length` is `elements` transforms of length / elements, of what lies so far apart, behind twiddle factors:
// levels of n, n / elements, ... until what is left fits into a thread. Outputs stay where inputs were, so that
// frequencies lie in the order of their digits reversed. The inverse goes the same way back, and a product of spectra
// needs no other order. A level reads and writes the same places; one barrier stands between two levels.
#pragma once

#include <device/ptx/memory.cuh>
#include <kernels/image_filter/pixels.cuh>

namespace leanconv {

template <class T>
struct __align__(2 * sizeof(T)) Complex {
    T re, im;
};
template <class T>
__device__ __forceinline__ Complex<T> operator+(Complex<T> a, Complex<T> b) { return {a.re + b.re, a.im + b.im}; }
template <class T>
__device__ __forceinline__ Complex<T> operator-(Complex<T> a, Complex<T> b) { return {a.re - b.re, a.im - b.im}; }
template <class T>
__device__ __forceinline__ Complex<T> operator*(Complex<T> a, Complex<T> b) {
    return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}
template <class T>
__device__ __forceinline__ Complex<T> conjugate(Complex<T> a) { return {a.re, -a.im}; }

// Times i^-1, or times i in an inverse transform.
template <bool inverse, class T>
__device__ __forceinline__ Complex<T> quarter_turn(Complex<T> a) {
    return inverse ? Complex<T>{-a.im, a.re} : Complex<T>{a.im, -a.re};
}

// Times exp(-2 pi i k / 16), or its inverse.
template <bool inverse, class T>
__device__ __forceinline__ Complex<T> sixteenths(Complex<T> a, int k) {
    constexpr T half = static_cast<T>(0.70710678118654752440), cosine = static_cast<T>(0.92387953251128675613),
                sine = static_cast<T>(0.38268343236508977173);
    if (k == 0) return a;
    if (k == 4) return quarter_turn<inverse>(a);
    const T re = k == 1 ? cosine : k == 2 ? half : k == 3 ? sine : k == 6 ? -half : -cosine;  // k is 9 otherwise
    const T im = k == 1 ? sine : k == 2 || k == 6 ? half : k == 3 ? cosine : -sine;
    return a * Complex<T>{re, inverse ? im : -im};
}

// The transform of `radix` neighbours, from number `first` on, in place, its frequencies in order.
template <int radix, bool inverse, int first, int elements, class T>
__device__ __forceinline__ void transform_few(Complex<T> (&v)[elements]) {
    if constexpr (radix == 2) {
        const Complex<T> a = v[first], b = v[first + 1];
        v[first] = a + b, v[first + 1] = a - b;
    } else if constexpr (radix == 4) {
        const Complex<T> a = v[first] + v[first + 2], b = v[first] - v[first + 2];
        const Complex<T> c = v[first + 1] + v[first + 3], d = quarter_turn<inverse>(v[first + 1] - v[first + 3]);
        v[first] = a + c, v[first + 1] = b + d, v[first + 2] = a - c, v[first + 3] = b - d;
    } else {
        // columns * 4: transforms of 4, twiddle factors, transforms of `columns`
        static_assert(radix == 8 || radix == 16, "transforms of 2, 4, 8 or 16");
        constexpr int columns = radix / 4;
        Complex<T> rows[4][columns];
#pragma unroll
        for (int i = 0; i < columns; ++i) {
            Complex<T> line[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) line[j] = v[first + i + columns * j];
            transform_few<4, inverse, 0>(line);
#pragma unroll
            for (int k = 0; k < 4; ++k) rows[k][i] = sixteenths<inverse>(line[k], i * k * (16 / radix));
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            transform_few<columns, inverse, 0>(rows[k]);
#pragma unroll
            for (int m = 0; m < columns; ++m) v[first + k + 4 * m] = rows[k][m];
        }
    }
}

// exp(-2 pi i k place / length), for each level from a table, or computed.
template <class T>
struct TwiddleTable {
    const Complex<T>* table;  // of this level: that of k and place is number k * length / elements + place
    __device__ __forceinline__ TwiddleTable below(int length) const { return {table + length}; }
    __device__ __forceinline__ Complex<T> at(int k, int place, int part, int) const { return table[k * part + place]; }
};
template <class T>
struct ComputedTwiddles {
    __device__ __forceinline__ ComputedTwiddles below(int) const { return {}; }
    __device__ __forceinline__ Complex<T> at(int k, int place, int, int length) const {
        double sine, cosine;
        sincospi(-2.0 * (k * place) / length, &sine, &cosine);
        return {static_cast<T>(cosine), static_cast<T>(sine)};
    }
};

// Transforms of `lines` lines at once, by the same threads.
template <int n_, int elements_, int lines_, class T>
struct Transform {
    static constexpr int n = n_, elements = elements_, lines = lines_, threads = n / elements;
    static constexpr int line_places = n + n / elements;
    static constexpr int shared_bytes = lines * line_places * sizeof(Complex<T>);
    using Values = Complex<T>[lines][elements];

    static_assert(n % elements == 0 && n > elements, "a thread has some of the elements");

    // Twiddle factors of all levels.
    static __device__ constexpr int table(int length = n) { return length <= elements ? 0 : length + table(length / elements); }

    __device__ __forceinline__ void write_table(Complex<T>* to) const {
        for (int length = n; length > elements; length /= elements) {
            const int part = length / elements;
            for (int i = t; i < length; i += threads) to[i] = ComputedTwiddles<T>().at(i / part, i % part, part, length);
            to += length;
        }
    }

    // The number in its line of a thread's first element at a level, and how far apart its elements are.
    template <int length>
    static __device__ __forceinline__ int first(int t) {
        constexpr int part = length / elements;
        if constexpr (part <= 1) return t * elements;
        else return t / part * length + t % part;
    }
    template <int length>
    static constexpr int apart = length <= elements ? 1 : length / elements;

    Complex<T>* const shared;
    const int t;

    // NOTE: one place is left out behind every `elements`: then the threads of a warp meet all banks at every level.
    template <int length>
    __device__ __forceinline__ Complex<T>* place(int line, int j) const {
        // j * apart is a multiple of `elements`, or the thread's first element lies less than apart behind one
        const int number = first<length>(t), further = j * apart<length>;
        return shared + number + number / elements + (line * line_places + further + further / elements);
    }

    template <int from, int to>
    __device__ __forceinline__ void exchange(Values& v) const {
#pragma unroll
        for (int line = 0; line < lines; ++line)
#pragma unroll
            for (int j = 0; j < elements; ++j) *place<from>(line, j) = v[line][j];
        __syncthreads();
#pragma unroll
        for (int line = 0; line < lines; ++line)
#pragma unroll
            for (int j = 0; j < elements; ++j) v[line][j] = *place<to>(line, j);
    }

    template <int length, bool inverse, int first_ = 0>
    __device__ __forceinline__ void last_level(Values& v) const {
        if constexpr (first_ < elements) {
#pragma unroll
            for (int line = 0; line < lines; ++line) transform_few<length, inverse, first_>(v[line]);
            last_level<length, inverse, first_ + length>(v);
        }
    }

    template <bool inverse, int length, class Twiddles>
    __device__ __forceinline__ void twiddle(Values& v, const Twiddles& twiddles) const {
        constexpr int part = length / elements;
#pragma unroll
        for (int k = 1; k < elements; ++k) {
            const Complex<T> w = twiddles.at(k, t % part, part, length);
#pragma unroll
            for (int line = 0; line < lines; ++line) v[line][k] = v[line][k] * (inverse ? conjugate(w) : w);
        }
    }

    // From elements t, t + threads, ... of a line to the frequencies in places t * elements, t * elements + 1, ...
    template <int length = n, class Twiddles>
    __device__ __forceinline__ void forward(Values& v, const Twiddles& twiddles) const {
        if constexpr (length <= elements) {
            last_level<length, false>(v);
        } else {
#pragma unroll
            for (int line = 0; line < lines; ++line) transform_few<elements, false, 0>(v[line]);
            twiddle<false, length>(v, twiddles);
            exchange<length, length / elements>(v);
            forward<length / elements>(v, twiddles.below(length));
        }
    }

    // The way back; without the factor 1 / n.
    template <int length = n, class Twiddles>
    __device__ __forceinline__ void inverse(Values& v, const Twiddles& twiddles) const {
        if constexpr (length <= elements) {
            last_level<length, true>(v);
        } else {
            inverse<length / elements>(v, twiddles.below(length));
            exchange<length / elements, length>(v);
            twiddle<true, length>(v, twiddles);
#pragma unroll
            for (int line = 0; line < lines; ++line) transform_few<elements, true, 0>(v[line]);
        }
    }
};

}  // namespace leanconv
