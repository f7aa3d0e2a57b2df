// Products of rows with the matrices of their experts, y[r] = x[r] w[expert[r]], each matrix [inputs, outputs].
//
// The rows of an expert are taken together, so that its matrix is read once, and matrices of experts without rows not at
// all. A matrix is read along its rows, some at a time, which are added to the sums of all rows of x: those lie in the
// nearest cache. A sum runs over the inputs in their order, whatever other rows there are: its bits depend on nothing else.

#include <type_traits>
#include <vector>

#include "cpu.h"

namespace dflash {
namespace {

constexpr int kInputs = 8;         // rows of a matrix that are added to a row of y at a time
constexpr int64_t kColumns = 256;  // outputs of a part
constexpr int64_t kRows = 16;      // rows of x whose sums stay in the nearest cache

template <typename Weight>
struct Products {
  const float* x;           // [rows, inputs]
  const Weight* w;          // [experts, inputs, outputs]
  float* y;                 // [rows, outputs]
  int64_t inputs, outputs;
};

// The rows of an expert, [from, to) of those in order.
struct Group {
  int64_t expert, from, to;
};

inline void Store(float* at, Lanes values, int64_t count) {
  if (count == kLanes) {
    *reinterpret_cast<Lanes*>(at) = values;
  } else {
    for (int64_t i = 0; i < count; ++i) at[i] = values[i];
  }
}

// y += x[0] w[0] + ... + x[kCount - 1] w[kCount - 1], in this order.
template <int kCount, typename Weight>
inline void Add(const float* x, const Weight* w, int64_t stride, float* y, int64_t columns) {
  Lanes factor[kCount];
  for (int i = 0; i < kCount; ++i) factor[i] = All(x[i]);
  int64_t c = 0;
  for (; c + kLanes <= columns; c += kLanes) {
    Lanes sum = Load(y + c);
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) sum = MultiplyAdd(factor[i], Load(w + i * stride + c), sum);
    Store(y + c, sum, kLanes);
  }
  if (const int64_t left = columns - c) {
    Lanes sum = Load(y + c, left);
    for (int i = 0; i < kCount; ++i) sum = MultiplyAdd(factor[i], Load(w + i * stride + c, left), sum);
    Store(y + c, sum, left);
  }
}

// Outputs from .. to of a group's rows.
template <typename Weight>
void Compute(const Products<Weight>& p, const Group& group, const int64_t* rows, int64_t from, int64_t to) {
  const Weight* matrix = p.w + group.expert * p.inputs * p.outputs + from;
  for (int64_t first = group.from; first < group.to; first += kRows) {
    const int64_t end = std::min(first + kRows, group.to);
    for (int64_t r = first; r < end; ++r) std::fill(p.y + rows[r] * p.outputs + from, p.y + rows[r] * p.outputs + to, 0.0f);
    int64_t k = 0;
    for (; k + kInputs <= p.inputs; k += kInputs)
      for (int64_t r = first; r < end; ++r)
        Add<kInputs>(p.x + rows[r] * p.inputs + k, matrix + k * p.outputs, p.outputs, p.y + rows[r] * p.outputs + from,
                     to - from);
    for (; k < p.inputs; ++k)
      for (int64_t r = first; r < end; ++r)
        Add<1>(p.x + rows[r] * p.inputs + k, matrix + k * p.outputs, p.outputs, p.y + rows[r] * p.outputs + from,
               to - from);
  }
}

template <typename Weight>
void Run(ffi::ThreadPool& pool, const Products<Weight>& p, const int32_t* expert_of, int64_t count, int64_t experts) {
  std::vector<int64_t> begin(experts + 1), rows(count);
  for (int64_t r = 0; r < count; ++r) ++begin[expert_of[r] + 1];
  std::vector<Group> groups;
  for (int64_t e = 0; e < experts; ++e) {
    begin[e + 1] += begin[e];
    if (begin[e + 1] > begin[e]) groups.push_back({e, begin[e], begin[e + 1]});
  }
  for (int64_t r = 0; r < count; ++r) rows[begin[expert_of[r]]++] = r;
  constexpr int64_t kShare = 1 << 15;  // products that are worth a thread, some microseconds
  const int64_t pieces = (p.outputs + kColumns - 1) / kColumns;
  const int64_t threads =
      std::clamp<int64_t>(pool.num_threads(), 1, std::max<int64_t>(1, count * p.inputs * p.outputs / kShare));
  RunParts(pool, groups.size() * pieces, threads, [p, pieces, groups, rows](int64_t part) {
    const int64_t from = part % pieces * kColumns;
    Compute(p, groups[part / pieces], rows.data(), from, std::min(from + kColumns, p.outputs));
  });
}

ffi::Error Multiply(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer w, ffi::Buffer<ffi::S32> expert_of,
                    ffi::ResultBuffer<ffi::F32> y) {
  const Sizes of_x = SizesOf(x), of_w = SizesOf(w);
  if (of_x.size() != 2 || of_w.size() != 3 || of_x[1] != of_w[1] || SizesOf(expert_of) != Sizes{of_x[0]} ||
      SizesOf(*y) != Sizes{of_x[0], of_w[2]})
    return ffi::Error::InvalidArgument(
        "a product of [rows, inputs] and [experts, inputs, outputs], with an expert for each row, is [rows, outputs]");
  const int32_t* of_rows = expert_of.typed_data();
  for (int64_t r = 0; r < of_x[0]; ++r)
    if (of_rows[r] < 0 || of_rows[r] >= of_w[0]) return ffi::Error::InvalidArgument("there is no expert of that number");
  auto run = [&](auto weights) {
    using Weight = std::remove_const_t<std::remove_pointer_t<decltype(weights)>>;
    Run(pool, Products<Weight>{x.typed_data(), weights, y->typed_data(), of_w[1], of_w[2]}, of_rows, of_x[0], of_w[0]);
    return ffi::Error::Success();
  };
  switch (w.element_type()) {
    case ffi::F32: return run(static_cast<const float*>(w.untyped_data()));
    case ffi::BF16: return run(static_cast<const BFloat16*>(w.untyped_data()));
    default: return ffi::Error::InvalidArgument("the matrices must be float32 or bfloat16");
  }
}

}  // namespace
}  // namespace dflash

XLA_FFI_DEFINE_HANDLER_SYMBOL(DflashExperts, dflash::Multiply,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());
