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

// Fetches the lines in which `write` will put the first row of each sequence: a row of keys lies in as many as it has
// pairs of channels, and each would be waited for. For when there is something else to compute first.
void fetch_for_write(const Format& format, const Batch& batch);

}  // namespace kvloom
