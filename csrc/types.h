// Plain data shared by planning, kernels and bindings. No function with external linkage: the
// kernel sources are compiled with different instruction sets, and a shared inline function would
// let the linker keep whichever copy it likes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvloom {

enum class DType : int { f32 = 0, f16 = 1, bf16 = 2 };

static inline int item_bytes(DType type) { return type == DType::f32 ? 4 : 2; }

// Keys are attended in chunks of kChunk positions with absolute boundaries. Each chunk is a
// softmax of its own; chunks are merged in ascending order. This fixes a query row's arithmetic
// whatever else is in the call and whoever computes the chunk, so decode, prefill and any number
// of threads agree bitwise. A multiple of every block size.
constexpr int kChunk = 256;

// Row stride of queries, scores and weights in scratch, in elements. A compile-time constant
// lets the kernels address all rows of a tile from one register; the 16 beyond kChunk keep rows
// from falling into the same cache sets.
constexpr int kLda = kChunk + 16;

constexpr int kMinDim = 16;
constexpr int kMaxDim = 256;

// Query rows (token, query head of the group) that share one reading of the keys.
constexpr int kMaxRows = 60;

// Latent attention (MLA): all query heads share one latent, the V of its Format, whose K is the
// rotated part. More rows, so that V3's 128 heads read it once; tokens widened at a time.
constexpr int kMaxLatentDim = 512;
constexpr int kMaxLatentRows = 128;
constexpr int kLatentTokens = 32;

// Codes of consecutive channels, all of one width.
struct CodedPart {
    int bits = 0;  // 8, 4, 3, 2 or 1
    int channels = 0;
    int8_t levels[16] = {};
    int64_t codes[2] = {};  // places of the two lower bits or all, and of the third bit
};
constexpr int kMaxParts = 3;

// Codes of one plane and what undoes them (coded.h): value = level * scale + offset, of the token, of its group of
// channels, or of the channel within the block. Places are in bytes from the block's start, -1 where there is
// nothing; scales and offsets are fp16.
struct CodedPlane {
    int bits = 0;           // of the first part; 0: a raw plane
    int exponent_bits = 0;  // codes are floats of 8 bits with so many of exponent; 0: integers
    CodedPart parts[kMaxParts];
    int num_parts = 0;    // values have one
    float center = 0.0f;  // added to levels: value = (level + center) * scale + offset
    int token_groups = 1;   // numbers per token, each for dim / token_groups channels
    int64_t token_scale = -1, token_offset = -1;      // [block_size][token_groups]
    int64_t channel_scale = -1, channel_offset = -1;  // [dim]
};

struct Format {
    DType dtype;
    int block_size;
    int num_heads;
    int k_dim, v_dim;
    int64_t k_offset, v_offset;  // bytes from the block's start
    int64_t block_bytes, layer_bytes;
    CodedPlane k_codes = {}, v_codes = {};

    bool coded() const { return k_codes.bits != 0 || v_codes.bits != 0; }
};

// How a plane's rows become codes (encode_plane.h, docs/codecs.md); the places are a CodedPlane's.
enum class EncodeMethod : int { none = 0, absmax = 1, small_float = 2, affine = 3, unit = 4, q8_0 = 5, q4_0 = 6, kvarn = 7, segments = 8 };

struct PlaneEncoder {
    EncodeMethod method = EncodeMethod::none;  // none: the plane is raw and copied
    bool rotated = false;            // by a Hadamard transform, after the signs
    const float* signs = nullptr;    // [dim], or null for all +1
    const float* means = nullptr;    // [places][heads][dim], taken off rows first, or null
    const float* stretch = nullptr;  // unit, segments: grid units per standard deviation, [parts],
    const float* edges = nullptr;    // and where the next code begins, [parts][15]
    const float* transforms = nullptr;  // segments: [places][heads][dim][dim], what rows are multiplied with,
    const float* weights = nullptr;     // and what errors weigh, [places][heads][parts]
};

// One plane of one head's block, from its raw copy to its bytes. Blocks by address.
struct EncodeArgs {
    const Format* raw;
    const Format* coded;
    const PlaneEncoder* encoder;
    bool values;
    int place, head;  // of the layer in its group
    const unsigned char* from;
    unsigned char* to;
};

static inline int coded_groups(const Format& format) {
    const int k = format.k_codes.token_groups, v = format.v_codes.token_groups;
    return k > v ? k : v;
}

// Bytes of ChunkArgs::coded for up to `rows` rows.
static inline size_t coded_scratch_bytes(const Format& format, int rows) {
    const int groups = coded_groups(format), dim = format.k_dim > format.v_dim ? format.k_dim : format.v_dim;
    constexpr int widest = 16;  // lanes of a vector
    const size_t per_row = 2 * kMaxDim + static_cast<size_t>(2 * groups) * kLda + 4 * (1 + groups) * kChunk + 4 * (2 + (1 + widest) * groups);
    return 4u * dim * format.block_size + 128 + rows * per_row + 12u * kChunk * groups + 6 * kMaxDim + 4 * kLda + 16 * 64;
}

