#pragma once

#include "batch.h"
#include "parallel.h"
#include "plan.h"

namespace kvloom {

struct Attention {
    const void* q;  // [tokens, query heads, k_dim], unit stride on the last
    DType q_dtype;
    int64_t q_token_stride, q_head_stride;  // elements
    int query_heads;
    void* out;  // [tokens, query heads, v_dim], unit stride on the last
    DType out_dtype;
    float* lse;  // [tokens, query heads] or null
    float scale;
    float softcap;       // 0: none
    const float* sinks;  // [query heads] or null
    KeyBounds keys;

    // Latent attention: q belongs to the rotated part, and this to the latents [tokens, query heads, v_dim].
    const void* q_latent = nullptr;  // of q's type
    int64_t latent_token_stride = 0, latent_head_stride = 0;

    int64_t out_token_stride = 0, out_head_stride = 0;  // elements; 0: contiguous
};

// Plans, or takes a plan of this thread's that fits, and runs it for the layer at batch.layer_offset.
void attend(const KernelTable& kernels, const Format& format, const Batch& batch, const Attention& attention,
            const Parallel& parallel);

// Runs a plan for one layer. The plan's batch, keys and heads count; it was made for parallel's number of
// threads and may be run by several callers at once. Throws std::invalid_argument where attention is not
// what was planned.
void attend(const KernelTable& kernels, const AttentionPlan& plan, int64_t layer_offset, const Attention& attention,
            const Parallel& parallel);

// The same for up to kMostPlanned calls, whose outputs lie apart: threads go from one to the next without waiting.
struct Planned {
    const AttentionPlan* plan;
    int64_t layer_offset;
    Attention attention;
};
constexpr int kMostPlanned = 3;
void attend(const KernelTable& kernels, const Planned* calls, int count, const Parallel& parallel);

}  // namespace kvloom
