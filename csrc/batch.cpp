#include "batch.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace kvloom {

unsigned char* Batch::block(const Format& format, int sequence, int64_t block) const {
    const int64_t offset = block >= 0 && block < max_blocks ? tables[sequence * table_stride + block] : -1;
    if (offset < 0 || offset + layer_offset + format.layer_bytes > arena_bytes) {
        throw std::invalid_argument("block " + std::to_string(block) + " of sequence " + std::to_string(sequence) +
                                    " is needed but its table entry is " +
                                    (block < max_blocks ? std::to_string(offset) : std::string("missing")) +
                                    " (" + std::to_string(max_blocks) + " entries, arena of " +
                                    std::to_string(arena_bytes) + " bytes)");
    }
    return arena + offset + layer_offset;
}

void KeyBounds::of(int64_t position, int64_t block_size, int64_t* low, int64_t* high) const {
    const int64_t block = position / block_size;
    int64_t from = first_block * block_size, to = position + 1;
    if (window >= 0) from = std::max(from, position - window + 1);
    if (max_lag >= 0) from = std::max(from, (block - max_lag) * block_size);
    if (end_block >= 0) to = std::min(to, end_block * block_size);
    if (min_lag > 0) to = std::min(to, (block - min_lag + 1) * block_size);
    *low = std::max<int64_t>(from, 0);
    *high = to;
}

}  // namespace kvloom
