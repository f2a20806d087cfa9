// Attention over encoded blocks of integer codes, read without expanding them to memory.
//
// A block's codes become int16 levels in registers, or for more than a few query rows in the first-level cache;
// queries and softmax weights become int16 with one scale per row, and products are exact int32 sums
// of pairs. So sums do not depend on their order, and a row's bits on nothing but its query and keys.
// Scales and offsets of tokens are folded into scores and weights, those of channels into the query.
//
// Layouts (codecs/kernel_layout.py): codes lie in planes of 4, 2 or 1 bits (3 = 2 + 1), or whole bytes.
// With n = 8 / width codes to a byte, a plane of keys is [dim/2/n][token][2] bytes, of values
// [token/2/n][dim][2]: the bits of a byte are n consecutive pairs of channels or tokens.
#pragma once

#include "elementwise.h"
#include "softmax.h"

namespace kvloom::KVLOOM_ISA {

template <int N>
struct Bits {
    static constexpr int value = N;
};

// Calls f(levels, row) for each of `rows` rows of `units` pairs of levels, which lie in planes as above, in ascending
// order, with VECS vectors of them from byte `at` of the row on. `next`, where there is one, is fetched meanwhile.
template <int BITS, int VECS, class F>
[[gnu::always_inline]] inline void each_levels(const unsigned char* block, const CodedPart& part, int rows, int units,
                                               int at, const unsigned char* next, F&& f) {
    using B = typename Vec::Bytes;
    const int row_bytes = 2 * units;
    const ptrdiff_t to_next = next != nullptr ? next - block : 0;  // without one, what is here already is asked for
    const B levels = Vec::table(part.levels);
    const unsigned char* low = block + part.codes[0] + at;
    const auto load = [&](const unsigned char* from, B(&x)[VECS]) __attribute__((always_inline)) {
#pragma GCC unroll 2
        for (int v = 0; v < VECS; ++v) {
            __builtin_prefetch(from + to_next + v * Vec::kBytes, 0, 2);
            x[v] = Vec::load_bytes(from + v * Vec::kBytes);
        }
    };
    if constexpr (BITS == 8) {
        for (int row = 0; row < rows; ++row, low += row_bytes) {
            B x[VECS];
            load(low, x);
            f(x, row);
        }
    } else if constexpr (BITS == 3) {
        const unsigned char* high = block + part.codes[1] + at;
        for (int row = 0; row < rows; row += 8, low += 2 * row_bytes, high += row_bytes) {
            B first[VECS], second[VECS], top[VECS];
            load(low, first);
            load(low + row_bytes, second);
            load(high, top);
            const auto put = [&](const B(&two)[VECS], auto shift, auto top_shift, int to) __attribute__((always_inline)) {
                B x[VECS];
#pragma GCC unroll 2
                for (int v = 0; v < VECS; ++v) {
                    constexpr int up = decltype(top_shift)::value;
                    B third;
                    if constexpr (up < 0) {
                        third = Vec::template bits_up<-up, 4>(top[v]);
                    } else {
                        third = Vec::template bits<up, 4>(top[v]);
                    }
                    x[v] = Vec::look_up(levels, Vec::either(Vec::template bits<decltype(shift)::value, 3>(two[v]), third));
                }
                f(x, to);
            };
            put(first, Bits<0>{}, Bits<-2>{}, row);
            put(first, Bits<2>{}, Bits<-1>{}, row + 1);
            put(first, Bits<4>{}, Bits<0>{}, row + 2);
            put(first, Bits<6>{}, Bits<1>{}, row + 3);
            put(second, Bits<0>{}, Bits<2>{}, row + 4);
            put(second, Bits<2>{}, Bits<3>{}, row + 5);
            put(second, Bits<4>{}, Bits<4>{}, row + 6);
            put(second, Bits<6>{}, Bits<5>{}, row + 7);
        }
    } else {
        for (int row = 0; row < rows; row += 8 / BITS, low += row_bytes) {
            B codes[VECS];
            load(low, codes);
            const auto put = [&](auto nth) __attribute__((always_inline)) {
                constexpr int n = decltype(nth)::value;
                B x[VECS];
#pragma GCC unroll 2
                for (int v = 0; v < VECS; ++v) {
                    x[v] = Vec::look_up(levels, Vec::template bits<n * BITS, (1 << BITS) - 1>(codes[v]));
                }
                f(x, row + n);
            };
            put(Bits<0>{});
            put(Bits<1>{});
            if constexpr (BITS < 4) {
                put(Bits<2>{});
                put(Bits<3>{});
            }
            if constexpr (BITS < 2) {
                put(Bits<4>{});
                put(Bits<5>{});
                put(Bits<6>{});
                put(Bits<7>{});
            }
        }
    }
}

// All levels as int16 pairs, [rows][units][2].
template <int BITS>
void decode_levels(const unsigned char* block, const CodedPart& part, int rows, int units, const unsigned char* next,
                   int16_t* out) {
    for (int at = 0; at < 2 * units; at += Vec::kBytes) {
        each_levels<BITS, 1>(block, part, rows, units, at, next, [&](const typename Vec::Bytes(&x)[1], int row) __attribute__((always_inline)) {
            int16_t* to = out + static_cast<ptrdiff_t>(row) * 2 * units + at;
            typename Vec::I first, second;
            Vec::widen(x[0], first, second);
            Vec::reorder(first, second);
            Vec::store_ints(to, first);
            Vec::store_ints(to + Vec::kBytes / 2, second);
        });
    }
}

static void decode(const unsigned char* block, const CodedPart& part, int rows, int units, const unsigned char* next,
                   int16_t* out) {
    switch (part.bits) {
        case 8: return decode_levels<8>(block, part, rows, units, next, out);
        case 4: return decode_levels<4>(block, part, rows, units, next, out);
        case 3: return decode_levels<3>(block, part, rows, units, next, out);
        case 1: return decode_levels<1>(block, part, rows, units, next, out);
        default: return decode_levels<2>(block, part, rows, units, next, out);
    }
}

// c [rows][c_stride] int32 (+)= a [rows][a_stride] int16 times b, [steps][units][2] int16.
struct Levels {
    const int16_t* a;
    ptrdiff_t a_stride;
    const int16_t* b;
    ptrdiff_t b_stride;  // int16 from one step to the next
    int steps;
    int32_t* c;
    ptrdiff_t c_stride;
    bool accumulate;
};

template <int ROWS, int VECS>
void levels_tile(const Levels& o, int row, int column) {
    using I = typename Vec::I;
    constexpr int W = Vec::W;
    const int16_t* a = o.a + row * o.a_stride;
    const int16_t* b = o.b + 2 * column;
    int32_t* c = o.c + row * o.c_stride + column;
    I acc[ROWS][VECS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) acc[r][v] = o.accumulate ? Vec::load_ints(c + r * o.c_stride + v * W) : Vec::zero_ints();
    }
    for (int s = 0; s < o.steps; ++s, a += 2, b += o.b_stride) {
        if constexpr (VECS == 2) {
            const I x[2] = {Vec::load_ints(b), Vec::load_ints(b + 2 * W)};
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r) Vec::add_pairs(acc[r], x, a + r * o.a_stride);
        } else {
#pragma GCC unroll 4
            for (int v = 0; v < VECS; ++v) {
                const I x = Vec::load_ints(b + 2 * v * W);
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; ++r) {
                    int32_t pair;
                    __builtin_memcpy(&pair, a + r * o.a_stride, 4);
                    acc[r][v] = Vec::add_pairs(acc[r][v], x, pair);
                }
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) Vec::store_ints(c + r * o.c_stride + v * W, acc[r][v]);
    }
}

