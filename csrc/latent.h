// Logits of multi-head latent attention against token-major latents.
//
// The latent plane lies as values do, [token/P][dim][P], since the outputs are weighted sums of it.
// For the logits its tokens become rows of A and the queries, packed once per tile as
// [dim/P][column][P], become B: a latent is widened once for all query heads, and what has to be
// turned round afterwards is one number per token and query row instead of the whole latent.
#pragma once

#include "product.h"

namespace kvloom::KVLOOM_ISA {

// What tokens are multiplied as: bf16 pairs where queries are too, else fp32.
template <class T>
struct Widened {
    using Type = F32;
};
template <>
struct Widened<BF16Dot> {
    using Type = BF16Dot;
};

// Channels of one token, as a row of A. `plane` is the first of them in the token's row of the block.
template <class T>
void widen_token(const typename T::B* plane, int part, int channels, typename Widened<T>::Type::A* row) {
    using V = typename T::V;
    if constexpr (Same<T, F32>::value) {
        __builtin_memcpy(row, plane, channels * sizeof(float));
    } else if constexpr (Same<T, BF16Dot>::value) {
        for (int d = 0; d < channels; ++d) row[d] = plane[2 * d + part];
    } else {
        int d = 0;
        for (; d + V::W <= channels; d += V::W) {
            if constexpr (Same<T, F16>::value) {
                V::store(row + d, V::load_f16(plane + d));
            } else {
                V::store(row + d, part == 0 ? V::bf16_first(plane + 2 * d) : V::bf16_second(plane + 2 * d));
            }
        }
        if constexpr (V::W > 8) {
            if (d < channels) {  // an odd multiple of 8
                if constexpr (Same<T, F16>::value) {
                    V::store_half(row + d, V::load_f16_half(plane + d));
                } else {
                    V::store_half(row + d, part == 0 ? V::bf16_first_half(plane + 2 * d)
                                                     : V::bf16_second_half(plane + 2 * d));
                }
            }
        }
    }
}

// Adds the latents' part to the scores of a segment's rows at its tokens.
template <class T>
void latent_scores(const ChunkArgs& args, const Segment& segment) {
    using U = typename Widened<T>::Type;
    const Format& format = *args.format;
    const LatentArgs& latent = *args.latent;
    const int size = format.block_size, dim = format.v_dim, columns = latent.columns;
    // The segment's rows among the queries' columns, in whole vectors of 8.
    const int column = segment.row / 8 * 8, count_columns = (segment.row + segment.rows + 7) / 8 * 8 - column;
    const unsigned char* const queries[] = {static_cast<const unsigned char*>(latent.q), nullptr};
    auto* tokens = static_cast<typename U::A*>(latent.tokens);

    const unsigned char* const* block = segment.blocks;
    for (int start = segment.first / size * size; start < segment.end; start += size, ++block) {
        const auto* plane = reinterpret_cast<const typename T::B*>(block[0] + format.v_offset);
        const ptrdiff_t ahead = block[1] != nullptr ? block[1] - block[0] : 0;
        const int begin = segment.first > start ? segment.first : start;
        const int end = segment.end < start + size ? segment.end : start + size;
        for (int token = begin, count; token < end; token += count) {
            count = end - token < kLatentTokens ? end - token : kLatentTokens;
            for (int d = 0; d < dim; d += kChunk) {  // what a row of A holds
                const int channels = dim - d < kChunk ? dim - d : kChunk;
                for (int t = 0; t < count; ++t) {
                    const int at = token - start + t;
                    const auto* row = plane + (static_cast<ptrdiff_t>(at / T::P) * dim + d) * T::P;
                    if (ahead != 0 && at % T::P == 0) {
                        const char* next = reinterpret_cast<const char*>(row) + ahead;
                        const int bytes = channels * T::P * static_cast<int>(sizeof(typename T::B));
                        for (int b = 0; b < bytes; b += 64) __builtin_prefetch(next + b, 0, 2);
                    }
                    widen_token<T>(row, at % T::P, channels, tokens + static_cast<ptrdiff_t>(t) * kLda);
                }
                Operands o;
                o.a = tokens;
                o.block = queries;
                o.blocks = 1;
                o.b_offset = (static_cast<ptrdiff_t>(d) * columns + column * U::P) *
                             static_cast<ptrdiff_t>(sizeof(typename U::B));
                o.b_stride = static_cast<ptrdiff_t>(columns) * U::P;
                o.steps = channels / U::P;
                o.c = latent.products + column;
                o.c_stride = columns;
                o.accumulate = d > 0;
                o.prefetch = false;
                product<U>(count, count_columns, o);
            }
            for (int row = segment.row; row < segment.row + segment.rows; ++row) {
                float* scores = args.scores + static_cast<ptrdiff_t>(row) * kLda + token;
                for (int t = 0; t < count; ++t) scores[t] += latent.products[t * columns + row];
            }
        }
    }
}

// One tile's queries as B. Columns beyond `count` are zero.
static void pack_latent(const void* const* rows, int count, int columns, int dim, DType dtype, bool dot, void* packed) {
    for (int column = 0; column < columns; ++column) {
        if (dot) {
            auto* to = static_cast<uint16_t*>(packed) + 2 * column;
            const auto* from = column < count ? static_cast<const uint16_t*>(rows[column]) : nullptr;
            for (int d = 0; d < dim; d += 2, to += 2 * static_cast<ptrdiff_t>(columns)) {
                to[0] = from != nullptr ? from[d] : 0;
                to[1] = from != nullptr ? from[d + 1] : 0;
            }
            continue;
        }
        auto* to = static_cast<float*>(packed) + column;
        const void* from = column < count ? rows[column] : nullptr;
        for (int d = 0; d < dim; ++d, to += columns) {
            if (from == nullptr) {
                *to = 0.0f;
            } else if (dtype == DType::f32) {
                *to = static_cast<const float*>(from)[d];
            } else if (dtype == DType::bf16) {
                *to = bf16_to_float(static_cast<const uint16_t*>(from)[d]);
            } else {
                *to = f16_to_float(static_cast<const uint16_t*>(from)[d]);
            }
        }
    }
}

}  // namespace kvloom::KVLOOM_ISA
