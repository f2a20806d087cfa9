// Four lanes of fp32 in the compilers' vector extension: SSE2, NEON or whatever the target has.
#pragma once

#include <cstring>

#include "convert.h"

namespace kvloom::KVLOOM_ISA {

struct Vec {
    typedef float F __attribute__((vector_size(16)));
    typedef int32_t I __attribute__((vector_size(16)));
    typedef I M;

    static constexpr int W = 4;
    static constexpr bool kDot = false;
    // Most rows of a register tile that is 4, 2 or 1 vectors wide.
    struct Rows {
        static constexpr int kRows4 = 2, kRows2 = 4, kRows1 = 4;
    };
    using RowsOfPairs = Rows;

    static F zero() { return F{}; }
    static F set1(float x) { return F{x, x, x, x}; }
    static F load(const float* p) {
        F x;
        std::memcpy(&x, p, sizeof x);
        return x;
    }
    static void store(float* p, F x) { std::memcpy(p, &x, sizeof x); }
    static F fma(F a, F b, F c) { return a * b + c; }
    static F add(F a, F b) { return a + b; }
    static F sub(F a, F b) { return a - b; }
    static F mul(F a, F b) { return a * b; }
    static F div(F a, F b) { return a / b; }
    static F max(F a, F b) { return select(a > b, a, b); }
    static F min(F a, F b) { return select(a < b, a, b); }
    static F abs(F a) { return (F)((I)a & 0x7fffffff); }
    static M lt(F a, F b) { return a < b; }
    static F select(M mask, F a, F b) { return (F)((mask & (I)a) | (~mask & (I)b)); }
    static constexpr bool kScales = false;
    static F pow2_shifted(F t) { return (F)(((I)t + 127) << 23); }
    // Lanes i with low <= base + i < high.
    static M range(int base, int low, int high) {
        const I at = I{0, 1, 2, 3} + base;
        return (at >= low) & (at < high);
    }
    static float reduce_add(F x) { return (x[0] + x[2]) + (x[1] + x[3]); }
    static float reduce_max(F x) {
        const float a = x[0] > x[2] ? x[0] : x[2], b = x[1] > x[3] ? x[1] : x[3];
        return a > b ? a : b;
    }
    // The larger of numbers from 0 on, by their bits: NaN is larger than any.
    static F max_size(F a, F b) { return select((I)a > (I)b, a, b); }
    static float reduce_max_size(F x) {
        const F y = max_size(x, F{x[2], x[3], x[0], x[1]});
        return max_size(y, F{y[1], y[0], y[3], y[2]})[0];
    }

    // bf16 pairs: 4 lanes of 32 bits, the first of each pair in the lower half.
    static F bf16_first(const uint16_t* p) { return (F)(load_bits(p) << 16); }
    static F bf16_second(const uint16_t* p) { return (F)(load_bits(p) & (int32_t)0xffff0000); }
    static F load_f16(const uint16_t* p) {
        return F{f16_to_float(p[0]), f16_to_float(p[1]), f16_to_float(p[2]), f16_to_float(p[3])};
    }
    // W pairs of numbers: first ones and second ones.
    static void load_f16_pairs(const uint16_t* p, F& first, F& second) {
        for (int i = 0; i < W; ++i) {
            first[i] = f16_to_float(p[2 * i]);
            second[i] = f16_to_float(p[2 * i + 1]);
        }
    }
    static void store_f16(uint16_t* p, F x) {
        for (int i = 0; i < W; ++i) p[i] = float_to_f16(x[i]);
    }

    // Integers: 16-bit pairs in 32-bit lanes, and bytes by the vector.
    typedef uint8_t Bytes __attribute__((vector_size(16)));
    static constexpr int kBytes = 16;
    static I zero_ints() { return I{}; }
    static I load_ints(const void* p) { return load_bits(p); }
    static void store_ints(void* p, I x) { std::memcpy(p, &x, sizeof x); }
    static F from_ints(I x) { return __builtin_convertvector(x, F); }
    static I add_pairs(I acc, I x, int32_t pair) {
        const int32_t low = static_cast<int16_t>(pair), high = pair >> 16;
        return acc + (x << 16 >> 16) * low + (x >> 16) * high;
    }
    template <int N>
    static void add_pairs(I (&acc)[N], const I (&x)[N], const int16_t* at) {
        int32_t pair;
        __builtin_memcpy(&pair, at, 4);
#pragma GCC unroll 4
        for (int v = 0; v < N; ++v) acc[v] = add_pairs(acc[v], x[v], pair);
    }
    // a * b / 2^15, to nearest, of 2 W numbers.
    static void multiply_high(const int16_t* a, const int16_t* b, int16_t* to) {
        for (int i = 0; i < 2 * W; ++i) to[i] = static_cast<int16_t>((a[i] * b[i] + (1 << 14)) >> 15);
    }
    static void store_rounded(int16_t* p, F x) {
        for (int i = 0; i < W; ++i) p[i] = static_cast<int16_t>(__builtin_lrintf(x[i]));
    }
    // Bytes of sign, exponent and mantissa as fp32 whose exponent is as it stands in the byte.
    template <int SHIFT>
    static F small_floats(const unsigned char* p) {
        const I x = I{static_cast<int8_t>(p[0]), static_cast<int8_t>(p[1]), static_cast<int8_t>(p[2]), static_cast<int8_t>(p[3])};
        return (F)((x << SHIFT) & static_cast<int32_t>(0x80000000u | 0x7fu << SHIFT));
    }
    static Bytes load_bytes(const void* p) {
        Bytes x;
        std::memcpy(&x, p, sizeof x);
        return x;
    }
    static Bytes table(const int8_t* levels) { return load_bytes(levels); }
    static Bytes look_up(Bytes levels, Bytes codes) {
        Bytes x;
        for (int i = 0; i < kBytes; ++i) x[i] = levels[codes[i] & 15];
        return x;
    }
    template <int SHIFT, int MASK>
    static Bytes bits(Bytes x) {
        return (x >> SHIFT) & static_cast<uint8_t>(MASK);
    }
    template <int SHIFT, int MASK>
    static Bytes bits_up(Bytes x) {
        return (x << SHIFT) & static_cast<uint8_t>(MASK);
    }
    static Bytes either(Bytes a, Bytes b) { return a | b; }
    static void widen(Bytes x, I& first, I& second) {
        first = widen_half(x, 0);
        second = widen_half(x, kBytes / 2);
    }
    static void reorder(I&, I&) {}

private:
    static I widen_half(Bytes x, int from) {
        int16_t wide[kBytes / 2];
        for (int i = 0; i < kBytes / 2; ++i) wide[i] = static_cast<int8_t>(x[from + i]);
        return load_bits(wide);
    }
    static I load_bits(const void* p) {
        I x;
        std::memcpy(&x, p, sizeof x);
        return x;
    }
};

}  // namespace kvloom::KVLOOM_ISA
