#define KVLOOM_ISA portable

#include "simd_portable.h"  // defines Vec, which the rest is written in

#include "kernels.h"
#include "variants.h"

namespace kvloom {

const KernelTable& kernels_portable() { return portable::table; }

}  // namespace kvloom
