// A call's tensors as pointers, and the key range of each query token.
#pragma once

#include <cstdint>

#include "types.h"

namespace kvloom {

// Arena, block table and query tokens of one call (ops.QueryBatch).
struct Batch {
    unsigned char* arena;
    int64_t arena_bytes;
    int64_t layer_offset;
    const int64_t* tables;  // [sequences, max_blocks]
    int64_t table_stride;
    int64_t max_blocks;
    const int32_t* query_start;     // [sequences + 1]
    const int32_t* first_position;  // [sequences]
    int sequences;

    // The block of head 0 that holds `block`. Throws std::invalid_argument where there is none.
    unsigned char* block(const Format& format, int sequence, int64_t block) const;
};

// ops.KeyRange with the window; negative: no bound.
struct KeyBounds {
    int64_t window = -1;
    int64_t first_block = 0, end_block = -1;
    int64_t min_lag = 0, max_lag = -1;

    // Keys [low, high) that a query at `position` reads.
    void of(int64_t position, int64_t block_size, int64_t* low, int64_t* high) const;
};

}  // namespace kvloom