using LevelsFunction = void (*)(const Levels&, int, int);
template <int VECS, int... N>
struct LevelsTable {
    static constexpr LevelsFunction by_rows[] = {nullptr, levels_tile<N + 1, VECS>...};
};
template <int VECS, int MAX, int... N>
struct MakeLevels : MakeLevels<VECS, MAX - 1, MAX - 1, N...> {};
template <int VECS, int... N>
struct MakeLevels<VECS, 0, N...> {
    using Table = LevelsTable<VECS, N...>;
};

// `columns` is a multiple of the vector's width.
static void levels_product(int rows, int columns, const Levels& o) {
    constexpr int W = Vec::W, most4 = Vec::Rows::kRows4, most = Vec::Rows::kRows2;
    const int groups = rows <= most4 ? 1 : (rows + most - 1) / most;
    for (int g = 0, row = 0; g < groups; ++g) {
        const int count = (rows - row) / (groups - g);
        int column = 0;
        if (count <= most4) {
            for (; column + 4 * W <= columns; column += 4 * W) MakeLevels<4, most4>::Table::by_rows[count](o, row, column);
        }
        for (; column + 2 * W <= columns; column += 2 * W) MakeLevels<2, most>::Table::by_rows[count](o, row, column);
        for (; column < columns; column += W) MakeLevels<1, most>::Table::by_rows[count](o, row, column);
        row += count;
    }
}

// The same product for few rows straight from the codes of `count` blocks, with the sums in registers; `a_step` int16
// of the rows' numbers belong to each block.
struct Codes {
    const unsigned char* const* block;
    int count;
    const CodedPart& part;
    int steps, units;
    ptrdiff_t a_step;
};

