// Rows of activations against weights packed in panels: the linear layers of a native step.
//
// A panel holds kPanel output channels: [inner/P][kPanel][P] elements, so that a step of the inner
// dimension is one contiguous row whose lanes are output channels, as in the cache's planes, and the
// same product (product.h) serves. Each output is one chain of multiply-adds in ascending order of the
// inner dimension: its bits depend on its row alone, whatever else is in the batch.
#pragma once

#include "product.h"

namespace kvloom::KVLOOM_ISA {

static constexpr int kPanel = 4 * Vec::W;

template <class T>
void linear_panel(const LinearArgs& args) {
    constexpr ptrdiff_t item = sizeof(typename T::B);
    const unsigned char* weights = args.weights;
    for (int done = 0, chunk = 0; done < args.inner; done += kChunk, ++chunk) {
        const int inner = args.inner - done < kChunk ? args.inner - done : kChunk;
        const unsigned char* after = weights + inner * kPanel * item;
        const unsigned char* const blocks[] = {weights, done + inner < args.inner ? after : args.next};
        Operands o;
        o.a = static_cast<const typename T::A*>(args.a) + chunk * args.chunk_stride;
        o.block = blocks;
        o.blocks = 1;
        o.b_offset = 0;
        o.b_stride = kPanel * T::P;
        o.steps = inner / T::P;
        o.c = args.c;
        o.c_stride = args.c_stride;
        o.accumulate = done > 0;
        o.prefetch = true;
        product<T>(args.rows, kPanel, o);
        weights = after;
    }
}

template <class V>
struct LinearChooser {
    static void panel(const LinearArgs& args, bool dot) {
        switch (args.dtype) {
            case DType::f32: return linear_panel<F32>(args);
            case DType::f16: return linear_panel<F16>(args);
            case DType::bf16:
                if constexpr (V::kDot) {
                    if (dot) return linear_panel<BF16Dot>(args);
                }
                return linear_panel<BF16>(args);
        }
    }
};

}  // namespace kvloom::KVLOOM_ISA
