// Attention of a few tokens over a paged context and themselves, with keys and values read where they are.
//
// The queries that share a KV head lie side by side in the lanes of vectors, and every number of a key or value meets
// a whole vector of them. Keys are taken in the order of their positions, in chunks that begin at multiples of a fixed
// length, with an online softmax (arXiv 1805.02867) over the chunks. So the order of each sum depends on nothing but
// the position of the query: where all numbers are finite, a token's result is the same bits whether the tokens before
// it come from the pages or with it in the block, and whatever else is computed.

#include <limits>
#include <type_traits>
#include <vector>

#include "cpu.h"

namespace dflash {
namespace {

constexpr int kTile = 8;    // sums at a time: what a core can have under way
constexpr int kChunk = 64;  // keys of a step of the softmax
constexpr float kNone = -1e30f;

inline Lanes Greater(Lanes x, Lanes y) { return x > y ? x : y; }

// In a vector of these, the attributes of the type are kept.
struct Vector {
  Lanes lanes = {};
};

struct Shape {
  int64_t rows, queries, heads, kv_heads, head_dim, layers, pages, page_size, slots, slot_pages;
};

struct Scope {
  int64_t layer, window;
  bool causal;
  float scale;
};

template <typename Value>
struct Attention {
  Shape shape;
  Scope scope;
  const float* q;                                     // [rows, queries, heads, head_dim]
  const Value *k_block, *v_block;                     // [rows, queries, kv_heads, head_dim]
  const Value *k_pages, *v_pages;                     // [layers, pages, page_size, kv_heads, head_dim]
  const int32_t *table, *mapping, *lengths, *counts;  // [slots, slot_pages], [rows], [slots], [rows]
  float* out;                                         // as q

  int64_t group() const { return shape.heads / shape.kv_heads; }
  int64_t groups() const { return (shape.queries * group() + kLanes - 1) / kLanes; }
  int64_t tasks() const { return shape.rows * shape.kv_heads * groups(); }
};

// Where keys and values of some positions in a row lie.
template <typename Value>
struct Places {
  int64_t start = 0, size = 0;
  const Value *keys[kChunk], *values[kChunk];
};

// Values as floats: where they are, or in `scratch`.
inline const float* Floats(const float* values, int64_t, float*) { return values; }
inline const float* Floats(const BFloat16* values, int64_t count, float* scratch) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) *reinterpret_cast<Lanes*>(scratch + i) = Load(values + i);
  if (const int64_t left = count - i) {
    const Lanes rest = Load(values + i, left);
    for (int64_t lane = 0; lane < left; ++lane) scratch[i + lane] = rest[lane];
  }
  return scratch;
}

// The inner products of keys 0 .. kCount with the queries, a lane per query.
template <int kCount>
inline void Score(const float* const* keys, const Lanes* q, int64_t head_dim, Lanes* scores) {
  Lanes sum[kCount] = {};
  for (int64_t d = 0; d < head_dim; ++d)
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) sum[i] = MultiplyAdd(All(keys[i][d]), q[d], sum[i]);
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) scores[i] = sum[i];
}

// Adds the weighted values to channels d .. d + kCount of what is mixed.
template <int kCount>
inline void Mix(const float* const* values, const Lanes* weights, int64_t count, int64_t d, Lanes* mixed) {
  Lanes sum[kCount];
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) sum[i] = mixed[d + i];
  for (int64_t key = 0; key < count; ++key)
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) sum[i] = MultiplyAdd(All(values[key][d + i]), weights[key], sum[i]);
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) mixed[d + i] = sum[i];
}

template <typename Value>
inline void Prefetch(const Value* values, int64_t count) {
  constexpr int64_t kLine = 64 / sizeof(Value);
  for (int64_t i = 0; i < count; i += kLine) __builtin_prefetch(values + i);
}

// A vector of queries: those of a row and KV head from the task's first on, counted by token and then by head.
template <typename Value>
struct Task {
  const Attention<Value>& a;
  const Shape& s = a.shape;
  int64_t row, kv_head, first, lanes;
  const int32_t* table;
  int64_t context, count;         // tokens in the pages, and in the block
  Integers begin = {}, end = {};  // each query sees the keys from `begin` to before `end`,
  int64_t from, to = 0;           // and all of them together those from `from` to before `to`

