#include "parallel.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace kvloom {
namespace {

// One pool per process, grown to the largest number asked for and never torn down.
class Pool {
public:
    static Pool& instance() {
        static Pool* pool = new Pool;  // leaked: workers may outlive static destruction
        return *pool;
    }

    void run(void (*body)(void*), void* data, int num_threads) {
        std::unique_lock<std::mutex> busy(busy_, std::try_to_lock);
        if (!busy.owns_lock()) return body(data);  // another caller has the pool: work alone
        while (static_cast<int>(workers_.size()) < num_threads - 1) {
            const int index = static_cast<int>(workers_.size());
            workers_.emplace_back([this, index, seen = generation_.load()] { loop(index, seen); });
            workers_.back().detach();
        }
        body_ = body;
        data_ = data;
        wanted_ = num_threads - 1;
        left_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            generation_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        body(data);
        while (left_.load(std::memory_order_acquire) > 0) relax();
    }

private:
    static constexpr int kSpins = 4000;  // some tens of microseconds: the gap between two layers

    void loop(int index, uint64_t seen) {
        for (;;) {
            for (int i = 0; i < kSpins && generation_.load(std::memory_order_acquire) == seen; ++i) relax();
            if (generation_.load(std::memory_order_acquire) == seen) {
                std::unique_lock<std::mutex> lock(mutex_);
                wake_.wait(lock, [&] { return generation_.load(std::memory_order_acquire) != seen; });
            }
            seen = generation_.load(std::memory_order_acquire);
            if (index < wanted_) body_(data_);
            left_.fetch_sub(1, std::memory_order_release);
        }
    }

    std::mutex busy_, mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
    std::atomic<uint64_t> generation_{0};
    std::atomic<int> left_{0};
    void (*body_)(void*) = nullptr;
    void* data_ = nullptr;
    int wanted_ = 0;
};

}  // namespace

Parallel::Parallel(int num_threads, uintptr_t gomp_parallel)
    : num_threads_(std::max(1, num_threads)), gomp_parallel_(gomp_parallel) {}

void Parallel::run(void (*body)(void*), void* data, bool wide) const {
    if (!wide || num_threads_ == 1) return body(data);
    if (gomp_parallel_ != 0) {
        using Function = void (*)(void (*)(void*), void*, unsigned, unsigned);
        // Always the same number of threads: libgomp ends and restarts threads when it changes.
        return reinterpret_cast<Function>(gomp_parallel_)(body, data, static_cast<unsigned>(num_threads_), 0);
    }
    Pool::instance().run(body, data, num_threads_);
}

}  // namespace kvloom
