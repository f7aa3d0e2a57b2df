// What the native kernels share: vectors of a CPU's lanes, the sizes of arrays, and work in parts for XLA's threads.

#ifndef DFLASH_JAX_CPU_H_
#define DFLASH_JAX_CPU_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "xla/ffi/api/ffi.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace dflash {

namespace ffi = xla::ffi;

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Lanes __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Bits __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));

struct BFloat16 {
  uint16_t bits;
};

inline Lanes Load(const float* at) { return *reinterpret_cast<const Lanes*>(at); }
inline Lanes Load(const BFloat16* at) {
  const Bits bits = __builtin_convertvector(*reinterpret_cast<const Halves*>(at), Bits) << 16;
  return (Lanes)bits;
}

// The first `count` values, and zeros.
template <typename Value>
inline Lanes Load(const Value* at, int64_t count) {
  Value values[kLanes] = {};
  std::copy(at, at + count, values);
  return Load(values);
}

// sum + x y. Whether they are fused is not left to the compiler, that would choose as suits each place.
inline Lanes MultiplyAdd(Lanes x, Lanes y, Lanes sum) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(x, y, sum);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(x, y, sum);
#elif defined(__aarch64__)
  return vfmaq_f32(sum, x, y);
#else
  return sum + x * y;
#endif
}

inline Lanes All(float value) { return value - Lanes{}; }  // - 0 changes no float and costs nothing, + 0 does

// The sum over a vector's lanes, halves first: in the same order wherever it is taken.
inline float Sum(Lanes x) {
#if defined(__AVX512F__)
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)));
#elif defined(__AVX__)
  const __m256 eight = x;
#endif
#if defined(__AVX__)
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
  static_assert(kLanes == 4);
  return (x[0] + x[2]) + (x[1] + x[3]);
#endif
}

// The sums over four vectors' lanes, to four places: the same bits as of `Sum`, with half the work.
inline void StoreSums(const Lanes* x, float* to) {
#if defined(__AVX512F__)
  const __m512 a = (__m512)x[0], b = (__m512)x[1], c = (__m512)x[2], d = (__m512)x[3];
  const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
  const __m512 four = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
  const __m512 two = _mm512_add_ps(four, _mm512_permute_ps(four, 0x4e));
  const __m512 one = _mm512_add_ps(two, _mm512_permute_ps(two, 0xb1));
  _mm_storeu_ps(to, _mm512_castps512_ps128(_mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12), one)));
#elif defined(__AVX__)
  const __m256 ab = _mm256_add_ps(_mm256_permute2f128_ps(x[0], x[1], 0x20), _mm256_permute2f128_ps(x[0], x[1], 0x31));
  const __m256 cd = _mm256_add_ps(_mm256_permute2f128_ps(x[2], x[3], 0x20), _mm256_permute2f128_ps(x[2], x[3], 0x31));
  const __m256 two = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
  const __m256 one = _mm256_add_ps(two, _mm256_permute_ps(two, 0xb1));  // a a c c, b b d d
  _mm_storeu_ps(to, _mm_blend_ps(_mm256_castps256_ps128(one), _mm256_extractf128_ps(one, 1), 0b1010));
#else
  for (int i = 0; i < 4; ++i) to[i] = Sum(x[i]);
#endif
}

// e^x for x <= 0, within two units in the last place; 0 gives 1. Below -87, where it is next to nothing, it is as there.
inline Lanes Exp(Lanes x) {
  x = x < All(-87.0f) ? All(-87.0f) : x;
  const Lanes rounder = All(12582912.0f);  // 1.5 * 2^23: added and subtracted, leaves a whole number
  const Lanes power = (x * 1.44269504f + rounder) - rounder;
  Lanes rest = MultiplyAdd(power, All(-0.693359375f), x);
  rest = MultiplyAdd(power, All(2.12194440e-4f), rest);
  Lanes sum = All(1.0f / 5040);
  for (float term : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) sum = MultiplyAdd(sum, rest, All(term));
  const Integers exponent = (__builtin_convertvector(power, Integers) + 127) << 23;
  return sum * (Lanes)exponent;
}

typedef std::vector<int64_t> Sizes;

template <typename Buffer>
Sizes SizesOf(const Buffer& buffer) {
  const auto dimensions = buffer.dimensions();
  return Sizes(dimensions.begin(), dimensions.end());
}

// Work in parts, which the threads that come take one after the other. Whoever waits has found no part left to
// take, so that all are in somebody's hands: a pool that is busy, or has a single thread, cannot block anybody.
struct Parts {
  explicit Parts(int64_t count) : count(count) {}

  template <typename Work>
  void Take(const Work& work) {
    for (int64_t part; (part = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      work(part);
      done.fetch_add(1, std::memory_order_release);
    }
  }

  void Wait() const {
    // The others are about to end, mostly sooner than a thread wakes up. One that has lost its core gets it back sooner
    // if this one lets go.
    for (int64_t turn = 0; done.load(std::memory_order_acquire) < count; ++turn)
      if (turn > 4096) std::this_thread::yield();
  }

  const int64_t count;
  std::atomic<int64_t> next{0}, done{0};
};

// Calls work(part) for parts 0 .. count, on up to `threads` threads of the pool, this one among them.
template <typename Work>
void RunParts(ffi::ThreadPool& pool, int64_t count, int64_t threads, const Work& work) {
  auto parts = std::make_shared<Parts>(count);
  for (int64_t helper = 1; helper < std::min(threads, count); ++helper)
    pool.Schedule([parts, work] { parts->Take(work); });
  parts->Take(work);
  parts->Wait();
}

}  // namespace dflash

#endif  // DFLASH_JAX_CPU_H_
