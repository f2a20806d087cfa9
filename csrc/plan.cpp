#include "plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

namespace kvloom {
namespace {

using Strip = AttentionPlan::Strip;
using Tile = AttentionPlan::Tile;
using Shared = AttentionPlan::Shared;
using Item = AttentionPlan::Item;

constexpr int64_t kItemsPerThread = 16;  // where threads share
// Rough cost of reading a key in units of the cost of a multiply-add per query row.
constexpr int64_t kReadCost = 8;
// Strips that shared the chunk before stay in one tile for so few keys of their own: an item each would cost more.
constexpr int64_t kShortTail = 64;

// Strips that may have blocks in common, or those of one sequence.
struct Family {
    size_t strips, end_strips;  // in Scratch::order
    size_t tiles, end_tiles;
    bool shares;
};

// What a thread keeps between plans.
struct Scratch {
    std::vector<int> order;  // strips, family by family
    std::vector<Family> families;
    std::vector<int> next;   // [strips], in a family
    std::vector<std::pair<int64_t, int64_t>> nodes;  // block and table entry
    std::vector<int> last;   // [nodes], strip of those with this node that comes last in their family
    std::vector<int> slots;  // hash table of nodes; -1: free
    std::vector<int> path;   // nodes of a strip
    std::vector<int> needing;
    std::vector<int> latest;  // [strips], the last tile that it was put in
    std::vector<int> parts;   // [tiles], items per head
};

class Planner {
public:
    Planner(AttentionPlan& plan, Scratch& scratch)
        : p_(plan), s_(scratch), size_(plan.format.block_size), most_(plan.latent ? kMaxLatentRows : kMaxRows) {}

    void make() {
        cut_strips();
        find_families();
        s_.latest.assign(p_.strips.size(), -1);
        for (Family& family : s_.families) {
            family.tiles = p_.tiles.size();
            if (family.shares) {
                cut_family(family);
            } else {
                for (size_t i = family.strips; i < family.end_strips; ++i) add_tile(&s_.order[i], 1, chunks(s_.order[i]));
            }
            family.end_tiles = p_.tiles.size();
        }
        for (Tile& tile : p_.tiles) {
            if (tile.members == 1) continue;
            tile.segments = static_cast<int>(p_.segment_start.size());
            for (int64_t chunk = tile.chunk; chunk < tile.end_chunk; ++chunk) add_segments(tile, chunk);
        }
        p_.segment_start.push_back(static_cast<int>(p_.segments.size()));
        find_parts();
        make_items();
    }

private:
    // Strips of nearly equal size, and the keys that they need.
    void cut_strips() {
        for (int sequence = 0; sequence < p_.sequences; ++sequence) {
            const int start = p_.query_start[sequence];
            const int rows = (p_.query_start[sequence + 1] - start) * p_.group, count = (rows + most_ - 1) / most_;
            for (int i = 0, row = 0; i < count; ++i) {
                Strip strip{sequence, row, (rows - row) / (count - i), INT64_MAX, 0, 0, 0, -1};
                row += strip.rows;
                for (int t = strip.row / p_.group; t * p_.group < row; ++t) {
                    if (p_.low[start + t] >= p_.high[start + t]) continue;
                    strip.low = std::min(strip.low, p_.low[start + t]);
                    strip.high = std::max(strip.high, p_.high[start + t]);
                }
                if (strip.low >= strip.high) strip.low = strip.high = 0;
                p_.strips.push_back(strip);
            }
        }
    }

    int64_t first_block(const Strip& strip) const { return strip.low / size_; }
    int64_t end_block(const Strip& strip) const { return (strip.high + size_ - 1) / size_; }
    bool needs(const Strip& strip, int64_t block) const {
        return block * size_ < strip.high && (block + 1) * size_ > strip.low;
    }
    std::pair<int64_t, int64_t> chunks(int index) const {
        const Strip& strip = p_.strips[index];
        return {strip.low / kChunk, (strip.high + kChunk - 1) / kChunk};
    }

