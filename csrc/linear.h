// Rows of activations against weights packed in panels: the linear layers of a native step.
//
// A panel holds kPanel output channels: [inner/P][kPanel][P] elements, so that a step of the inner
// dimension is one contiguous row whose lanes are output channels, as in the cache's planes, and the
// same product (product.h) serves. Each output is one chain of multiply-adds in ascending order of the
// inner dimension: its bits depend on its row alone, whatever else is in the batch.
#pragma once

#include "product.h"

namespace kvloom::KVLOOM_ISA {

static constexpr int kPanel = 32;

template <class T>
void linear_panel(const LinearArgs& args) {
    constexpr ptrdiff_t item = sizeof(typename T::B);
    const unsigned char* weights = args.weights;
    // Channels of a panel that are multiplied with all rows before the next ones, while as many are fetched. More of
    // them mean fewer sums to store and load again; wide vectors get through short pieces before memory answers.
    const int piece = Vec::W > 8 && args.rows > 4 ? 128 : 64;
    for (int done = 0; done < args.inner; done += piece) {
        const int inner = args.inner - done < piece ? args.inner - done : piece;
        // Panels follow each other in memory, so what comes next is the next panel's beginning at the latest;
        // beyond the last panel a prefetch does no harm.
        const unsigned char* const following = weights + piece * kPanel * item;
        const unsigned char* const blocks[] = {weights, following, following};
        Operands o;
        o.a = static_cast<const typename T::A*>(args.a) + done / kChunk * args.chunk_stride + done % kChunk;
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
        weights += inner * kPanel * item;
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