  Task(const Attention<Value>& a, int64_t number) : a(a) {
    const int64_t groups = a.groups(), group = a.group();
    row = number / (groups * s.kv_heads), kv_head = number / groups % s.kv_heads, first = number % groups * kLanes;
    lanes = std::min<int64_t>(kLanes, s.queries * group - first);
    const int64_t slot = std::clamp<int64_t>(a.mapping[row], 0, s.slots - 1);
    const bool live = a.mapping[row] >= 0;
    table = a.table + slot * s.slot_pages;
    context = live ? std::clamp<int64_t>(a.lengths[slot], 0, s.slot_pages * s.page_size) : 0;
    count = live ? std::clamp<int64_t>(a.counts[row], 0, s.queries) : 0;
    from = context + count;
    for (int64_t lane = 0; lane < lanes; ++lane) {
      const int64_t token = (first + lane) / group, position = context + token;
      if (token >= count) continue;
      const int64_t low = std::max<int64_t>(0, position - a.scope.window + 1);
      int64_t high = std::min(context + count, position + a.scope.window);
      if (a.scope.causal) high = position + 1;
      begin[lane] = low, end[lane] = high;
      from = std::min(from, low), to = std::max(to, high);
    }
  }

  // Of a lane's query, in q and in out.
  int64_t Offset(int64_t lane) const {
    const int64_t token = (first + lane) / a.group(), head = kv_head * a.group() + (first + lane) % a.group();
    return ((row * s.queries + token) * s.heads + head) * s.head_dim;
  }

  // The keys of the chunk that begins at a position, as far as any is seen; none behind the last.
  Places<Value> Find(int64_t chunk) const {
    Places<Value> found;
    found.start = std::max(chunk, from), found.size = std::max<int64_t>(0, std::min(chunk + kChunk, to) - found.start);
    const int64_t stride = s.kv_heads * s.head_dim;
    for (int64_t i = 0; i < found.size;) {
      const int64_t position = found.start + i, within = position % s.page_size;
      const Value *k = a.k_block, *v = a.v_block;
      int64_t token = row * s.queries + position - context, end = found.size;
      if (position < context) {
        const int64_t page = std::clamp<int64_t>(table[position / s.page_size], 0, s.pages - 1);
        k = a.k_pages, v = a.v_pages;
        token = (a.scope.layer * s.pages + page) * s.page_size + within;
        end = std::min({end, i + s.page_size - within, i + context - position});
      }
      for (int64_t at = token * stride + kv_head * s.head_dim; i < end; ++i, at += stride)
        found.keys[i] = k + at, found.values[i] = v + at;
    }
    return found;
  }
};

template <typename Value>
void Compute(const Attention<Value>& a, int64_t number) {
  const Task<Value> task(a, number);
  const int64_t head_dim = a.shape.head_dim;
  std::vector<float> scratch(std::is_same_v<Value, float> ? 0 : kChunk * head_dim);
  const float* rows[kChunk];
  auto read = [&](const Value* const* values, int64_t size) {
    for (int64_t i = 0; i < size; ++i) rows[i] = Floats(values[i], head_dim, scratch.data() + i * head_dim);
  };
  std::vector<Vector> q(head_dim), mixed(head_dim);
  for (int64_t lane = 0; lane < task.lanes; ++lane)
    for (int64_t d = 0; d < head_dim; ++d) q[d].lanes[lane] = a.q[task.Offset(lane) + d] * a.scope.scale;
  Lanes top = All(kNone), total = {};

  int64_t chunk = task.from / kChunk * kChunk;
  Places<Value> places = task.Find(chunk);
  for (int64_t i = 0; i < places.size; ++i) Prefetch(places.keys[i], head_dim);
  while (const int64_t size = places.size) {
    const Places<Value> next = task.Find(chunk += kChunk);
    Lanes weights[kChunk];
    read(places.keys, size);
    for (int64_t key = 0; key < size;) {
      // While keys are multiplied, their values and the next chunk's keys are on their way.
      const int64_t tile = key + kTile <= size ? kTile : 1;
      for (int64_t i = key; i < key + tile; ++i) {
        Prefetch(places.values[i], head_dim);
        if (i < next.size) Prefetch(next.keys[i], head_dim);
      }
      (tile == kTile ? Score<kTile> : Score<1>)(rows + key, &q[0].lanes, head_dim, weights + key);
      key += tile;
    }

    auto seen = [&](int64_t key) {
      const Integers position = Integers{} + static_cast<int32_t>(places.start + key);
      return (position >= task.begin) & (position < task.end);
    };
    Lanes new_top = top;
    for (int64_t key = 0; key < size; ++key) new_top = Greater(seen(key) ? weights[key] : All(kNone), new_top);
    const Lanes shrink = Exp(top - new_top);
    top = new_top;
    total *= shrink;
    for (Vector& channel : mixed) channel.lanes *= shrink;
    for (int64_t key = 0; key < size; ++key) {
      weights[key] = seen(key) ? Exp(weights[key] - top) : Lanes{};
      total += weights[key];
    }
    read(places.values, size);
    int64_t d = 0;
    for (; d + kTile <= head_dim; d += kTile) Mix<kTile>(rows, weights, size, d, &mixed[0].lanes);
    for (; d < head_dim; ++d) Mix<1>(rows, weights, size, d, &mixed[0].lanes);
    places = next;
  }
  for (int64_t lane = 0; lane < task.lanes; ++lane)
    for (int64_t d = 0; d < head_dim; ++d)
      a.out[task.Offset(lane) + d] = task.end[lane] ? mixed[d].lanes[lane] / total[lane] : 0;
}