template <int BITS, int ROWS, int VECS>
void direct_tile(const Codes& codes, int at, const Levels& o, int32_t* c) {
    using I = typename Vec::I;
    constexpr int W = Vec::W;
    I acc[ROWS][2 * VECS];  // a vector of codes' two halves in the order that widening leaves them in
    const auto reorder = [&acc](int r) __attribute__((always_inline)) {
#pragma GCC unroll 2
        for (int v = 0; v < VECS; ++v) Vec::reorder(acc[r][2 * v], acc[r][2 * v + 1]);
    };
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < 2 * VECS; ++v) acc[r][v] = o.accumulate ? Vec::load_ints(c + r * o.c_stride + v * W) : Vec::zero_ints();
        reorder(r);
    }
    const int16_t* a = o.a;
    const ptrdiff_t a_stride = o.a_stride;
    for (int i = 0; i < codes.count; ++i, a += codes.a_step) {
        each_levels<BITS, VECS>(codes.block[i], codes.part, codes.steps, codes.units, at, ahead(codes.block + i, 2 * codes.steps * codes.units),
                                [&](const typename Vec::Bytes(&x)[VECS], int step) __attribute__((always_inline)) {
            I wide[2 * VECS];
#pragma GCC unroll 2
            for (int v = 0; v < VECS; ++v) Vec::widen(x[v], wide[2 * v], wide[2 * v + 1]);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) Vec::add_pairs(acc[r], wide, a + r * a_stride + 2 * step);
        });
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
        reorder(r);
#pragma GCC unroll 4
        for (int v = 0; v < 2 * VECS; ++v) Vec::store_ints(c + r * o.c_stride + v * W, acc[r][v]);
    }
}

static constexpr int kDirectRows = 4;

// Columns [from, to) in bytes, from o.c on.
template <int BITS, int ROWS>
void direct_columns(const Codes& codes, int from, int to, const Levels& o) {
    int at = from;
    if constexpr (Vec::W > 8) {  // others have no registers for two vectors of codes
        for (; at + 2 * Vec::kBytes <= to; at += 2 * Vec::kBytes) direct_tile<BITS, ROWS, 2>(codes, at, o, o.c + (at - from) / 2);
    }
    for (; at < to; at += Vec::kBytes) direct_tile<BITS, ROWS, 1>(codes, at, o, o.c + (at - from) / 2);
}

template <int BITS>
void direct_rows(int rows, const Codes& codes, int from, int to, const Levels& o) {
    switch (rows) {
        case 1: return direct_columns<BITS, 1>(codes, from, to, o);
        case 2: return direct_columns<BITS, 2>(codes, from, to, o);
        case 3: return direct_columns<BITS, 3>(codes, from, to, o);
        default: return direct_columns<BITS, 4>(codes, from, to, o);
    }
}

static void direct_product(int rows, const Codes& codes, int from, int to, const Levels& o) {
    switch (codes.part.bits) {
        case 8: return direct_rows<8>(rows, codes, from, to, o);
        case 4: return direct_rows<4>(rows, codes, from, to, o);
        case 3: return direct_rows<3>(rows, codes, from, to, o);
        case 1: return direct_rows<1>(rows, codes, from, to, o);
        default: return direct_rows<2>(rows, codes, from, to, o);
    }
}

// x [count], of size `most` at most, as int16 with the scale that undoes it; count is a multiple of the vector's width.
static float quantise_row(const float* x, int count, float most, int16_t* to) {
    if (!(most > 0.0f) || !(most < __builtin_inff())) {
        __builtin_memset(to, 0, count * sizeof(int16_t));
        return most - most;  // 0, or NaN, which spreads, where a number is not finite
    }
    const Vec::F by = Vec::set1(32767.0f / most);
    for (int i = 0; i < count; i += Vec::W) Vec::store_rounded(to + i, Vec::mul(Vec::load(x + i), by));
    return most / 32767.0f;
}

static float quantise_row(const float* x, int count, int16_t* to) {
    Vec::F top = Vec::zero();
    for (int i = 0; i < count; i += Vec::W) top = Vec::max_size(top, Vec::abs(Vec::load(x + i)));
    return quantise_row(x, count, Vec::reduce_max_size(top), to);
}

static void halves(const unsigned char* from, int count, float* to) {
    const auto* bits = reinterpret_cast<const uint16_t*>(from);
    for (int i = 0; i < count; i += Vec::W) Vec::store(to + i, Vec::load_f16(bits + i));
}

// What a chunk's computation keeps between its parts, carved out of ChunkArgs::coded.
struct CodedScratch {
    int16_t* levels;   // [max(k_dim, v_dim) * block], and what a vector longer than the last row writes beyond it
    int16_t* query;    // [rows][kMaxDim]
    int16_t* weights;  // [groups][rows][kLda]
    int32_t* sums;     // [rows][kChunk]
    float* scales;     // [kChunk * groups], tokens'
    float* offsets;    // the same
    float* channels;   // [kMaxDim]
    float* row;        // [rows][2 + (1 + W) * groups]: query scale, sum and constant; weights' scales and offsets
    float* scaled;     // [kLda]
    int16_t* channel_levels;  // [kMaxDim], channels' scales of a block
    float* spare;      // as scales
    float* products;   // [groups][rows][kChunk]

