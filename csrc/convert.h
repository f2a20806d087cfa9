// Scalar conversions, rounding to nearest even. static: see types.h.
#pragma once

#include <cstdint>
#include <cstring>

namespace kvloom {

static inline uint32_t float_bits(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    return u;
}

static inline float bits_float(uint32_t u) {
    float x;
    std::memcpy(&x, &u, 4);
    return x;
}

static inline float bf16_to_float(uint16_t h) { return bits_float(static_cast<uint32_t>(h) << 16); }

static inline uint16_t float_to_bf16(float x) {
    const uint32_t u = float_bits(x);
    const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return static_cast<uint16_t>(x != x ? 0x7fc0u : rounded);
}

static inline float f16_to_float(uint16_t h) {
    // Shift exponent and mantissa to fp32's place, then correct the bias by a multiplication,
    // which also normalises subnormals.
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
    const uint32_t rest = static_cast<uint32_t>(h & 0x7fffu) << 13;
    const float magnitude = bits_float(rest) * bits_float(0x77800000u);  // 2^112
    const uint32_t bits = (h & 0x7c00u) == 0x7c00u ? (rest | 0x7f800000u) : float_bits(magnitude);
    return bits_float(sign | bits);
}

static inline uint16_t float_to_f16(float x) {
    const uint32_t u = float_bits(x);
    const uint32_t sign = (u >> 16) & 0x8000u;
    const uint32_t rest = u & 0x7fffffffu;
    uint32_t half;
    if (rest > 0x7f800000u) {
        half = 0x7e00u;  // NaN
    } else if (rest >= 0x477ff000u) {
        half = 0x7c00u;  // 65520 and more round to infinity
    } else if (rest < 0x38800000u) {
        // Subnormal: adding 0.5 leaves the wanted bits, rounded, at the bottom of the mantissa.
        half = float_bits(bits_float(rest) + 0.5f) - 0x3f000000u;
    } else {
        half = (rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13;
    }
    return static_cast<uint16_t>(sign | half);
}

}  // namespace kvloom
