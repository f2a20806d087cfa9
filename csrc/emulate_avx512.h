// Development only: AVX-512 through SIMDe, so that the AVX-512 sources can be tested on a CPU
// without it (see docs/kernels.md). Adds what SIMDe 0.7 lacks.
#pragma once

#include <simde/x86/avx512.h>

#include <cstring>

#include "convert.h"

namespace kvloom::KVLOOM_ISA::emulated {

template <class X, class Element>
static inline X load_masked(unsigned mask, const void* p) {
    Element lanes[16] = {};
    for (int i = 0; i < 16; ++i) {
        if (mask >> i & 1u) std::memcpy(&lanes[i], static_cast<const Element*>(p) + i, sizeof(Element));
    }
    X x;
    std::memcpy(&x, lanes, sizeof x);
    return x;
}

static inline void store_masked(float* p, unsigned mask, __m512 x) {
    float lanes[16];
    std::memcpy(lanes, &x, sizeof lanes);
    for (int i = 0; i < 16; ++i) {
        if (mask >> i & 1u) p[i] = lanes[i];
    }
}

// To, From: one lane; convert: one lane's conversion.
template <class X, class To, class Y, class From, class F>
static inline X map_lanes(Y y, F convert) {
    From in[16];
    To out[16];
    std::memcpy(in, &y, sizeof in);
    for (int i = 0; i < 16; ++i) out[i] = convert(in[i]);
    X x;
    std::memcpy(&x, out, sizeof x);
    return x;
}

static inline __m512 from_half(__m256i h) { return map_lanes<__m512, float, __m256i, uint16_t>(h, f16_to_float); }
static inline __m256i to_half(__m512 x) { return map_lanes<__m256i, uint16_t, __m512, float>(x, float_to_f16); }
static inline __m256i to_bf16(__m512 x) { return map_lanes<__m256i, uint16_t, __m512, float>(x, float_to_bf16); }
static inline __m512i widen(__m256i x) {
    return map_lanes<__m512i, uint32_t, __m256i, uint16_t>(x, [](uint16_t i) { return static_cast<uint32_t>(i); });
}
static inline __m512i widen_bytes(__m128i x) {
    return map_lanes<__m512i, int32_t, __m128i, int8_t>(x, [](int8_t i) { return static_cast<int32_t>(i); });
}
static inline __m512 from_ints(__m512i x) {
    return map_lanes<__m512, float, __m512i, int32_t>(x, [](int32_t i) { return static_cast<float>(i); });
}
static inline __m512i to_ints(__m512 x) {
    return map_lanes<__m512i, int32_t, __m512, float>(x, [](float f) { return static_cast<int32_t>(__builtin_lrintf(f)); });
}
static inline __m256i saturated(__m512i x) {
    return map_lanes<__m256i, int16_t, __m512i, int32_t>(x, [](int32_t i) {
        return static_cast<int16_t>(i > 32767 ? 32767 : i < -32768 ? -32768 : i);
    });
}

}  // namespace kvloom::KVLOOM_ISA::emulated

#define _mm512_maskz_loadu_ps(mask, p) emulated::load_masked<__m512, float>(mask, p)
#define _mm512_maskz_loadu_epi32(mask, p) emulated::load_masked<__m512i, uint32_t>(mask, p)
#define _mm512_mask_storeu_ps(p, mask, x) emulated::store_masked(p, mask, x)
#define _mm512_cvtph_ps(h) emulated::from_half(h)
#define _mm512_cvtps_ph(x, rounding) emulated::to_half(x)
#define _mm512_cvtneps_pbh(x) emulated::to_bf16(x)
#define _mm512_cvtepu16_epi32(x) emulated::widen(x)
#define _mm512_cvtepi8_epi32(x) emulated::widen_bytes(x)

// SIMDe 0.7.4 gives this name a macro of four arguments.
#undef _mm512_madd_epi16
#define _mm512_madd_epi16(a, b) simde_mm512_madd_epi16(a, b)
#define _mm512_cvtepi32_ps(x) emulated::from_ints(x)
#define _mm512_cvtps_epi32(x) emulated::to_ints(x)
#define _mm512_cvtsepi32_epi16(x) emulated::saturated(x)