    // Puts strips that have blocks in common next to each other. As prefixes are shared, a block is
    // the end of one prefix, and the strips that read it are those of a subtree: a new strip goes
    // behind the last of the deepest subtree that it belongs to. (Were the tables no such tree, it
    // would only be less shared.)
    void find_families() {
        s_.order.clear();
        s_.families.clear();
        s_.next.assign(p_.strips.size(), -1);
        s_.nodes.clear();
        s_.last.clear();
        size_t slots = 64;
        while (slots < 2 * p_.entries.size()) slots *= 2;
        s_.slots.clear();
        if (p_.sequences > 1) s_.slots.assign(slots, -1);

        const int count = static_cast<int>(p_.strips.size());
        for (int i = 0, end; i < count; i = end) {
            for (end = i + 1; end < count && p_.strips[end].sequence == p_.strips[i].sequence;) ++end;
            Family family{static_cast<size_t>(i), 0, 0, 0, false};  // its first strip, for now
            if (end - i > 1) {
                for (int strip = i; strip + 1 < end; ++strip) s_.next[strip + 1] = strip;  // longest first
                family.strips = end - 1;
            } else if (p_.sequences > 1 && insert(i)) {
                continue;
            }
            s_.families.push_back(family);
        }
        for (Family& family : s_.families) {
            int strip = static_cast<int>(family.strips);
            family.strips = s_.order.size();
            for (; strip >= 0; strip = s_.next[strip]) s_.order.push_back(strip);
            family.end_strips = s_.order.size();
            const auto sequence = [&](size_t i) { return p_.strips[s_.order[i]].sequence; };
            family.shares = sequence(family.strips) != sequence(family.end_strips - 1);
        }
    }

    // Returns whether the strip has joined a family.
    bool insert(int index) {
        const Strip& strip = p_.strips[index];
        s_.path.clear();
        const size_t mask = s_.slots.size() - 1;
        for (int64_t block = first_block(strip); block < end_block(strip); ++block) {
            const std::pair<int64_t, int64_t> key{block, p_.block(strip.sequence, block)};
            size_t slot = (static_cast<uint64_t>(key.second) + static_cast<uint64_t>(block)) * 0x9e3779b97f4a7c15u >> 32;
            for (slot &= mask; s_.slots[slot] >= 0 && s_.nodes[s_.slots[slot]] != key;) slot = (slot + 1) & mask;
            if (s_.slots[slot] >= 0) {
                s_.path.push_back(s_.slots[slot]);
            } else {
                s_.slots[slot] = static_cast<int>(s_.nodes.size());
                s_.nodes.push_back(key);
                s_.last.push_back(index);
            }
        }
        if (s_.path.empty()) return false;
        const int before = s_.last[s_.path.back()];
        s_.next[index] = s_.next[before];
        s_.next[before] = index;
        for (int node : s_.path) {
            if (s_.last[node] == before) s_.last[node] = index;
        }
        return true;
    }

    // Whether two strips that need a chunk read the same there to begin with.
    bool linked(const Strip& a, const Strip& b, int64_t chunk) const {
        const int64_t block = std::max({first_block(a), first_block(b), chunk * kChunk / size_});
        return needs(a, block) && needs(b, block) && block < (chunk + 1) * kChunk / size_ &&
               p_.block(a.sequence, block) == p_.block(b.sequence, block);
    }

    // Tiles of strips that share, chunk by chunk.
    void cut_family(const Family& family) {
        int64_t from = INT64_MAX, to = 0;
        for (size_t i = family.strips; i < family.end_strips; ++i) {
            from = std::min(from, chunks(s_.order[i]).first);
            to = std::max(to, chunks(s_.order[i]).second);
        }
        for (int64_t chunk = from; chunk < to; ++chunk) {
            s_.needing.clear();
            for (size_t i = family.strips; i < family.end_strips; ++i) {
                const auto range = chunks(s_.order[i]);
                if (range.first <= chunk && chunk < range.second) s_.needing.push_back(s_.order[i]);
            }
            for (size_t begin = 0, end; begin < s_.needing.size(); begin = end) {
                int rows = strip_rows(begin);
                for (end = begin + 1; end < s_.needing.size(); ++end) {
                    if (!linked(p_.strips[s_.needing[end - 1]], p_.strips[s_.needing[end]], chunk) &&
                        !stay_together(s_.needing[end - 1], s_.needing[end], chunk)) {
                        break;
                    }
                    rows += strip_rows(end);
                }
                while (begin < end) {  // into tiles of nearly equal size
                    const int aim = rows / ((rows + most_ - 1) / most_);
                    size_t stop = begin + 1;
                    int taken = strip_rows(begin);
                    for (; stop < end && taken < aim && taken + strip_rows(stop) <= most_; ++stop) taken += strip_rows(stop);
                    extend_tile(&s_.needing[begin], static_cast<int>(stop - begin), chunk);
                    rows -= taken;
                    begin = stop;
                }
            }
        }
    }