    CodedScratch(const ChunkArgs& args) {
        const Format& format = *args.format;
        const int groups = coded_groups(format), rows = args.rows;
        auto* at = static_cast<unsigned char*>(args.coded);
        const auto take = [&at](size_t bytes) {
            auto* found = at;
            at += (bytes + 63) / 64 * 64;
            return found;
        };
        const int dim = format.k_dim > format.v_dim ? format.k_dim : format.v_dim;
        levels = reinterpret_cast<int16_t*>(take(2u * dim * format.block_size + 2u * Vec::kBytes));
        query = reinterpret_cast<int16_t*>(take(2u * rows * kMaxDim));
        weights = reinterpret_cast<int16_t*>(take(2u * groups * rows * kLda));
        sums = reinterpret_cast<int32_t*>(take(4u * rows * kChunk));
        scales = reinterpret_cast<float*>(take(4u * kChunk * groups));
        offsets = reinterpret_cast<float*>(take(4u * kChunk * groups));
        channels = reinterpret_cast<float*>(take(4u * kMaxDim));
        row = reinterpret_cast<float*>(take(4u * rows * (2 + (1 + Vec::W) * groups)));
        scaled = reinterpret_cast<float*>(take(4u * kLda));
        channel_levels = reinterpret_cast<int16_t*>(take(2u * kMaxDim));
        spare = reinterpret_cast<float*>(take(4u * kChunk * groups));
        products = reinterpret_cast<float*>(take(4u * groups * rows * kChunk));
    }
};

// Rows of `groups` numbers per token as one run of tokens per group.
static void by_group(const unsigned char* from, int tokens, int groups, uint16_t* to) {
    const auto* numbers = reinterpret_cast<const uint16_t*>(from);
    for (int g = 0; g < groups; ++g) {
        for (int t = 0; t < tokens; ++t) to[g * tokens + t] = numbers[t * groups + g];
    }
}

// Scales and offsets; those of values are read block after block when the softmax is done. Always inline: GCC drops
// calls of a function that does nothing but fetch.
[[gnu::always_inline]] static inline void fetch_numbers(const unsigned char* block, const CodedPlane& plane, int size, int dim) {
    if (plane.bits == 0) return;
    const auto fetch = [&](int64_t place, int bytes) __attribute__((always_inline)) {
        for (int at = 0; place >= 0 && at < bytes; at += 64) __builtin_prefetch(block + place + at, 0, 2);
    };
    fetch(plane.token_scale, 2 * size * plane.token_groups);
    fetch(plane.token_offset, 2 * size * plane.token_groups);
    fetch(plane.channel_scale, 2 * dim);
    fetch(plane.channel_offset, 2 * dim);
}

// Scales (and offsets, where there are any) of a block's tokens, one run per group.
static void token_numbers(const unsigned char* block, const CodedPlane& plane, int size, float* spare, float* scales,
                          float* offsets) {
    const int groups = plane.token_groups;
    const auto read = [&](int at, float* to) {
        if (groups == 1) return halves(block + at, size, to);
        if (groups == 2) {
            const auto* pairs = reinterpret_cast<const uint16_t*>(block + at);
            for (int t = 0; t < size; t += Vec::W) {
                Vec::F first, second;
                Vec::load_f16_pairs(pairs + 2 * t, first, second);
                Vec::store(to + t, first);
                Vec::store(to + size + t, second);
            }
            return;
        }
        by_group(block + at, size, groups, reinterpret_cast<uint16_t*>(spare));
        halves(reinterpret_cast<const unsigned char*>(spare), size * groups, to);
    };
    if (plane.token_scale >= 0) {
        read(plane.token_scale, scales);
    } else {
        for (int i = 0; i < size * groups; ++i) scales[i] = 1.0f;
    }
    if (plane.token_offset < 0) return;
    read(plane.token_offset, offsets);
    for (int i = 0; i < size * groups; ++i) offsets[i] += plane.center * scales[i];
}

// A block's scales and offsets of channels: the scales as int16 `levels` with the scale that undoes it, and each
// channel's middle, offset + center * scale, where there are offsets. `scaled` is scratch; both are [dim].
static float channel_numbers(const unsigned char* scales, const unsigned char* offsets, float center, int dim, float* scaled,
                             int16_t* levels, float* middles) {
    halves(scales, dim, scaled);
    if (offsets != nullptr) {
        const auto* bits = reinterpret_cast<const uint16_t*>(offsets);
        const Vec::F by = Vec::set1(center);
        for (int d = 0; d < dim; d += Vec::W) Vec::store(middles + d, Vec::fma(Vec::load(scaled + d), by, Vec::load_f16(bits + d)));
    }
    return quantise_row(scaled, dim, levels);
}

static void scale_query(const int16_t* query, const int16_t* levels, int dim, int16_t* to) {
    for (int d = 0; d < dim; d += 2 * Vec::W) Vec::multiply_high(query + d, levels + d, to + d);
}

static float dot(const float* a, const float* b, int count) {
    Vec::F sum = Vec::zero();
    for (int i = 0; i < count; i += Vec::W) sum = Vec::fma(Vec::load(a + i), Vec::load(b + i), sum);
    return Vec::reduce_add(sum);
}

// to (+)= (sums * scale + shift) * scales, of a block's tokens.
static void block_scores(const int32_t* sums, int size, Vec::F scale, Vec::F shift, const float* scales, bool accumulate,
                         float* to) {
    for (int t = 0; t < size; t += Vec::W) {
        Vec::F x = Vec::fma(Vec::from_ints(Vec::load_ints(sums + t)), scale, shift);
        x = Vec::mul(x, Vec::load(scales + t));
        Vec::store(to + t, accumulate ? Vec::add(x, Vec::load(to + t)) : x);
    }
}

