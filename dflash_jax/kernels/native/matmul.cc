// Products with a large matrix, y = x w^T, at the speed at which a CPU reads the matrix.
//
// A library's product first copies the matrix into an order that suits many rows, which costs a few rows more than
// the product itself. Here it is read once, in place: a row of it is as long as a row of x, so that every output is
// an inner product of two rows, and what is read meets all rows of x while it is in a register. The order of each
// sum does not depend on the number of rows, so a row's result is the same bits whatever it is multiplied with.
//
// A matrix that is not float32 is widened in registers. Where there are more rows than a tile takes, it is widened a few
// outputs at a time into a buffer that stays in a core's cache, and all rows are multiplied by that.

#include <type_traits>
#include <vector>

#include "cpu.h"
#include "weights.h"

namespace dflash {
namespace {

// Rows of a tile. Its sums should fit in the registers of a core, and few rows take the more outputs, so that enough of
// the matrix is on its way at any time.
constexpr int kMostRows = 6;
constexpr int kWidened = 18;  // more rows than this meet a block that is widened once, into a buffer
constexpr int kLine = 16;   // floats of a cache's line, at which a vector that is read should begin
constexpr int kBlock = 24;  // outputs that all rows meet before the next: whole tiles of nearly any width

// What is widened already, and in a core's cache.
struct Widened : Float32 {};

// Outputs of a tile, which are widened one after the other. Long units keep enough of the matrix on its way with fewer,
// and take the compiler long enough so.
template <typename Format>
constexpr int Wide(int rows) {
  return std::clamp((kLanes == 16 ? 24 : 12) / rows, 2, Format::kInputs > 32 ? 3 : 8);
}

// What is multiplied, and where it goes: output n of row r to y[r * stride + n].
struct Rows {
  const float* x;  // [rows, inputs]
  float* y;
  int64_t count, inputs, stride;
};

template <typename Format>
struct Codes {
  const uint8_t* w;                         // [outputs, row_bytes]
  const float* scales;                      // [outputs, groups], if the format has them
  int64_t row_bytes, groups, group_units;  // units of a row that share a scale
};

// Outputs n .. n + kWide, as far as `to`, of kRows rows.
template <int kRows, typename Format>
inline void Tile(const Codes<Format>& m, const Rows& p, int64_t row, int64_t n, int64_t to) {
  constexpr int kWide = Wide<Format>(kRows);
  const float* x = p.x + row * p.inputs;
  const uint8_t* w[kWide];
  const float* scales[kWide];
  for (int i = 0; i < kWide; ++i) {
    const int64_t output = std::min(n + i, to - 1);
    w[i] = m.w + output * m.row_bytes;
    scales[i] = m.scales + output * m.groups;
  }
  Lanes sum[kRows][kWide] = {};
  const int64_t units = p.inputs / Format::kInputs;
  int64_t unit = 0;
  for (int64_t group = 0; unit < units; ++group) {
    const int64_t end = std::min(units, (group + 1) * m.group_units);
    for (; unit < end; ++unit) {
      if constexpr (std::is_same_v<Format, Widened> && kLanes == 16) {
        // All is in a core's caches, and loads are what limits: each factor is loaded once for all outputs, which takes
        // the registers of AVX-512.
        Lanes factors[kRows];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) factors[r] = Load(x + r * p.inputs + unit * kLanes);
#pragma GCC unroll 8
        for (int i = 0; i < kWide; ++i) {
          const Lanes value = Load(reinterpret_cast<const float*>(w[i]) + unit * kLanes);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) sum[r][i] = MultiplyAdd(factors[r], value, sum[r][i]);
        }
        continue;
      }
#pragma GCC unroll 8
      for (int i = 0; i < kWide; ++i) {
        const uint8_t* at = w[i] + unit * Format::kBytes;
        for (int ahead = 0; ahead < Format::kBytes; ahead += 64) __builtin_prefetch(at + kWide * m.row_bytes + ahead);
        const float* factors = x + unit * Format::kInputs;
        Format::Widen(at, Format::kScaled ? scales[i][group] : 0, [&](int step, Lanes value) {
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r)
            sum[r][i] = MultiplyAdd(Load(factors + r * p.inputs + step * kLanes), value, sum[r][i]);
        });
      }
    }
  }
  if (const int64_t left = p.inputs - units * Format::kInputs)  // only of formats with as many bytes for each weight
    for (int i = 0; i < kWide; ++i) {
      const int64_t size = Format::kBytes / Format::kInputs;
      uint8_t last[Format::kBytes] = {};
      std::copy_n(w[i] + units * Format::kBytes, left * size, last);
      float factors[kRows][Format::kInputs] = {};
      for (int r = 0; r < kRows; ++r) std::copy_n(x + r * p.inputs + units * Format::kInputs, left, factors[r]);
      Format::Widen(last, Format::kScaled ? scales[i][units / m.group_units] : 0, [&](int step, Lanes value) {
        for (int r = 0; r < kRows; ++r)
          if (step * kLanes < left) sum[r][i] = MultiplyAdd(Load(factors[r] + step * kLanes), value, sum[r][i]);
      });
    }
  for (int r = 0; r < kRows; ++r) {
    float* y = p.y + (row + r) * p.stride + n;
    constexpr int kFours = kWide / 4 * 4;
    const int64_t vectors = n + kFours <= to ? kFours : 0;
    for (int i = 0; i < vectors; i += 4) StoreSums(sum[r] + i, y + i);
    for (int64_t i = vectors; i < kWide && n + i < to; ++i) y[i] = Sum(sum[r][i]);
  }
}

