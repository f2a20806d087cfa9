// C = A B or C += A B for a few rows of A against a plane of the cache.
//
// Logits are A = queries, B = K as [dim/P][token][P]; outputs are A = weights, B = V as
// [token/P][dim][P]. Either way a step of the inner dimension is one contiguous row of B, whose
// lanes are independent columns of C: no horizontal sums. Each element of C is one chain of
// multiply-adds in ascending order, so its bits do not depend on the tile it was computed in.
#pragma once

#include "types.h"

namespace kvloom::KVLOOM_ISA {

// Storage types: A is the type of queries and weights, P the elements that a step takes. V repeats
// Vec as a name that depends on the template, since not every Vec has every operation.
struct F32 : Vec::Rows {
    using V = Vec;
    using A = float;
    using B = float;
    static constexpr int P = 1;
};
struct F16 : Vec::Rows {
    using V = Vec;
    using A = float;
    using B = uint16_t;
    static constexpr int P = 1;
};
struct BF16 : Vec::RowsOfPairs {
    using V = Vec;
    using A = float;
    using B = uint16_t;
    static constexpr int P = 2;
};
struct BF16Dot : Vec::Rows {
    using V = Vec;
    using A = uint16_t;
    using B = uint16_t;
    static constexpr int P = 2;
};

template <class X, class Y>
struct Same {
    static constexpr bool value = false;
};
template <class X>
struct Same<X, X> {
    static constexpr bool value = true;
};

// The block to fetch while `bytes` of one are read: the next one or, where they are read in about the time that memory
// takes to answer, the one after it. Lists of the cache's blocks end with two nulls.
static inline const unsigned char* ahead(const unsigned char* const* block, ptrdiff_t bytes) {
    return bytes > 8192 || block[1] == nullptr ? block[1] : block[2];
}

// B is one plane of `blocks` blocks, `steps` rows of each from `b_offset` bytes after the block's start;
// A goes on from block to block. With `prefetch`, as much of the block that is ahead is fetched as is read here.
struct Operands {
    const void* a;
    const unsigned char* const* block;
    int blocks;
    ptrdiff_t b_offset;
    ptrdiff_t b_stride;  // elements from one step's row of B to the next
    int steps;
    float* c;
    ptrdiff_t c_stride;
    bool accumulate;
    bool prefetch;
};

// ROWS x VECS vectors of C in registers; HALF: one vector of which only the lower half counts.
template <class T, int ROWS, int VECS, bool HALF>
void product_tile(const Operands& o, int row, int column) {
    using V = typename T::V;
    using F = typename V::F;
    constexpr int W = V::W;
    constexpr int kRowBytes = (HALF ? W / 2 : VECS * W) * T::P * static_cast<int>(sizeof(typename T::B));
    const auto* a = static_cast<const typename T::A*>(o.a) + static_cast<ptrdiff_t>(row) * kLda;
    const ptrdiff_t c_stride = o.c_stride, b_stride = o.b_stride;
    float* c = o.c + row * c_stride + column;
    const int steps = o.steps;
    const ptrdiff_t plane_bytes = b_stride * steps * static_cast<ptrdiff_t>(sizeof(typename T::B));

    F acc[ROWS][VECS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) {
            if (!o.accumulate) {
                acc[r][v] = V::zero();
            } else if constexpr (HALF) {
                acc[r][v] = V::load_half(c + r * c_stride);
            } else {
                acc[r][v] = V::load(c + r * c_stride + v * W);
            }
        }
    }
    for (int block = 0; block < o.blocks; ++block) {
        const unsigned char* start = o.block[block];
        const auto* b = reinterpret_cast<const typename T::B*>(start + o.b_offset) + column * T::P;
        // The tiles of a row of C fetch the next block's plane in order, each as many bytes as it reads.
        const char* next = o.prefetch ? reinterpret_cast<const char*>(ahead(o.block + block, plane_bytes)) : nullptr;
        if (next != nullptr) {
            next += o.b_offset + static_cast<ptrdiff_t>(column) * T::P * static_cast<int>(sizeof(typename T::B)) * steps;
        }
        for (int s = 0; s < steps; ++s, a += T::P, b += b_stride) {
            if (next != nullptr) {
#pragma GCC unroll 8
                for (int at = 0; at < kRowBytes; at += 64) __builtin_prefetch(next + at, 0, 2);
                next += kRowBytes;
            }
            if constexpr (Same<T, BF16Dot>::value) {
                typename V::I x[VECS];
#pragma GCC unroll 4
                for (int v = 0; v < VECS; ++v) {
                    if constexpr (HALF) {
                        x[v] = V::load_bits_half(b);
                    } else {
                        x[v] = V::load_bits(b + v * W * 2);
                    }
                    V::keep(x[v]);
                }
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; ++r) {
                    uint32_t pair;
                    __builtin_memcpy(&pair, a + r * kLda, 4);
#pragma GCC unroll 4
                    for (int v = 0; v < VECS; ++v) acc[r][v] = V::dot(acc[r][v], pair, x[v]);
                }
            } else if constexpr (Same<T, BF16>::value && ROWS == 3 && VECS == 4 && W == 8) {
                V::step_3x4(acc, a, b);
            } else {
                // Wide tiles keep the rows' factors in registers, tall ones the vectors of B.
                constexpr bool wide = VECS == 4;
#pragma GCC unroll 2
                for (int part = 0; part < T::P; ++part) {
                    F x[VECS], factor[ROWS];
#pragma GCC unroll 16
                    for (int r = 0; r < ROWS; ++r) {
                        if constexpr (wide) factor[r] = V::set1(a[r * kLda + part]);
                    }
#pragma GCC unroll 4
                    for (int v = 0; v < VECS; ++v) {
                        const auto* at = b + v * W * T::P;
                        // Load pairs again for their second half: keeping them would spill accumulators.
                        if (part == 1) asm("" : "+r"(at));
                        if constexpr (Same<T, BF16>::value && HALF) {
                            x[v] = part == 0 ? V::bf16_first_half(at) : V::bf16_second_half(at);
                        } else if constexpr (Same<T, BF16>::value) {
                            x[v] = part == 0 ? V::bf16_first(at) : V::bf16_second(at);
                        } else if constexpr (Same<T, F16>::value && HALF) {
                            x[v] = V::load_f16_half(at);
                        } else if constexpr (Same<T, F16>::value) {
                            x[v] = V::load_f16(at);
                        } else if constexpr (HALF) {
                            x[v] = V::load_half(at);
                        } else {
                            x[v] = V::load(at);
                        }
#pragma GCC unroll 16
                        for (int r = 0; r < ROWS; ++r) {
                            if constexpr (wide) acc[r][v] = V::fma(factor[r], x[v], acc[r][v]);
                        }
                    }
#pragma GCC unroll 16
                    for (int r = 0; r < ROWS; ++r) {
                        if constexpr (wide) continue;
                        factor[r] = V::set1(a[r * kLda + part]);
#pragma GCC unroll 4
                        for (int v = 0; v < VECS; ++v) acc[r][v] = V::fma(factor[r], x[v], acc[r][v]);
                    }
                }
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) {
            if constexpr (HALF) {
                V::store_half(c + r * c_stride, acc[r][v]);
            } else {
                V::store(c + r * c_stride + v * W, acc[r][v]);
            }
        }
    }
}

