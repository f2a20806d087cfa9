// Python bindings. Tensors cross as addresses and strides in elements; kvloom.kernels.cpu, the only
// caller, checks types, devices and shapes.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "attend.h"
#include "bindings.h"
#include "encode.h"
#include "parallel.h"
#include "variants.h"
#include "write.h"

namespace nb = nanobind;
using namespace kvloom;

const KernelTable& kvloom::find_kernels(const std::string& name) {
    Variant variants[4];
    const int count = available_variants(variants);
    for (int i = 0; i < count; ++i) {
        if (name == variants[i].name) return *variants[i].kernels;
    }
    throw std::invalid_argument("this CPU has no variant " + name);
}

namespace {

std::vector<std::string> variant_names() {
    Variant variants[4];
    const int count = available_variants(variants);
    std::vector<std::string> names;
    for (int i = 0; i < count; ++i) names.emplace_back(variants[i].name);
    return names;
}

Batch make_batch(uintptr_t arena, int64_t arena_bytes, uintptr_t tables, int64_t table_stride, int64_t max_blocks,
                 uintptr_t query_start, uintptr_t first_position, int sequences) {
    return {address<unsigned char>(arena),       arena_bytes,  0, address<const int64_t>(tables),
            table_stride,                        max_blocks,   address<const int32_t>(query_start),
            address<const int32_t>(first_position), sequences};
}

class Kernels {
public:
    Kernels(const std::string& variant, int num_threads, uintptr_t gomp_parallel)
        : table_(find_kernels(variant)), parallel_(num_threads, gomp_parallel) {}

    void write(const Format& format, Batch batch, int64_t layer_offset, uintptr_t k, int k_dtype, int64_t k_token_stride,
               int64_t k_head_stride, uintptr_t v, int v_dtype, int64_t v_token_stride, int64_t v_head_stride) const {
        const Rows keys{address<const void>(k), static_cast<DType>(k_dtype), k_token_stride, k_head_stride};
        const Rows values{address<const void>(v), static_cast<DType>(v_dtype), v_token_stride, v_head_stride};
        batch.layer_offset = layer_offset;
        kvloom::write(format, batch, keys, values, parallel_);
    }

    void attend(const Format& format, Batch batch, int64_t layer_offset, uintptr_t q, int q_dtype, int64_t q_token_stride,
                int64_t q_head_stride, int query_heads, uintptr_t out, int out_dtype, uintptr_t lse, float scale,
                float softcap, uintptr_t sinks, int64_t window, int64_t first_block, int64_t end_block,
                int64_t min_lag, int64_t max_lag) const {
        Attention attention;
        attention.q = address<const void>(q);
        attention.q_dtype = static_cast<DType>(q_dtype);
        attention.q_token_stride = q_token_stride;
        attention.q_head_stride = q_head_stride;
        attention.query_heads = query_heads;
        attention.out = address<void>(out);
        attention.out_dtype = static_cast<DType>(out_dtype);
        attention.lse = address<float>(lse);
        attention.scale = scale;
        attention.softcap = softcap;
        attention.sinks = address<const float>(sinks);
        attention.keys = {window, first_block, end_block, min_lag, max_lag};
        batch.layer_offset = layer_offset;
        kvloom::attend(table_, format, batch, attention, parallel_);
    }

    void attend_latent(const Format& format, Batch batch, int64_t layer_offset, int dtype, uintptr_t q_latent,
                       int64_t latent_token_stride, int64_t latent_head_stride, uintptr_t q_rope,
                       int64_t rope_token_stride, int64_t rope_head_stride, int query_heads, uintptr_t out,
                       int out_dtype, uintptr_t lse, float scale, int64_t first_block, int64_t end_block,
                       int64_t min_lag, int64_t max_lag) const {
        Attention attention{};
        attention.q = address<const void>(q_rope);
        attention.q_dtype = static_cast<DType>(dtype);
        attention.q_token_stride = rope_token_stride;
        attention.q_head_stride = rope_head_stride;
        attention.q_latent = address<const void>(q_latent);
        attention.latent_token_stride = latent_token_stride;
        attention.latent_head_stride = latent_head_stride;
        attention.query_heads = query_heads;
        attention.out = address<void>(out);
        attention.out_dtype = static_cast<DType>(out_dtype);
        attention.lse = address<float>(lse);
        attention.scale = scale;
        attention.keys = {-1, first_block, end_block, min_lag, max_lag};
        batch.layer_offset = layer_offset;
        kvloom::attend(table_, format, batch, attention, parallel_);
    }

