#include "step.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <stdexcept>

#include "convert.h"
#include "shares.h"
#include "write.h"

namespace kvloom {
namespace {

constexpr int kSmallRows = 16;    // up to here the rows' work between products is not worth waking threads
constexpr int kSmallTurns = 3;    // nor that of turning their queries
constexpr int kFetchedRows = 64;  // up to here where rows of keys go is fetched beforehand; more would fill the cache
// Panels that a thread reads in a row, at most, and how many runs each thread should find.
constexpr int kMostPanels = 8, kRunsPerThread = 6;

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

const Encoding* encoding_of(const StepInput& input, int group) {
    if (input.encodings.empty() || input.encodings[group].storage < 0) return nullptr;
    return &input.encodings[group];
}

int chunks_of(int inner) { return (inner + kChunk - 1) / kChunk; }

float* grow(std::vector<float>& memory, size_t count) {
    if (memory.size() < count + 16) memory.resize(count + 16);
    const auto address = reinterpret_cast<uintptr_t>(memory.data());
    return reinterpret_cast<float*>((address + 63) / 64 * 64);
}

}  // namespace

Step::Step(const KernelTable& kernels, Parallel parallel, StepShape shape, bool dot)
    : kernels_(kernels), parallel_(parallel), shape_(shape), dot_(dot && kernels.has_dot) {}

Step Step::alone() const {
    Step step(kernels_, Parallel(1, 0), shape_, dot_);
    step.layers_ = layers_;
    step.head_ = head_;
    step.final_norm_ = final_norm_;
    step.embedding_ = embedding_;
    step.embedding_dtype_ = embedding_dtype_;
    return step;
}

void Step::set_embedding(const void* rows, DType dtype) {
    embedding_ = rows;
    embedding_dtype_ = dtype;
}

void Step::set_head(Linear head, const float* final_norm) {
    head_ = head;
    final_norm_ = final_norm;
}

void Step::lap(Phase phase) {
    const double at = now();
    double Times::*const spent[] = {&Times::linear, &Times::attention, &Times::encode, &Times::rest};
    times_.*spent[static_cast<int>(phase)] += at - last_;
    last_ = at;
}

Step::Times Step::take_times() {
    const Times times = times_;
    times_ = Times{};
    return times;
}

// body(item) for every item, over the threads if `wide`.
template <class F>
void Step::each(int items, bool wide, F&& body) {
    if (!wide || items <= 1) {
        for (int i = 0; i < items; ++i) body(i);
        return;
    }
    struct Work {
        F& body;
        Shares shares;
    } work{body, Shares(items, parallel_.num_threads())};
    parallel_.run(
        [](void* data) {
            auto& work = *static_cast<Work*>(data);
            work.shares.work([&](int64_t item) { work.body(static_cast<int>(item)); });
        },
        &work, true);
}

// Room for `rows` rows of activations as LinearArgs::a wants them; padding lanes are never read.
void* Step::activations(std::vector<float>& memory, int rows, int inner) {
    return grow(memory, static_cast<size_t>(chunks_of(inner)) * rows * kLda);
}

// Panels follow each other in memory: a thread takes a run of them, and enough runs are left to share.
Step::Product Step::product(const Linear& linear, const void* a, int rows, int together) const {
    const int width = kernels_.panel * together, groups = (linear.outputs + width - 1) / width;
    const int run = std::max(1, std::min(kMostPanels, groups / (parallel_.num_threads() * kRunsPerThread)));
    return {&linear, a, rows, together, groups, run, (groups + run - 1) / run};
}

// Item `index` of a product: some rows against a run of panels, `together` panels at a time: finish(first panel,
// first row, rows, tile [rows][together * panel]).
template <class F>
void Step::multiply(const Product& product, int index, F&& finish) const {
    static thread_local std::vector<float> memory;
    const Linear& linear = *product.linear;
    const int panel = kernels_.panel, together = product.together, width = panel * together;
    const int64_t panel_bytes = linear.panel_bytes(panel);
    const ptrdiff_t item = dot_ ? 2 : 4;
    const int first = index / product.runs * kRowBlock, count = std::min(kRowBlock, product.rows - first);
    float* tile = grow(memory, static_cast<size_t>(kRowBlock) * width);
    const int begin = index % product.runs * product.run, end = std::min(product.groups, begin + product.run);
    for (int group = begin; group < end; ++group) {
        for (int p = 0; p < together; ++p) {
            LinearArgs args;
            args.a = static_cast<const unsigned char*>(product.a) + static_cast<ptrdiff_t>(first) * kLda * item;
            args.chunk_stride = static_cast<ptrdiff_t>(product.rows) * kLda;
            args.rows = count;
            args.inner = linear.inner;
            args.weights = linear.panels + (static_cast<int64_t>(group) * together + p) * panel_bytes;
            args.dtype = linear.dtype;
            args.c = tile + p * panel;
            args.c_stride = width;
            kernels_.linear(args, dot_ && linear.dtype == DType::bf16);
        }
        if (linear.bias != nullptr) {
            for (int r = 0; r < count; ++r) {
                for (int c = 0; c < width; ++c) tile[r * width + c] += linear.bias[group * width + c];
            }
        }
        finish(group * together, first, count, tile);
    }
}

template <class F>
void Step::linear(const Linear& linear, const void* a, int rows, int together, F&& finish) {
    const Product all = product(linear, a, rows, together);
    each(all.items(), true, [&](int index) { multiply(all, index, finish); });
    lap(Phase::linear);
}

int64_t Step::run(const StepInput& input) {
    if (input.tokens == 0) return 0;
    body(input);
    each(head_items(), true, [&](int item) { head(input, item); });
    lap(Phase::linear);
    if (input.best != nullptr) each(input.num_rows, input.num_rows > 1, [&](int row) { best(input, row); });
    lap(Phase::rest);
    return not_finite_;
}

void Step::body(const StepInput& input) {
    last_ = now();
    not_finite_ = 0;
    plan(input);
    embed(input);
    for (size_t index = 0; index < layers_.size(); ++index) layer(static_cast<int>(index), input);
    if (input.num_rows > 0) norm_pack(grow(x_, 0), final_norm_, input.rows, input.num_rows);
    head_product_ = product(head_, grow(packed_, 0), input.num_rows, 1);
    lap(Phase::rest);
}

void Step::head(const StepInput& input, int item) const {
    const int panel = kernels_.panel, vocab = shape_.vocab;
    multiply(head_product_, item, [&](int first_panel, int first, int count, const float* tile) {
        const int column = first_panel * panel, columns = std::min(panel, vocab - column);
        for (int r = 0; r < count; ++r) {
            __builtin_memcpy(input.logits + static_cast<ptrdiff_t>(first + r) * vocab + column, tile + r * panel,
                             columns * sizeof(float));
        }
    });
}

void Step::best(const StepInput& input, int row) const {
    const int64_t vocab = shape_.vocab;
    input.best[row] = kernels_.largest(input.logits + row * vocab, vocab, input.best_value + row);
}

int64_t Step::encode_before(const StepInput& input) {
    last_ = now();
    not_finite_ = 0;
    for (size_t index = 0; index < layers_.size(); ++index) {
        if (encoding_of(input, layers_[index].group) != nullptr) encode_due(static_cast<int>(index), input);
    }
    return not_finite_;
}

void Step::plan(const StepInput& input) {
    size_t groups = 0;
    for (const StepLayer& layer : layers_) groups = std::max(groups, static_cast<size_t>(layer.group) + 1);
    for (auto* plans : {&plans_, &sink_plans_, &encoded_plans_}) plans->resize(groups);
    std::vector<bool> made(groups, false);
    for (const StepLayer& layer : layers_) {
        const int group = layer.group;
        if (made[group]) continue;
        made[group] = true;
        const auto make = [&](AttentionPlan& plan, int storage, const KeyBounds& keys) {
            plan.make(*input.formats[storage], input.batches[storage], keys, layer.query_heads, false, parallel_.num_threads());
        };
        KeyBounds keys;
        keys.window = layer.window;
        const Encoding* encoding = encoding_of(input, group);
        if (encoding == nullptr) {
            make(plans_[group], group, keys);
            continue;
        }
        keys.max_lag = encoding->recents;
        make(plans_[group], group, keys);
        keys.max_lag = -1;
        keys.min_lag = encoding->recents + 1;
        if (encoding->sinks > 0) {
            keys.end_block = encoding->sinks;
            make(sink_plans_[group], group, keys);
            keys.end_block = -1;
            keys.first_block = encoding->sinks;
        }
        make(encoded_plans_[group], encoding->storage, keys);
    }
    lap(Phase::attention);
}

void Step::embed(const StepInput& input) {
    const int hidden = shape_.hidden;
    float* x = grow(x_, static_cast<size_t>(input.tokens) * hidden);
    for (int t = 0; t < input.tokens; ++t) {
        if (input.ids[t] < 0 || input.ids[t] >= shape_.vocab) {
            throw std::invalid_argument("token id " + std::to_string(input.ids[t]) + " is outside the vocabulary of " +
                                        std::to_string(shape_.vocab));
        }
    }
    each(input.tokens, input.tokens > kSmallRows, [&](int t) {
        float* row = x + static_cast<ptrdiff_t>(t) * hidden;
        if (embedding_ == nullptr) {
            unpack_row(head_, kernels_.panel, static_cast<int>(input.ids[t]), row);
        } else {
            const int64_t from = input.ids[t] * hidden;
            for (int d = 0; d < hidden; ++d) {
                switch (embedding_dtype_) {
                    case DType::f32: row[d] = static_cast<const float*>(embedding_)[from + d]; break;
                    case DType::f16: row[d] = f16_to_float(static_cast<const uint16_t*>(embedding_)[from + d]); break;
                    case DType::bf16: row[d] = bf16_to_float(static_cast<const uint16_t*>(embedding_)[from + d]); break;
                }
            }
        }
        if (shape_.embedding_scale != 1.0f) {
            for (int d = 0; d < hidden; ++d) row[d] *= shape_.embedding_scale;
        }
    });
    lap(Phase::rest);
}

// Rows of x, all or the given ones, normed if the model norms here, as activations in packed_.
void Step::norm_pack(const float* x, const float* weight, const int64_t* rows, int count) {
    const int hidden = shape_.hidden;
    unsigned char* packed = static_cast<unsigned char*>(activations(packed_, count, hidden));
    const ptrdiff_t row_bytes = static_cast<ptrdiff_t>(kLda) * (dot_ ? 2 : 4), stride = static_cast<ptrdiff_t>(count) * kLda;
    each(count, count > kSmallRows, [&](int r) {
        static thread_local std::vector<float> memory;
        const float* from = x + (rows != nullptr ? rows[r] : r) * hidden;
        if (weight != nullptr) {
            float* normed = grow(memory, hidden);
            kernels_.rms_norm(from, weight, hidden, shape_.eps, normed);
            from = normed;
        }
        kernels_.pack_row(from, hidden, packed + r * row_bytes, stride, 0, dot_);
    });
}

// x += scale * norm(out_): the end of a half layer whose output is normed before it is added.
void Step::add_residual(const float* norm, int tokens) {
    const int hidden = shape_.hidden;
    float *x = grow(x_, 0), *out = grow(out_, 0);
    each(tokens, tokens > kSmallRows, [&](int t) {
        float* from = out + static_cast<ptrdiff_t>(t) * hidden;
        float* to = x + static_cast<ptrdiff_t>(t) * hidden;
        kernels_.rms_norm(from, norm, hidden, shape_.eps, from);
        kernels_.scaled(from, shape_.residual_scale, hidden, true, to);
    });
    lap(Phase::rest);
}

void Step::layer(int index, const StepInput& input) {
    const StepLayer& layer = layers_[index];
    const int tokens = input.tokens, hidden = shape_.hidden, panel = kernels_.panel;
    float* x = grow(x_, 0);
    float* out = grow(out_, static_cast<size_t>(tokens) * hidden);
    // The product's rows are added to x, or kept in out_ until they are normed.
    const auto add = [&](const float* norm) {
        return [=](int first_panel, int first, int count, const float* tile) {
            const int column = first_panel * panel, width = std::min(panel, hidden - column);
            for (int r = 0; r < count; ++r) {
                const ptrdiff_t at = static_cast<ptrdiff_t>(first + r) * hidden + column;
                if (norm != nullptr) {
                    __builtin_memcpy(out + at, tile + r * panel, width * sizeof(float));
                } else {
                    kernels_.scaled(tile + r * panel, shape_.residual_scale, width, true, x + at);
                }
            }
        };
    };

    norm_pack(x, layer.input_norm, nullptr, tokens);
    lap(Phase::rest);
    attention(index, input);
    const int attended_width = layer.o.inner;
    void* packed = activations(packed_, tokens, attended_width);
    const float* attended = grow(attended_, 0);
    const ptrdiff_t row_bytes = static_cast<ptrdiff_t>(kLda) * (dot_ ? 2 : 4), stride = static_cast<ptrdiff_t>(tokens) * kLda;
    each(tokens, tokens > kSmallRows, [&](int t) {
        kernels_.pack_row(attended + static_cast<ptrdiff_t>(t) * attended_width, attended_width,
                          static_cast<unsigned char*>(packed) + t * row_bytes, stride, 0, dot_);
    });
    lap(Phase::rest);
    linear(layer.o, packed, tokens, 1, add(layer.attention_out_norm));
    if (layer.attention_out_norm != nullptr) add_residual(layer.attention_out_norm, tokens);

    norm_pack(x, layer.mlp_norm, nullptr, tokens);
    packed = grow(packed_, 0);
    lap(Phase::rest);
    unsigned char* gated = static_cast<unsigned char*>(activations(gated_, tokens, shape_.intermediate));
    linear(layer.gate_up, packed, tokens, 2, [&](int first_panel, int first, int count, float* tile) {
        const int column = first_panel / 2 * panel, width = std::min(panel, shape_.intermediate - column);
        for (int r = 0; r < count; ++r) {
            float* row = tile + r * 2 * panel;
            kernels_.gate(row, row + panel, panel, shape_.activation);
            kernels_.pack_row(row, width, gated + (first + r) * row_bytes, stride, column, dot_);
        }
    });
    linear(layer.down, gated, tokens, 1, add(layer.mlp_out_norm));
    if (layer.mlp_out_norm != nullptr) add_residual(layer.mlp_out_norm, tokens);
}

// Queries, keys and values of packed_; keys and values into the cache; attention into attended_.
void Step::attention(int index, const StepInput& input) {
    const StepLayer& layer = layers_[index];
    const Format& format = *input.formats[layer.group];
    const int tokens = input.tokens, panel = kernels_.panel, width = layer.qkv.outputs;
    const int keys_at = layer.query_heads * format.k_dim, values_at = keys_at + format.num_heads * format.k_dim;
    float* qkv = grow(qkv_, static_cast<size_t>(tokens) * width);
    Batch batch = input.batches[layer.group];
    batch.layer_offset = layer.place * format.layer_bytes;
    if (tokens <= kFetchedRows) fetch_for_write(format, batch);
    linear(layer.qkv, grow(packed_, 0), tokens, 1, [&](int first_panel, int first, int count, const float* tile) {
        const int column = first_panel * panel, columns = std::min(panel, width - column);
        for (int r = 0; r < count; ++r) {
            __builtin_memcpy(qkv + static_cast<ptrdiff_t>(first + r) * width + column, tile + r * panel,
                             columns * sizeof(float));
        }
    });
    // Rows in bf16: queries as pairs are multiplied with, keys and values as they are stored.
    const bool pairs = dot_ && format.dtype == DType::bf16;
    if (pairs && rounded_.size() < static_cast<size_t>(tokens) * width) rounded_.resize(static_cast<size_t>(tokens) * width);
    each(tokens, tokens > kSmallRows, [&](int t) {
        float* row = qkv + static_cast<ptrdiff_t>(t) * width;
        for (int head = 0; head < layer.query_heads + format.num_heads; ++head) {
            float* at = row + head * format.k_dim;
            const float* norm = head < layer.query_heads ? layer.q_norm : layer.k_norm;
            if (norm != nullptr) kernels_.rms_norm(at, norm, format.k_dim, shape_.eps, at);
            if (layer.rope >= 0) {
                const ptrdiff_t angles = input.positions[t] * input.rotary_channels;
                const auto& [cosines, sines] = input.ropes[layer.rope];
                kernels_.rotate(at, cosines + angles, sines + angles, input.rotary_channels / 2);
            }
        }
        if (pairs) {
            kernels_.pack_row(row, width, rounded_.data() + static_cast<ptrdiff_t>(t) * width, kChunk, 0, true);
        }
    });
    lap(Phase::rest);

    if (pairs) {
        write(format, batch, {rounded_.data() + keys_at, DType::bf16, width, format.k_dim},
              {rounded_.data() + values_at, DType::bf16, width, format.v_dim}, parallel_);
    } else {
        write(format, batch, {qkv + keys_at, DType::f32, width, format.k_dim},
              {qkv + values_at, DType::f32, width, format.v_dim}, parallel_);
    }
    lap(Phase::rest);
    Attention attention;
    attention.q = pairs ? static_cast<const void*>(rounded_.data()) : qkv;
    attention.q_dtype = pairs ? DType::bf16 : DType::f32;
    attention.q_token_stride = width;
    attention.q_head_stride = format.k_dim;
    attention.query_heads = layer.query_heads;
    attention.out = grow(attended_, static_cast<size_t>(tokens) * layer.query_heads * format.v_dim);
    attention.out_dtype = DType::f32;
    attention.lse = nullptr;
    attention.scale = layer.scale;
    attention.softcap = layer.softcap;
    attention.sinks = layer.sinks;
    attention.keys.window = layer.window;
    if (encoding_of(input, layer.group) == nullptr) {
        attend(kernels_, plans_[layer.group], batch.layer_offset, attention, parallel_);
    } else {
        encode_due(index, input);
        attend_encoded(index, input, attention);
    }
    lap(Phase::attention);
}

void Step::encode_due(int index, const StepInput& input) {
    const StepLayer& layer = layers_[index];
    const BlockEncoder* encoder = encoding_of(input, layer.group)->encoder;
    const Batch& batch = input.batches[layer.group];
    if (encoder != nullptr && !input.encode_tasks.empty()) {
        not_finite_ += encode(kernels_, *encoder, input.encode_tasks[layer.group], static_cast<int>(layer.place),
                              batch.arena, batch.arena_bytes, parallel_);
    } else if (encoder == nullptr && input.encode) {
        input.encode(index);
    }
    lap(Phase::encode);
}

// Attends raw recents, raw sinks and encoded blocks, and merges them by their log-sum-exps.
void Step::attend_encoded(int index, const StepInput& input, Attention& attention) {
    const StepLayer& layer = layers_[index];
    const Encoding& encoding = *encoding_of(input, layer.group);
    const Format &raw = *input.formats[layer.group], &coded = *input.formats[encoding.storage];
    const int tokens = input.tokens, heads = layer.query_heads, k_dim = raw.k_dim, v_dim = raw.v_dim;
    const int group = heads / raw.num_heads;
    const size_t rows = static_cast<size_t>(tokens) * heads;
    float* const out = static_cast<float*>(attention.out);
    float* const lse = grow(lse_, 3 * rows);
    float* const parts = grow(part_, 2 * rows * v_dim);  // sinks', encoded
    const int64_t raw_offset = layer.place * raw.layer_bytes;
    const int64_t coded_offset = encoding.decoded ? 0 : layer.place * coded.layer_bytes;
    if (encoding.decoded && input.decode) input.decode(index);

    attention.lse = lse;
    // Queries as codes are read: fp32, turned as keys were.
    const float* queries = grow(qkv_, 0);
    Attention encoded = attention;
    encoded.q = queries;
    encoded.q_dtype = DType::f32;
    encoded.q_token_stride = layer.qkv.outputs;
    encoded.q_head_stride = k_dim;
    // Where vectors are turned, even few rows are work for all threads.
    const bool turns = encoding.query_turn != nullptr || encoding.output_turn != nullptr;
    const bool wide = tokens > (turns ? kSmallTurns : kSmallRows);
    if (encoding.query_turn != nullptr) {
        float* const turned = grow(turned_, rows * k_dim);
        each(tokens, wide, [&](int t) {
            for (int head = 0; head < heads; ++head) {
                const int64_t of_head = layer.place * raw.num_heads + head / group;
                const float* turn = encoding.query_turn + (encoding.turns_by_head ? of_head * k_dim * k_dim : 0);
                kernels_.row_matrix(queries + static_cast<ptrdiff_t>(t) * layer.qkv.outputs + head * k_dim, turn, k_dim, k_dim,
                                    turned + (static_cast<ptrdiff_t>(t) * heads + head) * k_dim);
            }
        });
        encoded.q = turned;
        encoded.q_token_stride = static_cast<int64_t>(heads) * k_dim;
    }
    encoded.out = parts + rows * v_dim;
    encoded.lse = lse + 2 * rows;
    // The longest first, so that threads end together.
    Planned calls[kMostPlanned] = {{&encoded_plans_[layer.group], coded_offset, encoded},
                                   {&plans_[layer.group], raw_offset, attention}};
    if (encoding.sinks > 0) {
        attention.out = parts;
        attention.lse = lse + rows;
        calls[2] = {&sink_plans_[layer.group], raw_offset, attention};
    }
    attend(kernels_, calls, encoding.sinks > 0 ? 3 : 2, parallel_);

    each(tokens, wide, [&](int t) {
        float back[kMaxDim];
        for (int head = 0; head < heads; ++head) {
            const size_t row = static_cast<size_t>(t) * heads + head;
            float encoded_lse = lse[2 * rows + row];
            if (encoding.means != nullptr && encoded_lse > -__builtin_inff()) {
                const float* mean = encoding.means + (layer.place * raw.num_heads + head / group) * k_dim;
                const float* query = queries + static_cast<ptrdiff_t>(t) * layer.qkv.outputs + head * k_dim;
                float sum = 0.0f;
                for (int d = 0; d < k_dim; ++d) sum += query[d] * mean[d];
                encoded_lse += layer.scale * sum;
            }
            const float sink_lse = encoding.sinks > 0 ? lse[rows + row] : -__builtin_inff();
            // Recents hold the query's own key: there is always one.
            const float top = std::max(lse[row], std::max(sink_lse, encoded_lse));
            const float recent = std::exp(lse[row] - top), sink = std::exp(sink_lse - top), code = std::exp(encoded_lse - top);
            const float by = 1.0f / (recent + sink + code);
            float* to = out + row * v_dim;
            kernels_.scaled(to, recent * by, v_dim, false, to);
            if (sink > 0.0f) kernels_.scaled(parts + row * v_dim, sink * by, v_dim, true, to);
            if (code > 0.0f) {
                const float* from = parts + (rows + row) * v_dim;
                if (encoding.output_turn != nullptr) {
                    kernels_.row_matrix(from, encoding.output_turn, v_dim, v_dim, back);
                    from = back;
                }
                kernels_.scaled(from, code * by, v_dim, true, to);
            }
        }
    });
}

}  // namespace kvloom