template <int kRows, typename Format>
void Tiles(const Codes<Format>& m, const Rows& p, int64_t row, int64_t from, int64_t to) {
  for (int64_t n = from; n < to; n += Wide<Format>(kRows)) Tile<kRows>(m, p, row, n, to);
}

// Outputs from .. to of all rows, in groups of like size.
template <typename Format>
void Groups(const Codes<Format>& m, const Rows& p, int64_t from, int64_t to) {
  const int64_t groups = (p.count + kMostRows - 1) / kMostRows;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t row = group * p.count / groups;
    switch ((group + 1) * p.count / groups - row) {
      case 1: Tiles<1>(m, p, row, from, to); break;
      case 2: Tiles<2>(m, p, row, from, to); break;
      case 3: Tiles<3>(m, p, row, from, to); break;
      case 4: Tiles<4>(m, p, row, from, to); break;
      case 5: Tiles<5>(m, p, row, from, to); break;
      case kMostRows: Tiles<kMostRows>(m, p, row, from, to); break;
    }
  }
}

// A matrix of float32.
template <typename Format = Float32>
inline Codes<Format> AllFloats(const float* w, int64_t inputs) {
  return {reinterpret_cast<const uint8_t*>(w), nullptr, 4 * inputs, 0, inputs + 1};
}

// A row of the matrix in float32.
template <typename Format>
void WidenRow(const Codes<Format>& m, int64_t output, int64_t inputs, float* to) {
  const uint8_t* w = m.w + output * m.row_bytes;
  const float* scales = m.scales + output * m.groups;
  const int64_t units = inputs / Format::kInputs;
  int64_t unit = 0;
  for (int64_t group = 0; unit < units; ++group)
    for (const int64_t end = std::min(units, (group + 1) * m.group_units); unit < end; ++unit) {
      float* at = to + unit * Format::kInputs;
      Format::Widen(w + unit * Format::kBytes, Format::kScaled ? scales[group] : 0,
                    [&](int step, Lanes value) { *reinterpret_cast<Lanes*>(at + step * kLanes) = value; });
    }
  if (const int64_t left = inputs - units * Format::kInputs) {
    uint8_t last[Format::kBytes] = {};
    std::copy_n(w + units * Format::kBytes, left * (Format::kBytes / Format::kInputs), last);
    float values[Format::kInputs];
    Format::Widen(last, Format::kScaled ? scales[units / m.group_units] : 0,
                  [&](int step, Lanes value) { *reinterpret_cast<Lanes*>(values + step * kLanes) = value; });
    std::copy_n(values, left, to + units * Format::kInputs);
  }
}