    int64_t encode(const BlockEncoder& encoder, const EncodeTask& task, int place, uintptr_t arena, int64_t arena_bytes) const {
        return kvloom::encode(table_, encoder, task, place, address<unsigned char>(arena), arena_bytes, parallel_);
    }

private:
    const KernelTable& table_;
    Parallel parallel_;
};

// For tests: what sharing saves. `window` -1: none.
int64_t keys_read(const Format& format, const Batch& batch, int query_heads, bool latent, int64_t window) {
    KeyBounds keys;
    keys.window = window;
    AttentionPlan plan;
    plan.make(format, batch, keys, query_heads, latent, 1);
    return plan.keys_read();
}

}  // namespace

NB_MODULE(_cpu, m) {
    m.doc() = "Native kernels of kvloom.kernels.cpu.";
    m.attr("MIN_DIM") = kMinDim;
    m.attr("MAX_DIM") = kMaxDim;
    m.attr("MAX_LATENT_DIM") = kMaxLatentDim;
    m.attr("CHUNK") = kChunk;
    m.def("keys_read", &keys_read, "Keys that attention reads for a layer of `format`, over all heads.");
    m.def("variant_names", &variant_names, "Instruction sets this CPU has, slowest first.");

    nb::class_<Format>(m, "Format", "Geometry of one layer group's blocks; offsets in bytes.")
        .def("__init__",
             [](Format* self, int dtype, int block_size, int num_heads, int k_dim, int v_dim, int64_t k_offset,
                int64_t v_offset, int64_t block_bytes, int64_t layer_bytes) {
                 new (self) Format{static_cast<DType>(dtype), block_size, num_heads, k_dim, v_dim,
                                   k_offset, v_offset, block_bytes, layer_bytes};
             })
        .def("set_codes",
             [](Format& format, bool values, int exponent_bits, float center, int token_groups, int64_t token_scale,
                int64_t token_offset, int64_t channel_scale, int64_t channel_offset) {
                 CodedPlane& plane = values ? format.v_codes : format.k_codes;
                 plane.exponent_bits = exponent_bits;
                 plane.center = center;
                 plane.token_groups = token_groups;
                 plane.token_scale = token_scale;
                 plane.token_offset = token_offset;
                 plane.channel_scale = channel_scale;
                 plane.channel_offset = channel_offset;
             },
             "What undoes a plane's codes; offsets in bytes from the block's start, -1 for none.")
        .def("add_part",
             [](Format& format, bool values, int bits, int channels, const std::vector<int>& levels,
                const std::vector<int64_t>& codes) {
                 CodedPlane& plane = values ? format.v_codes : format.k_codes;
                 if (plane.num_parts == (values ? 1 : kMaxParts)) throw std::invalid_argument("too many parts");
                 CodedPart& part = plane.parts[plane.num_parts++];
                 part.bits = bits;
                 part.channels = channels;
                 for (size_t i = 0; i < levels.size() && i < 16; ++i) part.levels[i] = static_cast<int8_t>(levels[i]);
                 for (size_t i = 0; i < codes.size() && i < 2; ++i) part.codes[i] = codes[i];
                 plane.bits = plane.parts[0].bits;
             },
             "Codes of a plane's next channels; offsets in bytes from the block's start.");
    nb::class_<BlockEncoder>(m, "BlockEncoder", "How blocks of the first format become blocks of the second.")
        .def("__init__", [](BlockEncoder* self, const Format& raw, const Format& coded) {
            new (self) BlockEncoder{raw, coded, {}, {}};
        })
        .def("set_plane",
             [](BlockEncoder& encoder, bool values, int method, bool rotated, uintptr_t signs, uintptr_t means,
                uintptr_t stretch, uintptr_t edges, uintptr_t transforms, uintptr_t weights) {
                 (values ? encoder.v : encoder.k) = {static_cast<EncodeMethod>(method), rotated, address<const float>(signs),
                                                     address<const float>(means), address<const float>(stretch),
                                                     address<const float>(edges), address<const float>(transforms),
                                                     address<const float>(weights)};
             },
             "Method and numbers of a plane, by address; planes that are not set are copied.");
    nb::class_<Batch>(m, "Batch", "Arena, block table and query tokens of one call, by address.")
        .def("__init__",
             [](Batch* self, uintptr_t arena, int64_t arena_bytes, uintptr_t tables, int64_t table_stride,
                int64_t max_blocks, uintptr_t query_start, uintptr_t first_position, int sequences) {
                 new (self) Batch(make_batch(arena, arena_bytes, tables, table_stride, max_blocks, query_start,
                                             first_position, sequences));
             });
    nb::class_<Kernels>(m, "Kernels", "The kernels of one variant with its threads. Calls release the GIL.")
        .def(nb::init<const std::string&, int, uintptr_t>())
        .def("write", &Kernels::write, nb::call_guard<nb::gil_scoped_release>())
        .def("encode", &Kernels::encode, nb::call_guard<nb::gil_scoped_release>())
        .def("attend", &Kernels::attend, nb::call_guard<nb::gil_scoped_release>())
        .def("attend_latent", &Kernels::attend_latent, nb::call_guard<nb::gil_scoped_release>());
    bind_step(m);
}