template <typename Value>
void Run(ffi::ThreadPool& pool, const Attention<Value>& a) {
  constexpr int64_t kShare = 1 << 17;  // multiplications that are worth a thread, some microseconds
  int64_t keys = 0;
  for (int64_t row = 0; row < a.shape.rows; ++row)
    if (a.mapping[row] >= 0) {
      const int64_t context = a.lengths[std::min<int64_t>(a.mapping[row], a.shape.slots - 1)];
      keys += a.shape.queries + std::clamp<int64_t>(context, 0, a.scope.window);
    }
  const int64_t work = keys * a.shape.kv_heads * a.groups() * kLanes * a.shape.head_dim * 2;
  const int64_t threads = std::clamp<int64_t>(pool.num_threads(), 1, std::max<int64_t>(1, work / kShare));
  RunParts(pool, a.tasks(), threads, [a](int64_t number) { Compute(a, number); });
}

ffi::Error Attend(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::AnyBuffer k_block, ffi::AnyBuffer v_block,
                  ffi::AnyBuffer k_pages, ffi::AnyBuffer v_pages, ffi::Buffer<ffi::S32> table,
                  ffi::Buffer<ffi::S32> mapping, ffi::Buffer<ffi::S32> lengths, ffi::Buffer<ffi::S32> counts,
                  ffi::ResultBuffer<ffi::F32> out, int64_t layer, int64_t window, bool causal, float scale) {
  const Sizes of_q = SizesOf(q), of_k = SizesOf(k_pages), of_table = SizesOf(table);
  if (of_q.size() != 4 || of_k.size() != 5 || of_table.size() != 2)
    return ffi::Error::InvalidArgument("q has 4 dimensions, pages have 5 and the block table has 2");
  const Shape shape{of_q[0], of_q[1], of_q[2], of_k[3], of_q[3], of_k[0], of_k[1], of_k[2], of_table[0], of_table[1]};
  const Sizes of_block = {shape.rows, shape.queries, shape.kv_heads, shape.head_dim};
  if (of_k[4] != shape.head_dim || SizesOf(v_pages) != of_k || SizesOf(k_block) != of_block ||
      SizesOf(v_block) != of_block || SizesOf(mapping) != Sizes{shape.rows} || SizesOf(counts) != Sizes{shape.rows} ||
      SizesOf(lengths) != Sizes{shape.slots} || SizesOf(*out) != of_q)
    return ffi::Error::InvalidArgument("rows, queries, heads or slots differ between the arguments");
  if (shape.kv_heads < 1 || shape.heads % shape.kv_heads || shape.slots < 1 || shape.pages < 1 || shape.page_size < 1 ||
      layer < 0 || layer >= shape.layers || window < 1 || window > std::numeric_limits<int32_t>::max())
    return ffi::Error::InvalidArgument(
        "there is no such layer, slot, page or window, or KV heads do not divide the heads");
  const Scope scope{layer, window, causal, scale};
  auto run = [&](auto zero) {
    using Value = decltype(zero);
    auto values = [](const ffi::AnyBuffer& buffer) { return static_cast<const Value*>(buffer.untyped_data()); };
    Run(pool, Attention<Value>{shape, scope, q.typed_data(), values(k_block), values(v_block), values(k_pages),
                               values(v_pages), table.typed_data(), mapping.typed_data(), lengths.typed_data(),
                               counts.typed_data(), out->typed_data()});
    return ffi::Error::Success();
  };
  for (const ffi::AnyBuffer& buffer : {k_block, v_block, v_pages})
    if (buffer.element_type() != k_pages.element_type())
      return ffi::Error::InvalidArgument("keys and values must be of one type");
  switch (k_pages.element_type()) {
    case ffi::F32: return run(float{});
    case ffi::BF16: return run(BFloat16{});
    default: return ffi::Error::InvalidArgument("keys and values must be float32 or bfloat16");
  }
}

}  // namespace
}  // namespace dflash

XLA_FFI_DEFINE_HANDLER_SYMBOL(DflashAttend, dflash::Attend,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<int64_t>("layer")
                                  .Attr<int64_t>("window")
                                  .Attr<bool>("causal")
                                  .Attr<float>("scale"));
