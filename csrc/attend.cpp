// Plans a call and runs it.
//
// The query rows of a KV head (token-major, then the query heads of its group) are cut into tiles
// that read the keys once. A tile's keys are cut at absolute multiples of kChunk; each chunk gives
// a partial result, and a tile's partial results are folded in ascending order. A long tile becomes
// several items, each some of its chunks, whose partials go to scratch; whoever finishes the last of
// them folds all. So who computes what changes no bit of the result.

#include "attend.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <vector>

namespace kvloom {
namespace {

constexpr int64_t kItemsPerThread = 16;
// Rough cost of reading a key in units of the cost of a multiply-add per query row.
constexpr int64_t kReadCost = 8;
constexpr int64_t kSmallCost = 4096;  // below it, waking threads takes longer than the work

int round16(int dim) { return (dim + 15) / 16 * 16; }

struct Tile {
    int sequence;
    int row, rows;        // of the sequence's rows for one KV head
    int64_t low, high;    // keys visible to any row
    int64_t cost() const { return (high - low) * (rows + kReadCost); }
};

struct Item {
    int tile, head;
    int64_t chunk, end_chunk;
    int split;  // index into splits, or -1: the item is the whole tile
};

// A tile of one head that several items share.
struct Split {
    int64_t chunk;      // first
    int chunks;
    size_t partials;    // offset in scratch of [chunks][rows * (stride + 2)]
    std::atomic<int> left;
};

// Scratch of one worker thread, kept between calls.
struct Workspace {
    std::vector<float> memory;
    std::vector<const unsigned char*> blocks;

    float* floats(size_t count) {
        if (memory.size() < count + 16) memory.resize(count + 16);
        const auto address = reinterpret_cast<uintptr_t>(memory.data());
        return reinterpret_cast<float*>((address + 63) / 64 * 64);
    }
};

// What a calling thread keeps between calls.
struct Plan {
    std::vector<int64_t> low, high;  // [tokens]
    std::vector<Tile> tiles;
    std::vector<Item> items;
    std::vector<float> partials;
};

struct Result {
    float* out;
    float *top, *sum;
};

class Call {
public:
    Call(const KernelTable& kernels, const Format& format, const Batch& batch, const Attention& attention, Plan& plan)
        : kernels_(kernels), format_(format), batch_(batch), attention_(attention), plan_(plan),
          group_(attention.query_heads / format.num_heads), stride_(round16(format.v_dim)),
          max_rows_(attention.q_latent != nullptr ? kMaxLatentRows : kMaxRows),
          dot_(kernels.has_dot && format.dtype == DType::bf16 && attention.q_dtype == DType::bf16) {}

    // Returns the total cost.
    int64_t make_plan(int threads) {
        const int tokens = batch_.sequences == 0 ? 0 : batch_.query_start[batch_.sequences];
        plan_.low.resize(tokens);
        plan_.high.resize(tokens);
        plan_.tiles.clear();
        plan_.items.clear();
        int64_t total = 0;
        for (int s = 0; s < batch_.sequences; ++s) total += plan_sequence(s);
        total *= format_.num_heads;

        const int64_t target = std::max<int64_t>(total / (threads * kItemsPerThread), 1);
        size_t partials = 0;
        int splits = 0;
        // Heads outermost within a sequence, so that tiles which run together share keys; last
        // tiles first, since they are the longest.
        for (size_t begin = 0, end; begin < plan_.tiles.size(); begin = end) {
            for (end = begin; end < plan_.tiles.size() && plan_.tiles[end].sequence == plan_.tiles[begin].sequence;) ++end;
            for (int head = 0; head < format_.num_heads; ++head) {
                for (size_t index = end; index-- > begin;) add_items(static_cast<int>(index), head, target, splits, partials);
            }
        }
        plan_.partials.resize(std::max(plan_.partials.size(), partials));
        splits_.reset(new Split[splits]);
        size_t offset = 0;
        for (const Item& item : plan_.items) {
            if (item.split < 0) continue;
            const Tile& tile = plan_.tiles[item.tile];
            Split& split = splits_[item.split];
            if (item.chunk == tile.low / kChunk) {  // first item of its split
                split.chunk = item.chunk;
                split.chunks = static_cast<int>(chunk_count(tile));
                split.partials = offset;
                split.left.store(0, std::memory_order_relaxed);
                offset += split.chunks * partial_floats(tile.rows);
            }
            split.left.fetch_add(1, std::memory_order_relaxed);
        }
        return total;
    }

    void work() {
        static thread_local Workspace workspace;
        for (size_t i = next_.fetch_add(1); i < plan_.items.size(); i = next_.fetch_add(1)) {
            run(plan_.items[i], workspace);
        }
    }

private:
    static int64_t chunk_count(const Tile& tile) { return (tile.high - 1) / kChunk - tile.low / kChunk + 1; }
    size_t partial_floats(int rows) const { return static_cast<size_t>(rows) * (stride_ + 2); }

