// Full blocks from their raw copies to their encoded ones, for one layer.
#pragma once

#include "parallel.h"
#include "types.h"

namespace kvloom {

// How the blocks of a layer group are encoded.
struct BlockEncoder {
    Format raw, coded;
    PlaneEncoder k, v;
};

// Which ones: arena offsets of their spans, [count].
struct EncodeTask {
    const int64_t* from;
    const int64_t* to;
    int count = 0;
};

// Encodes the task's blocks of the layer at `place` of its group, all heads, and returns how many numbers were
// not finite. Throws std::invalid_argument for a block outside the arena.
int64_t encode(const KernelTable& kernels, const BlockEncoder& encoder, const EncodeTask& task, int place,
               unsigned char* arena, int64_t arena_bytes, const Parallel& parallel);

}  // namespace kvloom
