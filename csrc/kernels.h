// The kernels of one instruction set. Included once per set, by kernels_<name>.cpp, after its Vec.
#pragma once

#include <cmath>

#include "convert.h"
#include "elementwise.h"
#include "latent.h"
#include "linear.h"
#include "product.h"
#include "softmax.h"
#include "types.h"

namespace kvloom::KVLOOM_ISA {

// Logits of a segment's rows at its tokens, rounded outwards to whole vectors.
template <class T>
void segment_scores(const ChunkArgs& args, const Segment& segment) {
    const Format& format = *args.format;
    const int size = format.block_size;
    const int grain = Vec::W < size ? Vec::W : size;
    const ptrdiff_t row = static_cast<ptrdiff_t>(segment.row) * kLda;
    const unsigned char* const* block = segment.blocks;
    for (int start = segment.first / size * size; start < segment.end; start += size, ++block) {
        const int from = segment.first > start ? (segment.first - start) / grain * grain : 0;
        int to = segment.end - start;
        to = to < size ? (to + grain - 1) / grain * grain : size;
        Operands o;
        o.a = static_cast<const typename T::A*>(args.q) + row;
        o.block = block;
        o.blocks = 1;
        o.b_offset = format.k_offset + from * T::P * static_cast<ptrdiff_t>(sizeof(typename T::B));
        o.b_stride = static_cast<ptrdiff_t>(size) * T::P;
        o.steps = format.k_dim / T::P;
        o.c = args.scores + row + start + from;
        o.c_stride = kLda;
        o.accumulate = false;
        o.prefetch = true;
        product<T>(segment.rows, to - from, o);
    }
}

// out (+)= weights V over a segment's tokens and no other: what lies beside them in memory may
// never have been written, and 0 * NaN would spoil the sum.
template <class T>
void segment_outputs(const ChunkArgs& args, const Segment& segment, bool accumulate) {
    const Format& format = *args.format;
    const int size = format.block_size, dim = format.v_dim;
    const auto* weights = (Same<T, BF16Dot>::value ? static_cast<const typename T::A*>(args.weights)
                                                   : reinterpret_cast<const typename T::A*>(args.scores)) +
                          static_cast<ptrdiff_t>(segment.row) * kLda;
    const unsigned char* const* block = segment.blocks;
    typename T::B lone[kMaxLatentDim * T::P];
    const unsigned char* const lone_block[] = {reinterpret_cast<const unsigned char*>(lone), nullptr};
    // Where several groups of rows read the values, or one tile is as wide as they are, a tile goes
    // through all blocks with its sums in registers. Else block by block, so that memory is read in order.
    const bool through = segment.rows > T::kRows2 || (segment.rows <= T::kRows4 && dim <= 4 * Vec::W);

    Operands o;
    o.c = args.out + segment.row * args.out_stride;
    o.c_stride = args.out_stride;
    o.b_stride = static_cast<ptrdiff_t>(dim) * T::P;
    o.accumulate = accumulate;
    o.prefetch = true;
    const auto run = [&](int token, const unsigned char* const* list, int blocks, ptrdiff_t offset, int steps) {
        o.a = weights + token;
        o.block = list;
        o.blocks = blocks;
        o.b_offset = offset;
        o.steps = steps;
        product<T>(segment.rows, dim, o);
        o.accumulate = true;
    };
    for (int start = segment.first / size * size; start < segment.end;) {
        int from = segment.first > start ? segment.first : start;
        const int to = segment.end < start + size ? segment.end : start + size;
        if (to - from == size) {
            const int blocks = through ? (segment.end - start) / size : 1;
            run(start, block, blocks, format.v_offset, size / T::P);
            start += blocks * size;
            block += blocks;
            continue;
        }
        const auto offset = [&](int token) {  // of the row of values that holds the token
            return format.v_offset + static_cast<ptrdiff_t>((token - start) / T::P) * dim * T::P *
                                         static_cast<ptrdiff_t>(sizeof(typename T::B));
        };
        // A pair of which one token is not visible is read through a copy with a zero in its place.
        const auto single = [&](int token) {
            const auto* pair = reinterpret_cast<const typename T::B*>(block[0] + offset(token));
            const int keep = token % T::P;
            for (int d = 0; d < dim; ++d) {
                for (int p = 0; p < T::P; ++p) lone[T::P * d + p] = p == keep ? pair[T::P * d + p] : 0;
            }
            run(token - keep, lone_block, 1, 0, 1);
        };
        if (from % T::P != 0) single(from++);
        const int steps = (to - from) / T::P;
        if (steps > 0) run(from, block, 1, offset(from), steps);
        if (from + steps * T::P < to) single(to - 1);
        start += size;
        ++block;
    }
}

template <class T>
void attend_chunk(const ChunkArgs& args) {
    constexpr int W = Vec::W;
    for (int s = 0; s < args.count; ++s) {
        segment_scores<T>(args, args.segments[s]);
        if (args.latent != nullptr) latent_scores<T>(args, args.segments[s]);
    }
    const int begin = args.first / W * W, end = (args.end + W - 1) / W * W;
    softmax_rows<T>(args, begin, end);
    // Rows of one segment can have had another before it or not: all start from zero then.
    const bool several = args.count > 1;
    for (int row = 0; several && row < args.rows; ++row) {
        __builtin_memset(args.out + row * args.out_stride, 0, args.format->v_dim * sizeof(float));
    }
    for (int s = 0; s < args.count; ++s) segment_outputs<T>(args, args.segments[s], several);
}

}  // namespace kvloom::KVLOOM_ISA