template <typename Format>
void Compute(const Codes<Format>& m, const Rows& p, int64_t from, int64_t to) {
  const bool widen = !std::is_same_v<Format, Float32> && p.count > kWidened;
  thread_local std::vector<float> space;
  if (widen) space.resize(std::max<size_t>(space.size(), kBlock * p.inputs + kLine));
  float* buffer = space.data() + (kLine - reinterpret_cast<uintptr_t>(space.data()) / sizeof(float) % kLine) % kLine;
  // Many rows meet a tile of the matrix while it is in the nearest cache, a few while a block is in a core's.
  const int64_t step = p.count > kWidened ? Wide<Float32>(kMostRows) : kBlock;
  for (int64_t n = from; n < to; n += kBlock) {
    const int64_t end = std::min<int64_t>(n + kBlock, to);
    if (widen) {
      for (int64_t i = n; i < end; ++i) WidenRow(m, i, p.inputs, buffer + (i - n) * p.inputs);
      Groups(AllFloats<Widened>(buffer, p.inputs), Rows{p.x, p.y + n, p.count, p.inputs, p.stride}, 0, end - n);
    } else {
      for (int64_t t = n; t < end; t += step) Groups(m, p, t, std::min(t + step, end));
    }
  }
}

template <typename Format>
void Run(ffi::ThreadPool& pool, const Codes<Format>& m, const Rows& p, int64_t outputs) {
  constexpr int64_t kShare = 1 << 15;  // weights that are worth a thread, some microseconds
  const int64_t blocks = (outputs + kBlock - 1) / kBlock, most = std::max<int64_t>(1, p.inputs * outputs / kShare);
  const int64_t threads = std::clamp<int64_t>(pool.num_threads(), 1, most);
  const int64_t count = std::min(blocks, threads == 1 ? 1 : 2 * threads);
  RunParts(pool, count, threads, [m, p, blocks, count, outputs](int64_t part) {
    Compute(m, p, part * blocks / count * kBlock, std::min((part + 1) * blocks / count * kBlock, outputs));
  });
}

ffi::Error Multiply(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer w, ffi::ResultBuffer<ffi::F32> y) {
  const auto of_x = x.dimensions(), of_w = w.dimensions(), of_y = y->dimensions();
  if (of_x.size() != 2 || of_w.size() != 2 || of_y.size() != 2 || of_x[1] != of_w[1] || of_y[0] != of_x[0] ||
      of_y[1] != of_w[0])
    return ffi::Error::InvalidArgument("a product of [rows, inputs] and [outputs, inputs] is [rows, outputs]");
  const Rows rows{x.typed_data(), y->typed_data(), of_x[0], of_x[1], of_w[0]};
  const uint8_t* data = static_cast<const uint8_t*>(w.untyped_data());
  switch (w.element_type()) {
    case ffi::F32: Run(pool, AllFloats(reinterpret_cast<const float*>(data), of_x[1]), rows, of_w[0]); break;
    case ffi::BF16: Run(pool, Codes<Brain16>{data, nullptr, 2 * of_x[1], 0, of_x[1] + 1}, rows, of_w[0]); break;
    default: return ffi::Error::InvalidArgument("the matrix must be float32 or bfloat16");
  }
  return ffi::Error::Success();
}

// Calls work(codes) if the arrays are what the format makes of a matrix [outputs, inputs].
template <typename Format, typename Work>
ffi::Error WithCodes(ffi::AnyBuffer codes, ffi::Buffer<ffi::F32> scales, int64_t inputs, int64_t group, const Work& work) {
  const auto of_codes = codes.dimensions(), of_scales = scales.dimensions();
  const int64_t outputs = of_codes[0], units = inputs / Format::kInputs;
  // Formats of whole bytes for each weight may end with a part of a unit; an element of their array is a weight.
  const bool by_weight = Format::kBytes % Format::kInputs == 0;
  if (by_weight ? of_codes[1] != inputs : units * Format::kInputs != inputs || of_codes[1] != units * Format::kBytes)
    return ffi::Error::InvalidArgument("the matrix has not as many codes as its format needs for the inputs");
  if (Format::kScaled && (group < 1 || (group < inputs && group % Format::kInputs)))
    return ffi::Error::InvalidArgument("a group must be of whole units of the format, or of all inputs");
  const int64_t groups = Format::kScaled ? (inputs + group - 1) / group : 0;
  if (of_scales.size() != 2 || of_scales[0] != outputs || of_scales[1] != groups)
    return ffi::Error::InvalidArgument("scales are [outputs, groups]");
  const int64_t row_bytes = by_weight ? inputs * (Format::kBytes / Format::kInputs) : of_codes[1];
  const int64_t group_units = groups > 1 ? group / Format::kInputs : units + 1;
  work(Codes<Format>{static_cast<const uint8_t*>(codes.untyped_data()), scales.typed_data(), row_bytes, groups, group_units});
  return ffi::Error::Success();
}

