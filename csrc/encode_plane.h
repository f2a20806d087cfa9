// From a raw block of one plane to its codes. Bit for bit what codecs/ computes: additions, multiplications,
// divisions and square roots as they stand there, sums pairwise in its order (codecs/numbers.py), nothing fused.
//
// Rows lie in a tile [channel][token] whatever the plane, so that most steps are loops over a vector of tokens,
// which compilers turn into vector instructions: none is written by hand here.
#pragma once

#include <cmath>

#include "convert.h"
#include "types.h"

namespace kvloom::KVLOOM_ISA {
namespace {

constexpr float kHalfMax = 65504.0f, kHalfMin = 0x1p-24f;
constexpr int kMaxTokens = kChunk;
constexpr int kStride = kMaxTokens + 16;  // of a tile's rows: powers of two would fall into the same cache sets

// [channels][tokens].
class Tile {
public:
    Tile(float* memory, int channels, int tokens) : channels(channels), tokens(tokens), memory_(memory) {}
    float* operator[](int channel) const { return memory_ + static_cast<ptrdiff_t>(channel) * kStride; }
    const int channels, tokens;

private:
    float* memory_;
};

struct Scratch {
    alignas(64) float tile[kMaxDim * kStride];
    alignas(64) float spare[kMaxDim * kStride];
    alignas(64) float level[kMaxDim * kStride];
    alignas(64) uint8_t codes[kMaxDim * kMaxTokens];    // [channel][token]
    alignas(64) uint8_t turned[kMaxDim * kMaxTokens];   // [token][channel]
    alignas(64) float a[kMaxTokens], b[kMaxTokens], c[kMaxTokens];
    float by_channel[kMaxDim];
};

constexpr auto less = [](float a, float b) { return a < b ? a : b; };
constexpr auto more = [](float a, float b) { return a > b ? a : b; };
inline float clamped(float x, float low, float high) { return less(more(x, low), high); }

// To nearest, halves to even, of numbers far below 2^22.
inline int rounded(float x) {
    const float magic = 0x1.8p23f;
    return static_cast<int>(float_bits(x + magic) - 0x4b400000u);
}

// numbers.half_nearest, half_up, half_down, positive_scale.
inline uint16_t half_nearest(float x) { return float_to_f16(clamped(x, -kHalfMax, kHalfMax)); }
inline uint16_t half_up(float x) {
    const uint16_t half = half_nearest(x);
    if (!(f16_to_float(half) < x) || half == 0x7bffu) return half;
    if ((half & 0x7fffu) == 0) return 1;
    return static_cast<uint16_t>(half & 0x8000u ? half - 1 : half + 1);
}
inline uint16_t half_down(float x) {
    const uint16_t half = half_nearest(x);
    if (!(f16_to_float(half) > x) || half == 0xfbffu) return half;
    if ((half & 0x7fffu) == 0) return 0x8001u;
    return static_cast<uint16_t>(half & 0x8000u ? half + 1 : half - 1);
}
inline uint16_t positive_scale(float x) {
    const uint16_t half = half_up(x);
    return (half & 0x7fffu) == 0 ? 1 : half;
}

uint16_t* halves_at(unsigned char* block, int64_t place) { return reinterpret_cast<uint16_t*>(block + place); }

// -- raw rows ------------------------------------------------------------------------------------------

// numbers.finite of one number, and whether it was.
inline float finite(float x, int* bad) {
    const bool fine = (float_bits(x) & 0x7f800000u) != 0x7f800000u;
    *bad += fine ? 0 : 1;
    return clamped(fine ? x : 0.0f, -kHalfMax, kHalfMax);
}

template <class T, class F>
int64_t read_rows(const T* from, bool pairs, bool values, const Tile& x, F as_float) {
    int bad = 0;
    const int size = x.tokens, dim = x.channels;
    if (!pairs) {
        for (int d = 0; d < dim; ++d) {
            float* row = x[d];
            for (int t = 0; t < size; ++t) row[t] = finite(as_float(values ? from[t * dim + d] : from[d * size + t]), &bad);
        }
    } else if (!values) {
        for (int d = 0; d < dim; d += 2, from += 2 * size) {
            float *first = x[d], *second = x[d + 1];
            for (int t = 0; t < size; ++t) {
                first[t] = finite(as_float(from[2 * t]), &bad);
                second[t] = finite(as_float(from[2 * t + 1]), &bad);
            }
        }
    } else {
        for (int t = 0; t < size; t += 2, from += 2 * dim) {
            for (int d = 0; d < dim; ++d) {
                x[d][t] = finite(as_float(from[2 * d]), &bad);
                x[d][t + 1] = finite(as_float(from[2 * d + 1]), &bad);
            }
        }
    }
    return bad;
}

int64_t read(const EncodeArgs& args, const Tile& x) {
    const Format& raw = *args.raw;
    const unsigned char* from = args.from + (args.values ? raw.v_offset : raw.k_offset);
    const auto* bits = reinterpret_cast<const uint16_t*>(from);
    switch (raw.dtype) {
        case DType::f32:
            return read_rows(reinterpret_cast<const float*>(from), false, args.values, x, [](float x) { return x; });
        case DType::f16: return read_rows(bits, false, args.values, x, f16_to_float);
        default: return read_rows(bits, true, args.values, x, bf16_to_float);
    }
}

// -- rotation (codecs/hadamard.py) -----------------------------------------------------------------------

void rotate(const PlaneEncoder& encoder, const Tile& x) {
    const int dim = x.channels, size = x.tokens, power = dim & -dim, odd = dim / power;
    for (int d = 0; encoder.signs != nullptr && d < dim; ++d) {
        float* row = x[d];
        const float sign = encoder.signs[d];
        for (int t = 0; t < size; ++t) row[t] *= sign;
    }
    for (int step = 1; step < power; step *= 2) {
        for (int d = 0; d < dim; d = (d + 1) % step == 0 ? d + 1 + step : d + 1) {
            float *first = x[d], *second = x[d + step];
            for (int t = 0; t < size; ++t) {
                const float a = first[t], b = second[t];
                first[t] = a + b;
                second[t] = a - b;
            }
        }
    }
    const float by = static_cast<float>(1.0 / std::sqrt(static_cast<double>(power)));
    for (int d = 0; d < dim; ++d) {
        float* row = x[d];
        for (int t = 0; t < size; ++t) row[t] *= by;
    }
    if (odd == 1) return;
    const float share = static_cast<float>(2.0 / odd);
    for (int d = 0; d < power; ++d) {
        for (int t = 0; t < size; ++t) {
            float total = x[d][t];
            for (int row = 1; row < odd; ++row) total += x[row * power + d][t];
            total *= share;
            for (int row = 0; row < odd; ++row) x[row * power + d][t] -= total;
        }
    }
}

// -- reductions ------------------------------------------------------------------------------------------

// numbers.tree_sum over channels: f(channel, token) of each token's channels. Uses `spare`.
template <class F>
void sum_channels(const Tile& spare, F f, float* to) {
    int n = spare.channels;  // those of the sum: the tile is scratch
    for (int d = 0; d < n; ++d) {
        float* row = spare[d];
        for (int t = 0; t < spare.tokens; ++t) row[t] = f(d, t);
    }
    for (; n > 1; n = n / 2 + n % 2) {
        const int half = n / 2;
        for (int d = 0; d < half; ++d) {
            float *row = spare[d], *other = spare[d + half];
            for (int t = 0; t < spare.tokens; ++t) row[t] += other[t];
        }
        if (n % 2 != 0) __builtin_memcpy(spare[half], spare[n - 1], spare.tokens * sizeof(float));
    }
    __builtin_memcpy(to, spare[0], spare.tokens * sizeof(float));
}

// numbers.tree_sum of `count` numbers, a power of two, in place.
float sum_tokens(float* x, int count) {
    for (int half = count / 2; half > 0; half /= 2) {
        for (int t = 0; t < half; ++t) x[t] += x[t + half];
    }
    return x[0];
}

template <class F>
void fold_channels(const Tile& x, int from, int to, F f, float* out) {
    __builtin_memcpy(out, x[from], x.tokens * sizeof(float));
    for (int d = from + 1; d < to; ++d) {
        const float* row = x[d];
        for (int t = 0; t < x.tokens; ++t) out[t] = f(out[t], row[t]);
    }
}

template <class F>
float fold_tokens(const float* x, int count, F f, float* spare) {
    __builtin_memcpy(spare, x, count * sizeof(float));
    for (int half = count / 2; half > 0; half /= 2) {
        for (int t = 0; t < half; ++t) spare[t] = f(spare[t], spare[t + half]);
    }
    return spare[0];
}

// -- codes -------------------------------------------------------------------------------------------------

// affine.affine_encode's scale and minimum of a group that spans low … high.
inline void affine_numbers(float low, float high, float top, uint16_t* minimum, uint16_t* scale) {
    *minimum = half_down(low + 0.0f);  // never -0
    *scale = positive_scale((high - f16_to_float(*minimum)) / top);
}

inline uint8_t affine_code(float x, float minimum, float scale, float top) {
    return static_cast<uint8_t>(rounded(clamped((x - minimum) / scale, 0.0f, top)));
}

// One group per token and `width` channels; numbers go to [token][group].
void affine_by_token(const Tile& x, const CodedPlane& plane, unsigned char* to, Scratch& s) {
    const int size = x.tokens, groups = plane.token_groups, width = x.channels / groups;
    const float top = static_cast<float>((1 << plane.bits) - 1);
    for (int g = 0; g < groups; ++g) {
        fold_channels(x, g * width, (g + 1) * width, less, s.a);
        fold_channels(x, g * width, (g + 1) * width, more, s.b);
        for (int t = 0; t < size; ++t) {
            uint16_t* minimum = halves_at(to, plane.token_offset) + t * groups + g;
            uint16_t* scale = halves_at(to, plane.token_scale) + t * groups + g;
            affine_numbers(s.a[t], s.b[t], top, minimum, scale);
            s.a[t] = f16_to_float(*minimum);
            s.b[t] = f16_to_float(*scale);
        }
        for (int d = g * width; d < (g + 1) * width; ++d) {
            const float* row = x[d];
            uint8_t* codes = s.codes + d * size;
            for (int t = 0; t < size; ++t) codes[t] = affine_code(row[t], s.a[t], s.b[t], top);
        }
    }
}

// One group per channel.
void affine_by_channel(const Tile& x, const CodedPlane& plane, unsigned char* to, Scratch& s) {
    const int size = x.tokens;
    const float top = static_cast<float>((1 << plane.bits) - 1);
    for (int d = 0; d < x.channels; ++d) {
        const float* row = x[d];
        uint16_t *minimum = halves_at(to, plane.channel_offset) + d, *scale = halves_at(to, plane.channel_scale) + d;
        affine_numbers(fold_tokens(row, size, less, s.a), fold_tokens(row, size, more, s.a), top, minimum, scale);
        const float least = f16_to_float(*minimum), by = f16_to_float(*scale);
        uint8_t* codes = s.codes + d * size;
        for (int t = 0; t < size; ++t) codes[t] = affine_code(row[t], least, by, top);
    }
}

// Largest magnitude of each token over channels [from, to).
void magnitudes(const Tile& x, int from, int to, float* out) {
    for (int t = 0; t < x.tokens; ++t) out[t] = 0.0f;
    for (int d = from; d < to; ++d) {
        const float* row = x[d];
        for (int t = 0; t < x.tokens; ++t) out[t] = more(out[t], std::fabs(row[t]));
    }
}

// Each token's scale, by which its largest magnitude becomes `most`: stored, and as fp32 in `scales`.
void token_scales(const Tile& x, const CodedPlane& plane, float most, unsigned char* to, float* scales) {
    magnitudes(x, 0, x.channels, scales);
    for (int t = 0; t < x.tokens; ++t) {
        const uint16_t scale = positive_scale(scales[t] / most);
        halves_at(to, plane.token_scale)[t] = scale;
        scales[t] = f16_to_float(scale);
    }
}

void absmax(const Tile& x, const CodedPlane& plane, unsigned char* to, Scratch& s) {
    token_scales(x, plane, 127.0f, to, s.a);
    for (int d = 0; d < x.channels; ++d) {
        const float* row = x[d];
        uint8_t* codes = s.codes + d * x.tokens;
        for (int t = 0; t < x.tokens; ++t) {
            codes[t] = static_cast<uint8_t>(rounded(clamped(row[t] / s.a[t], -127.0f, 127.0f)));
        }
    }
}

// A number within ±448 as e4m3 or e5m2, to nearest even.
template <int MANTISSA>
inline uint8_t small_float(float x) {
    constexpr int shift = 23 - MANTISSA, bias = MANTISSA == 3 ? 7 : 15;
    constexpr uint32_t least = static_cast<uint32_t>(127 - bias + 1) << 23;  // the smallest normal one
    // Subnormal: adding this leaves the wanted bits, rounded, at the bottom of the mantissa.
    constexpr uint32_t magic = static_cast<uint32_t>(127 - bias + 1 + shift) << 23;
    const uint32_t bits = float_bits(x), rest = bits & 0x7fffffffu;
    const uint32_t small = float_bits(bits_float(rest) + bits_float(magic)) - magic;
    const uint32_t normal =
        (rest - (static_cast<uint32_t>(127 - bias) << 23) + ((1u << (shift - 1)) - 1u) + (rest >> shift & 1u)) >> shift;
    return static_cast<uint8_t>((rest < least ? small : normal) | (bits >> 24 & 0x80u));
}

void small_floats(const Tile& x, const CodedPlane& plane, unsigned char* to, Scratch& s) {
    token_scales(x, plane, 448.0f, to, s.a);
    for (int d = 0; d < x.channels; ++d) {
        const float* row = x[d];
        uint8_t* codes = s.codes + d * x.tokens;
        for (int t = 0; t < x.tokens; ++t) {
            const float step = clamped(row[t] / s.a[t], -448.0f, 448.0f);
            codes[t] = plane.exponent_bits == 4 ? small_float<3>(step) : small_float<2>(step);
        }
    }
}

// unit_codes.UnitCodes.encode; `norms` of the rows before they were rotated.
template <int BITS>
void unit_codes(const Tile& x, const PlaneEncoder& encoder, const CodedPlane& plane, const float* norms, unsigned char* to,
                Scratch& s) {
    constexpr int count = (1 << BITS) - 1;
    const float root = static_cast<float>(std::sqrt(static_cast<double>(x.channels)));
    int32_t squares[kMaxTokens] = {};
    float edges[count];
    __builtin_memcpy(edges, encoder.edges, sizeof edges);
    for (int t = 0; t < x.tokens; ++t) s.a[t] = norms[t] > 0.0f ? norms[t] : 1.0f;
    for (int d = 0; d < x.channels; ++d) {
        const float* row = x[d];
        uint8_t* codes = s.codes + d * x.tokens;
        int32_t found[kMaxTokens];
        for (int t = 0; t < x.tokens; ++t) {
            const float z = row[t] / s.a[t] * root * encoder.stretch[0];
            int code = 0;
#pragma GCC unroll 16
            for (int e = 0; e < count; ++e) code += z > edges[e] ? 1 : 0;
            found[t] = code;
        }
        for (int t = 0; t < x.tokens; ++t) {
            const int level = plane.parts[0].levels[found[t]];
            squares[t] += level * level;
            codes[t] = static_cast<uint8_t>(found[t]);
        }
    }
    for (int t = 0; t < x.tokens; ++t) {
        halves_at(to, plane.token_scale)[t] = half_nearest(norms[t] / std::sqrt(static_cast<float>(squares[t])));
    }
}

void unit(const Tile& x, const PlaneEncoder& encoder, const CodedPlane& plane, unsigned char* to, Scratch& s) {
    const Tile spare(s.spare, x.channels, x.tokens);
    sum_channels(spare, [&](int d, int t) { return x[d][t] * x[d][t]; }, s.b);
    for (int t = 0; t < x.tokens; ++t) s.b[t] = std::sqrt(s.b[t]);
    rotate(encoder, x);
    switch (plane.bits) {
        case 4: return unit_codes<4>(x, encoder, plane, s.b, to, s);
        case 3: return unit_codes<3>(x, encoder, plane, s.b, to, s);
        default: return unit_codes<2>(x, encoder, plane, s.b, to, s);
    }
}

// turn.times: y = matrix x, summed over x's channels in ascending order.
void times(const Tile& x, const float* matrix, const Tile& y) {
    typedef float Lanes __attribute__((vector_size(32)));
    constexpr int kLanes = 8, kVectors = 4;
    const int dim = x.channels;
    for (int from = 0; from < x.tokens; from += kLanes * kVectors) {
        const int vectors = x.tokens - from < kLanes * kVectors ? (x.tokens - from) / kLanes : kVectors;
        for (int i = 0; i < dim; ++i) {
            const float* row = matrix + static_cast<ptrdiff_t>(i) * dim;
            Lanes sums[kVectors];
            for (int c = 0; c < dim; ++c) {
#pragma GCC unroll 4
                for (int v = 0; v < kVectors; ++v) {
                    if (v >= vectors) break;
                    Lanes lanes;
                    __builtin_memcpy(&lanes, x[c] + from + v * kLanes, sizeof lanes);
                    sums[v] = c == 0 ? lanes * row[c] : sums[v] + lanes * row[c];
                }
            }
            for (int v = 0; v < vectors; ++v) __builtin_memcpy(y[i] + from + v * kLanes, &sums[v], sizeof(Lanes));
        }
    }
}

// The nearest levels of a row of a part's channel, and their codes.
template <int COUNT>
void nearest(const float* row, const float* divisor, int tokens, const float* edges, const int8_t* levels, uint8_t* codes,
             float* found) {
    float gaps[COUNT];
    for (int e = 0; e < COUNT; ++e) gaps[e] = static_cast<float>(levels[e + 1] - levels[e]);
    for (int t = 0; t < tokens; ++t) {
        const float z = row[t] / divisor[t];
        float level = levels[0];
        int code = 0;
#pragma GCC unroll 16
        for (int e = 0; e < COUNT; ++e) {
            level += z > edges[e] ? gaps[e] : 0.0f;
            code += z > edges[e] ? 1 : 0;
        }
        found[t] = level;
        codes[t] = static_cast<uint8_t>(code);
    }
}

// segments.SegmentCodes.encode of transformed rows y. Uses x as scratch.
void segments(const Tile& y, const Tile& x, const PlaneEncoder& encoder, const CodedPlane& plane, const float* weights,
              unsigned char* to, Scratch& s) {
    constexpr float tries[] = {0.75f, 0.85f, 0.95f, 1.05f, 1.18f, 1.32f};
    const int size = y.tokens, dim = y.channels;
    uint8_t* const codes = s.turned;  // of a try; the best are in s.codes
    float unit[kMaxDim];
    for (int p = 0, d = 0; p < plane.num_parts; ++p) {
        for (const int end = d + plane.parts[p].channels; d < end; ++d) unit[d] = encoder.stretch[p];
    }
    sum_channels(Tile(s.spare, dim, size), [&](int d, int t) { return (y[d][t] / unit[d]) * (y[d][t] / unit[d]); }, s.b);
    for (int t = 0; t < size; ++t) {
        const float first = std::sqrt(s.b[t] / static_cast<float>(dim));
        s.b[t] = first > 0.0f ? first : 1.0f;
    }
    alignas(64) float divisor[kMaxTokens], product[kMaxTokens], square[kMaxTokens], sum[kMaxTokens], best[kMaxTokens], scale[kMaxTokens];
    for (int attempt = 0; attempt < 6; ++attempt) {
        for (int t = 0; t < size; ++t) divisor[t] = s.b[t] * tries[attempt];
        for (int p = 0, first = 0; p < plane.num_parts; first += plane.parts[p++].channels) {
            const CodedPart& part = plane.parts[p];
            const float* edges = encoder.edges + p * 15;
            const Tile level(x[first], part.channels, size), spare(s.spare, part.channels, size);
            for (int d = 0; d < part.channels; ++d) {
                const float* row = y[first + d];
                uint8_t* here = codes + (first + d) * size;
                switch (part.bits) {
                    case 4: nearest<15>(row, divisor, size, edges, part.levels, here, level[d]); break;
                    case 1: nearest<1>(row, divisor, size, edges, part.levels, here, level[d]); break;
                    case 3: nearest<7>(row, divisor, size, edges, part.levels, here, level[d]); break;
                    default: nearest<3>(row, divisor, size, edges, part.levels, here, level[d]);
                }
            }
            const float weight = weights[p];
            const auto add = [&](float* total) {
                for (int t = 0; t < size; ++t) total[t] = p == 0 ? weight * sum[t] : total[t] + weight * sum[t];
            };
            sum_channels(spare, [&](int d, int t) { return y[first + d][t] * level[d][t]; }, sum);
            add(product);
            sum_channels(spare, [&](int d, int t) { return level[d][t] * level[d][t]; }, sum);
            add(square);
        }
        bool better[kMaxTokens];
        for (int t = 0; t < size; ++t) {
            const float found = product[t] * product[t] / square[t];
            better[t] = attempt == 0 || found > best[t];
            best[t] = better[t] ? found : best[t];
            scale[t] = better[t] ? product[t] / square[t] : scale[t];
        }
        for (int d = 0; d < dim; ++d) {
            uint8_t *kept = s.codes + d * size, *here = codes + d * size;
            for (int t = 0; t < size; ++t) kept[t] = better[t] ? here[t] : kept[t];
        }
    }
    for (int t = 0; t < size; ++t) halves_at(to, plane.token_scale)[t] = half_nearest(scale[t]);
}

// ggml.q8_0_quantize and q4_0_quantize, group by group.
void ggml(const Tile& x, const CodedPlane& plane, unsigned char* to, Scratch& s) {
    const int groups = plane.token_groups, width = x.channels / groups;
    for (int g = 0; g < groups; ++g) {
        const int from = g * width, end = from + width;
        if (plane.bits == 8) {
            magnitudes(x, from, end, s.a);
            for (int t = 0; t < x.tokens; ++t) s.a[t] /= 127.0f;
        } else {  // the first of the largest magnitudes, with its sign
            for (int t = 0; t < x.tokens; ++t) s.a[t] = x[from][t];
            for (int d = from + 1; d < end; ++d) {
                const float* row = x[d];
                for (int t = 0; t < x.tokens; ++t) s.a[t] = std::fabs(row[t]) > std::fabs(s.a[t]) ? row[t] : s.a[t];
            }
            for (int t = 0; t < x.tokens; ++t) s.a[t] /= -8.0f;
        }
        for (int t = 0; t < x.tokens; ++t) {
            halves_at(to, plane.token_scale)[t * groups + g] = half_nearest(s.a[t]);
            const float inverse = 1.0f / s.a[t];
            s.b[t] = (float_bits(inverse) & 0x7f800000u) == 0x7f800000u ? 0.0f : inverse;
        }
        for (int d = from; d < end; ++d) {
            const float* row = x[d];
            uint8_t* codes = s.codes + d * x.tokens;
            if (plane.bits == 8) {
                for (int t = 0; t < x.tokens; ++t) {
                    const float step = row[t] * s.b[t];
                    const int size = static_cast<int>(less(std::fabs(step) + 0.5f, 127.0f));
                    codes[t] = static_cast<uint8_t>(step < 0.0f ? -size : size);
                }
            } else {
                for (int t = 0; t < x.tokens; ++t) {
                    codes[t] = static_cast<uint8_t>(static_cast<int>(clamped(row[t] * s.b[t] + 8.5f, 0.0f, 15.0f)));
                }
            }
        }
    }
}

// kvarn._deviation over channels, of each token; and over tokens, of each channel.
inline float deviation(float sum, int count) {
    const float found = std::sqrt(sum / static_cast<float>(count));
    return found > kHalfMin ? found : 1.0f;
}
void channel_deviations(const Tile& x, const Tile& spare, float* mean, float* to) {
    sum_channels(spare, [&](int d, int t) { return x[d][t]; }, mean);
    for (int t = 0; t < x.tokens; ++t) mean[t] /= static_cast<float>(x.channels);
    sum_channels(spare, [&](int d, int t) { return (x[d][t] - mean[t]) * (x[d][t] - mean[t]); }, to);
    for (int t = 0; t < x.tokens; ++t) to[t] = deviation(to[t], x.channels);
}
float token_deviation(const float* x, int count, float* spare) {
    __builtin_memcpy(spare, x, count * sizeof(float));
    const float mean = sum_tokens(spare, count) / static_cast<float>(count);
    for (int t = 0; t < count; ++t) spare[t] = (x[t] - mean) * (x[t] - mean);
    return deviation(sum_tokens(spare, count), count);
}

void kvarn(const Tile& x, const PlaneEncoder& encoder, const CodedPlane& plane, bool values, unsigned char* to, Scratch& s) {
    constexpr int sweeps = 4;
    const int dim = x.channels, size = x.tokens;
    const Tile level(s.level, dim, size), spare(s.spare, dim, size);
    float *by_token = s.c, *by_channel = s.by_channel;
    rotate(encoder, x);
    for (int d = 0; d < dim; ++d) {
        __builtin_memcpy(level[d], x[d], size * sizeof(float));
        by_channel[d] = 1.0f;
    }
    for (int t = 0; t < size; ++t) by_token[t] = 1.0f;
    const auto level_tokens = [&](bool keep) {
        channel_deviations(level, spare, s.a, s.b);
        for (int d = 0; d < dim; ++d) {
            float* row = level[d];
            for (int t = 0; t < size; ++t) row[t] /= s.b[t];
        }
        for (int t = 0; keep && t < size; ++t) by_token[t] *= s.b[t];
    };
    const auto level_channels = [&](bool keep) {
        for (int d = 0; d < dim; ++d) {
            float* row = level[d];
            const float by = token_deviation(row, size, s.a);
            for (int t = 0; t < size; ++t) row[t] /= by;
            if (keep) by_channel[d] *= by;
        }
    };
    for (int sweep = 0; sweep < sweeps; ++sweep) {
        if (values) {
            level_tokens(false);
            level_channels(true);
        } else {
            level_channels(false);
            level_tokens(true);
        }
    }
    if (values) {
        for (int d = 0; d < dim; ++d) {
            const uint16_t scale = positive_scale(by_channel[d]);
            halves_at(to, plane.channel_scale)[d] = scale;
            float* row = x[d];
            const float by = f16_to_float(scale);
            for (int t = 0; t < size; ++t) row[t] /= by;
        }
        return affine_by_token(x, plane, to, s);
    }
    for (int t = 0; t < size; ++t) {
        const uint16_t scale = positive_scale(by_token[t]);
        halves_at(to, plane.token_scale)[t] = scale;
        by_token[t] = f16_to_float(scale);
    }
    for (int d = 0; d < dim; ++d) {
        float* row = x[d];
        for (int t = 0; t < size; ++t) row[t] /= by_token[t];
    }
    affine_by_channel(x, plane, to, s);
}

// -- places of codes (codecs/kernel_layout.py) ---------------------------------------------------------------

// Bits [shift, shift + WIDTH) of codes [rows][units] as a plane [rows/2/n][units][2], n = 8 / WIDTH.
template <int WIDTH>
void pack_plane(const uint8_t* codes, int rows, int units, int shift, uint8_t* to) {
    constexpr int n = 8 / WIDTH, mask = (1 << WIDTH) - 1;
    uint8_t first[kMaxTokens], second[kMaxTokens];
    for (int row = 0; row < rows; row += 2 * n, to += 2 * units) {
        for (int slot = 0; slot < n; ++slot) {
            const uint8_t *a = codes + (row + 2 * slot) * units, *b = a + units;
            const int up = slot * WIDTH;
            for (int u = 0; u < units; ++u) {
                const auto x = static_cast<uint8_t>((a[u] >> shift & mask) << up);
                const auto y = static_cast<uint8_t>((b[u] >> shift & mask) << up);
                first[u] = slot == 0 ? x : static_cast<uint8_t>(first[u] | x);
                second[u] = slot == 0 ? y : static_cast<uint8_t>(second[u] | y);
            }
        }
        for (int u = 0; u < units; ++u) {
            to[2 * u] = first[u];
            to[2 * u + 1] = second[u];
        }
    }
}

void store(const CodedPlane& plane, bool values, int dim, int size, unsigned char* to, Scratch& s) {
    const uint8_t* codes = s.codes;
    int units = size;
    if (values) {
        constexpr int kTile = 16;
        for (int from = 0; from < dim; from += kTile) {
            const int end = from + kTile < dim ? from + kTile : dim;
            for (int t = 0; t < size; ++t) {
                for (int d = from; d < end; ++d) s.turned[t * dim + d] = codes[d * size + t];
            }
        }
        codes = s.turned;
        units = dim;
    }
    if (plane.exponent_bits != 0) {
        __builtin_memcpy(to + plane.parts[0].codes[0], codes, static_cast<size_t>(dim) * size);
        return;
    }
    for (int p = 0; p < plane.num_parts; ++p) {
        const CodedPart& part = plane.parts[p];
        const int rows = values ? size : part.channels;
        switch (part.bits) {
            case 8: pack_plane<8>(codes, rows, units, 0, to + part.codes[0]); break;
            case 4: pack_plane<4>(codes, rows, units, 0, to + part.codes[0]); break;
            case 1: pack_plane<1>(codes, rows, units, 0, to + part.codes[0]); break;
            case 3: pack_plane<1>(codes, rows, units, 2, to + part.codes[1]); [[fallthrough]];
            default: pack_plane<2>(codes, rows, units, 0, to + part.codes[0]);
        }
        codes += static_cast<ptrdiff_t>(rows) * units;
    }
}

}  // namespace

int64_t encode_plane(const EncodeArgs& args) {
    const Format& raw = *args.raw;
    const PlaneEncoder& encoder = *args.encoder;
    const int dim = args.values ? raw.v_dim : raw.k_dim, size = raw.block_size;
    if (encoder.method == EncodeMethod::none) {
        const Format& coded = *args.coded;
        __builtin_memcpy(args.to + (args.values ? coded.v_offset : coded.k_offset),
                         args.from + (args.values ? raw.v_offset : raw.k_offset),
                         static_cast<size_t>(dim) * size * item_bytes(raw.dtype));
        return 0;
    }
    static thread_local Scratch s;
    const CodedPlane& plane = args.values ? args.coded->v_codes : args.coded->k_codes;
    const Tile x(s.tile, dim, size);
    const int64_t bad = read(args, x);
    if (encoder.means != nullptr) {
        const float* mean = encoder.means + (static_cast<ptrdiff_t>(args.place) * raw.num_heads + args.head) * dim;
        for (int d = 0; d < dim; ++d) {
            float* row = x[d];
            for (int t = 0; t < size; ++t) row[t] -= mean[d];
        }
    }
    switch (encoder.method) {
        case EncodeMethod::absmax: absmax(x, plane, args.to, s); break;
        case EncodeMethod::small_float: small_floats(x, plane, args.to, s); break;
        case EncodeMethod::affine:
            if (encoder.rotated) rotate(encoder, x);
            if (plane.channel_scale >= 0) {
                affine_by_channel(x, plane, args.to, s);
            } else {
                affine_by_token(x, plane, args.to, s);
            }
            break;
        case EncodeMethod::unit: unit(x, encoder, plane, args.to, s); break;
        case EncodeMethod::segments: {
            const ptrdiff_t head = static_cast<ptrdiff_t>(args.place) * raw.num_heads + args.head;
            const Tile y(s.level, dim, size);
            times(x, encoder.transforms + head * dim * dim, y);
            segments(y, x, encoder, plane, encoder.weights + head * plane.num_parts, args.to, s);
            break;
        }
        case EncodeMethod::q8_0:
        case EncodeMethod::q4_0:
            rotate(encoder, x);
            ggml(x, plane, args.to, s);
            break;
        default: kvarn(x, encoder, plane, args.values, args.to, s);
    }
    store(plane, args.values, dim, size, args.to, s);
    return bad;
}

}  // namespace kvloom::KVLOOM_ISA