    Result partial(float* at, int rows) const {
        return {at, at + static_cast<size_t>(rows) * stride_, at + static_cast<size_t>(rows) * (stride_ + 1)};
    }

    // Bounds of the sequence's tokens, and its tiles. Returns their cost for one head.
    int64_t plan_sequence(int s) {
        const int start = batch_.query_start[s], tokens = batch_.query_start[s + 1] - start;
        int64_t low = INT64_MAX, high = 0;
        for (int t = 0; t < tokens; ++t) {
            int64_t from, to;
            attention_.keys.of(batch_.first_position[s] + static_cast<int64_t>(t), format_.block_size, &from, &to);
            plan_.low[start + t] = from;
            plan_.high[start + t] = to;
            if (from < to) {
                low = std::min(low, from);
                high = std::max(high, to);
            }
        }
        for (int64_t b = low / format_.block_size; b * format_.block_size < high; ++b) batch_.block(format_, s, b);  // checks

        const int rows = tokens * group_, count = (rows + max_rows_ - 1) / max_rows_;
        int64_t cost = 0;
        for (int i = 0, row = 0; i < count; ++i) {
            Tile tile{s, row, (rows - row) / (count - i), INT64_MAX, 0};
            for (int t = row / group_; t * group_ < row + tile.rows; ++t) {
                const int64_t from = plan_.low[start + t], to = plan_.high[start + t];
                if (from < to) {
                    tile.low = std::min(tile.low, from);
                    tile.high = std::max(tile.high, to);
                }
            }
            if (tile.low >= tile.high) tile.low = tile.high = 0;
            row += tile.rows;
            cost += tile.cost();
            plan_.tiles.push_back(tile);
        }
        return cost;
    }

    void add_items(int index, int head, int64_t target, int& splits, size_t& partials) {
        const Tile& tile = plan_.tiles[index];
        if (tile.high == 0) {
            plan_.items.push_back({index, head, 0, 0, -1});
            return;
        }
        const int64_t first = tile.low / kChunk, chunks = chunk_count(tile);
        const int64_t parts = std::min(chunks, (tile.cost() + target - 1) / target);
        if (parts <= 1) {
            plan_.items.push_back({index, head, first, first + chunks, -1});
            return;
        }
        for (int64_t p = 0; p < parts; ++p) {
            plan_.items.push_back({index, head, first + chunks * p / parts, first + chunks * (p + 1) / parts, splits});
        }
        ++splits;
        partials += chunks * partial_floats(tile.rows);
    }

