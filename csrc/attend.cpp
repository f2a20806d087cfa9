// Runs a plan: threads take its items (shares.h). An item that holds all of its strips' keys
// finishes their rows; of the others, which leave partial results in scratch, whoever is the last
// to work on a strip folds them.

#include "attend.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#include "shares.h"

namespace kvloom {
namespace {

using Strip = AttentionPlan::Strip;
using Tile = AttentionPlan::Tile;
using Item = AttentionPlan::Item;

constexpr int64_t kSmallCost = 4096;  // below it, waking threads takes longer than the work
constexpr size_t kKeptPlans = 8;      // of a thread; a step has one per layer group and run of a format

// Floats from a multiple of 64 bytes on, kept between calls.
class Floats {
public:
    float* get(size_t count) {
        if (memory_.size() < count + 16) memory_.resize(count + 16);
        const auto address = reinterpret_cast<uintptr_t>(memory_.data());
        return reinterpret_cast<float*>((address + 63) / 64 * 64);
    }

private:
    std::vector<float> memory_;
};

// Scratch of one worker thread.
struct Workspace {
    Floats floats;
    std::vector<const unsigned char*> blocks;
    std::vector<Segment> segments;  // of all chunks of an item
    std::vector<size_t> chunks;     // where each chunk's begin, and the end
};

// What a calling thread keeps between calls.
struct Shared {
    Floats partials;
    std::unique_ptr<std::atomic<int>[]> left;
    size_t size = 0;

    std::atomic<int>* counters(const std::vector<int>& counts) {
        if (size < counts.size()) {
            size = counts.size();
            left.reset(new std::atomic<int>[size]);
        }
        for (size_t i = 0; i < counts.size(); ++i) left[i].store(counts[i], std::memory_order_relaxed);
        return left.get();
    }
};

struct Result {
    float* out;
    float *top, *sum;
    Result from(int row, int stride) const { return {out + static_cast<ptrdiff_t>(row) * stride, top + row, sum + row}; }
};

class Run {
public:
    Run(const KernelTable& kernels, const AttentionPlan& plan, int64_t layer_offset, const Attention& attention,
        Shared& shared)
        : kernels_(kernels), plan_(plan), format_(plan.format), attention_(attention),
          layer_(plan.arena + layer_offset),
          dot_(kernels.has_dot && !format_.coded() && format_.dtype == DType::bf16 && attention.q_dtype == DType::bf16),
          partials_(shared.partials.get(plan.partials)), left_(shared.counters(plan.counts)),
          shares_(static_cast<int64_t>(plan.items.size()), plan.num_threads) {}

    void work() {
        static thread_local Workspace workspace;
        shares_.work([&](int64_t item) { run(plan_.items[item], workspace); });
    }

private:
    Result result(float* at, int rows) const {
        float* const end = at + static_cast<size_t>(rows) * plan_.stride;
        return {at, end, end + rows};
    }

    // Calls f(row of the tile, token, query head) for rows [row, row + strip.rows).
    template <class F>
    void each_row(const Strip& strip, int row, int kv_head, F f) const {
        int token = plan_.query_start[strip.sequence] + strip.row / plan_.group, member = strip.row % plan_.group;
        for (int end = row + strip.rows; row < end; ++row) {
            f(row, token, kv_head * plan_.group + member);
            if (++member == plan_.group) {
                member = 0;
                ++token;
            }
        }
    }
    template <class F>
    void each_row(const Item& item, F f) const {
        const Tile& tile = plan_.tiles[item.tile];
        for (int m = tile.member; m < tile.member + tile.members; ++m) {
            each_row(plan_.strips[plan_.members[m].strip], plan_.members[m].row, item.head, f);
        }
    }

    void run(const Item& item, Workspace& workspace) {
        const Tile& tile = plan_.tiles[item.tile];
        const int rows = tile.rows, columns = (rows + 7) / 8 * 8;
        const size_t row_floats = static_cast<size_t>(rows) * kLda, result_floats = plan_.partial_floats(rows);
        const size_t query_floats = plan_.latent ? static_cast<size_t>(columns) * format_.v_dim : 0;
        const size_t token_floats = plan_.latent ? static_cast<size_t>(kLatentTokens) * kLda : 0;
        const size_t product_floats = plan_.latent ? static_cast<size_t>(kLatentTokens) * columns : 0;
        const size_t coded_floats = format_.coded() ? coded_scratch_bytes(format_, rows) / sizeof(float) + 16 : 0;
        float* at = workspace.floats.get(3 * row_floats + 2 * result_floats + query_floats + token_floats + product_floats +
                                         coded_floats);
        const auto take = [&at](size_t count) { return (at += count) - count; };

        ChunkArgs args{};
        float* const q = take(row_floats);
        args.scores = take(row_floats);
        args.weights = take(row_floats);
        const Result acc = result(take(result_floats), rows), part = result(take(result_floats), rows);
        LatentArgs latent{take(query_floats), columns, take(token_floats), take(product_floats)};
        pack(item, rows, q, latent);
        args.coded = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(take(coded_floats)) + 63) / 64 * 64);

