#pragma once

#include "batch.h"
#include "parallel.h"

namespace kvloom {

struct Attention {
    const void* q;  // [tokens, query heads, k_dim], unit stride on the last
    DType q_dtype;
    int64_t q_token_stride, q_head_stride;  // elements
    int query_heads;
    void* out;  // [tokens, query heads, v_dim] contiguous
    DType out_dtype;
    float* lse;  // [tokens, query heads] or null
    float scale;
    float softcap;       // 0: none
    const float* sinks;  // [query heads] or null
    KeyBounds keys;

    // Latent attention: q belongs to the rotated part, and this to the latents [tokens, query heads, v_dim].
    const void* q_latent = nullptr;  // of q's type
    int64_t latent_token_stride = 0, latent_head_stride = 0;
};

void attend(const KernelTable& kernels, const Format& format, const Batch& batch, const Attention& attention,
            const Parallel& parallel);

}  // namespace kvloom