    // Whether two strips that shared the chunk before are at their ends.
    bool stay_together(int a, int b, int64_t chunk) const {
        const int tile = s_.latest[a];
        return tile >= 0 && tile == s_.latest[b] && p_.tiles[tile].end_chunk == chunk &&
               std::max(p_.strips[a].high, p_.strips[b].high) - chunk * kChunk <= kShortTail;
    }

    int strip_rows(size_t needing) const { return p_.strips[s_.needing[needing]].rows; }

    // The tile of the chunk before goes on if it has the same strips.
    void extend_tile(const int* strips, int count, int64_t chunk) {
        if (const int latest = s_.latest[strips[0]]; latest >= 0) {
            Tile& tile = p_.tiles[latest];
            if (tile.end_chunk == chunk && tile.members == count &&
                std::equal(strips, strips + count, p_.members.begin() + tile.member,
                           [](int strip, const AttentionPlan::Part& part) { return strip == part.strip; })) {
                ++tile.end_chunk;
                return;
            }
        }
        for (int i = 0; i < count; ++i) s_.latest[strips[i]] = static_cast<int>(p_.tiles.size());
        add_tile(strips, count, {chunk, chunk + 1});
    }

    void add_tile(const int* strips, int count, std::pair<int64_t, int64_t> range) {
        Tile tile{static_cast<int>(p_.members.size()), count, 0, range.first, range.second, -1, 0, false};
        for (int i = 0; i < count; ++i) {
            p_.members.push_back({strips[i], static_cast<int>(p_.tiles.size()), tile.rows});
            tile.rows += p_.strips[strips[i]].rows;
        }
        p_.tiles.push_back(tile);
    }

    const Strip& member(const Tile& tile, int index) const { return p_.strips[p_.members[tile.member + index].strip]; }

    // What consecutive strips read together, block by block, joined where it goes on.
    void add_segments(const Tile& tile, int64_t chunk) {
        const size_t begin = p_.segments.size();
        p_.segment_start.push_back(static_cast<int>(begin));
        for (int64_t block = chunk * kChunk / size_; block < (chunk + 1) * kChunk / size_; ++block) {
            for (int m = 0, end; m < tile.members; m = end) {
                const Strip& strip = member(tile, m);
                end = m + 1;
                if (!needs(strip, block)) continue;
                const int64_t entry = p_.block(strip.sequence, block);
                Shared segment{strip.sequence, p_.members[tile.member + m].row, strip.rows, strip.low, strip.high};
                for (; end < tile.members; ++end) {
                    const Strip& other = member(tile, end);
                    if (!needs(other, block) || p_.block(other.sequence, block) != entry) break;
                    segment.rows += other.rows;
                    segment.first = std::min(segment.first, other.low);
                    segment.end = std::max(segment.end, other.high);
                }
                segment.first = std::max(segment.first, block * size_);
                segment.end = std::min(segment.end, (block + 1) * size_);
                size_t i = begin;
                while (i < p_.segments.size() &&
                       std::tie(p_.segments[i].row, p_.segments[i].rows, p_.segments[i].end) !=
                           std::tie(segment.row, segment.rows, segment.first)) {
                    ++i;
                }
                if (i < p_.segments.size()) {
                    p_.segments[i].end = segment.end;
                } else {
                    p_.segments.push_back(segment);
                }
            }
        }
    }