static void add_offsets(const float* offsets, int size, Vec::F sum, float* to) {
    for (int t = 0; t < size; t += Vec::W) Vec::store(to + t, Vec::fma(Vec::load(offsets + t), sum, Vec::load(to + t)));
}

static void coded_scores(const ChunkArgs& args, const CodedScratch& s) {
    constexpr int W = Vec::W;
    const Format& format = *args.format;
    const CodedPlane& plane = format.k_codes;
    const int size = format.block_size, dim = format.k_dim, groups = plane.token_groups;
    const auto* q = static_cast<const float*>(args.q);
    const auto row_of = [&](int r) { return s.row + r * 2; };
    float* const constants = s.row + 2 * args.rows;  // [rows], what the channels' offsets add
    const bool by_channel = plane.channel_scale >= 0;
    for (int r = 0; r < args.rows; ++r) {
        constants[r] = 0.0f;
        const float* from = q + static_cast<ptrdiff_t>(r) * kLda;
        Vec::F sum = Vec::zero();
        for (int d = 0; d < dim; d += W) sum = Vec::add(sum, Vec::load(from + d));
        row_of(r)[1] = Vec::reduce_add(sum);
        row_of(r)[0] = quantise_row(from, dim, s.query + r * kMaxDim);
    }
    for (int i = 0; i < args.count; ++i) {
        const Segment& segment = args.segments[i];
        const unsigned char* const* block = segment.blocks;
        for (int start = segment.first / size * size; start < segment.end; start += size, ++block) {
            const unsigned char* const next = ahead(block, size * dim);
            fetch_numbers(*block, format.v_codes, size, format.v_dim);
            if (next != nullptr) fetch_numbers(next, plane, size, dim);
            const bool direct = segment.rows <= kDirectRows && groups == 1;
            for (int p = 0, first = 0; !direct && p < plane.num_parts; first += plane.parts[p++].channels) {
                decode(*block, plane.parts[p], plane.parts[p].channels / 2, size, next, s.levels + static_cast<ptrdiff_t>(first) * size);
            }
            token_numbers(*block, plane, size, s.spare, s.scales, s.offsets);
            float block_scale = 1.0f;
            if (by_channel) {  // the channels' scales go into the queries: both are int16 of their largest
                const bool offsets = plane.channel_offset >= 0;
                const unsigned char* const offsets_at = offsets ? *block + plane.channel_offset : nullptr;
                block_scale = 32768.0f * channel_numbers(*block + plane.channel_scale, offsets_at, plane.center, dim, s.scaled,
                                                         s.channel_levels, s.channels);
                for (int r = segment.row; r < segment.row + segment.rows; ++r) {
                    scale_query(s.query + r * kMaxDim, s.channel_levels, dim, s.weights + r * kLda);
                    if (offsets) constants[r] = dot(q + static_cast<ptrdiff_t>(r) * kLda, s.channels, dim);
                }
            }
            const int16_t* const queries = by_channel ? s.weights : s.query;
            const ptrdiff_t query_stride = by_channel ? kLda : kMaxDim;
            for (int g = 0; g < groups; ++g) {
                const int width = dim / groups;
                Levels o;
                o.a = queries + segment.row * query_stride + g * width;
                o.a_stride = query_stride;
                o.b = s.levels + static_cast<ptrdiff_t>(g) * width * size;
                o.b_stride = 2 * size;
                o.steps = width / 2;
                o.c = s.sums;
                o.c_stride = size;
                o.accumulate = false;
                if (direct) {
                    for (int p = 0; p < plane.num_parts; ++p) {
                        const CodedPart& part = plane.parts[p];
                        direct_product(segment.rows, {block, 1, part, part.channels / 2, size, 0}, 0, 2 * size, o);
                        o.a += part.channels;
                        o.accumulate = true;
                    }
                } else {
                    levels_product(segment.rows, size, o);
                }
                for (int r = 0; r < segment.rows; ++r) {
                    const int row = segment.row + r;
                    const Vec::F scale = Vec::set1(row_of(row)[0] * block_scale);
                    float* const scores = args.scores + static_cast<ptrdiff_t>(row) * kLda + start;
                    block_scores(s.sums + r * size, size, scale, Vec::set1(constants[row]), s.scales + g * size, g > 0, scores);
                    if (plane.token_offset >= 0) add_offsets(s.offsets, size, Vec::set1(row_of(row)[1]), scores);
                }
            }
        }
    }
}

// to = weights * scales of a block's tokens [from, end), multiples of the vector's width, and 0 at others. Returns the
// larger of `top` and their sizes, or NaN where one is.
static Vec::F scale_weights(const float* weights, const float* scales, int size, int from, int end, Vec::F top, float* to) {
    for (int t = 0; t < size; t += Vec::W) {
        const bool seen = t >= from && t < end;
        const Vec::F x = seen ? Vec::mul(Vec::load(weights + t), Vec::load(scales + t)) : Vec::zero();
        top = Vec::max_size(top, Vec::abs(x));
        Vec::store(to + t, x);
    }
    return top;
}

