#define KVLOOM_ISA avx2

#include "simd_avx2.h"  // defines Vec, which the rest is written in

#include "kernels.h"
#include "variants.h"

namespace kvloom {

const KernelTable& kernels_avx2() { return avx2::table; }

}  // namespace kvloom
