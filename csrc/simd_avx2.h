// Eight lanes of fp32: AVX2 with FMA and F16C.
#pragma once

#include <immintrin.h>

#include "convert.h"
#include "types.h"

namespace kvloom::KVLOOM_ISA {

struct Vec {
    using F = __m256;
    using I = __m256i;
    using M = __m256;

    static constexpr int W = 8;
    static constexpr bool kDot = false;
    struct Rows {
        static constexpr int kRows4 = 3, kRows2 = 6, kRows1 = 6;
    };
    struct RowsOfPairs {  // splitting pairs takes registers
        static constexpr int kRows4 = 3, kRows2 = 5, kRows1 = 6;
    };

    static F zero() { return _mm256_setzero_ps(); }
    static F set1(float x) { return _mm256_set1_ps(x); }
    static F load(const float* p) { return _mm256_loadu_ps(p); }
    static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
    static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    static F add(F a, F b) { return _mm256_add_ps(a, b); }
    static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    static F div(F a, F b) { return _mm256_div_ps(a, b); }
    static F max(F a, F b) { return _mm256_max_ps(a, b); }
    static F min(F a, F b) { return _mm256_min_ps(a, b); }
    static F abs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
    static M lt(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
    static F select(M mask, F a, F b) { return _mm256_blendv_ps(b, a, mask); }
    static constexpr bool kScales = false;
    static F pow2_shifted(F t) {
        return _mm256_castsi256_ps(
            _mm256_slli_epi32(_mm256_add_epi32(_mm256_castps_si256(t), _mm256_set1_epi32(127)), 23));
    }
    static M range(int base, int low, int high) {
        const I at = _mm256_add_epi32(_mm256_set1_epi32(base), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
        const I below = _mm256_cmpgt_epi32(_mm256_set1_epi32(low), at);
        const I above = _mm256_cmpgt_epi32(_mm256_set1_epi32(high), at);
        return _mm256_castsi256_ps(_mm256_andnot_si256(below, above));
    }
    static float reduce_add(F x) {
        __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        y = _mm_add_ps(y, _mm_movehl_ps(y, y));
        return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
    }
    static float reduce_max(F x) {
        __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        y = _mm_max_ps(y, _mm_movehl_ps(y, y));
        return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
    }
    // The larger of numbers from 0 on, by their bits: NaN is larger than any.
    static F max_size(F a, F b) {
        return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
    }
    static float reduce_max_size(F x) {
        const I bits = _mm256_castps_si256(x);
        __m128i y = _mm_max_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
        y = _mm_max_epi32(y, _mm_shuffle_epi32(y, 0x4e));
        return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epi32(y, _mm_shuffle_epi32(y, 0xb1))));
    }

    static F bf16_first(const uint16_t* p) { return _mm256_castsi256_ps(_mm256_slli_epi32(load_bits(p), 16)); }
    static F bf16_second(const uint16_t* p) {
        return _mm256_castsi256_ps(_mm256_and_si256(load_bits(p), _mm256_set1_epi32(static_cast<int>(0xffff0000))));
    }

    // A step of 3 rows and 4 vectors of pairs takes all 16 registers, and compilers spill accumulators.
    // Each half of it: a vector of B in x, split by SPLIT, times the rows' factors.
    static void step_3x4(F (&acc)[3][4], const float* a, const uint16_t* b) {
#define KVLOOM_VECTOR(V, AT, SPLIT)                  \
    "vmovdqu " AT "(%[b]), %[x]\n\t" SPLIT "\n\t"    \
    "vfmadd231ps %[x], %[f0], %[c0" V "]\n\t"       \
    "vfmadd231ps %[x], %[f1], %[c1" V "]\n\t"       \
    "vfmadd231ps %[x], %[f2], %[c2" V "]\n\t"
#define KVLOOM_HALF(SPLIT)                                                                                             \
    asm volatile(KVLOOM_VECTOR("0", "0", SPLIT) KVLOOM_VECTOR("1", "32", SPLIT) KVLOOM_VECTOR("2", "64", SPLIT)        \
                     KVLOOM_VECTOR("3", "96", SPLIT)                                                                   \
                 : [c00] "+x"(acc[0][0]), [c01] "+x"(acc[0][1]), [c02] "+x"(acc[0][2]), [c03] "+x"(acc[0][3]),         \
                   [c10] "+x"(acc[1][0]), [c11] "+x"(acc[1][1]), [c12] "+x"(acc[1][2]), [c13] "+x"(acc[1][3]),         \
                   [c20] "+x"(acc[2][0]), [c21] "+x"(acc[2][1]), [c22] "+x"(acc[2][2]), [c23] "+x"(acc[2][3]),         \
                   [x] "=&x"(x)                                                                                        \
                 : [b] "r"(b), [mask] "m"(mask), [f0] "x"(f0), [f1] "x"(f1), [f2] "x"(f2)                              \
                 : "memory")
        alignas(32) static constexpr uint32_t mask[8] = {0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000,
                                                         0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000};
        F x, f0 = set1(a[0]), f1 = set1(a[kLda]), f2 = set1(a[2 * kLda]);
        KVLOOM_HALF("vpslld $16, %[x], %[x]");
        f0 = set1(a[1]), f1 = set1(a[kLda + 1]), f2 = set1(a[2 * kLda + 1]);
        KVLOOM_HALF("vpand %[mask], %[x], %[x]");
#undef KVLOOM_HALF
#undef KVLOOM_VECTOR
    }

