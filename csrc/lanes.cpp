#include "lanes.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>

#include "shares.h"

namespace kvloom {
namespace {

// Lanes read the weights once each. A thread's share of rows must give it enough to do for every weight that memory
// keeps up with all threads reading at once: so many rows per thread, times the number of threads.
constexpr int kRowsPerThread = 8;
// From about here on a product takes as long to compute as to read.
constexpr int64_t kBalancedRows = 12;
// How much longer than the mean the slowest lane may take. Threads that share products end together.
constexpr double kMostUneven = 1.06;

int64_t bytes_of(const Linear& linear) {
    return static_cast<int64_t>(linear.outputs) * linear.inner * item_bytes(linear.dtype);
}

}  // namespace

// One step of all lanes. Threads may be fewer than lanes, down to one.
struct Lanes::Work {
    struct Part {
        std::atomic<bool> taken{false}, ready{false};
        std::atomic<int> next{0}, left{0};  // items of the head's product: to be taken, not finished
        std::exception_ptr failure;
    };

    explicit Work(std::vector<Lane>& all) : lanes(all), parts(all.size()) {}

    // By each thread: a lane nobody has, beginning with its own, as long as there are any; then what is left of heads.
    void run() {
        const int count = static_cast<int>(lanes.size()), own = Shares::seat() % count;
        for (int i = 0; i < count; ++i) {
            if (!parts[(own + i) % count].taken.exchange(true)) body((own + i) % count);
        }
        for (int i = 0; i < count; ++i) head((own + i) % count);
    }

    void body(int index) {
        Lane& lane = lanes[index];
        Part& part = parts[index];
        try {
            lane.step.body(lane.input);
            part.left.store(lane.step.head_items(), std::memory_order_relaxed);
        } catch (...) {  // must not leave the thread that it was thrown in
            part.failure = std::current_exception();
        }
        part.ready.store(true, std::memory_order_release);
    }

    void head(int index) {
        const Lane& lane = lanes[index];
        Part& part = parts[index];
        while (!part.ready.load(std::memory_order_acquire)) relax();
        if (part.failure) return;
        const int items = lane.step.head_items();
        const auto start = std::chrono::steady_clock::now();
        for (int item = part.next.fetch_add(1); item < items; item = part.next.fetch_add(1)) {
            lane.step.head(lane.input, item);
            if (part.left.fetch_sub(1, std::memory_order_acq_rel) > 1 || lane.input.best == nullptr) continue;
            for (int row = 0; row < lane.input.num_rows; ++row) lane.step.best(lane.input, row);
        }
        nanoseconds += std::chrono::nanoseconds(std::chrono::steady_clock::now() - start).count();
    }

    void rethrow() const {
        for (const Part& part : parts) {
            if (part.failure) std::rethrow_exception(part.failure);
        }
    }

