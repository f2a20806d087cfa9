// Python bindings of the native step; kvloom.models.native, the only caller, checks types and shapes and
// keeps alive whatever is given by address.

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "lanes.h"

namespace nb = nanobind;

namespace kvloom {
namespace {

template <class T>
auto pointer(T StepLayer::*member) {
    return [member](StepLayer& layer, uintptr_t value) { layer.*member = address<const float>(value); };
}

int64_t step_run(Lanes& step, uintptr_t ids, uintptr_t positions, int tokens, const std::vector<std::pair<uintptr_t, uintptr_t>>& ropes,
              int rotary_channels, const std::vector<const Format*>& formats, const std::vector<const Batch*>& batches,
              const std::vector<Encoding>& encodings, const std::vector<EncodeTask>& encode_tasks, nb::object encode,
              nb::object decode,
              uintptr_t rows, int num_rows, uintptr_t logits, uintptr_t best, uintptr_t best_value) {
    StepInput input{};
    input.encodings = encodings;
    input.encode_tasks = encode_tasks;
    if (!encode.is_none()) {
        input.encode = [&encode](int layer) {
            nb::gil_scoped_acquire acquire;
            encode(layer);
        };
    }
    if (!decode.is_none()) {
        input.decode = [&decode](int layer) {
            nb::gil_scoped_acquire acquire;
            decode(layer);
        };
    }
    input.ids = address<const int64_t>(ids);
    input.positions = address<const int64_t>(positions);
    input.tokens = tokens;
    for (const auto& [cosines, sines] : ropes) {
        input.ropes.emplace_back(address<const float>(cosines), address<const float>(sines));
    }
    input.rotary_channels = rotary_channels;
    input.formats = formats;
    for (const Batch* batch : batches) input.batches.push_back(*batch);
    input.rows = address<const int64_t>(rows);
    input.num_rows = num_rows;
    input.logits = address<float>(logits);
    input.best = address<int64_t>(best);
    input.best_value = address<float>(best_value);
    nb::gil_scoped_release release;
    return step.run(input);
}

}  // namespace

void bind_step(nb::module_& m) {
    m.def("vector_lanes", [](const std::string& variant) { return find_kernels(variant).lanes; },
          "Floats of a vector.");
    m.def("panel_width", [](const std::string& variant) { return find_kernels(variant).panel; },
          "Output channels of a panel of packed weights.");
    m.def("has_pair_products", [](const std::string& variant) { return find_kernels(variant).has_dot; },
          "Whether the variant multiplies bf16 pairs.");
    m.def("pack_weights",
          [](uintptr_t rows, int dtype, int outputs, int inner, int panel, uintptr_t to) {
              nb::gil_scoped_release release;
              pack_weights(address<const void>(rows), static_cast<DType>(dtype), outputs, inner, panel,
                           address<void>(to));
          },
          "Weights [outputs, inner] into panels.");

    nb::class_<Linear>(m, "Linear", "Packed weights of a linear layer, by address.")
        .def("__init__", [](Linear* self, uintptr_t panels, int dtype, int outputs, int inner, uintptr_t bias) {
            new (self) Linear{address<const unsigned char>(panels), static_cast<DType>(dtype), outputs, inner,
                              address<const float>(bias)};
        });
    nb::class_<StepLayer>(m, "StepLayer", "One decoder layer; norms and sinks by address, 0 for none.")
        .def(nb::init<>())
        .def_rw("qkv", &StepLayer::qkv)
        .def_rw("o", &StepLayer::o)
        .def_rw("gate_up", &StepLayer::gate_up)
        .def_rw("down", &StepLayer::down)
        .def("set_input_norm", pointer(&StepLayer::input_norm))
        .def("set_q_norm", pointer(&StepLayer::q_norm))
        .def("set_k_norm", pointer(&StepLayer::k_norm))
        .def("set_attention_out_norm", pointer(&StepLayer::attention_out_norm))
        .def("set_mlp_norm", pointer(&StepLayer::mlp_norm))
        .def("set_mlp_out_norm", pointer(&StepLayer::mlp_out_norm))
        .def("set_sinks", pointer(&StepLayer::sinks))
        .def_rw("query_heads", &StepLayer::query_heads)
        .def_rw("group", &StepLayer::group)
        .def_rw("place", &StepLayer::place)
        .def_rw("rope", &StepLayer::rope)
        .def_rw("window", &StepLayer::window)
        .def_rw("scale", &StepLayer::scale)
        .def_rw("softcap", &StepLayer::softcap);
    nb::class_<Encoding>(m, "Encoding", "How the layers of a group read encoded blocks; matrices by address.")
        .def("__init__", [](Encoding* self, int storage, bool decoded, int sinks, int recents, uintptr_t query_turn,
                            bool turns_by_head, uintptr_t output_turn, uintptr_t means, const BlockEncoder* encoder) {
            new (self) Encoding{storage, decoded, sinks, recents, address<const float>(query_turn),
                                turns_by_head, address<const float>(output_turn), address<const float>(means), encoder};
        }, nb::arg("storage"), nb::arg("decoded"), nb::arg("sinks"), nb::arg("recents"), nb::arg("query_turn"), nb::arg("turns_by_head"), nb::arg("output_turn"),
           nb::arg("means"), nb::arg("encoder").none());
    nb::class_<EncodeTask>(m, "EncodeTask", "Arena offsets of spans to encode and of their encoded ones, by address.")
        .def("__init__", [](EncodeTask* self, uintptr_t from, uintptr_t to, int count) {
            new (self) EncodeTask{address<const int64_t>(from), address<const int64_t>(to), count};
        });
    nb::class_<Lanes>(m, "Step", "A decoder's whole forward pass; not for several threads at once.")
        .def("__init__",
             [](Lanes* self, const std::string& variant, int num_threads, uintptr_t gomp_parallel, int hidden,
                int intermediate, int vocab, float eps, float residual_scale, int activation, bool pairs) {
                 StepShape shape;
                 shape.hidden = hidden;
                 shape.intermediate = intermediate;
                 shape.vocab = vocab;
                 shape.eps = eps;
                 shape.residual_scale = residual_scale;
                 shape.activation = static_cast<Activation>(activation);
                 new (self) Lanes(Step(find_kernels(variant), Parallel(num_threads, gomp_parallel), shape, pairs));
             })
        .def("set_embedding",
             [](Lanes& step, uintptr_t rows, int dtype) {
                 step.change().set_embedding(address<const void>(rows), static_cast<DType>(dtype));
             })
        .def("set_embedding_scale", [](Lanes& step, float scale) { step.change().set_embedding_scale(scale); })
        .def("set_head", [](Lanes& step, const Linear& head, uintptr_t norm) {
            step.change().set_head(head, address<const float>(norm));
        })
        .def("add_layer", [](Lanes& step, const StepLayer& layer) { step.change().add_layer(layer); })
        .def("run", &step_run, nb::arg("ids"), nb::arg("positions"), nb::arg("tokens"), nb::arg("ropes"),
             nb::arg("rotary_channels"), nb::arg("formats"), nb::arg("batches"), nb::arg("encodings"),
             nb::arg("encode_tasks"), nb::arg("encode").none(), nb::arg("decode").none(), nb::arg("rows"), nb::arg("num_rows"), nb::arg("logits"),
             nb::arg("best"), nb::arg("best_value"))
        .def("by_rows", &Lanes::by_rows, "Runs in which each thread took rows of its own through all layers.")
        .def("take_times", [](Lanes& step) {
            const Step::Times times = step.take_times();
            nb::dict found;
            found["linear"] = times.linear;
            found["attention"] = times.attention;
            found["encode"] = times.encode;
            found["rest"] = times.rest;
            return found;
        }, "Seconds in products, attention, encoding and elsewhere since the last call.");
}

}  // namespace kvloom
