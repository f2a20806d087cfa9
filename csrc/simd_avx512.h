// Sixteen lanes of fp32: AVX-512 F, BW, DQ and VL; with KVLOOM_DOT also BF16's pair products.
#pragma once

#ifdef KVLOOM_EMULATE_AVX512
#include "emulate_avx512.h"
#else
#include <immintrin.h>
#endif

#include "convert.h"

namespace kvloom::KVLOOM_ISA {

struct Vec {
    using F = __m512;
    using I = __m512i;
    using M = __mmask16;

    static constexpr int W = 16;
    struct Rows {
        static constexpr int kRows4 = 6, kRows2 = 12, kRows1 = 12;
    };
    struct RowsOfPairs {  // splitting pairs takes a register
        static constexpr int kRows4 = 5, kRows2 = 12, kRows1 = 12;
    };

    static F zero() { return _mm512_setzero_ps(); }
    static F set1(float x) { return _mm512_set1_ps(x); }
    static F load(const float* p) { return _mm512_loadu_ps(p); }
    static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
    static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static F add(F a, F b) { return _mm512_add_ps(a, b); }
    static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static F div(F a, F b) { return _mm512_div_ps(a, b); }
    static F max(F a, F b) { return _mm512_max_ps(a, b); }
    static F min(F a, F b) { return _mm512_min_ps(a, b); }
    static F abs(F a) {
        return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7fffffff)));
    }
    static M lt(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
    static F select(M mask, F a, F b) { return _mm512_mask_mov_ps(b, mask, a); }
    static F pow2_shifted(F t) {
        return _mm512_castsi512_ps(
            _mm512_slli_epi32(_mm512_add_epi32(_mm512_castps_si512(t), _mm512_set1_epi32(127)), 23));
    }
#ifdef KVLOOM_EMULATE_AVX512
    static constexpr bool kScales = false;
#else
    static constexpr bool kScales = true;  // has nearest and times_pow2
    static F nearest(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static F times_pow2(F x, F n) { return _mm512_scalef_ps(x, n); }  // n whole
#endif
    static M range(int base, int low, int high) {
        const auto below = [base](int edge) -> unsigned {  // lanes i with base + i < edge
            const int count = edge - base;
            return count <= 0 ? 0u : count >= W ? 0xffffu : (1u << count) - 1u;
        };
        return static_cast<M>(below(high) & ~below(low));
    }
    static float reduce_add(F x) {
        const __m256 y = _mm256_add_ps(lower(x), upper(x));
        __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
        z = _mm_add_ps(z, _mm_movehl_ps(z, z));
        return _mm_cvtss_f32(_mm_add_ss(z, _mm_movehdup_ps(z)));
    }
    static float reduce_max(F x) {
        const __m256 y = _mm256_max_ps(lower(x), upper(x));
        __m128 z = _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
        z = _mm_max_ps(z, _mm_movehl_ps(z, z));
        return _mm_cvtss_f32(_mm_max_ss(z, _mm_movehdup_ps(z)));
    }
    // The larger of numbers from 0 on, by their bits: NaN is larger than any.
    static F max_size(F a, F b) {
        return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
    }
    static float reduce_max_size(F x) {
        const __m512i bits = _mm512_castps_si512(x);
        const __m256i y = _mm256_max_epi32(_mm512_castsi512_si256(bits), _mm512_extracti64x4_epi64(bits, 1));
        __m128i z = _mm_max_epi32(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
        z = _mm_max_epi32(z, _mm_shuffle_epi32(z, 0x4e));
        return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epi32(z, _mm_shuffle_epi32(z, 0xb1))));
    }

    static F bf16_first(const uint16_t* p) { return bf16_first(load_bits(p)); }
    static F bf16_second(const uint16_t* p) { return bf16_second(load_bits(p)); }
    static F load_f16(const uint16_t* p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    // W pairs of numbers: first ones and second ones.
    static void load_f16_pairs(const uint16_t* p, F& first, F& second) {
        const I pairs = _mm512_loadu_si512(p);
        first = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(pairs));
        second = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(pairs, 16)));
    }
    static F load_f16_half(const uint16_t* p) {
        return _mm512_cvtph_ps(_mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
    }
    static void store_f16(uint16_t* p, F x) {
        const __m256i h = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), h);
    }

    // The same for the lower eight lanes alone: rows whose length is an odd multiple of 8.
    static F load_half(const float* p) { return _mm512_maskz_loadu_ps(kHalf, p); }
    static void store_half(float* p, F x) { _mm512_mask_storeu_ps(p, kHalf, x); }
    static F bf16_first_half(const uint16_t* p) { return bf16_first(load_bits_half(p)); }
    static F bf16_second_half(const uint16_t* p) { return bf16_second(load_bits_half(p)); }

    // Integers: 16-bit pairs in 32-bit lanes, and bytes by the vector.
    using Bytes = __m512i;
    static constexpr int kBytes = 64;
    static I zero_ints() { return _mm512_setzero_si512(); }
    static I load_ints(const void* p) { return _mm512_loadu_si512(p); }
    static void store_ints(void* p, I x) { _mm512_storeu_si512(p, x); }
    static F from_ints(I x) { return _mm512_cvtepi32_ps(x); }
    static I add_pairs(I acc, I x, int32_t pair) {
#ifdef __AVX512VNNI__
        return _mm512_dpwssd_epi32(acc, x, _mm512_set1_epi32(pair));
#else
        return _mm512_add_epi32(acc, _mm512_madd_epi16(x, _mm512_set1_epi32(pair)));
#endif
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
        store_ints(to, _mm512_mulhrs_epi16(load_ints(a), load_ints(b)));
    }
    static void store_rounded(int16_t* p, F x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x)));
    }
    // Bytes of sign, exponent and mantissa as fp32 whose exponent is as it stands in the byte.
    template <int SHIFT>
    static F small_floats(const unsigned char* p) {
        const I x = _mm512_slli_epi32(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), SHIFT);
        return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0x80000000u | 0x7fu << SHIFT))));
    }
    static Bytes load_bytes(const void* p) { return _mm512_loadu_si512(p); }
    static Bytes table(const int8_t* levels) {
        return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(levels)));
    }
    static Bytes look_up(Bytes levels, Bytes codes) { return _mm512_shuffle_epi8(levels, codes); }
    template <int SHIFT, int MASK>
    static Bytes bits(Bytes x) {
        return _mm512_and_si512(SHIFT == 0 ? x : _mm512_srli_epi16(x, SHIFT), _mm512_set1_epi8(MASK));
    }
    template <int SHIFT, int MASK>
    static Bytes bits_up(Bytes x) {
        return _mm512_and_si512(_mm512_slli_epi16(x, SHIFT), _mm512_set1_epi8(MASK));
    }
    static Bytes either(Bytes a, Bytes b) { return _mm512_or_si512(a, b); }
    static void widen(Bytes x, I& first, I& second) {
        first = _mm512_cvtepi8_epi16(_mm512_castsi512_si256(x));
        second = _mm512_cvtepi8_epi16(_mm512_extracti64x4_epi64(x, 1));
    }
    static void reorder(I&, I&) {}