#include "coded.h"

namespace kvloom::KVLOOM_ISA {

template <class V>
struct Chooser {
    static void chunk(const ChunkArgs& args, bool dot) {
        if (args.format->coded()) {
            switch (args.format->dtype) {
                case DType::f32: return coded_chunk<F32>(args);
                case DType::f16: return coded_chunk<F16>(args);
                case DType::bf16: return coded_chunk<BF16>(args);
            }
        }
        switch (args.format->dtype) {
            case DType::f32: return attend_chunk<F32>(args);
            case DType::f16: return attend_chunk<F16>(args);
            case DType::bf16:
                if constexpr (V::kDot) {
                    if (dot) return attend_chunk<BF16Dot>(args);
                }
                return attend_chunk<BF16>(args);
        }
    }
};

static void pack(const void* const* rows, int count, int dim, DType dtype, bool dot, void* packed) {
    for (int row = 0; row < count; ++row) {
        if (dot) {
            __builtin_memcpy(static_cast<uint16_t*>(packed) + static_cast<ptrdiff_t>(row) * kLda, rows[row], dim * 2);
            continue;
        }
        float* to = static_cast<float*>(packed) + static_cast<ptrdiff_t>(row) * kLda;
        if (dtype == DType::f32) {
            __builtin_memcpy(to, rows[row], dim * 4);
            continue;
        }
        const auto* from = static_cast<const uint16_t*>(rows[row]);
        if (dtype == DType::bf16) {
            for (int d = 0; d < dim; ++d) to[d] = bf16_to_float(from[d]);
        } else {
            int d = 0;
            for (; d + Vec::W <= dim; d += Vec::W) Vec::store(to + d, Vec::load_f16(from + d));
            for (; d < dim; ++d) to[d] = f16_to_float(from[d]);
        }
    }
}

static void fold(int rows, int v_dim, float* acc, ptrdiff_t acc_stride, float* acc_top, float* acc_sum,
                 const float* part, ptrdiff_t part_stride, const float* part_top, const float* part_sum) {
    for (int row = 0; row < rows; ++row, acc += acc_stride, part += part_stride) {
        if (part_sum[row] == 0.0f) continue;
        if (acc_sum[row] == 0.0f) {
            __builtin_memcpy(acc, part, v_dim * sizeof(float));
            acc_top[row] = part_top[row];
            acc_sum[row] = part_sum[row];
            continue;
        }
        const float top = acc_top[row] > part_top[row] ? acc_top[row] : part_top[row];
        const float ours = exp2_one(acc_top[row] - top), theirs = exp2_one(part_top[row] - top);
        const Vec::F a = Vec::set1(ours), b = Vec::set1(theirs);
        for (int d = 0; d < v_dim; d += Vec::W) {  // strides are multiples of 16: no tail
            Vec::store(acc + d, Vec::fma(Vec::load(acc + d), a, Vec::mul(Vec::load(part + d), b)));
        }
        acc_top[row] = top;
        acc_sum[row] = acc_sum[row] * ours + part_sum[row] * theirs;
    }
}

static void finish(const FinishArgs& args) {
    float sum = args.sum, factor = 1.0f, top = args.top;
    if (args.sink != nullptr && args.sum != 0.0f) {
        const float sink = *args.sink * kLog2e;
        top = args.top > sink ? args.top : sink;
        factor = exp2_one(args.top - top);
        sum = sum * factor + exp2_one(sink - top);
    }
    if (args.lse != nullptr) *args.lse = sum == 0.0f ? -__builtin_inff() : (top + log2f(sum)) * kLn2;
    const float by = sum == 0.0f ? 0.0f : factor / sum;

    constexpr int W = Vec::W;
    alignas(64) float row[kMaxLatentDim];
    const Vec::F scale = Vec::set1(by);
    for (int d = 0; d < args.v_dim; d += W) {  // acc is padded to a multiple of 16
        const Vec::F x = sum == 0.0f ? Vec::zero() : Vec::mul(Vec::load(args.acc + d), scale);
        Vec::store(row + d, x);
    }
    if (args.dtype == DType::f32) {
        __builtin_memcpy(args.out, row, args.v_dim * sizeof(float));
        return;
    }
    auto* out = static_cast<uint16_t*>(args.out);
    if (args.dtype == DType::bf16) {
        for (int d = 0; d < args.v_dim; ++d) out[d] = float_to_bf16(row[d]);
    } else {
        int d = 0;
        for (; d + W <= args.v_dim; d += W) Vec::store_f16(out + d, Vec::load(row + d));
        for (; d < args.v_dim; ++d) out[d] = float_to_f16(row[d]);
    }
}

int64_t encode_plane(const EncodeArgs& args);  // encode_<name>.cpp: compiled without fused multiply-adds

static const KernelTable table = {Vec::W, Vec::kDot, pack, pack_latent,
                                  Chooser<Vec>::chunk, fold, finish,
                                  kPanel,    LinearChooser<Vec>::panel, rms_norm,
                                  rotate,    gate,     pack_activations<Vec>,
                                  row_matrix, scaled,   largest,  encode_plane};

}  // namespace kvloom::KVLOOM_ISA