    static F load_f16(const uint16_t* p) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    // W pairs of numbers: first ones and second ones.
    static void load_f16_pairs(const uint16_t* p, F& first, F& second) {
        const I pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        const auto halves = [](I x) {  // lower 16 bits of each lane
            return _mm256_cvtph_ps(_mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(x, x), 0xd8)));
        };
        first = halves(_mm256_and_si256(pairs, _mm256_set1_epi32(0xffff)));
        second = halves(_mm256_srli_epi32(pairs, 16));
    }
    static void store_f16(uint16_t* p, F x) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }

    // Integers: 16-bit pairs in 32-bit lanes, and bytes by the vector.
    using Bytes = I;
    static constexpr int kBytes = 32;
    static I zero_ints() { return _mm256_setzero_si256(); }
    static I load_ints(const void* p) { return load_bits(p); }
    static void store_ints(void* p, I x) { _mm256_storeu_si256(static_cast<I*>(p), x); }
    static F from_ints(I x) { return _mm256_cvtepi32_ps(x); }
    static I add_pairs(I acc, I x, int32_t pair) {
        return _mm256_add_epi32(acc, _mm256_madd_epi16(x, _mm256_set1_epi32(pair)));
    }
    // The same for two vectors and one row's pair. Compilers would fetch all rows' pairs first, which leaves too few
    // registers for the sums: a sum in memory makes a chain through it.
    static void add_pairs(I (&acc)[2], const I (&x)[2], const int16_t* pair) {
        using Pair [[gnu::may_alias]] = int32_t;
        I first, second;
        asm volatile(
            "vpbroadcastd %[pair], %[second]\n\t"
            "vpmaddwd %[second], %[x0], %[first]\n\t"
            "vpmaddwd %[second], %[x1], %[second]\n\t"
            "vpaddd %[first], %[acc0], %[acc0]\n\t"
            "vpaddd %[second], %[acc1], %[acc1]"
            : [acc0] "+x"(acc[0]), [acc1] "+x"(acc[1]), [first] "=&x"(first), [second] "=&x"(second)
            : [x0] "x"(x[0]), [x1] "x"(x[1]), [pair] "m"(*reinterpret_cast<const Pair*>(pair)));
    }
    // a * b / 2^15, to nearest, of 2 W numbers.
    static void multiply_high(const int16_t* a, const int16_t* b, int16_t* to) {
        store_ints(to, _mm256_mulhrs_epi16(load_ints(a), load_ints(b)));
    }
    static void store_rounded(int16_t* p, F x) {
        const I i = _mm256_cvtps_epi32(x);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                         _mm_packs_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1)));
    }
    // Bytes of sign, exponent and mantissa as fp32 whose exponent is as it stands in the byte.
    template <int SHIFT>
    static F small_floats(const unsigned char* p) {
        const I x = _mm256_slli_epi32(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))), SHIFT);
        return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(0x80000000u | 0x7fu << SHIFT))));
    }
    static Bytes load_bytes(const void* p) { return load_bits(p); }
    static Bytes table(const int8_t* levels) {
        return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(levels)));
    }
    static Bytes look_up(Bytes levels, Bytes codes) { return _mm256_shuffle_epi8(levels, codes); }
    template <int SHIFT, int MASK>
    static Bytes bits(Bytes x) {
        return _mm256_and_si256(SHIFT == 0 ? x : _mm256_srli_epi16(x, SHIFT), _mm256_set1_epi8(MASK));
    }
    template <int SHIFT, int MASK>
    static Bytes bits_up(Bytes x) {
        return _mm256_and_si256(_mm256_slli_epi16(x, SHIFT), _mm256_set1_epi8(MASK));
    }
    static Bytes either(Bytes a, Bytes b) { return _mm256_or_si256(a, b); }
    // Bytes as int16, in an order of their own: each half of the register is widened where it lies, since what crosses
    // from one half to the other costs some processors (Zen 3) nearly three times as much.
    static void widen(Bytes x, I& first, I& second) {
        const I signs = _mm256_cmpgt_epi8(_mm256_setzero_si256(), x);
        first = _mm256_unpacklo_epi8(x, signs);
        second = _mm256_unpackhi_epi8(x, signs);
    }
    // From that order to memory's, and back.
    static void reorder(I& first, I& second) {
        const I low = _mm256_permute2x128_si256(first, second, 0x20);
        second = _mm256_permute2x128_si256(first, second, 0x31);
        first = low;
    }

private:
    static I load_bits(const void* p) { return _mm256_loadu_si256(static_cast<const I*>(p)); }
};

}  // namespace kvloom::KVLOOM_ISA
