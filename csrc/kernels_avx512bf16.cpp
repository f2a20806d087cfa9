#define KVLOOM_DOT
#define KVLOOM_ISA avx512bf16

#include "simd_avx512.h"  // defines Vec, which the rest is written in

#include "kernels.h"
#include "variants.h"

namespace kvloom {

const KernelTable& kernels_avx512bf16() { return avx512bf16::table; }

}  // namespace kvloom
