// Threads. The extension links no OpenMP runtime: two runtimes in one process keep two spinning
// pools that take each other's cores. It calls GOMP_parallel of the runtime torch has loaded, when
// Python found its address, so that both share one pool; else it has a pool of its own.
#pragma once

#include <cstdint>

namespace kvloom {

// Tells the processor that this thread only waits.
static inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Parallel {
public:
    // gomp_parallel: address of GOMP_parallel, or 0 for our own pool.
    Parallel(int num_threads, uintptr_t gomp_parallel);

    int num_threads() const { return num_threads_; }

    // Calls body(data) once on each of num_threads threads, the caller's included, and returns when
    // all have. Bodies share work through an atomic counter in data. `wide` false: the caller alone.
    void run(void (*body)(void*), void* data, bool wide) const;

private:
    int num_threads_;
    uintptr_t gomp_parallel_;
};

}  // namespace kvloom
