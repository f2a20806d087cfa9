// Items for several threads. Each takes those of its own share, in order, and then what others have left. Shares lie
// in the order of items and threads keep theirs from call to call: rows that a thread has written are mostly those
// that it reads next, and stay in its caches, which on processors made of several dies are far from the others'.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>

namespace kvloom {

class Shares {
public:
    Shares(int64_t items, int num_threads) : count_(std::clamp(num_threads, 1, kMost)) {
        for (int i = 0; i < count_; ++i) {
            shares_[i].next.store(items * i / count_, std::memory_order_relaxed);
            shares_[i].end = items * (i + 1) / count_;
        }
    }

    // Called once by each thread: body(item) for every item that it gets.
    template <class F>
    void work(F&& body) {
        const int own = seat() % count_;
        for (int i = 0; i < count_; ++i) {
            Share& share = shares_[(own + i) % count_];
            if (share.next.load(std::memory_order_relaxed) >= share.end) continue;
            for (int64_t item = share.next.fetch_add(1); item < share.end; item = share.next.fetch_add(1)) body(item);
        }
    }

    // A number of the thread's own. Threads that run together mostly came one after the other.
    static int seat() {
        static std::atomic<unsigned> taken{0};
        static thread_local const int own = static_cast<int>(taken.fetch_add(1) & 0xffff);
        return own;
    }

private:
    static constexpr int kMost = 64;  // more threads have shares in common

    struct alignas(64) Share {
        std::atomic<int64_t> next{0};
        int64_t end = 0;
    };

    const int count_;
    std::array<Share, kMost> shares_;
};

}  // namespace kvloom