#ifdef KVLOOM_DOT
    static constexpr bool kDot = true;

    // Keeps x in its register: GCC would load it again for every row.
#ifdef KVLOOM_EMULATE_AVX512
    static void keep(I&) {}  // an emulated vector has no register of its own
#else
    static void keep(I& x) { asm("" : "+v"(x)); }
#endif

    // acc + first*first + second*second over bf16 pairs.
    static F dot(F acc, uint32_t pair, I pairs) {
        return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_set1_epi32(static_cast<int>(pair)), (__m512bh)pairs);
    }
    static I load_bits(const void* p) { return _mm512_loadu_si512(p); }
    static I load_bits_half(const void* p) { return _mm512_maskz_loadu_epi32(kHalf, p); }

    // Stores x rounded to bf16 and returns what it stored.
    static F store_bf16(uint16_t* p, F x) {
        const __m256i h = (__m256i)_mm512_cvtneps_pbh(x);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), h);
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
    }

    // Stores x and y rounded to bf16, one after the other, and returns what it stored added to `sum`.
    static F store_bf16(uint16_t* p, F x, F y, F sum) {
#ifdef KVLOOM_EMULATE_AVX512
        return add(add(sum, store_bf16(p, x)), store_bf16(p + W, y));
#else
        const __m512bh both = _mm512_cvtne2ps_pbh(y, x);
        _mm512_storeu_si512(p, (__m512i)both);
        return _mm512_dpbf16_ps(sum, both, (__m512bh)_mm512_set1_epi32(0x3f803f80));  // pairs of ones
#endif
    }

private:
#else
    static constexpr bool kDot = false;

private:
    static I load_bits(const void* p) { return _mm512_loadu_si512(p); }
    static I load_bits_half(const void* p) { return _mm512_maskz_loadu_epi32(kHalf, p); }
#endif

    static constexpr __mmask16 kHalf = 0xff;

    static F bf16_first(I bits) { return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)); }
    static F bf16_second(I bits) {
        return _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
    }
    static __m256 lower(F x) { return _mm512_castps512_ps256(x); }
    static __m256 upper(F x) {
        return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1));
    }
};

}  // namespace kvloom::KVLOOM_ISA