    std::vector<Lane>& lanes;
    std::vector<Part> parts;
    std::atomic<int64_t> nanoseconds{0};  // of all threads, on heads
};

int64_t Lanes::run(const StepInput& input) {
    if (!cut(input)) return whole_.run(input);
    // A row reads encoded only blocks before its own, and those were written before.
    const bool encodes = !input.encode_tasks.empty() || input.encode;
    const int64_t not_finite = encodes ? whole_.encode_before(input) : 0;
    for (Lane& lane : lanes_) fill(lane, input);
    ++by_rows_;
    Work work(lanes_);
    whole_.parallel().run([](void* data) { static_cast<Work*>(data)->run(); }, &work, true);
    work.rethrow();
    head_seconds_ += 1e-9 * static_cast<double>(work.nanoseconds) / static_cast<double>(lanes_.size());
    return not_finite;
}

// Whether the input is worth lanes; their sequences then take about as long each.
bool Lanes::cut(const StepInput& input) {
    const int threads = whole_.parallel().num_threads(), tokens = input.tokens;
    if (input.decode) return false;  // which is Python's, in memory that all share
    if (threads < 2 || tokens < static_cast<int64_t>(kRowsPerThread) * threads * threads) return false;
    const Batch& batch = input.batches.front();
    if (batch.sequences != tokens || !std::is_sorted(input.rows, input.rows + input.num_rows)) return false;
    for (int i = 0; i <= tokens; ++i) {
        if (batch.query_start[i] != i) return false;
    }

    int64_t weights = bytes_of(whole_.head_weights());
    struct Reading {
        int64_t window, bytes;  // per token of it
    };
    std::vector<Reading> readings;  // of layers with equal windows
    for (const StepLayer& layer : whole_.layers()) {
        for (const Linear* linear : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down}) weights += bytes_of(*linear);
        const Format& format = *input.formats[layer.group];
        const int64_t bytes = format.layer_bytes / format.block_size;
        const auto same = [&](const Reading& reading) { return reading.window == layer.window; };
        const auto found = std::find_if(readings.begin(), readings.end(), same);
        if (found != readings.end()) {
            found->bytes += bytes;
        } else {
            readings.push_back({layer.window, bytes});
        }
    }
    std::vector<int64_t> until(tokens + 1, 0);  // cost of the sequences before each, in bytes
    for (int i = 0; i < tokens; ++i) {
        int64_t cost = weights / kBalancedRows;
        const int64_t context = batch.first_position[i] + 1;
        for (const Reading& reading : readings) {
            cost += (reading.window < 0 ? context : std::min(context, reading.window)) * reading.bytes;
        }
        until[i + 1] = until[i] + cost;
    }
    while (static_cast<int>(lanes_.size()) < threads) lanes_.push_back(Lane{whole_.alone(), 0, 0, {}, {}});
    int first = 0;
    int64_t longest = 0;
    for (int i = 0; i < threads; ++i) {
        const int64_t aim = until[tokens] * (i + 1) / threads;
        int end = static_cast<int>(std::lower_bound(until.begin() + first, until.end(), aim) - until.begin());
        if (end > first && end <= tokens && until[end] - aim > aim - until[end - 1]) --end;
        if (i + 1 == threads) end = tokens;
        lanes_[i].first = first;
        lanes_[i].end = end;
        longest = std::max(longest, until[end] - until[first]);
        first = end;
    }
    return static_cast<double>(longest) * threads <= kMostUneven * static_cast<double>(until[tokens]);
}

void Lanes::fill(Lane& lane, const StepInput& input) {
    lane.input = input;
    lane.input.encode_tasks.clear();
    lane.input.encode = nullptr;
    lane.input.ids += lane.first;
    lane.input.positions += lane.first;
    lane.input.tokens = lane.end - lane.first;
    for (Batch& batch : lane.input.batches) {  // one row each: query_start begins alike everywhere
        batch.tables += lane.first * batch.table_stride;
        batch.first_position += lane.first;
        batch.sequences = lane.end - lane.first;
    }
    const int64_t* const begin = std::lower_bound(input.rows, input.rows + input.num_rows, lane.first);
    const int64_t* const end = std::lower_bound(begin, input.rows + input.num_rows, lane.end);
    lane.rows.assign(begin, end);
    for (int64_t& row : lane.rows) row -= lane.first;
    lane.input.rows = lane.rows.data();
    lane.input.num_rows = static_cast<int>(lane.rows.size());
    lane.input.logits += (begin - input.rows) * static_cast<int64_t>(whole_.vocab());
    if (input.best != nullptr) {
        lane.input.best += begin - input.rows;
        lane.input.best_value += begin - input.rows;
    }
}

Step::Times Lanes::take_times() {
    Step::Times times = whole_.take_times();
    times.linear += head_seconds_;
    head_seconds_ = 0;
    for (Lane& lane : lanes_) times.add(lane.step.take_times(), 1.0 / static_cast<double>(lanes_.size()));
    return times;
}

}  // namespace kvloom
