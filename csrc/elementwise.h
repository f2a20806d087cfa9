// What a native step does to single rows between its products. Sums run over fixed lanes, so a row's
// bits depend on the row alone.
#pragma once

#include "convert.h"
#include "softmax.h"

namespace kvloom::KVLOOM_ISA {

// out = x / sqrt(mean(x^2) + eps) * weight, in place or not.
static void rms_norm(const float* x, const float* weight, int dim, float eps, float* out) {
    constexpr int W = Vec::W;
    Vec::F sums[4] = {Vec::zero(), Vec::zero(), Vec::zero(), Vec::zero()};
    int d = 0;
    for (int lane = 0; d + W <= dim; d += W, lane = (lane + 1) % 4) {
        const Vec::F v = Vec::load(x + d);
        sums[lane] = Vec::fma(v, v, sums[lane]);
    }
    float sum = Vec::reduce_add(Vec::add(Vec::add(sums[0], sums[1]), Vec::add(sums[2], sums[3])));
    for (; d < dim; ++d) sum += x[d] * x[d];
    const float scale = 1.0f / __builtin_sqrtf(sum / static_cast<float>(dim) + eps);
    const Vec::F factor = Vec::set1(scale);
    for (d = 0; d + W <= dim; d += W) {
        Vec::store(out + d, Vec::mul(Vec::mul(Vec::load(x + d), factor), Vec::load(weight + d)));
    }
    for (; d < dim; ++d) out[d] = x[d] * scale * weight[d];
}

// Rotates channel pairs (i, i + half) of x by the angles whose cosines and sines are given per channel.
static void rotate(float* x, const float* cosines, const float* sines, int half) {
    constexpr int W = Vec::W;
    int i = 0;
    for (; i + W <= half; i += W) {
        const Vec::F a = Vec::load(x + i), b = Vec::load(x + half + i);
        const Vec::F first = Vec::sub(Vec::mul(a, Vec::load(cosines + i)), Vec::mul(b, Vec::load(sines + i)));
        Vec::store(x + half + i, Vec::fma(a, Vec::load(sines + half + i), Vec::mul(b, Vec::load(cosines + half + i))));
        Vec::store(x + i, first);
    }
    for (; i < half; ++i) {
        const float a = x[i], b = x[half + i];
        x[i] = a * cosines[i] - b * sines[i];
        x[half + i] = a * sines[half + i] + b * cosines[half + i];
    }
}

static inline Vec::F silu_vec(Vec::F x) {
    const Vec::F one = Vec::set1(1.0f);
    const Vec::F t = exp2_vec(Vec::mul(Vec::abs(x), Vec::set1(-kLog2e)));  // e^-|x|: never overflows
    const Vec::F top = Vec::select(Vec::lt(x, Vec::zero()), t, one);
    return Vec::mul(x, Vec::div(top, Vec::add(one, t)));
}

// x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))): GELU's tanh form (arXiv 1606.08415).
static inline Vec::F gelu_tanh_vec(Vec::F x) {
    const Vec::F cube = Vec::mul(Vec::mul(x, x), x);
    const Vec::F inner = Vec::mul(Vec::fma(cube, Vec::set1(0.044715f), x), Vec::set1(0.7978845608028654f));
    return Vec::mul(Vec::mul(x, Vec::set1(0.5f)), Vec::add(Vec::set1(1.0f), tanh_vec(inner)));
}

// `count` floats to a row of activations (LinearArgs::a), from a column on whose vector does not cross a chunk.
// bf16 for a "dot" kernel, which only sets of instructions that have one ask for.
template <class V>
void pack_activations(const float* from, int count, void* row, ptrdiff_t chunk_stride, int column, bool dot) {
    for (int done = 0; done < count;) {
        const int at = (column + done) % kChunk;
        const int here = count - done < kChunk - at ? count - done : kChunk - at;
        const ptrdiff_t offset = (column + done) / kChunk * chunk_stride + at;
        if constexpr (V::kDot) {
            if (dot) {
                auto* to = static_cast<uint16_t*>(row) + offset;
                int i = 0;
                for (; i + V::W <= here; i += V::W) V::store_bf16(to + i, V::load(from + done + i));
                for (; i < here; ++i) to[i] = float_to_bf16(from[done + i]);
                done += here;
                continue;
            }
        }
        __builtin_memcpy(static_cast<float*>(row) + offset, from + done, here * sizeof(float));
        done += here;
    }
}

static void row_matrix(const float* x, const float* matrix, int rows, int columns, float* out) {
    constexpr int W = Vec::W;
    int c = 0;
    for (; c + 4 * W <= columns; c += 4 * W) {
        Vec::F sums[4] = {Vec::zero(), Vec::zero(), Vec::zero(), Vec::zero()};
        for (int r = 0; r < rows; ++r) {
            const Vec::F factor = Vec::set1(x[r]);
            const float* from = matrix + static_cast<ptrdiff_t>(r) * columns + c;
            for (int v = 0; v < 4; ++v) sums[v] = Vec::fma(factor, Vec::load(from + v * W), sums[v]);
        }
        for (int v = 0; v < 4; ++v) Vec::store(out + c + v * W, sums[v]);
    }
    for (; c < columns; ++c) {
        float sum = 0.0f;
        for (int r = 0; r < rows; ++r) sum += x[r] * matrix[static_cast<ptrdiff_t>(r) * columns + c];
        out[c] = sum;
    }
}

static void scaled(const float* x, float weight, int count, bool accumulate, float* out) {
    constexpr int W = Vec::W;
    const Vec::F factor = Vec::set1(weight);
    int i = 0;
    for (; i + W <= count; i += W) {
        const Vec::F base = accumulate ? Vec::load(out + i) : Vec::zero();
        Vec::store(out + i, Vec::fma(Vec::load(x + i), factor, base));
    }
    for (; i < count; ++i) out[i] = x[i] * weight + (accumulate ? out[i] : 0.0f);
}

static int64_t largest(const float* x, int64_t count, float* value) {
    constexpr int W = Vec::W;
    constexpr float minus_infinity = -__builtin_inff();
    // Which of two numbers a maximum takes where one is NaN depends on their order, so NaN is looked for by itself:
    // x - x is 0 or, for infinities too, NaN.
    Vec::F most[4], sums[4];
    for (int v = 0; v < 4; ++v) {
        most[v] = Vec::set1(minus_infinity);
        sums[v] = Vec::zero();
    }
    int64_t i = 0;
    for (; i + 4 * W <= count; i += 4 * W) {
        for (int v = 0; v < 4; ++v) {
            const Vec::F y = Vec::load(x + i + v * W);
            most[v] = Vec::max(most[v], y);
            sums[v] = Vec::add(sums[v], Vec::sub(y, y));
        }
    }
    float top = Vec::reduce_max(Vec::max(Vec::max(most[0], most[1]), Vec::max(most[2], most[3])));
    bool odd = !(Vec::reduce_add(Vec::add(Vec::add(sums[0], sums[1]), Vec::add(sums[2], sums[3]))) == 0.0f);
    for (; i < count; ++i) {
        top = x[i] > top ? x[i] : top;
        odd = odd || x[i] - x[i] != 0.0f;
    }
    if (odd) {
        top = minus_infinity;
        for (i = 0; i < count; ++i) {
            if (x[i] != x[i]) {
                *value = x[i];
                return i;
            }
            top = x[i] > top ? x[i] : top;
        }
    }
    *value = top;
    for (i = 0; i < count && x[i] != top;) ++i;
    return i < count ? i : 0;
}

// gate = act(gate) * up over one panel of columns.
static void gate(float* gates, const float* ups, int count, Activation activation) {
    for (int i = 0; i < count; i += Vec::W) {
        const Vec::F x = Vec::load(gates + i);
        const Vec::F y = activation == Activation::silu ? silu_vec(x) : gelu_tanh_vec(x);
        Vec::store(gates + i, Vec::mul(y, Vec::load(ups + i)));
    }
}

}  // namespace kvloom::KVLOOM_ISA