// sum += weights * numbers of a block's tokens [from, to), lane by lane.
static Vec::F weighted(const float* weights, const float* numbers, int from, int to, Vec::F sum) {
    for (int t = from; t < to; t += Vec::W) sum = Vec::fma(Vec::load(weights + t), Vec::load(numbers + t), sum);
    return sum;
}

static void coded_outputs(const ChunkArgs& args, const CodedScratch& s, int begin, int end) {
    constexpr int W = Vec::W;
    const Format& format = *args.format;
    const CodedPlane& plane = format.v_codes;
    const int size = format.block_size, dim = format.v_dim, groups = plane.token_groups, width = dim / groups;
    const bool by_channel = plane.channel_scale >= 0;
    float* const weight_scale = s.row;                 // [groups][rows], of the largest weight at first
    float* const offset = s.row + groups * args.rows;  // [groups][rows][W], lanes of their sums in order of blocks
    const auto weights_of = [&](int g, int r) { return s.weights + (static_cast<ptrdiff_t>(g) * args.rows + r) * kLda; };
    // Weights times scales: the block's part of each row, in all groups; scores keep the weights. Rows of several
    // segments read only some of the chunk's blocks: the other weights are 0.
    const int low = args.first / size * size, high = (args.end + size - 1) / size * size;
    const auto product_of = [&](int g, int r) { return s.products + (static_cast<ptrdiff_t>(g) * args.rows + r) * kChunk; };
    for (int i = 0; i < groups * args.rows; ++i) {
        weight_scale[i] = 0.0f;
        Vec::store(offset + i * W, Vec::zero());
        for (int t = low; args.count > 1 && t < high; t += W) Vec::store(product_of(0, i) + t, Vec::zero());
    }
    for (int i = 0; i < args.count; ++i) {
        const Segment& segment = args.segments[i];
        const int first = segment.first / size * size;
        const unsigned char* const* block = segment.blocks;
        for (int start = first; start < segment.end; start += size, ++block) {
            token_numbers(*block, plane, size, s.spare, s.scales + start * groups, s.offsets + start * groups);
        }
        for (int row = segment.row; row < segment.row + segment.rows; ++row) {
            const float* const weights = args.scores + static_cast<ptrdiff_t>(row) * kLda;
            for (int g = 0; g < groups; ++g) {
                Vec::F top = Vec::zero(), sum = Vec::load(offset + (g * args.rows + row) * W);
                for (int start = first; start < segment.end; start += size) {
                    const float* const scales = s.scales + start * groups + g * size;
                    const int from = start < begin ? begin - start : 0, to = start + size > end ? end - start : size;
                    top = scale_weights(weights + start, scales, size, from, to, top, product_of(g, row) + start);
                    if (plane.token_offset < 0 || by_channel) continue;
                    sum = weighted(weights + start, s.offsets + start * groups + g * size, from, to, sum);
                }
                Vec::store(offset + (g * args.rows + row) * W, sum);
                float& most = weight_scale[g * args.rows + row];  // of all the row's segments
                most = Vec::reduce_max_size(Vec::max_size(top, Vec::set1(most)));
            }
        }
    }
    for (int g = 0; g < groups; ++g) {
        for (int r = 0; r < args.rows; ++r) {
            float& scale = weight_scale[g * args.rows + r];
            scale = quantise_row(product_of(g, r) + low, high - low, scale, weights_of(g, r) + low);
        }
    }
    for (int r = 0; r < args.rows; ++r) {
        __builtin_memset(by_channel ? static_cast<void*>(args.out + r * args.out_stride) : s.sums + r * kChunk, 0, dim * 4);
    }
    const auto product = [&](const Segment& segment, const unsigned char* const* block, int count, int start, bool direct) {
        for (int g = 0; g < groups; ++g) {
            Levels o;
            o.a = weights_of(g, segment.row) + start;
            o.a_stride = kLda;
            o.b = s.levels + 2 * g * width;
            o.b_stride = 2 * dim;
            o.steps = size / 2;
            o.c = s.sums + segment.row * kChunk + g * width;
            o.c_stride = kChunk;
            o.accumulate = !by_channel;
            if (direct) {
                direct_product(segment.rows, {block, count, plane.parts[0], size / 2, dim, size}, 2 * g * width,
                               2 * (g + 1) * width, o);
            } else {
                levels_product(segment.rows, width, o);
            }
        }
    };
    // Scales of channels are the block's: its sums are added up as numbers, in order of blocks.
    const auto add_block = [&](const Segment& segment, const unsigned char* block, int start) {
        halves(block + plane.channel_scale, dim, s.channels);
        if (plane.token_offset >= 0) token_numbers(block, plane, size, s.spare, s.scales, s.offsets);
        for (int row = segment.row; row < segment.row + segment.rows; ++row) {
            const float* const weights = args.scores + static_cast<ptrdiff_t>(row) * kLda + start;
            const int from = start < begin ? begin - start : 0, to = start + size > end ? end - start : size;
            Vec::F sum = Vec::zero();
            if (plane.token_offset >= 0) sum = weighted(weights, s.offsets, from, to, sum);
            const Vec::F shift = Vec::set1(Vec::reduce_add(sum)), scale = Vec::set1(weight_scale[row]);
            float* out = args.out + row * args.out_stride;
            for (int d = 0; d < dim; d += W) {
                const Vec::F x = Vec::fma(Vec::from_ints(Vec::load_ints(s.sums + row * kChunk + d)), scale, shift);
                Vec::store(out + d, Vec::fma(x, Vec::load(s.channels + d), Vec::load(out + d)));
            }
        }
    };
    for (int i = 0; i < args.count; ++i) {
        const Segment& segment = args.segments[i];
        const int first = segment.first / size * size;
        const bool direct = segment.rows <= kDirectRows && 2 * width % Vec::kBytes == 0;
        if (direct && !by_channel) {  // without scales of a block's own, products go through all blocks at once
            product(segment, segment.blocks, (segment.end - first + size - 1) / size, first, true);
            continue;
        }
        const unsigned char* const* block = segment.blocks;
        for (int start = first; start < segment.end; start += size, ++block) {
            if (!direct) decode(*block, plane.parts[0], size / 2, dim, ahead(block, size * dim), s.levels);
            product(segment, block, 1, start, direct);
            if (by_channel) add_block(segment, *block, start);
        }
    }
    for (int r = 0; !by_channel && r < args.rows; ++r) {
        for (int g = 0; g < groups; ++g) {
            const Vec::F scale = Vec::set1(weight_scale[g * args.rows + r]);
            const Vec::F shift = Vec::set1(Vec::reduce_add(Vec::load(offset + (g * args.rows + r) * W)));
            for (int d = g * width; d < (g + 1) * width; d += W) {
                const Vec::F x = Vec::from_ints(Vec::load_ints(s.sums + r * kChunk + d));
                Vec::store(args.out + r * args.out_stride + d, Vec::fma(x, scale, shift));
            }
        }
    }
}