    // The tiles of each strip.
    void find_parts() {
        for (const auto& part : p_.members) ++p_.strips[part.strip].parts;
        int count = 0;
        for (Strip& strip : p_.strips) {
            strip.part = count;
            count += strip.parts;
            strip.parts = 0;
        }
        p_.parts.resize(count);
        for (const auto& part : p_.members) {  // a family's tiles come in ascending order of chunks
            Strip& strip = p_.strips[part.strip];
            p_.parts[strip.part + strip.parts++] = part;
        }
    }

    int64_t cost(const Tile& tile) const {
        int64_t cost = 0;
        p_.each_reading(tile, [&](int64_t keys, int rows) { cost += keys * (rows + kReadCost); });
        return cost;
    }

    void make_items() {
        const int heads = p_.format.num_heads;
        for (const Tile& tile : p_.tiles) p_.cost += cost(tile);
        p_.cost *= heads;
        const int64_t items = p_.num_threads > 1 ? p_.num_threads * kItemsPerThread : 1;
        const int64_t aim = std::max<int64_t>(p_.cost / items, 1);
        s_.parts.clear();
        for (Tile& tile : p_.tiles) {
            const int64_t parts = std::min(tile.end_chunk - tile.chunk, (cost(tile) + aim - 1) / aim);
            s_.parts.push_back(static_cast<int>(std::max<int64_t>(parts, 1)));
            tile.whole = parts <= 1;
            for (int m = 0; m < tile.members; ++m) tile.whole = tile.whole && member(tile, m).parts == 1;
            if (tile.whole) continue;
            tile.partials = p_.partials;
            p_.partials += heads * (tile.end_chunk - tile.chunk) * p_.partial_floats(tile.rows);
            for (int m = 0; m < tile.members; ++m) {
                Strip& strip = p_.strips[p_.members[tile.member + m].strip];
                if (strip.counter < 0) {
                    strip.counter = static_cast<int>(p_.counts.size());
                    p_.counts.resize(p_.counts.size() + heads, 0);
                }
                for (int head = 0; head < heads; ++head) p_.counts[strip.counter + head] += s_.parts.back();
            }
        }
        // Heads outermost in a family, and chunks where it shares, so that tiles which run together
        // read the same keys.
        for (const Family& family : s_.families) {
            for (int head = 0; head < heads; ++head) {
                const auto begin = static_cast<ptrdiff_t>(p_.items.size());
                for (size_t index = family.tiles; index < family.end_tiles; ++index) {
                    const Tile& tile = p_.tiles[index];
                    const int64_t count = tile.end_chunk - tile.chunk, parts = s_.parts[index];
                    for (int64_t part = 0; part < parts; ++part) {
                        p_.items.push_back({static_cast<int>(index), head, tile.chunk + count * part / parts,
                                            tile.chunk + count * (part + 1) / parts});
                    }
                }
                if (!family.shares) continue;
                std::stable_sort(p_.items.begin() + begin, p_.items.end(),
                                 [](const Item& a, const Item& b) { return a.chunk < b.chunk; });
            }
        }
    }

