#include "write.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "convert.h"

namespace kvloom {
namespace {

template <DType type>
struct Element {
    using Bits = uint16_t;
};
template <>
struct Element<DType::f32> {
    using Bits = uint32_t;
};

// One element's bits in type `to`.
template <DType to, DType from>
typename Element<to>::Bits convert(typename Element<from>::Bits bits) {
    if constexpr (to == from) {
        return bits;
    } else {
        float x;
        if constexpr (from == DType::f32) {
            x = bits_float(bits);
        } else if constexpr (from == DType::f16) {
            x = f16_to_float(bits);
        } else {
            x = bf16_to_float(bits);
        }
        if constexpr (to == DType::f32) {
            return float_bits(x);
        } else if constexpr (to == DType::f16) {
            return float_to_f16(x);
        } else {
            return float_to_bf16(x);
        }
    }
}

// Tokens [first, end) of one block of one head, row 0 of `rows` being token `first`.
template <DType to, DType from>
void write_keys(void* plane, const void* rows, int64_t stride, int first, int end, int dim, int block_size) {
    constexpr int P = to == DType::bf16 ? 2 : 1;  // [dim/P][token][P]
    using Out = typename Element<to>::Bits;
    auto* out = static_cast<Out*>(plane);
    const auto* in = static_cast<const typename Element<from>::Bits*>(rows);
    for (int d = 0; d < dim; d += P) {
        Out* row = out + static_cast<int64_t>(d) * block_size;
        for (int t = first; t < end; ++t) {
            if constexpr (P == 2 && to == from) {  // a pair as it is
                __builtin_memcpy(row + t * P, in + (t - first) * stride + d, sizeof(uint32_t));
                continue;
            }
            for (int p = 0; p < P; ++p) row[t * P + p] = convert<to, from>(in[(t - first) * stride + d + p]);
        }
    }
}

template <DType to, DType from>
void write_values(void* plane, const void* rows, int64_t stride, int first, int end, int dim) {
    using Out = typename Element<to>::Bits;
    auto* out = static_cast<Out*>(plane);
    const auto* in = static_cast<const typename Element<from>::Bits*>(rows);
    int t = first;
    while (t < end) {
        const auto* row = in + (t - first) * stride;
        if constexpr (to != DType::bf16) {  // [token][dim]
            for (int d = 0; d < dim; ++d) out[static_cast<int64_t>(t) * dim + d] = convert<to, from>(row[d]);
            ++t;
        } else {  // [token/2][dim][2]
            Out* pair = out + static_cast<int64_t>(t / 2) * dim * 2;
            if (t % 2 == 0 && t + 1 < end) {
                for (int d = 0; d < dim; ++d) {
                    pair[2 * d] = convert<to, from>(row[d]);
                    pair[2 * d + 1] = convert<to, from>(row[stride + d]);
                }
                t += 2;
            } else {
                for (int d = 0; d < dim; ++d) pair[2 * d + t % 2] = convert<to, from>(row[d]);
                ++t;
            }
        }
    }
}

// Calls f(to, from) with both types as constants.
template <class F>
void with_types(DType to, DType from, F f) {
    const auto inner = [&](auto target) {
        switch (from) {
            case DType::f32: return f(target, std::integral_constant<DType, DType::f32>{});
            case DType::f16: return f(target, std::integral_constant<DType, DType::f16>{});
            case DType::bf16: return f(target, std::integral_constant<DType, DType::bf16>{});
        }
    };
    switch (to) {
        case DType::f32: return inner(std::integral_constant<DType, DType::f32>{});
        case DType::f16: return inner(std::integral_constant<DType, DType::f16>{});
        case DType::bf16: return inner(std::integral_constant<DType, DType::bf16>{});
    }
}

// Consecutive tokens of one sequence in one block.
struct Run {
    unsigned char* block;
    int64_t row;  // of the packed tensors
    int first, end;
};

struct Call {
    const Format& format;
    const Rows &k, &v;
    std::vector<Run> runs;
    std::atomic<size_t> next{0};

    static const void* at(const Rows& rows, int64_t row, int head) {
        return static_cast<const unsigned char*>(rows.data) +
               (row * rows.token_stride + head * rows.head_stride) * item_bytes(rows.dtype);
    }

    void work() {
        for (size_t i = next.fetch_add(1); i < runs.size(); i = next.fetch_add(1)) {
            const Run& run = runs[i];
            for (int head = 0; head < format.num_heads; ++head) {
                unsigned char* block = run.block + head * format.block_bytes;
                with_types(format.dtype, k.dtype, [&](auto to, auto from) {
                    write_keys<decltype(to)::value, decltype(from)::value>(
                        block + format.k_offset, at(k, run.row, head), k.token_stride, run.first, run.end,
                        format.k_dim, format.block_size);
                });
                with_types(format.dtype, v.dtype, [&](auto to, auto from) {
                    write_values<decltype(to)::value, decltype(from)::value>(block + format.v_offset,
                                                                             at(v, run.row, head), v.token_stride,
                                                                             run.first, run.end, format.v_dim);
                });
            }
        }
    }
};

}  // namespace

void write(const Format& format, const Batch& batch, const Rows& k, const Rows& v, const Parallel& parallel) {
    Call call{format, k, v, {}};
    const int64_t size = format.block_size;
    for (int s = 0; s < batch.sequences; ++s) {
        int64_t row = batch.query_start[s], position = batch.first_position[s];
        const int64_t end = batch.query_start[s + 1];
        while (row < end) {
            const int64_t block = position / size, within = position % size;
            const int64_t count = std::min(size - within, end - row);
            call.runs.push_back({batch.block(format, s, block), row, static_cast<int>(within),
                                 static_cast<int>(within + count)});
            row += count;
            position += count;
        }
    }
    const int64_t tokens = batch.sequences == 0 ? 0 : batch.query_start[batch.sequences];
    const bool wide = tokens * format.num_heads * (format.k_dim + format.v_dim) > 64 * 1024;
    parallel.run([](void* data) { static_cast<Call*>(data)->work(); }, &call, wide);
}

void fetch_for_write(const Format& format, const Batch& batch) {
    const int64_t size = format.block_size, item = item_bytes(format.dtype), pack = format.dtype == DType::bf16 ? 2 : 1;
    for (int s = 0; s < batch.sequences; ++s) {
        if (batch.query_start[s + 1] == batch.query_start[s]) continue;
        const int64_t position = batch.first_position[s], within = position % size;
        const unsigned char* block = batch.block(format, s, position / size);
        for (int head = 0; head < format.num_heads; ++head, block += format.block_bytes) {
            const unsigned char* keys = block + format.k_offset + within * pack * item;  // [dim/P][token][P]
            for (int d = 0; d < format.k_dim; d += static_cast<int>(pack), keys += size * pack * item) __builtin_prefetch(keys, 1, 2);
            const int64_t row = format.v_dim * pack * item;  // [token/P][dim][P]
            const unsigned char* const values = block + format.v_offset + within / pack * row;
            for (int64_t at = 0; at < row; at += 64) __builtin_prefetch(values + at, 1, 2);
        }
    }
}

}  // namespace kvloom