    void run(const Item& item, Workspace& workspace) {
        const Tile& tile = plan_.tiles[item.tile];
        const int rows = tile.rows, start = batch_.query_start[tile.sequence];
        const size_t row_floats = static_cast<size_t>(rows) * kLda;
        const int columns = (rows + 7) / 8 * 8;
        const size_t latent_floats =
            attention_.q_latent == nullptr
                ? 0
                : static_cast<size_t>(columns) * (format_.v_dim + kLatentTokens) + static_cast<size_t>(kLatentTokens) * kLda;
        float* q = workspace.floats(3 * row_floats + 2 * partial_floats(rows) + 64 + latent_floats);
        float* scores = q + row_floats;
        float* weights = scores + row_floats;
        const Result acc = partial(weights + row_floats, rows);
        const Result part = partial(acc.sum + rows + (16 - 2 * rows % 16) % 16, rows);

        const void* query_rows[kMaxLatentRows];
        const auto find_rows = [&](const void* data, int64_t token_stride, int64_t head_stride) {
            for (int r = 0; r < rows; ++r) {
                const int64_t token = start + (tile.row + r) / group_, head = item.head * group_ + (tile.row + r) % group_;
                query_rows[r] = static_cast<const unsigned char*>(data) +
                                (token * token_stride + head * head_stride) * item_bytes(attention_.q_dtype);
            }
        };
        find_rows(attention_.q, attention_.q_token_stride, attention_.q_head_stride);
        kernels_.pack(query_rows, rows, format_.k_dim, attention_.q_dtype, dot_, q);
        LatentArgs latent{};
        if (attention_.q_latent != nullptr) {
            float* queries = part.sum + rows + (16 - 2 * rows % 16) % 16;
            latent = {queries, columns, queries + static_cast<size_t>(columns) * format_.v_dim, nullptr};
            latent.products = static_cast<float*>(latent.tokens) + static_cast<size_t>(kLatentTokens) * kLda;
            find_rows(attention_.q_latent, attention_.latent_token_stride, attention_.latent_head_stride);
            kernels_.pack_latent(query_rows, rows, columns, format_.v_dim, attention_.q_dtype, dot_, queries);
        }

        const int64_t size = format_.block_size;
        const int64_t from = std::max(tile.low, item.chunk * kChunk), to = std::min(tile.high, item.end_chunk * kChunk);
        workspace.blocks.clear();
        for (int64_t b = from / size; b * size < to; ++b) {
            workspace.blocks.push_back(batch_.block(format_, tile.sequence, b) + item.head * format_.block_bytes);
        }
        workspace.blocks.push_back(nullptr);

        int low[kMaxLatentRows], high[kMaxLatentRows];
        ChunkArgs args{};
        args.format = &format_;
        args.rows = rows;
        args.q = q;
        args.low = low;
        args.high = high;
        args.softcap = attention_.softcap;
        args.scale = attention_.softcap > 0.0f ? attention_.scale / attention_.softcap
                                               : attention_.scale * 1.44269504088896341f;
        args.scores = scores;
        args.weights = weights;
        args.out_stride = stride_;
        args.latent = attention_.q_latent != nullptr ? &latent : nullptr;

        std::fill(acc.sum, acc.sum + rows, 0.0f);
        for (int64_t chunk = item.chunk; chunk < item.end_chunk; ++chunk) {
            const int64_t base = chunk * kChunk;
            const int64_t first = std::max(from, base), end = std::min(to, base + kChunk);
            args.first = static_cast<int>(first - base);
            args.end = static_cast<int>(end - base);
            args.blocks = workspace.blocks.data() + (first / size - from / size);
            for (int r = 0; r < rows; ++r) {
                const int token = start + (tile.row + r) / group_;
                low[r] = static_cast<int>(std::max(plan_.low[token], first) - base);
                high[r] = static_cast<int>(std::min(plan_.high[token], end) - base);
            }
            const bool whole = item.split < 0;
            const bool direct = whole && chunk == item.chunk;  // nothing to fold into yet
            const Result to_write = direct ? acc : whole ? part : split_partial(item, chunk, rows);
            args.out = to_write.out;
            args.top = to_write.top;
            args.sum = to_write.sum;
            kernels_.chunk(args, dot_);
            if (whole && !direct) fold(rows, acc, part);
        }
        if (item.split < 0) {
            finish(tile, item.head, acc);
        } else {
            Split& split = splits_[item.split];
            if (split.left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
                const Result all = split_partial(item, split.chunk, rows);
                for (int c = 1; c < split.chunks; ++c) fold(rows, all, split_partial(item, split.chunk + c, rows));
                finish(tile, item.head, all);
            }
        }
    }

    Result split_partial(const Item& item, int64_t chunk, int rows) const {
        const Split& split = splits_[item.split];
        return partial(plan_.partials.data() + split.partials + (chunk - split.chunk) * partial_floats(rows), rows);
    }

    void fold(int rows, const Result& acc, const Result& part) const {
        kernels_.fold(rows, format_.v_dim, acc.out, stride_, acc.top, acc.sum, part.out, stride_, part.top, part.sum);
    }

    void finish(const Tile& tile, int kv_head, const Result& acc) const {
        const int start = batch_.query_start[tile.sequence];
        for (int r = 0; r < tile.rows; ++r) {
            const int64_t token = start + (tile.row + r) / group_;
            const int64_t head = static_cast<int64_t>(kv_head) * group_ + (tile.row + r) % group_;
            const int64_t row = token * attention_.query_heads + head;
            FinishArgs args{};
            args.acc = acc.out + static_cast<ptrdiff_t>(r) * stride_;
            args.v_dim = format_.v_dim;
            args.top = acc.top[r];
            args.sum = acc.sum[r];
            args.sink = attention_.sinks != nullptr ? attention_.sinks + head : nullptr;
            args.dtype = attention_.out_dtype;
            args.out = static_cast<unsigned char*>(attention_.out) + row * format_.v_dim * item_bytes(attention_.out_dtype);
            args.lse = attention_.lse != nullptr ? attention_.lse + row : nullptr;
            kernels_.finish(args);
        }
    }

    const KernelTable& kernels_;
    const Format& format_;
    const Batch& batch_;
    const Attention& attention_;
    Plan& plan_;
    const int group_;    // query heads per KV head
    const int stride_;   // floats per output row in scratch
    const int max_rows_;  // of a tile
    const bool dot_;
    std::unique_ptr<Split[]> splits_;
    std::atomic<size_t> next_{0};
};

}  // namespace

void attend(const KernelTable& kernels, const Format& format, const Batch& batch, const Attention& attention,
            const Parallel& parallel) {
    static thread_local Plan plan;
    Call call(kernels, format, batch, attention, plan);
    const int64_t cost = call.make_plan(parallel.num_threads());
    parallel.run([](void* data) { static_cast<Call*>(data)->work(); }, &call, cost > kSmallCost);
}

}  // namespace kvloom
