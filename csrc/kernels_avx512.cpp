#define KVLOOM_ISA avx512

#include "simd_avx512.h"  // defines Vec, which the rest is written in

#include "kernels.h"
#include "variants.h"

namespace kvloom {

const KernelTable& kernels_avx512() { return avx512::table; }

}  // namespace kvloom
