// The gated delta rule: a block's outputs after states that stay as they are, the same with the states after it beside them,
// and the fold of a block's accepted tokens into states where they lie.
//
// A column of a state, of one channel of the values, never meets another. So a task takes a row and a value head, and goes
// through its state in tiles of columns that stay in the nearest cache for all tokens: the state is read from memory once,
// and by the fold written once. While a tile meets the tokens, the next is on its way. Sums run down the columns, a lane to
// each, in the order of the channels of the keys.
// Whatever a token's result is the sum of is added in an order that depends on nothing else: it is the same bits alone, in a
// block, and whatever else is computed.

#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "cpu.h"

namespace dflash {
namespace {

constexpr int kWide = 4;  // vectors of a tile, as many sums as a core has under way while it reads and writes them

struct Shape {
  int64_t layers, slots, rows, tokens, channels, key_heads, value_heads, key_dim, value_dim, taps;

  int64_t group() const { return value_heads / key_heads; }
  int64_t state() const { return key_dim * value_dim; }
};

inline int64_t Padded(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

// x / (1 + e^-x), from the exponential that cannot be infinite.
inline Lanes Silu(Lanes x) {
  const Lanes small = Exp(x < Lanes{} ? x : -x), sum = All(1.0f) + small;
  return x * (x < Lanes{} ? small : All(1.0f)) / sum;
}

// What a token does to a tile's columns.
struct Token {
  const float *q, *k, *v;  // v of the tile's columns
  float decay, beta;
};

// Numbers kColumns apart in registers, and rows of a tile `stride` apart in memory.
template <int kColumns>
struct Tile {
  float* at;
  int64_t stride;

  Lanes* Row(int64_t i) const { return reinterpret_cast<Lanes*>(at + i * stride); }
};

// Decays a tile into another and reads a key from it.
template <int kColumns>
inline void Read(const Tile<kColumns>& from, const Tile<kColumns>& to, int64_t key_dim, const Token& token, Lanes* read) {
  Lanes sum[kColumns] = {};
  const Lanes decay = All(token.decay);
  for (int64_t i = 0; i < key_dim; ++i) {
    const Lanes *row = from.Row(i), k = All(token.k[i]);
    Lanes* written = to.Row(i);
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) {
      const Lanes value = row[c] * decay;
      sum[c] = MultiplyAdd(k, value, sum[c]);
      written[c] = value;
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < kColumns; ++c) read[c] = sum[c];
}

// The tile after the one at hand: of its rows, each token asks for a share of the lines.
struct Ahead {
  const float* at;  // nothing to ask for if null
  int64_t stride;
};

// Writes a token's difference into a tile, reads its query from it if there is one, and if there is a next token decays the
// tile for it and reads its key.
template <int kColumns, bool kQuery, bool kNext, bool kStore>
inline void Write(const Tile<kColumns>& from, const Tile<kColumns>& to, int64_t key_dim, const Token& token,
                  const Lanes* difference, const Token* next, Lanes* out, Lanes* read, const Ahead& ahead, int from_line,
                  int to_line) {
  Lanes sum[kColumns] = {}, answer[kColumns] = {}, d[kColumns];
#pragma GCC unroll 4
  for (int c = 0; c < kColumns; ++c) d[c] = difference[c];
  const Lanes decay = All(kNext ? next->decay : 1.0f);
  for (int64_t i = 0; i < key_dim; ++i) {
    const Lanes *row = from.Row(i), k = All(token.k[i]), q = All(kQuery ? token.q[i] : 0.0f);
    const Lanes next_k = All(kNext ? next->k[i] : 0.0f);
    Lanes* written = to.Row(i);
    for (int line = from_line; line < to_line; ++line) __builtin_prefetch(ahead.at + i * ahead.stride + line * kLanes);
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) {
      Lanes value = MultiplyAdd(k, d[c], row[c]);
      if (kQuery) answer[c] = MultiplyAdd(q, value, answer[c]);
      if (kNext) {
        value = value * decay;
        sum[c] = MultiplyAdd(next_k, value, sum[c]);
      }
      if (kStore) written[c] = value;
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < kColumns; ++c) {
    if (kQuery) out[c] = answer[c];
    if (kNext) read[c] = sum[c];
  }
}

// All tokens of a tile of columns: from `state`, with another tile in `scratch`, to `end` if it is wanted.
template <int kColumns, bool kQuery>
void Run(const Tile<kColumns>& state, const Tile<kColumns>& scratch, const Tile<kColumns>& end, int64_t key_dim,
         const Token* tokens, int64_t count, float* out, int64_t out_stride, const Ahead& ahead) {
  Lanes read[kColumns], difference[kColumns], answer[kColumns];
  Read(state, scratch, key_dim, tokens[0], read);
  for (int64_t t = 0; t < count; ++t) {
    const Token &token = tokens[t], *next = tokens + t + 1;
    const int from = ahead.at ? t * kWide / count : 0, to = ahead.at ? (t + 1) * kWide / count : 0;
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) difference[c] = All(token.beta) * (Load(token.v + c * kLanes) - read[c]);
    if (t + 1 < count)
      Write<kColumns, kQuery, true, true>(scratch, scratch, key_dim, token, difference, next, answer, read, ahead, from, to);
    else if (end.at)
      Write<kColumns, kQuery, false, true>(scratch, end, key_dim, token, difference, next, answer, read, ahead, from, to);
    else
      Write<kColumns, kQuery, false, false>(scratch, end, key_dim, token, difference, next, answer, read, ahead, from, to);
    if (kQuery)
      for (int c = 0; c < kColumns; ++c) *reinterpret_cast<Lanes*>(out + t * out_stride + c * kLanes) = answer[c];
  }
}

// All tokens of a state [key_dim, value_dim], which after them is in `end`, if not null: the same one or another. `out` is
// [tokens, padded], of queries; `next` is the state after this one, or null.
template <bool kQuery>
void Columns(const float* state, float* end, int64_t key_dim, int64_t value_dim, std::vector<Token>& tokens, float* out,
             const float* next) {
  const int64_t count = tokens.size(), stride = Padded(value_dim);
  const std::unique_ptr<float[]> memory(new float[key_dim * kWide * kLanes + kLanes]);
  // Vectors that lie across two lines of a cache take twice as long.
  float* scratch = memory.get() + (-reinterpret_cast<uintptr_t>(memory.get()) / 4) % kLanes;
  auto step = [&](int64_t columns) {
    for (Token& token : tokens) token.v += columns;
  };
  // Of a state that is only read nothing is written.
  auto tile = [&](const float* of, int64_t column) { return of ? const_cast<float*>(of) + column : nullptr; };
  auto after = [&](int64_t column) { return Ahead{column < value_dim ? state + column : next, value_dim}; };
  int64_t column = 0;
  for (; column + kWide * kLanes <= value_dim; column += kWide * kLanes, step(kWide * kLanes))
    Run<kWide, kQuery>({tile(state, column), value_dim}, {scratch, kWide * kLanes}, {tile(end, column), value_dim}, key_dim,
                       tokens.data(), count, out + column, stride, after(column + kWide * kLanes));
  for (; column + kLanes <= value_dim; column += kLanes, step(kLanes))
    Run<1, kQuery>({tile(state, column), value_dim}, {scratch, kLanes}, {tile(end, column), value_dim}, key_dim,
                   tokens.data(), count, out + column, stride, {nullptr, 0});
  if (const int64_t left = value_dim - column) {
    // The last columns, with zeros beside them.
    for (int64_t i = 0; i < key_dim; ++i)
      *reinterpret_cast<Lanes*>(scratch + i * kLanes) = Load(state + i * value_dim + column, left);
    Run<1, kQuery>({scratch, kLanes}, {scratch, kLanes}, {scratch, kLanes}, key_dim, tokens.data(), count, out + column,
                   stride, {nullptr, 0});
    if (end)
      for (int64_t i = 0; i < key_dim; ++i)
        std::copy(scratch + i * kLanes, scratch + i * kLanes + left, end + i * value_dim + column);
  }
}

inline float ToFloat(float value) { return value; }
inline float ToFloat(BFloat16 value) {
  const uint32_t bits = uint32_t{value.bits} << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

template <typename Input>
struct Block {
  Shape shape;
  const float *qkv, *g, *beta;        // [rows, tokens, channels], [rows, tokens, value_heads]
  const float* weight;                // [channels, taps + 1]
  const float* states;                // [slots, value_heads, key_dim, value_dim], of the layer
  const Input* conv_inputs;           // [slots, channels, taps], of the layer
  const int32_t *mapping, *counts;    // [rows]
  float *out, *k, *v;                 // [rows, tokens, heads, ...]
  float* ends;                        // [rows, value_heads, key_dim, value_dim], or null
};

// Convolution and silu of some channels of a row's first tokens, to [count, padded].
template <typename Input>
std::vector<float> Convolve(const Block<Input>& b, int64_t row, int64_t slot, int64_t count, int64_t first, int64_t size) {
  const Shape& s = b.shape;
  const int64_t padded = Padded(size), width = s.taps + 1;
  // Inputs and weights a channel beside the other, with zeros behind the last.
  std::vector<float> inputs((s.taps + count) * padded), weights(width * padded), result(count * padded);
  for (int64_t c = 0; c < size; ++c) {
    for (int64_t tap = 0; tap < s.taps; ++tap)
      inputs[tap * padded + c] = ToFloat(b.conv_inputs[(slot * s.channels + first + c) * s.taps + tap]);
    for (int64_t tap = 0; tap < width; ++tap) weights[tap * padded + c] = b.weight[(first + c) * width + tap];
  }
  for (int64_t t = 0; t < count; ++t) {
    const float* from = b.qkv + (row * s.tokens + t) * s.channels + first;
    std::copy(from, from + size, inputs.begin() + (s.taps + t) * padded);
  }
  for (int64_t t = 0; t < count; ++t)
    for (int64_t c = 0; c < padded; c += kLanes) {
      Lanes sum = {};
      for (int64_t tap = 0; tap < width; ++tap)
        sum = MultiplyAdd(Load(&weights[tap * padded + c]), Load(&inputs[(t + tap) * padded + c]), sum);
      *reinterpret_cast<Lanes*>(&result[t * padded + c]) = Silu(sum);
    }
  return result;
}

// Makes rows of a matrix as long as `length`.
void Normalise(std::vector<float>& matrix, int64_t rows, float length) {
  if (!rows) return;
  const int64_t padded = matrix.size() / rows;
  for (int64_t t = 0; t < rows; ++t) {
    float *row = &matrix[t * padded], total = 0;
    Lanes sum = {};
    for (int64_t c = 0; c < padded; c += kLanes) sum = MultiplyAdd(Load(row + c), Load(row + c), sum);
    for (int lane = 0; lane < kLanes; ++lane) total += sum[lane];
    const Lanes factor = All(length / std::sqrt(total + 1e-6f));
    for (int64_t c = 0; c < padded; c += kLanes) *reinterpret_cast<Lanes*>(row + c) = Load(row + c) * factor;
  }
}

// The tokens of a row that a slot's state meets.
struct Row {
  int64_t slot, count;
};

template <typename Work>
Row RowOf(const Work& work, int64_t row) {
  const int64_t slot = work.mapping[row];
  const bool live = slot >= 0 && slot < work.shape.slots;
  return {slot, live ? std::clamp<int64_t>(work.counts[row], 0, work.shape.tokens) : 0};
}

// The state of a task, or null for none that meets a token.
template <typename Work>
auto StateOf(const Work& work, int64_t task, int64_t end) -> decltype(work.states) {
  const Shape& s = work.shape;
  if (task >= end) return nullptr;
  const Row row = RowOf(work, task / s.value_heads);
  return row.count ? work.states + (row.slot * s.value_heads + task % s.value_heads) * s.state() : nullptr;
}

// Tasks first .. last, a row and value head each.
template <typename Input>
void Compute(const Block<Input>& b, int64_t first, int64_t last) {
  const Shape& s = b.shape;
  const int64_t keys = Padded(s.key_dim), values = Padded(s.value_dim);
  const int64_t first_k = s.key_heads * s.key_dim, first_v = 2 * first_k;
  std::vector<float> q, k, out;
  for (int64_t task = first; task < last; ++task) {
    const int64_t row = task / s.value_heads, head = task % s.value_heads, key_head = head / s.group();
    const auto [slot, count] = RowOf(b, row);
    auto place = [&](int64_t t) { return (row * s.tokens + t) * s.value_heads + task % s.value_heads; };
    for (int64_t t = count; t < s.tokens; ++t) std::memset(b.out + place(t) * s.value_dim, 0, 4 * s.value_dim);
    float* end = b.ends ? b.ends + task * s.state() : nullptr;
    if (!count) {
      // What an empty row's is, nobody asks for.
      if (end) std::copy_n(b.states + (std::max<int64_t>(slot, 0) * s.value_heads + head) * s.state(), s.state(), end);
      continue;
    }
    if (task == first || head % s.group() == 0) {
      q = Convolve(b, row, slot, count, key_head * s.key_dim, s.key_dim);
      k = Convolve(b, row, slot, count, first_k + key_head * s.key_dim, s.key_dim);
      Normalise(q, count, 1 / std::sqrt(static_cast<float>(s.key_dim)));
      Normalise(k, count, 1);
    }
    const std::vector<float> v = Convolve(b, row, slot, count, first_v + head * s.value_dim, s.value_dim);
    std::vector<Token> tokens(count);
    for (int64_t t = 0; t < count; ++t) {
      tokens[t] = {&q[t * keys], &k[t * keys], &v[t * values], std::exp(b.g[place(t)]), b.beta[place(t)]};
      std::copy_n(tokens[t].v, s.value_dim, b.v + place(t) * s.value_dim);
      if (head % s.group() == 0)
        std::copy_n(tokens[t].k, s.key_dim, b.k + ((row * s.tokens + t) * s.key_heads + key_head) * s.key_dim);
    }
    out.resize(count * values);
    Columns<true>(StateOf(b, task, last), end, s.key_dim, s.value_dim, tokens, out.data(), StateOf(b, task + 1, last));
    for (int64_t t = 0; t < count; ++t) std::copy_n(&out[t * values], s.value_dim, b.out + place(t) * s.value_dim);
  }
}

template <typename Input>
struct Fold {
  Shape shape;
  const float *k, *v, *g, *beta;    // [rows, tokens, heads, ...]
  const Input* qkv;                 // [rows, tokens, channels]
  const int32_t *mapping, *counts;  // [rows]
  float* states;                    // [slots, value_heads, key_dim, value_dim], of the layer
  Input* conv_inputs;               // [slots, channels, taps], of the layer
};

// A head's share of the convolution's inputs of a row, which lie oldest first, after `count` more of them.
template <typename Input>
void Shift(const Shape& s, Input* inputs, const Input* fresh, int64_t count, int64_t head) {
  for (int64_t c = head * s.channels / s.value_heads; c < (head + 1) * s.channels / s.value_heads; ++c)
    for (int64_t tap = 0; tap < s.taps; ++tap) {
      const int64_t at = count + tap - s.taps;  // before 0 it is one of the old, and none is overwritten before it is moved
      inputs[c * s.taps + tap] = at < 0 ? inputs[c * s.taps + count + tap] : fresh[at * s.channels + c];
    }
}

// Tasks first .. end, a row and value head each.
template <typename Input>
void Compute(const Fold<Input>& f, int64_t first, int64_t end) {
  const Shape& s = f.shape;
  const int64_t values = Padded(s.value_dim);
  for (int64_t task = first; task < end; ++task) {
    const int64_t row = task / s.value_heads, head = task % s.value_heads, key_head = head / s.group();
    const auto [slot, count] = RowOf(f, row);
    if (!count) continue;
    std::vector<Token> tokens(count);
    std::vector<float> v(count * values);
    for (int64_t t = 0; t < count; ++t) {
      const int64_t token = row * s.tokens + t, place = token * s.value_heads + head;
      std::copy_n(f.v + place * s.value_dim, s.value_dim, &v[t * values]);
      const float* k = f.k + (token * s.key_heads + key_head) * s.key_dim;
      tokens[t] = {nullptr, k, &v[t * values], std::exp(f.g[place]), f.beta[place]};
    }
    float* state = StateOf(f, task, end);
    Columns<false>(state, state, s.key_dim, s.value_dim, tokens, nullptr, StateOf(f, task + 1, end));
    Shift(s, f.conv_inputs + slot * s.channels * s.taps, f.qkv + row * s.tokens * s.channels, count, head);
  }
}

// All tasks, in parts that give each thread several and each task one after it.
template <typename Work>
void RunTasks(ffi::ThreadPool& pool, const Work& work) {
  constexpr int64_t kShare = 1 << 15;  // numbers of states and tokens that are worth a thread, some microseconds
  constexpr int64_t kMost = 8;         // tasks of a part
  int64_t tokens = 0;
  for (int64_t row = 0; row < work.shape.rows; ++row) tokens += RowOf(work, row).count;
  const int64_t tasks = work.shape.rows * work.shape.value_heads;
  const int64_t size = tokens * work.shape.value_heads * work.shape.state();
  const int64_t threads = std::clamp<int64_t>(pool.num_threads(), 1, std::max<int64_t>(1, size / kShare));
  const int64_t step = std::clamp<int64_t>(tasks / (4 * threads), 1, kMost);
  RunParts(pool, (tasks + step - 1) / step, threads, [work, tasks, step](int64_t part) {
    Compute(work, part * step, std::min(tasks, (part + 1) * step));
  });
}

// The shape that tables say; the others' are then compared with it.
ffi::ErrorOr<Shape> ShapeOf(const Sizes& states, const Sizes& conv_inputs, const Sizes& k, int64_t layer) {
  if (states.size() != 5 || conv_inputs.size() != 4 || k.size() != 4)
    return ffi::Unexpected(
        ffi::Error::InvalidArgument("states have 5 dimensions, and the convolution's inputs and keys 4"));
  const Shape s{states[0], states[1], k[0], k[1], conv_inputs[2], k[2], states[2], states[3], states[4], conv_inputs[3]};
  if (conv_inputs[0] != s.layers || conv_inputs[1] != s.slots || k[3] != s.key_dim || s.key_heads < 1 ||
      s.value_heads % s.key_heads || s.channels != 2 * s.key_heads * s.key_dim + s.value_heads * s.value_dim ||
      s.slots < 1 || layer < 0 || layer >= s.layers)
    return ffi::Unexpected(
        ffi::Error::InvalidArgument("states, the convolution's inputs, keys and layer do not fit each other"));
  return s;
}

// Calls run with the type of a buffer of floats.
template <typename Run>
ffi::Error ForType(ffi::DataType type, const Run& run) {
  switch (type) {
    case ffi::F32: run(float{}); return ffi::Error::Success();
    case ffi::BF16: run(BFloat16{}); return ffi::Error::Success();
    default: return ffi::Error::InvalidArgument("the convolution's inputs must be float32 or bfloat16");
  }
}

typedef ffi::Buffer<ffi::F32> Floats;
typedef ffi::Buffer<ffi::S32> Indices;
typedef ffi::ResultBuffer<ffi::F32> Results;

ffi::Error RunBlock(ffi::ThreadPool pool, Floats qkv, Floats g, Floats beta, Floats weight, Floats states,
                    ffi::AnyBuffer conv_inputs, Indices mapping, Indices counts, Results out, Results k, Results v,
                    Results ends, int64_t layer) {
  const auto shape = ShapeOf(SizesOf(states), SizesOf(conv_inputs), SizesOf(*k), layer);
  if (shape.has_error()) return shape.error();
  const Shape& s = *shape;
  const Sizes of_gates = {s.rows, s.tokens, s.value_heads}, of_values = {s.rows, s.tokens, s.value_heads, s.value_dim};
  if (SizesOf(qkv) != Sizes{s.rows, s.tokens, s.channels} || SizesOf(g) != of_gates || SizesOf(beta) != of_gates ||
      SizesOf(weight) != Sizes{s.channels, s.taps + 1} || SizesOf(mapping) != Sizes{s.rows} ||
      SizesOf(counts) != Sizes{s.rows} || SizesOf(*out) != of_values || SizesOf(*v) != of_values ||
      (ends->element_count() && SizesOf(*ends) != Sizes{s.rows, s.value_heads, s.key_dim, s.value_dim}))
    return ffi::Error::InvalidArgument("rows, tokens, heads or channels differ between the arguments");
  return ForType(conv_inputs.element_type(), [&](auto zero) {
    using Input = decltype(zero);
    const auto* inputs = static_cast<const Input*>(conv_inputs.untyped_data()) + layer * s.slots * s.channels * s.taps;
    const float* of_layer = states.typed_data() + layer * s.slots * s.value_heads * s.state();
    const Block<Input> block{s, qkv.typed_data(), g.typed_data(), beta.typed_data(), weight.typed_data(), of_layer, inputs,
                             mapping.typed_data(), counts.typed_data(), out->typed_data(), k->typed_data(),
                             v->typed_data(), ends->element_count() ? ends->typed_data() : nullptr};
    RunTasks(pool, block);
  });
}

ffi::Error RunFold(ffi::ThreadPool pool, Floats states, ffi::AnyBuffer conv_inputs, ffi::AnyBuffer qkv, Floats k, Floats v,
                   Floats g, Floats beta, Indices mapping, Indices counts, Results new_states,
                   ffi::Result<ffi::AnyBuffer> new_inputs, int64_t layer) {
  const auto shape = ShapeOf(SizesOf(states), SizesOf(conv_inputs), SizesOf(k), layer);
  if (shape.has_error()) return shape.error();
  const Shape& s = *shape;
  const Sizes of_gates = {s.rows, s.tokens, s.value_heads};
  if (SizesOf(k) != Sizes{s.rows, s.tokens, s.key_heads, s.key_dim} || SizesOf(g) != of_gates ||
      SizesOf(v) != Sizes{s.rows, s.tokens, s.value_heads, s.value_dim} || SizesOf(beta) != of_gates ||
      SizesOf(qkv) != Sizes{s.rows, s.tokens, s.channels} || SizesOf(mapping) != Sizes{s.rows} ||
      SizesOf(counts) != Sizes{s.rows} || SizesOf(*new_states) != SizesOf(states) ||
      SizesOf(*new_inputs) != SizesOf(conv_inputs))
    return ffi::Error::InvalidArgument("rows, tokens, heads or channels differ between the arguments");
  if (qkv.element_type() != conv_inputs.element_type() || new_inputs->element_type() != conv_inputs.element_type())
    return ffi::Error::InvalidArgument("the block's inputs of the convolution must have the type of the slots'");
  // XLA gives both one memory, and copies before if the old tables are still needed.
  if (new_states->untyped_data() != states.untyped_data())
    std::memcpy(new_states->untyped_data(), states.untyped_data(), states.size_bytes());
  if (new_inputs->untyped_data() != conv_inputs.untyped_data())
    std::memcpy(new_inputs->untyped_data(), conv_inputs.untyped_data(), conv_inputs.size_bytes());
  return ForType(conv_inputs.element_type(), [&](auto zero) {
    using Input = decltype(zero);
    const Fold<Input> fold{s, k.typed_data(), v.typed_data(), g.typed_data(), beta.typed_data(),
                           static_cast<const Input*>(qkv.untyped_data()), mapping.typed_data(), counts.typed_data(),
                           new_states->typed_data() + layer * s.slots * s.value_heads * s.state(),
                           static_cast<Input*>(new_inputs->untyped_data()) + layer * s.slots * s.channels * s.taps};
    RunTasks(pool, fold);
  });
}

}  // namespace
}  // namespace dflash

XLA_FFI_DEFINE_HANDLER_SYMBOL(DflashDeltaBlock, dflash::RunBlock,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<int64_t>("layer"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(DflashDeltaFold, dflash::RunFold,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<int64_t>("layer"));
