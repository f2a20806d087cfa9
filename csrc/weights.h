// Weights in the layout of linear.h, and back.
#pragma once

#include "types.h"

namespace kvloom {

// A linear layer: `outputs` rows of `inner` weights, in panels; the last panel is padded with zeros.
struct Linear {
    const unsigned char* panels = nullptr;
    DType dtype = DType::f32;
    int outputs = 0, inner = 0;
    const float* bias = nullptr;  // [outputs rounded up to whole panels] or null

    int64_t panel_bytes(int panel) const { return static_cast<int64_t>(inner) * panel * item_bytes(dtype); }
};

// Elements of one inner step of a panel: bf16 lies in pairs (product.h).
static inline int pack_of(DType dtype) { return dtype == DType::bf16 ? 2 : 1; }

// `rows` [outputs][inner] of `dtype`, contiguous, into panels; `to` holds them rounded up to whole panels.
void pack_weights(const void* rows, DType dtype, int outputs, int inner, int panel, void* to);

// One output's weights as fp32 [inner]: a row of the embedding, where it is the head's matrix too.
void unpack_row(const Linear& linear, int panel, int output, float* to);

}  // namespace kvloom