        int low[kMaxLatentRows], high[kMaxLatentRows];
        args.format = &format_;
        args.rows = rows;
        args.q = q;
        args.low = low;
        args.high = high;
        args.softcap = attention_.softcap;
        args.scale = attention_.softcap > 0.0f ? attention_.scale / attention_.softcap
                                               : attention_.scale * 1.44269504088896341f;
        args.out_stride = plan_.stride;
        args.latent = plan_.latent ? &latent : nullptr;

        find_segments(item, workspace);
        std::fill(acc.sum, acc.sum + rows, 0.0f);
        for (int64_t chunk = item.chunk; chunk < item.end_chunk; ++chunk) {
            const size_t begin = workspace.chunks[chunk - item.chunk], end = workspace.chunks[chunk - item.chunk + 1];
            args.segments = workspace.segments.data() + begin;
            args.count = static_cast<int>(end - begin);
            args.first = kChunk;
            args.end = 0;
            for (size_t s = begin; s < end; ++s) {
                args.first = std::min(args.first, workspace.segments[s].first);
                args.end = std::max(args.end, workspace.segments[s].end);
            }
            const int64_t base = chunk * kChunk;
            each_row(item, [&](int row, int token, int) {
                low[row] = static_cast<int>(std::max(plan_.low[token], base + args.first) - base);
                high[row] = static_cast<int>(std::min(plan_.high[token], base + args.end) - base);
            });
            const bool direct = tile.whole && chunk == item.chunk;  // nothing to fold into yet
            const Result to = direct ? acc : tile.whole ? part : partial(item.tile, item.head, chunk);
            args.out = to.out;
            args.top = to.top;
            args.sum = to.sum;
            kernels_.chunk(args, dot_);
            if (tile.whole && !direct) fold(rows, acc, part);
        }

        for (int m = tile.member; m < tile.member + tile.members; ++m) {
            const AttentionPlan::Part& member = plan_.members[m];
            const Strip& strip = plan_.strips[member.strip];
            if (tile.whole) {
                finish(strip, item.head, acc.from(member.row, plan_.stride));
            } else if (left_[strip.counter + item.head].fetch_sub(1, std::memory_order_acq_rel) == 1) {
                finish(strip, item.head, fold_all(strip, item.head));
            }
        }
    }

    void pack(const Item& item, int rows, float* q, const LatentArgs& latent) const {
        const void* query_rows[kMaxLatentRows];
        const auto find_rows = [&](const void* data, int64_t token_stride, int64_t head_stride) {
            each_row(item, [&](int row, int token, int head) {
                query_rows[row] = static_cast<const unsigned char*>(data) +
                                  (token * token_stride + head * head_stride) * item_bytes(attention_.q_dtype);
            });
        };
        find_rows(attention_.q, attention_.q_token_stride, attention_.q_head_stride);
        kernels_.pack(query_rows, rows, format_.k_dim, attention_.q_dtype, dot_, q);
        if (!plan_.latent) return;
        find_rows(attention_.q_latent, attention_.latent_token_stride, attention_.latent_head_stride);
        kernels_.pack_latent(query_rows, rows, latent.columns, format_.v_dim, attention_.q_dtype, dot_,
                             const_cast<void*>(latent.q));
    }

    // Segments of the item's chunks, and their blocks in one list: the entry after a segment's last
    // is the first that is read after it.
    void find_segments(const Item& item, Workspace& workspace) const {
        const Tile& tile = plan_.tiles[item.tile];
        workspace.blocks.clear();
        workspace.segments.clear();
        workspace.chunks.assign(1, 0);
        const unsigned char* const head = layer_ + item.head * format_.block_bytes;
        const auto add = [&](int sequence, int row, int rows, int64_t first, int64_t end, int64_t base) {
            workspace.segments.push_back({nullptr, static_cast<int>(first - base), static_cast<int>(end - base), row, rows});
            for (int64_t b = first / format_.block_size; b * format_.block_size < end; ++b) {
                workspace.blocks.push_back(head + plan_.block(sequence, b));
            }
        };
        for (int64_t chunk = item.chunk; chunk < item.end_chunk; ++chunk) {
            const int64_t base = chunk * kChunk;
            if (tile.segments < 0) {
                const Strip& strip = plan_.strips[plan_.members[tile.member].strip];
                add(strip.sequence, 0, strip.rows, std::max(strip.low, base), std::min(strip.high, base + kChunk), base);
            } else {
                const int index = tile.segments + static_cast<int>(chunk - tile.chunk);
                for (int s = plan_.segment_start[index]; s < plan_.segment_start[index + 1]; ++s) {
                    const auto& shared = plan_.segments[s];
                    add(shared.sequence, shared.row, shared.rows, shared.first, shared.end, base);
                }
            }
            workspace.chunks.push_back(workspace.segments.size());
        }
        workspace.blocks.insert(workspace.blocks.end(), 2, nullptr);
        const unsigned char* const* blocks = workspace.blocks.data();
        for (Segment& segment : workspace.segments) {
            segment.blocks = blocks;
            blocks += (segment.end + format_.block_size - 1) / format_.block_size - segment.first / format_.block_size;
        }
    }