// The same for a format that is named.
template <typename Work>
ffi::Error WithFormat(std::string_view format, ffi::AnyBuffer codes, ffi::Buffer<ffi::F32> scales, int64_t inputs, int64_t group,
                      const Work& work) {
  const auto type = codes.element_type();
  if (type == ffi::U8) {
    if (format == "Q8_0") return WithCodes<Q8_0>(codes, scales, inputs, group, work);
    if (format == "Q4_0") return WithCodes<Q4_0>(codes, scales, inputs, group, work);
    if (format == "Q4_1") return WithCodes<Q4_1>(codes, scales, inputs, group, work);
    if (format == "Q5_0") return WithCodes<Q5_0>(codes, scales, inputs, group, work);
    if (format == "Q5_1") return WithCodes<Q5_1>(codes, scales, inputs, group, work);
    if (format == "Q4_K") return WithCodes<Q4_K>(codes, scales, inputs, group, work);
    if (format == "Q5_K") return WithCodes<Q5_K>(codes, scales, inputs, group, work);
    if (format == "Q6_K") return WithCodes<Q6_K>(codes, scales, inputs, group, work);
  }
  if (format == "I8" && type == ffi::S8) return WithCodes<Int8>(codes, scales, inputs, group, work);
  if (format == "F8_E4M3" && type == ffi::F8E4M3FN) return WithCodes<E4M3>(codes, scales, inputs, group, work);
  if (format == "F16" && type == ffi::F16) return WithCodes<Float16>(codes, scales, inputs, group, work);
  if (format == "BF16" && type == ffi::BF16) return WithCodes<Brain16>(codes, scales, inputs, group, work);
  return ffi::Error::InvalidArgument("the codes are not of the format's dtype");
}

ffi::Error MultiplyCodes(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer codes, ffi::Buffer<ffi::F32> scales,
                         ffi::ResultBuffer<ffi::F32> y, std::string_view format, int64_t group) {
  const auto of_x = x.dimensions(), of_codes = codes.dimensions(), of_y = y->dimensions();
  if (of_x.size() != 2 || of_codes.size() != 2 || of_y.size() != 2 || of_y[0] != of_x[0] || of_y[1] != of_codes[0])
    return ffi::Error::InvalidArgument("a product of [rows, inputs] and [outputs, inputs] is [rows, outputs]");
  const Rows rows{x.typed_data(), y->typed_data(), of_x[0], of_x[1], of_codes[0]};
  return WithFormat(format, codes, scales, rows.inputs, group, [&](const auto& m) { Run(pool, m, rows, rows.stride); });
}

ffi::Error Widen(ffi::ThreadPool pool, ffi::AnyBuffer codes, ffi::Buffer<ffi::F32> scales, ffi::ResultBuffer<ffi::F32> y,
                 std::string_view format, int64_t group) {
  const auto of_codes = codes.dimensions(), of_y = y->dimensions();
  if (of_codes.size() != 2 || of_y.size() != 2 || of_y[0] != of_codes[0])
    return ffi::Error::InvalidArgument("a matrix is widened to [outputs, inputs]");
  const int64_t outputs = of_y[0], inputs = of_y[1];
  float* to = y->typed_data();
  return WithFormat(format, codes, scales, inputs, group, [&](const auto& m) {
    const int64_t blocks = (outputs + kBlock - 1) / kBlock;
    RunParts(pool, blocks, std::clamp<int64_t>(pool.num_threads(), 1, blocks), [m, to, outputs, inputs](int64_t part) {
      for (int64_t n = part * kBlock; n < std::min((part + 1) * kBlock, outputs); ++n) WidenRow(m, n, inputs, to + n * inputs);
    });
  });
}

}  // namespace
}  // namespace dflash

XLA_FFI_DEFINE_HANDLER_SYMBOL(DflashMultiply, dflash::Multiply,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(DflashMultiplyCodes, dflash::MultiplyCodes,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<std::string_view>("format")
                                  .Attr<int64_t>("group"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(DflashWiden, dflash::Widen,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<std::string_view>("format")
                                  .Attr<int64_t>("group"));