using TileFunction = void (*)(const Operands&, int, int);

// Register tiles of one width by number of rows.
template <class T, int VECS, bool HALF, int... N>
struct TileTable {
    static constexpr TileFunction by_rows[] = {nullptr, product_tile<T, N + 1, VECS, HALF>...};
};
template <class T, int VECS, bool HALF, int MAX, int... N>
struct MakeTiles : MakeTiles<T, VECS, HALF, MAX - 1, MAX - 1, N...> {};
template <class T, int VECS, bool HALF, int... N>
struct MakeTiles<T, VECS, HALF, 0, N...> {
    using Table = TileTable<T, VECS, HALF, N...>;
};
template <class T, int VECS, bool HALF, int MAX>
using Tiles = typename MakeTiles<T, VECS, HALF, MAX>::Table;

// `rows` rows of A against `columns` columns of B.
template <class T>
void product(int rows, int columns, Operands o) {
    constexpr int W = Vec::W;
    constexpr int most = T::kRows2;
    const int groups = (rows + most - 1) / most;
    for (int g = 0, row = 0; g < groups; ++g) {
        const int count = (rows - row) / (groups - g);  // groups of nearly equal size
        int column = 0;
        if (count <= T::kRows4) {
            for (; column + 4 * W <= columns; column += 4 * W) Tiles<T, 4, false, T::kRows4>::by_rows[count](o, row, column);
        }
        for (; column + 2 * W <= columns; column += 2 * W) Tiles<T, 2, false, T::kRows2>::by_rows[count](o, row, column);
        for (; column + W <= columns; column += W) Tiles<T, 1, false, T::kRows1>::by_rows[count](o, row, column);
        if constexpr (W > 8) {
            if (column < columns) Tiles<T, 1, true, T::kRows1>::by_rows[count](o, row, column);
        }
        row += count;
        o.prefetch = false;  // the first group has brought it
    }
}

}  // namespace kvloom::KVLOOM_ISA