// The latents' part of a tile's logits.
struct LatentArgs {
    const void* q;    // packed by KernelTable::pack_latent, for all chunks
    int columns;      // rows rounded up to a multiple of 8
    void* tokens;     // scratch [kLatentTokens][kLda]
    float* products;  // scratch [kLatentTokens][columns]
};

// Keys of a chunk that some of a tile's rows read together.
struct Segment {
    const unsigned char* const* blocks;  // from the block of `first`; one more entry than blocks
                                         // read: the next to prefetch, or null (and one more)
    int first, end;                      // tokens visible to any of the rows, from the chunk's start
    int row, rows;                       // of the tile
};

// One chunk of keys against one tile of query rows. A row's keys are those of its segments, which
// come in ascending order; rows of several sequences have some in common and some to themselves.
struct ChunkArgs {
    const Format* format;
    int rows;
    const void* q;            // [rows][kLda], packed by KernelTable::pack
    const Segment* segments;
    int count;                // of segments
    int first, end;           // tokens of all segments, from the chunk's start
    const int *low, *high;    // [rows], tokens visible to each row, from the chunk's start
    float scale;                         // includes log2(e) unless there is a softcap
    float softcap;                       // 0: none
    float* scores;                       // scratch [rows][kLda]
    void* weights;                       // scratch [rows][kLda], for the kernels with bf16 weights
    float* out;                          // [rows][out_stride], not normalised
    ptrdiff_t out_stride;
    float *top, *sum;                    // [rows]; logits are in base 2; no key: -inf and 0
    void* coded;                         // scratch, for coded formats
    const LatentArgs* latent;            // or null: q is the rotated part's, and the latents' is added
};

// Where one output row goes.
struct FinishArgs {
    const float* acc;  // [v_dim]
    int v_dim;
    float top, sum;
    const float* sink;  // or null
    DType dtype;
    void* out;
    float* lse;  // or null
};

// One panel of packed weights against rows of activations (linear.h).
struct LinearArgs {
    const void* a;            // fp32, or bf16 for a "dot" kernel: chunks of kChunk channels, each [rows][kLda]
    ptrdiff_t chunk_stride;   // elements from one chunk to the next
    int rows, inner;
    const unsigned char* weights;
    DType dtype;
    float* c;  // [rows][c_stride]
    ptrdiff_t c_stride;
};

enum class Activation : int { silu = 0, gelu_tanh = 1 };

// What one instruction set offers. A "dot" kernel multiplies bf16 pairs (queries and weights are
// bf16); the others compute on fp32 queries and weights.
struct KernelTable {
    int lanes;  // floats of a vector
    bool has_dot;
    // [rows][kLda] from `rows` pointers to query rows.
    void (*pack)(const void* const* rows, int count, int dim, DType dtype, bool dot, void* packed);
    void (*pack_latent)(const void* const* rows, int count, int columns, int dim, DType dtype, bool dot, void* packed);
    void (*chunk)(const ChunkArgs& args, bool dot);
    // acc = acc merged with part, row by row; a row without keys changes nothing.
    void (*fold)(int rows, int v_dim, float* acc, ptrdiff_t acc_stride, float* acc_top, float* acc_sum,
                 const float* part, ptrdiff_t part_stride, const float* part_top, const float* part_sum);
    void (*finish)(const FinishArgs& args);

    // For native steps: see linear.h and elementwise.h.
    int panel;  // output channels of a panel of weights
    void (*linear)(const LinearArgs& args, bool dot);
    void (*rms_norm)(const float* x, const float* weight, int dim, float eps, float* out);
    void (*rotate)(float* x, const float* cosines, const float* sines, int half);
    void (*gate)(float* gates, const float* ups, int count, Activation activation);
    void (*pack_row)(const float* from, int count, void* row, ptrdiff_t chunk_stride, int column, bool dot);
    // out [columns] = x [rows] times matrix [rows][columns]; not in place.
    void (*row_matrix)(const float* x, const float* matrix, int rows, int columns, float* out);
    // out (+)= weight * x over `count` numbers.
    void (*scaled)(const float* x, float weight, int count, bool accumulate, float* out);
    // The first place of the largest of `count` numbers, and it; NaN counts as largest.
    int64_t (*largest)(const float* x, int64_t count, float* value);

    // Encodes a plane of a block; how many of its numbers were not finite.
    int64_t (*encode)(const EncodeArgs& args);
};

}  // namespace kvloom
