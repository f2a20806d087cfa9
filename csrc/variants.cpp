#include "variants.h"

namespace kvloom {

int available_variants(Variant* variants) {
    int count = 0;
    variants[count++] = {"portable", &kernels_portable()};
#ifdef KVLOOM_X86
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (avx2) variants[count++] = {"avx2", &kernels_avx2()};
#ifdef KVLOOM_EMULATE_AVX512
    variants[count++] = {"avx512", &kernels_avx512()};
    variants[count++] = {"avx512bf16", &kernels_avx512bf16()};
#else
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (avx512) variants[count++] = {"avx512", &kernels_avx512()};
    if (avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")) {
        variants[count++] = {"avx512bf16", &kernels_avx512bf16()};
    }
#endif
#endif
    return count;
}

}  // namespace kvloom