// Floats of 8 bits. Their exponents are read as fp32's, that is 2^-120 (four bits) or 2^-112 (five) too small;
// queries and weights are made larger by half of that, and results by the other half, so that neither products
// nor sums leave fp32's range.
struct SmallFloats {
    const float* a;
    ptrdiff_t a_stride;
    const unsigned char* b;  // [steps][b_stride]
    ptrdiff_t b_stride;
    const unsigned char* next;  // as b of the block that is read next, or null
    int steps;
    float* c;
    ptrdiff_t c_stride;
    bool accumulate;
};

static float half_bias(const CodedPlane& plane) { return plane.exponent_bits == 4 ? 0x1p60f : 0x1p56f; }

template <int SHIFT, int ROWS, int VECS>
void small_float_tile(const SmallFloats& o, int row, int column) {
    constexpr int W = Vec::W;
    const float* a = o.a + row * o.a_stride;
    const unsigned char* b = o.b + column;
    float* c = o.c + row * o.c_stride + column;
    Vec::F acc[ROWS][VECS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) acc[r][v] = o.accumulate ? Vec::load(c + r * o.c_stride + v * W) : Vec::zero();
    }
    for (int s = 0; s < o.steps; ++s, b += o.b_stride) {
        if (o.next != nullptr) __builtin_prefetch(o.next + s * o.b_stride + column, 0, 2);
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) {
            const Vec::F x = Vec::template small_floats<SHIFT>(b + v * W);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) acc[r][v] = Vec::fma(Vec::set1(a[r * o.a_stride + s]), x, acc[r][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) Vec::store(c + r * o.c_stride + v * W, acc[r][v]);
    }
}

template <int SHIFT, int VECS>
void small_float_rows(int rows, const SmallFloats& o, int row, int column) {
    switch (rows) {
        case 1: return small_float_tile<SHIFT, 1, VECS>(o, row, column);
        case 2: return small_float_tile<SHIFT, 2, VECS>(o, row, column);
        case 3: return small_float_tile<SHIFT, 3, VECS>(o, row, column);
        default: return small_float_tile<SHIFT, 4, VECS>(o, row, column);
    }
}

template <int SHIFT>
void small_float_columns(int rows, int columns, const SmallFloats& o) {
    constexpr int W = Vec::W;
    const int groups = (rows + 3) / 4;
    for (int g = 0, row = 0; g < groups; ++g) {
        const int count = (rows - row) / (groups - g);
        int column = 0;
        for (; column + 2 * W <= columns; column += 2 * W) small_float_rows<SHIFT, 2>(count, o, row, column);
        for (; column < columns; column += W) small_float_rows<SHIFT, 1>(count, o, row, column);
        row += count;
    }
}

static void small_float_product(const CodedPlane& plane, int rows, int columns, const SmallFloats& o) {
    if (plane.exponent_bits == 4) return small_float_columns<20>(rows, columns, o);
    small_float_columns<21>(rows, columns, o);
}

