// Exponentials, and one chunk's softmax. Logits are in base 2 throughout.
#pragma once

#include "product.h"

namespace kvloom::KVLOOM_ISA {

static constexpr float kLog2e = 1.44269504088896341f;
static constexpr float kLn2 = 0.693147180559945309f;

// 2^x for x <= 0; 0 far below 2^-126. Minimax polynomial in x - n, n = x rounded: relative error 1e-7, or 8e-5 if
// `rough`, for what is rounded to bf16 (2e-3) right away. Several vectors in step: one chain of dependent operations
// after the other would fill the processor's queue with what has to wait.
template <int N, bool ROUGH = false, class V = Vec>
static inline void exp2_vecs(typename V::F (&x)[N]) {
    using F = typename V::F;
    F whole[N], p[N];
    const auto each = [](auto f) {
#pragma GCC unroll 8
        for (int i = 0; i < N; ++i) f(i);
    };
    // Where the power is 0: what is not visible has no weight at all. In this order max keeps what is no number.
    each([&](int i) { x[i] = V::max(V::set1(V::kScales ? -160.0f : -127.0f), x[i]); });
    if constexpr (V::kScales) {
        each([&](int i) { whole[i] = V::nearest(x[i]); });
        each([&](int i) { x[i] = V::sub(x[i], whole[i]); });
    } else {
        // Adding 1.5 * 2^23 rounds to an integer n and leaves it in the lowest bits, where pow2_shifted takes it.
        each([&](int i) { whole[i] = V::add(x[i], V::set1(12582912.0f)); });
        each([&](int i) { x[i] = V::sub(x[i], V::sub(whole[i], V::set1(12582912.0f))); });
    }
    if constexpr (ROUGH) {
        each([&](int i) { p[i] = V::fma(V::set1(5.517167e-02f), x[i], V::set1(2.4261113e-01f)); });
        each([&](int i) { p[i] = V::fma(p[i], x[i], V::set1(6.9326099e-01f)); });
        each([&](int i) { p[i] = V::fma(p[i], x[i], V::set1(9.9992807e-01f)); });
    } else {
        each([&](int i) { p[i] = V::fma(V::set1(1.340725310e-03f), x[i], V::set1(9.671874215e-03f)); });
        each([&](int i) { p[i] = V::fma(p[i], x[i], V::set1(5.550308382e-02f)); });
        each([&](int i) { p[i] = V::fma(p[i], x[i], V::set1(2.402223464e-01f)); });
        each([&](int i) { p[i] = V::fma(p[i], x[i], V::set1(6.931472149e-01f)); });
        each([&](int i) { p[i] = V::fma(p[i], x[i], V::set1(1.0f)); });
    }
    if constexpr (V::kScales) {
        each([&](int i) { x[i] = V::times_pow2(p[i], whole[i]); });
    } else {
        each([&](int i) { x[i] = V::mul(p[i], V::pow2_shifted(whole[i])); });
    }
}

static inline Vec::F exp2_vec(Vec::F x) {
    Vec::F one[1] = {x};
    exp2_vecs(one);
    return one[0];
}

static inline float exp2_one(float x) {
    float lanes[Vec::W];
    Vec::store(lanes, exp2_vec(Vec::set1(x)));
    return lanes[0];
}

// An odd polynomial near 0, where 1 - 2 / (e^2|x| + 1) would cancel.
static inline Vec::F tanh_vec(Vec::F x) {
    const Vec::F size = Vec::abs(x);
    const Vec::F z = Vec::mul(x, x);
    Vec::F p = Vec::set1(-5.717316996e-03f);
    p = Vec::fma(p, z, Vec::set1(2.065085693e-02f));
    p = Vec::fma(p, z, Vec::set1(-5.374359219e-02f));
    p = Vec::fma(p, z, Vec::set1(1.333149259e-01f));
    p = Vec::fma(p, z, Vec::set1(-3.333328398e-01f));
    const Vec::F small = Vec::fma(Vec::mul(p, z), x, x);
    const Vec::F e = exp2_vec(Vec::mul(size, Vec::set1(-2.0f * kLog2e)));  // (1 - e) / (1 + e) = tanh |x|
    const Vec::F one = Vec::set1(1.0f);
    const Vec::F large = Vec::div(Vec::sub(one, e), Vec::add(one, e));
    const Vec::F with_sign = Vec::select(Vec::lt(x, Vec::zero()), Vec::sub(Vec::zero(), large), large);
    return Vec::select(Vec::lt(size, Vec::set1(0.6f)), small, with_sign);
}

// What a row's weights are made of: logit = score * factor, and the tokens whose vectors are visible at all.
struct RowSpan {
    int from, to;
    float factor;
};

// The largest logit of one row, from scores at its visible tokens; scores of others in its vectors become -inf.
template <class T>
RowSpan softmax_top(const ChunkArgs& args, int row, int begin) {
    constexpr int W = Vec::W;
    constexpr float minus_infinity = -__builtin_inff();
    float* scores = args.scores + static_cast<ptrdiff_t>(row) * kLda;
    const int low = args.low[row], high = args.high[row];
    const bool any = low < high;
    const int from = any ? low / W * W : begin, to = any ? high : begin;

    // logit = score * scale, of which the largest is largest score * scale; with a softcap, and
    // where that does not hold, the scores are replaced by logits first.
    float scale = args.scale;
    if (args.softcap > 0.0f || !(scale > 0.0f)) {
        for (int t = from; t < to; t += W) {
            Vec::F x = Vec::mul(Vec::load(scores + t), Vec::set1(scale));
            if (args.softcap > 0.0f) x = Vec::mul(tanh_vec(x), Vec::set1(args.softcap * kLog2e));
            Vec::store(scores + t, x);
        }
        scale = 1.0f;
    }
    // Only the outermost vectors hold tokens that are not visible.
    const auto mask = [&](int t) {
        const Vec::F x = Vec::select(Vec::range(t, low, high), Vec::load(scores + t), Vec::set1(minus_infinity));
        Vec::store(scores + t, x);
    };
    if (from < low && any) mask(from);
    if (to % W != 0 && any) mask(to / W * W);
    Vec::F top = Vec::set1(minus_infinity);
    for (int t = from; t < to; t += W) top = Vec::max(top, Vec::load(scores + t));
    args.top[row] = any ? Vec::reduce_max(top) * scale : minus_infinity;
    return {from, to, scale};
}

// The row's weights 2^(logit - top) at tokens [begin, end) (multiples of W) and their sum. Tokens that are not visible
// get weight 0.
template <class T>
void softmax_weights(const ChunkArgs& args, int row, int begin, int end, const RowSpan& span) {
    constexpr int W = Vec::W;
    const float* scores = args.scores + static_cast<ptrdiff_t>(row) * kLda;
    auto* weights = (Same<T, BF16Dot>::value ? static_cast<typename T::A*>(args.weights)
                                             : reinterpret_cast<typename T::A*>(args.scores)) +
                    static_cast<ptrdiff_t>(row) * kLda;
    const int from = span.from, to = span.to;
    const Vec::F factor = Vec::set1(span.factor), minus_top = Vec::set1(-args.top[row]);
    constexpr bool pairs = Same<T, BF16Dot>::value;
    Vec::F sum = Vec::zero();
    const auto put = [&](int t, Vec::F p) {
        if constexpr (pairs) {
            p = T::V::store_bf16(weights + t, p);  // the sum is of what V is multiplied with
        } else {
            Vec::store(weights + t, p);
        }
        return p;
    };
    int t = begin;
    for (; t < from; t += W) put(t, Vec::zero());
    constexpr int N = 4;
    for (Vec::F p[N]; t + (N - 1) * W < to; t += N * W) {
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) p[i] = Vec::fma(Vec::load(scores + t + i * W), factor, minus_top);
        exp2_vecs<N, pairs>(p);
#pragma GCC unroll 4
        for (int i = 0; i < N; i += 2) {
            if constexpr (pairs) {
                sum = T::V::store_bf16(weights + t + i * W, p[i], p[i + 1], sum);
            } else {
                sum = Vec::add(sum, put(t + i * W, p[i]));
                sum = Vec::add(sum, put(t + (i + 1) * W, p[i + 1]));
            }
        }
    }
    for (Vec::F p[1]; t < to; t += W) {
        p[0] = Vec::fma(Vec::load(scores + t), factor, minus_top);
        exp2_vecs<1, pairs>(p);
        sum = Vec::add(sum, put(t, p[0]));
    }
    for (; t < end; t += W) put(t, Vec::zero());
    args.sum[row] = Vec::reduce_add(sum);
}

// Logits from scores, weights and their sums, of all rows. A few at a time: while one finds its largest logit across
// lanes, which takes long for what it is, others have something to do.
template <class T>
void softmax_rows(const ChunkArgs& args, int begin, int end) {
    constexpr int kTogether = 4;
    for (int first = 0; first < args.rows; first += kTogether) {
        const int count = args.rows - first < kTogether ? args.rows - first : kTogether;
        RowSpan spans[kTogether];
        for (int i = 0; i < count; ++i) spans[i] = softmax_top<T>(args, first + i, begin);
        for (int i = 0; i < count; ++i) softmax_weights<T>(args, first + i, begin, end, spans[i]);
    }
}

}  // namespace kvloom::KVLOOM_ISA
