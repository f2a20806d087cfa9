// How a call's work is cut up. The layers of a group ask the same of a step: only their blocks'
// places, queries and outputs differ, so they share a plan.
//
// The query rows of a sequence's KV head (token-major, then the query heads of its group) are cut
// into strips. Keys are cut at absolute multiples of kChunk; each chunk gives a row a partial result,
// and a row's partial results are folded in ascending order. A tile is one strip, or strips of several
// sequences that have blocks in common, over a range of chunks; an item is a tile of one head over
// some of its chunks, which one thread computes. None of this changes a bit of a row's result.
#pragma once

#include <algorithm>
#include <vector>

#include "batch.h"

namespace kvloom {

struct AttentionPlan {
    // Plans calls on layers of `format`. `latent`: with Attention::q_latent.
    // Throws std::invalid_argument where a key that is needed has no block.
    void make(const Format& format, const Batch& batch, const KeyBounds& keys, int query_heads, bool latent,
              int num_threads);

    // Whether `make` would give this plan. Compares all that a plan depends on, tables included.
    bool fits(const Format& format, const Batch& batch, const KeyBounds& keys, int query_heads, bool latent,
              int num_threads) const;

    // Keys that are read for a layer, over all heads and tiles.
    int64_t keys_read() const;

    // Throws std::invalid_argument unless the layer of every block needed lies in the arena.
    void check(int64_t layer_offset) const;

    struct Strip {
        int sequence;
        int row, rows;      // of the sequence's rows for one KV head
        int64_t low, high;  // keys visible to any row; equal where there are none
        int part, parts;    // tiles that hold it, in ascending order of chunks
        int counter;        // of head 0: items that hold it; -1: one item holds all
    };
    struct Tile {
        int member, members;
        int rows;
        int64_t chunk, end_chunk;
        int segments;     // of its first chunk, in segment_start; -1: a strip alone, read as it comes
        size_t partials;  // in floats, of [heads][chunks][partial_floats(rows)]
        bool whole;       // an item is all of its strips: partial results are folded in place
    };
    // A strip in a tile.
    struct Part {
        int strip, tile, row;
    };
    // Keys of a chunk that consecutive rows of a tile read together, by the table of `sequence`.
    struct Shared {
        int sequence;
        int row, rows;
        int64_t first, end;
    };
    struct Item {
        int tile, head;
        int64_t chunk, end_chunk;
    };

    // What the plan is for; the batch's arrays are copies.
    Format format;
    KeyBounds keys;
    unsigned char* arena;
    int64_t arena_bytes;
    int sequences = -1, query_heads, num_threads;
    bool latent;
    std::vector<int32_t> query_start, first_position;
    std::vector<int64_t> first_block, end_block;  // [sequences], needed
    std::vector<int64_t> entries, entry;          // table entries needed; where block 0 would be
    int64_t highest;                              // arena offset needed

    int group;                       // query heads per KV head
    int stride;                      // floats per output row of a partial result
    std::vector<int64_t> low, high;  // [tokens], keys each one sees
    std::vector<Strip> strips;
    std::vector<Tile> tiles;
    std::vector<Part> members, parts;  // by tile, by strip
    std::vector<Shared> segments;
    std::vector<int> segment_start;  // [chunks of tiles of several strips + 1]
    std::vector<Item> items;
    std::vector<int> counts;  // items per strip and head, by Strip::counter
    size_t partials;          // floats
    int64_t cost;

    int64_t block(int sequence, int64_t index) const { return entries[entry[sequence] + index]; }

    // Calls f(keys, rows that read them together).
    template <class F>
    void each_reading(const Tile& tile, F f) const {
        if (tile.segments < 0) {
            const Strip& strip = strips[members[tile.member].strip];
            f(std::min(strip.high, tile.end_chunk * kChunk) - std::max(strip.low, tile.chunk * kChunk), tile.rows);
            return;
        }
        const auto end = tile.segments + (tile.end_chunk - tile.chunk);
        for (int i = segment_start[tile.segments]; i < segment_start[end]; ++i) {
            f(segments[i].end - segments[i].first, segments[i].rows);
        }
    }

    // Of [rows][stride] outputs, [rows] tops and [rows] sums.
    size_t partial_floats(int rows) const { return static_cast<size_t>(rows) * stride + (2 * rows + 15) / 16 * 16; }
};

}  // namespace kvloom