    AttentionPlan& p_;
    Scratch& s_;
    const int64_t size_;  // of a block
    const int most_;      // rows of a tile
};

bool same(const CodedPart& a, const CodedPart& b) {
    const auto all = [](const CodedPart& p) { return std::tie(p.bits, p.channels, p.codes[0], p.codes[1]); };
    return all(a) == all(b) && std::equal(a.levels, a.levels + 16, b.levels);
}

bool same(const CodedPlane& a, const CodedPlane& b) {
    const auto all = [](const CodedPlane& p) {
        return std::tie(p.bits, p.num_parts, p.exponent_bits, p.center, p.token_groups, p.token_scale, p.token_offset,
                        p.channel_scale, p.channel_offset);
    };
    for (int i = 0; i < kMaxParts; ++i) {
        if (!same(a.parts[i], b.parts[i])) return false;
    }
    return all(a) == all(b);
}

bool same(const Format& a, const Format& b) {
    const auto all = [](const Format& f) {
        return std::tie(f.dtype, f.block_size, f.num_heads, f.k_dim, f.v_dim, f.k_offset, f.v_offset, f.block_bytes,
                        f.layer_bytes);
    };
    return all(a) == all(b) && same(a.k_codes, b.k_codes) && same(a.v_codes, b.v_codes);
}

bool same(const KeyBounds& a, const KeyBounds& b) {
    const auto all = [](const KeyBounds& k) {
        return std::tie(k.window, k.first_block, k.end_block, k.min_lag, k.max_lag);
    };
    return all(a) == all(b);
}

}  // namespace

void AttentionPlan::make(const Format& new_format, const Batch& batch, const KeyBounds& new_keys, int heads,
                         bool is_latent, int threads) {
    sequences = -1;  // fits nothing until it is whole
    format = new_format;
    keys = new_keys;
    arena = batch.arena;
    arena_bytes = batch.arena_bytes;
    query_heads = heads;
    num_threads = threads;
    latent = is_latent;
    group = heads / format.num_heads;
    stride = (format.v_dim + 15) / 16 * 16;
    query_start.assign(batch.query_start, batch.query_start + batch.sequences + 1);
    first_position.assign(batch.first_position, batch.first_position + batch.sequences);
    first_block.resize(batch.sequences);
    end_block.resize(batch.sequences);
    entry.resize(batch.sequences);
    const int tokens = batch.sequences == 0 ? 0 : query_start[batch.sequences];
    low.resize(tokens);
    high.resize(tokens);
    entries.clear();
    strips.clear();
    tiles.clear();
    members.clear();
    segments.clear();
    segment_start.clear();
    items.clear();
    counts.clear();
    highest = 0;
    partials = 0;
    cost = 0;
    for (int s = 0; s < batch.sequences; ++s) {
        int64_t from = INT64_MAX, to = 0;
        for (int t = query_start[s]; t < query_start[s + 1]; ++t) {
            keys.of(first_position[s] + static_cast<int64_t>(t - query_start[s]), format.block_size, &low[t], &high[t]);
            if (low[t] >= high[t]) continue;
            from = std::min(from, low[t]);
            to = std::max(to, high[t]);
        }
        first_block[s] = from < to ? from / format.block_size : 0;
        end_block[s] = from < to ? (to + format.block_size - 1) / format.block_size : 0;
        entry[s] = static_cast<int64_t>(entries.size()) - first_block[s];
        for (int64_t b = first_block[s]; b < end_block[s]; ++b) {
            entries.push_back(batch.block(format, s, b) - batch.arena - batch.layer_offset);
            highest = std::max(highest, entries.back());
        }
    }
    sequences = batch.sequences;
    static thread_local Scratch scratch;
    Planner(*this, scratch).make();
}

bool AttentionPlan::fits(const Format& other, const Batch& batch, const KeyBounds& other_keys, int heads, bool is_latent,
                         int threads) const {
    if (sequences != batch.sequences || sequences < 0 || arena != batch.arena || arena_bytes != batch.arena_bytes ||
        query_heads != heads || latent != is_latent || num_threads != threads || !same(format, other) ||
        !same(keys, other_keys) || !std::equal(query_start.begin(), query_start.end(), batch.query_start) ||
        !std::equal(first_position.begin(), first_position.end(), batch.first_position)) {
        return false;
    }
    for (int s = 0; s < sequences; ++s) {
        const int64_t* row = batch.tables + s * batch.table_stride;
        if (end_block[s] > batch.max_blocks ||
            !std::equal(row + first_block[s], row + end_block[s], entries.data() + entry[s] + first_block[s])) {
            return false;
        }
    }
    return true;
}

int64_t AttentionPlan::keys_read() const {
    int64_t read = 0;
    for (const Tile& tile : tiles) each_reading(tile, [&](int64_t count, int) { read += count * format.num_heads; });
    return read;
}

void AttentionPlan::check(int64_t layer_offset) const {
    if (!entries.empty() && highest + layer_offset + format.layer_bytes > arena_bytes) {
        throw std::invalid_argument("the layer at " + std::to_string(layer_offset) + " of the span at " +
                                    std::to_string(highest) + " lies beyond the arena of " +
                                    std::to_string(arena_bytes) + " bytes");
    }
}

}  // namespace kvloom