static void small_float_scores(const ChunkArgs& args, const CodedScratch& s) {
    constexpr int W = Vec::W;
    const Format& format = *args.format;
    const CodedPlane& plane = format.k_codes;
    const int size = format.block_size, dim = format.k_dim;
    const float bias = half_bias(plane);
    auto* const queries = static_cast<float*>(args.weights);
    for (int r = 0; r < args.rows; ++r) {
        scaled(static_cast<const float*>(args.q) + static_cast<ptrdiff_t>(r) * kLda, bias, dim, false,
               queries + static_cast<ptrdiff_t>(r) * kLda);
    }
    for (int i = 0; i < args.count; ++i) {
        const Segment& segment = args.segments[i];
        const unsigned char* const* block = segment.blocks;
        for (int start = segment.first / size * size; start < segment.end; start += size, ++block) {
            const unsigned char* const next = ahead(block, size * dim);
            fetch_numbers(*block, format.v_codes, size, format.v_dim);
            if (next != nullptr) fetch_numbers(next, plane, size, dim);
            token_numbers(*block, plane, size, s.spare, s.scales, s.offsets);
            float* const scores = args.scores + static_cast<ptrdiff_t>(segment.row) * kLda + start;
            small_float_product(plane, segment.rows, size,
                                {queries + static_cast<ptrdiff_t>(segment.row) * kLda, kLda, *block + plane.parts[0].codes[0], size,
                                 next != nullptr ? next + plane.parts[0].codes[0] : nullptr, dim, scores, kLda, false});
            for (int r = 0; r < segment.rows; ++r) {
                float* row = scores + static_cast<ptrdiff_t>(r) * kLda;
                for (int t = 0; t < size; t += W) {
                    Vec::store(row + t, Vec::mul(Vec::load(row + t), Vec::mul(Vec::load(s.scales + t), Vec::set1(bias))));
                }
            }
        }
    }
}

static void small_float_outputs(const ChunkArgs& args, const CodedScratch& s, int begin, int end) {
    constexpr int W = Vec::W;
    const Format& format = *args.format;
    const CodedPlane& plane = format.v_codes;
    const int size = format.block_size, dim = format.v_dim;
    const float bias = half_bias(plane);
    for (int row = 0; row < args.rows; ++row) {
        __builtin_memset(args.out + row * args.out_stride, 0, dim * sizeof(float));
    }
    for (int i = 0; i < args.count; ++i) {
        const Segment& segment = args.segments[i];
        const unsigned char* const* block = segment.blocks;
        for (int start = segment.first / size * size; start < segment.end; start += size, ++block) {
            const unsigned char* const next = ahead(block, size * dim);
            token_numbers(*block, plane, size, s.spare, s.scales, s.offsets);
            float* const weights = args.scores + static_cast<ptrdiff_t>(segment.row) * kLda + start;
            for (int r = 0; r < segment.rows; ++r) {
                float* row = weights + static_cast<ptrdiff_t>(r) * kLda;
                for (int t = 0; t < size; t += W) {
                    const bool seen = start + t >= begin && start + t < end;
                    const Vec::F by = Vec::mul(Vec::load(s.scales + t), Vec::set1(bias));
                    Vec::store(row + t, seen ? Vec::mul(Vec::load(row + t), by) : Vec::zero());
                }
            }
            small_float_product(plane, segment.rows, dim,
                                {weights, kLda, *block + plane.parts[0].codes[0], dim,
                                 next != nullptr ? next + plane.parts[0].codes[0] : nullptr, size,
                                 args.out + segment.row * args.out_stride, args.out_stride, true});
        }
    }
    for (int row = 0; row < args.rows; ++row) {
        float* out = args.out + row * args.out_stride;
        scaled(out, bias, dim, false, out);
    }
}

// Either plane may be raw, of storage type T.
template <class T>
void coded_chunk(const ChunkArgs& args) {
    const CodedScratch scratch(args);
    const Format& format = *args.format;
    if (format.k_codes.exponent_bits != 0) {
        small_float_scores(args, scratch);
    } else if (format.k_codes.bits != 0) {
        coded_scores(args, scratch);
    } else {
        for (int i = 0; i < args.count; ++i) segment_scores<T>(args, args.segments[i]);
    }
    const int begin = args.first / Vec::W * Vec::W, end = (args.end + Vec::W - 1) / Vec::W * Vec::W;
    softmax_rows<T>(args, begin, end);
    if (format.v_codes.exponent_bits != 0) return small_float_outputs(args, scratch, begin, end);
    if (format.v_codes.bits != 0) return coded_outputs(args, scratch, begin, end);
    for (int row = 0; row < args.rows; ++row) {
        __builtin_memset(args.out + row * args.out_stride, 0, format.v_dim * sizeof(float));
    }
    for (int i = 0; i < args.count; ++i) segment_outputs<T>(args, args.segments[i], true);
}

}  // namespace kvloom::KVLOOM_ISA