    Result partial(int index, int head, int64_t chunk) const {
        const Tile& tile = plan_.tiles[index];
        const int64_t at = head * (tile.end_chunk - tile.chunk) + (chunk - tile.chunk);
        return result(partials_ + tile.partials + at * plan_.partial_floats(tile.rows), tile.rows);
    }

    Result fold_all(const Strip& strip, int head) const {
        Result all{};
        for (int i = strip.part; i < strip.part + strip.parts; ++i) {
            const AttentionPlan::Part& part = plan_.parts[i];
            const Tile& tile = plan_.tiles[part.tile];
            for (int64_t chunk = tile.chunk; chunk < tile.end_chunk; ++chunk) {
                const Result next = partial(part.tile, head, chunk).from(part.row, plan_.stride);
                if (all.out == nullptr) {
                    all = next;
                } else {
                    fold(strip.rows, all, next);
                }
            }
        }
        return all;
    }

    void fold(int rows, const Result& acc, const Result& part) const {
        kernels_.fold(rows, format_.v_dim, acc.out, plan_.stride, acc.top, acc.sum, part.out, plan_.stride, part.top,
                      part.sum);
    }

    void finish(const Strip& strip, int kv_head, const Result& all) const {
        const bool strided = attention_.out_token_stride != 0;
        const int64_t head_stride = strided ? attention_.out_head_stride : format_.v_dim;
        const int64_t token_stride = strided ? attention_.out_token_stride : plan_.query_heads * head_stride;
        each_row(strip, 0, kv_head, [&](int row, int token, int head) {
            FinishArgs args{};
            args.acc = all.out + static_cast<ptrdiff_t>(row) * plan_.stride;
            args.v_dim = format_.v_dim;
            args.top = all.top[row];
            args.sum = all.sum[row];
            args.sink = attention_.sinks != nullptr ? attention_.sinks + head : nullptr;
            args.dtype = attention_.out_dtype;
            args.out = static_cast<unsigned char*>(attention_.out) +
                       (token * token_stride + head * head_stride) * item_bytes(attention_.out_dtype);
            args.lse = attention_.lse != nullptr
                           ? attention_.lse + static_cast<int64_t>(token) * plan_.query_heads + head
                           : nullptr;
            kernels_.finish(args);
        });
    }

    const KernelTable& kernels_;
    const AttentionPlan& plan_;
    const Format& format_;
    const Attention& attention_;
    const unsigned char* const layer_;
    const bool dot_;
    float* const partials_;
    std::atomic<int>* const left_;
    Shares shares_;
};

// The plan of this thread that fits, or else a new one in the place of the oldest.
const AttentionPlan& find_plan(const Format& format, const Batch& batch, const Attention& attention, int num_threads) {
    static thread_local std::array<AttentionPlan, kKeptPlans> plans;
    static thread_local size_t oldest = 0;
    const bool latent = attention.q_latent != nullptr;
    for (size_t i = 0; i < kKeptPlans; ++i) {  // newest first
        const AttentionPlan& plan = plans[(oldest + 2 * kKeptPlans - 1 - i) % kKeptPlans];
        if (plan.fits(format, batch, attention.keys, attention.query_heads, latent, num_threads)) return plan;
    }
    AttentionPlan& plan = plans[oldest];
    oldest = (oldest + 1) % kKeptPlans;
    plan.make(format, batch, attention.keys, attention.query_heads, latent, num_threads);
    return plan;
}

}  // namespace

void attend(const KernelTable& kernels, const Format& format, const Batch& batch, const Attention& attention,
            const Parallel& parallel) {
    const AttentionPlan& plan = find_plan(format, batch, attention, parallel.num_threads());
    attend(kernels, plan, batch.layer_offset, attention, parallel);
}

void attend(const KernelTable& kernels, const AttentionPlan& plan, int64_t layer_offset, const Attention& attention,
            const Parallel& parallel) {
    const Planned call{&plan, layer_offset, attention};
    attend(kernels, &call, 1, parallel);
}

void attend(const KernelTable& kernels, const Planned* calls, int count, const Parallel& parallel) {
    struct Runs {
        std::array<std::optional<Run>, kMostPlanned> each;
        void work() {
            for (auto& run : each) {
                if (run) run->work();
            }
        }
    } runs;
    static thread_local std::array<Shared, kMostPlanned> shared;
    if (count > kMostPlanned) throw std::invalid_argument("too many calls at once");
    int64_t cost = 0;
    for (int i = 0; i < count; ++i) {
        const auto& [plan, layer_offset, attention] = calls[i];
        if (plan->sequences < 0 || plan->query_heads != attention.query_heads ||
            plan->latent != (attention.q_latent != nullptr)) {
            throw std::invalid_argument("this attention was not planned");
        }
        plan->check(layer_offset);
        runs.each[i].emplace(kernels, *plan, layer_offset, attention, shared[i]);
        cost += plan->cost;
    }
    parallel.run([](void* data) { static_cast<Runs*>(data)->work(); }, &runs, cost > kSmallCost);
}

}  // namespace kvloom
