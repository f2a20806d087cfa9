// The whole forward pass of a Llama-shaped decoder over packed tokens: embedding, layers on the paged
// cache, logits. Activations are fp32; for kernels that multiply bf16 pairs they are rounded to bf16
// where they enter a product. See docs/native-step.md.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "attend.h"
#include "encode.h"
#include "weights.h"

namespace kvloom {

struct StepLayer {
    Linear qkv;      // query heads, KV heads' keys, their values
    Linear o;
    Linear gate_up;  // a panel of gates, the same panel of ups, and so on
    Linear down;
    // Weights of RMS norms, or null where the model has none. q and k: per head.
    const float* input_norm = nullptr;
    const float* q_norm = nullptr;
    const float* k_norm = nullptr;
    const float* attention_out_norm = nullptr;
    const float* mlp_norm = nullptr;
    const float* mlp_out_norm = nullptr;
    const float* sinks = nullptr;
    int query_heads = 0;
    int group = 0;             // of the cache's layer groups
    int64_t place = 0;         // within the group
    int rope = -1;             // which table of angles; -1: none
    int64_t window = -1;
    float scale = 1.0f, softcap = 0.0f;
};

// How the layers of a group read their encoded blocks (core/storage.py): blocks before `sinks` and the last
// `recents` before a query's own are raw, the others are in storage group `storage`.
struct Encoding {
    int storage = -1;  // -1: nothing is encoded
    // Storage group's blocks are not the arena's but those of one layer, decoded: StepInput::decode puts them there.
    bool decoded = false;
    int sinks = 0, recents = 0;
    // [dim][dim], or null: what queries are multiplied with before, outputs after. Of queries one for all heads, or
    // one per place and KV head.
    const float* query_turn = nullptr;
    bool turns_by_head = false;
    const float* output_turn = nullptr;
    // [places][KV heads][dim], taken off keys before they were encoded, or null.
    const float* means = nullptr;
    const BlockEncoder* encoder = nullptr;  // or null: StepInput::encode does it
};

struct StepShape {
    int hidden = 0, intermediate = 0, vocab = 0;
    float eps = 1e-6f;
    float embedding_scale = 1.0f;
    float residual_scale = 1.0f;
    Activation activation = Activation::silu;
};

struct StepInput {
    const int64_t* ids;
    int tokens;
    const int64_t* positions;
    // Per table: [positions, rotary channels] cosines and sines.
    std::vector<std::pair<const float*, const float*>> ropes;
    int rotary_channels;
    std::vector<const Format*> formats;  // per storage group, the layer groups first
    std::vector<Batch> batches;
    std::vector<Encoding> encodings;        // per layer group, or empty
    // What the layers' queries read encoded for the first time: tasks per layer group, or empty; and for groups
    // without an encoder of their own a function, or empty.
    std::vector<EncodeTask> encode_tasks;
    std::function<void(int layer)> encode;
    std::function<void(int layer)> decode;
    const int64_t* rows;  // whose logits are wanted
    int num_rows;
    float* logits;  // [num_rows, vocab]
    // Place and value of each row's largest logit [num_rows], or null.
    int64_t* best;
    float* best_value;
};

class Step {
    // Rows that one reading of a panel serves: their activations stay in the second-level cache.
    static constexpr int kRowBlock = 128;

public:
    Step(const KernelTable& kernels, Parallel parallel, StepShape shape, bool dot);

    void set_embedding(const void* rows, DType dtype);  // [vocab, hidden]; else the head's panels are used
    void set_head(Linear head, const float* final_norm);
    void set_embedding_scale(float scale) { shape_.embedding_scale = scale; }
    void add_layer(StepLayer layer) { layers_.push_back(layer); }

    // A copy with one thread and buffers of its own, which shares the weights.
    Step alone() const;

    // Returns how many numbers were not finite where blocks were encoded. Throws std::invalid_argument for ids
    // outside the vocabulary and blocks that no table has.
    int64_t run(const StepInput& input);

    // `run` in parts, for callers that share them out: all but the logits; then, in any order and by any thread, the
    // items of the head's product; then, row by row, the largest logits where they are wanted.
    void body(const StepInput& input);
    int head_items() const { return head_product_.items(); }
    void head(const StepInput& input, int item) const;
    void best(const StepInput& input, int row) const;

    // Only encodes what is due: for input whose due blocks were all written before. Returns as `run` does.
    int64_t encode_before(const StepInput& input);

    const std::vector<StepLayer>& layers() const { return layers_; }
    const Linear& head_weights() const { return head_; }
    const Parallel& parallel() const { return parallel_; }
    int vocab() const { return shape_.vocab; }

    // Seconds spent in products, in attention, encoding blocks and elsewhere since the last call.
    struct Times {
        double linear = 0, attention = 0, encode = 0, rest = 0;

        void add(const Times& other, double share) {
            linear += other.linear * share;
            attention += other.attention * share;
            encode += other.encode * share;
            rest += other.rest * share;
        }
    };
    Times take_times();

private:
    enum class Phase { linear, attention, encode, rest };

    // A linear layer's product with `rows` rows of activations, cut into items (multiply).
    struct Product {
        const Linear* linear = nullptr;
        const void* a = nullptr;
        int rows = 0, together = 1, groups = 0, run = 1, runs = 0;
        int items() const { return runs * ((rows + kRowBlock - 1) / kRowBlock); }
    };

    void plan(const StepInput& input);
    void embed(const StepInput& input);
    void layer(int index, const StepInput& input);
    void attention(int index, const StepInput& input);
    void encode_due(int index, const StepInput& input);
    void attend_encoded(int index, const StepInput& input, Attention& attention);
    void norm_pack(const float* x, const float* weight, const int64_t* rows, int count);
    void add_residual(const float* norm, int tokens);
    Product product(const Linear& linear, const void* a, int rows, int together) const;
    template <class F>
    void multiply(const Product& product, int index, F&& finish) const;
    template <class F>
    void linear(const Linear& linear, const void* a, int rows, int panels, F&& finish);
    template <class F>
    void each(int items, bool wide, F&& body);
    void* activations(std::vector<float>& memory, int rows, int inner);
    void lap(Phase phase);

    const KernelTable& kernels_;
    Parallel parallel_;
    StepShape shape_;
    bool dot_;
    std::vector<StepLayer> layers_;
    Linear head_;
    const float* final_norm_ = nullptr;
    const void* embedding_ = nullptr;
    DType embedding_dtype_ = DType::f32;

    std::vector<float> x_, qkv_, attended_, out_, packed_, gated_;
    // Per layer group, for the batch at hand: all keys, or raw recents, raw sinks and encoded.
    std::vector<AttentionPlan> plans_, sink_plans_, encoded_plans_;
    std::vector<float> part_, turned_, lse_;
    std::vector<uint16_t> rounded_;  // rows of qkv_ in bf16, for kernels that multiply pairs
    Product head_product_;
    int64_t not_finite_ = 0;
    Times times_;
    double last_ = 0;
};

}  // namespace kvloom
