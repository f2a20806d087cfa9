// The instruction sets in this build and which of them this CPU has. No standard header: the
// kernel sources include this one (see types.h).
#pragma once

#include "types.h"

namespace kvloom {

struct Variant {
    const char* name;
    const KernelTable* kernels;
};

const KernelTable& kernels_portable();
const KernelTable& kernels_avx2();
const KernelTable& kernels_avx512();
const KernelTable& kernels_avx512bf16();

// Fills `variants` (room for 4), slowest first, and returns how many this CPU can run.
int available_variants(Variant* variants);

}  // namespace kvloom
