#pragma once

#include "batch.h"
#include "parallel.h"

namespace kvloom {

// New rows of one plane: [tokens, heads, dim], strides in elements.
struct Rows {
    const void* data;
    DType dtype;
    int64_t token_stride, head_stride;
};

// Stores each token's rows at its position, converted to the format's dtype (to nearest even).
void write(const Format& format, const Batch& batch, const Rows& k, const Rows& v, const Parallel& parallel);

}  // namespace kvloom
