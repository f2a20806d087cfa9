#include "weights.h"

#include "convert.h"

namespace kvloom {
namespace {

template <class Bits>
void pack(const Bits* rows, int outputs, int inner, int panel, int pairs, Bits* to) {
    for (int first = 0; first < outputs; first += panel) {
        for (int i = 0; i < inner; i += pairs) {
            for (int column = 0; column < panel; ++column) {
                const bool real = first + column < outputs;
                const Bits* from = rows + static_cast<int64_t>(first + column) * inner + i;
                for (int p = 0; p < pairs; ++p) *to++ = real ? from[p] : Bits{0};
            }
        }
    }
}

}  // namespace

void pack_weights(const void* rows, DType dtype, int outputs, int inner, int panel, void* to) {
    if (dtype == DType::f32) {
        pack(static_cast<const uint32_t*>(rows), outputs, inner, panel, 1, static_cast<uint32_t*>(to));
    } else {
        pack(static_cast<const uint16_t*>(rows), outputs, inner, panel, pack_of(dtype), static_cast<uint16_t*>(to));
    }
}

void unpack_row(const Linear& linear, int panel, int output, float* to) {
    const unsigned char* start = linear.panels + output / panel * linear.panel_bytes(panel);
    const int pairs = pack_of(linear.dtype), column = output % panel;
    for (int i = 0; i < linear.inner; ++i) {
        const int64_t at = (static_cast<int64_t>(i / pairs) * panel + column) * pairs + i % pairs;
        if (linear.dtype == DType::f32) {
            to[i] = reinterpret_cast<const float*>(start)[at];
        } else {
            const uint16_t bits = reinterpret_cast<const uint16_t*>(start)[at];
            to[i] = linear.dtype == DType::bf16 ? bf16_to_float(bits) : f16_to_float(bits);
        }
    }
}

}  // namespace kvloom
