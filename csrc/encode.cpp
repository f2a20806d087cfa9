#include "encode.h"

#include <atomic>
#include <stdexcept>
#include <string>

namespace kvloom {
namespace {

struct Call {
    const KernelTable& kernels;
    const BlockEncoder& encoder;
    const EncodeTask& task;
    int place;
    unsigned char* arena;
    std::atomic<int> next{0};
    std::atomic<int64_t> bad{0};

    // Items are planes of blocks of heads.
    void work() {
        const int heads = encoder.raw.num_heads, items = 2 * heads * task.count;
        int64_t found = 0;
        for (int i = next.fetch_add(1); i < items; i = next.fetch_add(1)) {
            const int block = i / (2 * heads), head = i / 2 % heads;
            const bool values = i % 2 != 0;
            found += kernels.encode({&encoder.raw, &encoder.coded, values ? &encoder.v : &encoder.k, values, place, head,
                                     at(encoder.raw, task.from[block], head), at(encoder.coded, task.to[block], head)});
        }
        bad.fetch_add(found);
    }

    unsigned char* at(const Format& format, int64_t span, int head) const {
        return arena + span + place * format.layer_bytes + head * format.block_bytes;
    }
};

void check(const Format& format, const int64_t* spans, int count, int place, int64_t arena_bytes) {
    const int64_t layer = place * format.layer_bytes, end = layer + format.num_heads * format.block_bytes;
    for (int i = 0; i < count; ++i) {
        if (spans[i] >= 0 && spans[i] <= arena_bytes - end) continue;
        throw std::invalid_argument("a block to encode is at " + std::to_string(spans[i]) + ", outside the arena of " +
                                    std::to_string(arena_bytes) + " bytes");
    }
}

}  // namespace

int64_t encode(const KernelTable& kernels, const BlockEncoder& encoder, const EncodeTask& task, int place,
               unsigned char* arena, int64_t arena_bytes, const Parallel& parallel) {
    if (task.count == 0) return 0;
    check(encoder.raw, task.from, task.count, place, arena_bytes);
    check(encoder.coded, task.to, task.count, place, arena_bytes);
    Call call{kernels, encoder, task, place, arena};
    parallel.run([](void* data) { static_cast<Call*>(data)->work(); }, &call, true);
    return call.bad.load();
}

}  // namespace kvloom
