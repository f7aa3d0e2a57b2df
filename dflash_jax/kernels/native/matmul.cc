// Products of a few rows with a large matrix, y = x w^T, at the speed at which a CPU reads the matrix.
//
// A library's product first copies the matrix into an order that suits many rows, which costs a few rows more than
// the product itself. Here it is read once, in place: a row of it is as long as a row of x, so that every output is
// an inner product of two rows, and what is read meets all rows of x while it is in a register. The order of each
// sum does not depend on the number of rows, so a row's result is the same bits whatever it is multiplied with.

#include <type_traits>

#include "cpu.h"

namespace dflash {
namespace {

// Rows and outputs of a tile. Its sums should fit in the registers of a core, and few rows take the more outputs, so
// that enough of the matrix is on its way at any time; in float32, where there is more to wait for, some more do no harm.
constexpr int kMostRows = 6;
template <typename Weight>
constexpr int Wide(int rows) {
  return std::clamp((sizeof(Weight) == 4 ? 16 : 12) / rows, 2, 8);
}
constexpr int kBlock = 24;  // outputs that all rows meet before the next: whole tiles of nearly any width

template <typename Weight>
struct Product {
  const float* x;   // [rows, inputs]
  const Weight* w;  // [outputs, inputs]
  float* y;         // [rows, outputs]
  int64_t rows, inputs, outputs;
};

// Outputs n .. n + kWide, as far as `to`, of kRows rows.
template <int kRows, typename Weight>
inline void Tile(const Product<Weight>& p, int64_t row, int64_t n, int64_t to) {
  constexpr int kWide = Wide<Weight>(kRows);
  const float* x = p.x + row * p.inputs;
  const Weight* w[kWide];
  for (int i = 0; i < kWide; ++i) w[i] = p.w + std::min(n + i, to - 1) * p.inputs;
  Lanes sum[kRows][kWide] = {};
  int64_t k = 0;
  for (; k + kLanes <= p.inputs; k += kLanes) {
    Lanes value[kWide];
    for (int i = 0; i < kWide; ++i) {
      __builtin_prefetch(w[i] + k + kWide * p.inputs);
      value[i] = Load(w[i] + k);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Lanes factor = Load(x + r * p.inputs + k);
      for (int i = 0; i < kWide; ++i) sum[r][i] = MultiplyAdd(factor, value[i], sum[r][i]);
    }
  }
  if (const int64_t left = p.inputs - k)
    for (int r = 0; r < kRows; ++r) {
      const Lanes factor = Load(x + r * p.inputs + k, left);
      for (int i = 0; i < kWide; ++i) sum[r][i] = MultiplyAdd(factor, Load(w[i] + k, left), sum[r][i]);
    }
  for (int r = 0; r < kRows; ++r)
    for (int64_t i = 0; i < kWide && n + i < to; ++i) {
      float total = 0;
      for (int lane = 0; lane < kLanes; ++lane) total += sum[r][i][lane];
      p.y[(row + r) * p.outputs + n + i] = total;
    }
}

template <int kRows, typename Weight>
void Tiles(const Product<Weight>& p, int64_t row, int64_t from, int64_t to) {
  for (int64_t n = from; n < to; n += Wide<Weight>(kRows)) Tile<kRows>(p, row, n, to);
}

// Outputs from .. to of all rows, in groups of like size.
template <typename Weight>
void Compute(const Product<Weight>& p, int64_t from, int64_t to) {
  const int64_t groups = (p.rows + kMostRows - 1) / kMostRows;
  for (int64_t n = from; n < to; n += kBlock)
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t row = group * p.rows / groups, end = std::min(n + kBlock, to);
      switch ((group + 1) * p.rows / groups - row) {
        case 1: Tiles<1>(p, row, n, end); break;
        case 2: Tiles<2>(p, row, n, end); break;
        case 3: Tiles<3>(p, row, n, end); break;
        case 4: Tiles<4>(p, row, n, end); break;
        case 5: Tiles<5>(p, row, n, end); break;
        case kMostRows: Tiles<kMostRows>(p, row, n, end); break;
      }
    }
}

template <typename Weight>
void Run(ffi::ThreadPool& pool, const Product<Weight>& p) {
  constexpr int64_t kShare = 1 << 15;  // weights that are worth a thread, some microseconds
  const int64_t blocks = (p.outputs + kBlock - 1) / kBlock, most = std::max<int64_t>(1, p.inputs * p.outputs / kShare);
  const int64_t threads = std::clamp<int64_t>(pool.num_threads(), 1, most);
  const int64_t count = std::min(blocks, threads == 1 ? 1 : 2 * threads);
  RunParts(pool, count, threads, [p, blocks, count](int64_t part) {
    Compute(p, part * blocks / count * kBlock, std::min((part + 1) * blocks / count * kBlock, p.outputs));
  });
}

ffi::Error Multiply(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer w, ffi::ResultBuffer<ffi::F32> y) {
  const auto of_x = x.dimensions(), of_w = w.dimensions(), of_y = y->dimensions();
  if (of_x.size() != 2 || of_w.size() != 2 || of_y.size() != 2 || of_x[1] != of_w[1] || of_y[0] != of_x[0] ||
      of_y[1] != of_w[0])
    return ffi::Error::InvalidArgument("a product of [rows, inputs] and [outputs, inputs] is [rows, outputs]");
  const int64_t rows = of_x[0], inputs = of_x[1], outputs = of_w[0];
  auto run = [&](auto weights) {
    using Weight = std::remove_const_t<std::remove_pointer_t<decltype(weights)>>;
    Run(pool, Product<Weight>{x.typed_data(), weights, y->typed_data(), rows, inputs, outputs});
    return ffi::Error::Success();
  };
  switch (w.element_type()) {
    case ffi::F32: return run(static_cast<const float*>(w.untyped_data()));
    case ffi::BF16: return run(static_cast<const BFloat16*>(w.untyped_data()));
    default: return ffi::Error::InvalidArgument("the matrix must be float32 or bfloat16");
  }
}

}  // namespace
}  // namespace dflash

XLA_FFI_DEFINE_HANDLER_SYMBOL(DflashMultiply, dflash::Multiply,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());
