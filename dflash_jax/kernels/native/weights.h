// The formats in which a matrix [outputs, inputs] may be kept, and how each is widened to float32 in registers.
//
// A format has
//   kInputs   weights of a unit, the smallest part of a row that is read at a time,
//   kBytes    its bytes,
//   kScaled   whether scales stand in an array of their own, one for each output and group of inputs,
//   Widen(unit, scale, take)   which calls take(step, weights) for each kLanes of the unit's weights, in order.
// The widened values are those that ggml's and transformers' own code makes, bit for bit: a code has few enough bits
// that its product with a scale is exact or rounded once, and an offset is added with one rounding.

#ifndef DFLASH_JAX_WEIGHTS_H_
#define DFLASH_JAX_WEIGHTS_H_

#include <cstring>
#include <limits>

#include "cpu.h"

namespace dflash {

typedef uint8_t Bytes __attribute__((vector_size(16), aligned(1), may_alias));
typedef int8_t SignedBytes __attribute__((vector_size(16), aligned(1), may_alias));

inline Bytes LoadBytes(const uint8_t* at) { return *reinterpret_cast<const Bytes*>(at); }

inline uint32_t LoadWord(const uint8_t* at) {
  uint32_t word;
  std::memcpy(&word, at, 4);
  return word;
}

// A float of 16 bits (5 of exponent).
inline float HalfValue(uint16_t bits) {
#if defined(__F16C__)
  return _cvtsh_ss(bits);
#else
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, size = bits & 0x7fff;
  if (size < 0x400) {  // a whole number of 2^-24
    const float value = static_cast<float>(size) * 5.9604644775390625e-8f;
    return sign ? -value : value;
  }
  const uint32_t wide = sign | (size >= 0x7c00 ? 0x7f800000 | (size & 0x3ff) << 13 : (size << 13) + (112u << 23));
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
#endif
}

inline float HalfAt(const uint8_t* at) {
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  return HalfValue(bits);
}

// A float of 16 bits in all lanes.
inline Lanes AllOfHalf(const uint8_t* at) {
#if defined(__AVX512F__)
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  return (Lanes)_mm512_cvtph_ps(_mm256_set1_epi16(bits));
#else
  return All(HalfAt(at));
#endif
}

// Two that follow each other, a scale and an offset.
struct TwoHalves {
  Lanes first, second;

  explicit TwoHalves(const uint8_t* at) {
#if defined(__AVX512F__)
    const __m512 both = _mm512_cvtph_ps(_mm256_set1_epi32(LoadWord(at)));
    first = _mm512_moveldup_ps(both);
    second = _mm512_movehdup_ps(both);
#elif defined(__AVX__) && defined(__F16C__)
    const __m256 both = _mm256_cvtph_ps(_mm_set1_epi32(LoadWord(at)));
    first = _mm256_moveldup_ps(both);
    second = _mm256_movehdup_ps(both);
#else
    first = All(HalfAt(at));
    second = All(HalfAt(at + 2));
#endif
  }
};

// Lanes part * kLanes .. of 16 bytes, as numbers.
inline Lanes Unsigned(Bytes bytes, int part) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32((__m128i)bytes));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(part ? _mm_srli_si128((__m128i)bytes, 8) : (__m128i)bytes));
#else
  Lanes value;
  for (int lane = 0; lane < kLanes; ++lane) value[lane] = bytes[part * kLanes + lane];
  return value;
#endif
}

inline Lanes Signed(Bytes bytes, int part) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)bytes));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(part ? _mm_srli_si128((__m128i)bytes, 8) : (__m128i)bytes));
#else
  Lanes value;
  for (int lane = 0; lane < kLanes; ++lane) value[lane] = static_cast<int8_t>(bytes[part * kLanes + lane]);
  return value;
#endif
}

constexpr int kParts = 16 / kLanes;  // vectors of lanes that 16 bytes make

// What codes of 4 bits stand for, scale * code + offset.
struct Nibbles {
#if defined(__AVX512F__)
  __m512 table;  // a register has a value for each code, and a code is a place in it

  Nibbles(Lanes scale, Lanes offset)
      : table(MultiplyAdd(scale, Lanes{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, offset)) {}

  // Calls take for the low halves of 16 bytes, and for the high ones.
  template <typename Take>
  void Low(const uint8_t* at, int step, const Take& take) const {
    take(step, (Lanes)_mm512_permutexvar_ps(Places(at), table));
  }
  template <typename Take>
  void High(const uint8_t* at, int step, const Take& take) const {
    take(step, (Lanes)_mm512_permutexvar_ps(_mm512_srli_epi32(Places(at), 4), table));
  }

  static __m512i Places(const uint8_t* at) {  // of which four bits count
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
  }
#else
  Lanes scale, offset;

  Nibbles(Lanes scale, Lanes offset) : scale(scale), offset(offset) {}

  template <typename Take>
  void Low(const uint8_t* at, int step, const Take& take) const {
    for (int part = 0; part < kParts; ++part) take(step * kParts + part, MultiplyAdd(scale, Unsigned(LoadBytes(at) & 15, part), offset));
  }
  template <typename Take>
  void High(const uint8_t* at, int step, const Take& take) const {
    for (int part = 0; part < kParts; ++part) take(step * kParts + part, MultiplyAdd(scale, Unsigned(LoadBytes(at) >> 4, part), offset));
  }
#endif
};

// Calls take for 16 weights, the unit's steps from `step` on.
#define DFLASH_TAKE(step, value) \
  for (int part = 0; part < kParts; ++part) take((step) * kParts + part, value)

struct Q8_0 {
  static constexpr int kInputs = 32, kBytes = 34;
  static constexpr bool kScaled = false;

  template <typename Take>
  static inline void Widen(const uint8_t* unit, float, const Take& take) {
    const Lanes scale = AllOfHalf(unit);
    for (int half = 0; half < 2; ++half) {
      const Bytes codes = LoadBytes(unit + 2 + 16 * half);
      DFLASH_TAKE(half, scale * Signed(codes, part));
    }
  }
};

// 32 codes of 4 bits: in the low halves of 16 bytes, then in the high ones.
template <typename Take>
inline void TakeNibbles(const uint8_t* at, const Nibbles& nibbles, const Take& take) {
  nibbles.Low(at, 0, take);
  nibbles.High(at, 1, take);
}

struct Q4_0 {
  static constexpr int kInputs = 32, kBytes = 18;
  static constexpr bool kScaled = false;

  template <typename Take>
  static inline void Widen(const uint8_t* unit, float, const Take& take) {
    const Lanes scale = AllOfHalf(unit);
    TakeNibbles(unit + 2, Nibbles(scale, scale * -8.0f), take);
  }
};

struct Q4_1 {
  static constexpr int kInputs = 32, kBytes = 20;
  static constexpr bool kScaled = false;

  template <typename Take>
  static inline void Widen(const uint8_t* unit, float, const Take& take) {
    const TwoHalves both(unit);
    TakeNibbles(unit + 4, Nibbles(both.first, both.second), take);
  }
};

// 32 codes of 5 bits: four of each as above, and the fifth of all in 32 bits, lowest first.
template <typename Take>
inline void TakeFives(const uint8_t* high, const uint8_t* at, Lanes scale, Lanes offset, const Take& take) {
  const uint32_t bits = LoadWord(high);
#if defined(__AVX512F__)
  const __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
  const __m512i fifth = _mm512_set1_epi32(16), four = _mm512_set1_epi32(15);
  const __m512i low = _mm512_and_si512(codes, four), last = _mm512_srli_epi32(codes, 4);
  const __m512i first = _mm512_mask_or_epi32(low, static_cast<__mmask16>(bits), low, fifth);
  const __m512i second = _mm512_mask_or_epi32(last, static_cast<__mmask16>(bits >> 16), last, fifth);
  take(0, MultiplyAdd(scale, (Lanes)_mm512_cvtepi32_ps(first), offset));
  take(1, MultiplyAdd(scale, (Lanes)_mm512_cvtepi32_ps(second), offset));
#else
  const Bytes places = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const Bytes codes = LoadBytes(at);
  for (int half = 0; half < 2; ++half) {
    uint64_t spread[2];
    for (int byte = 0; byte < 2; ++byte) spread[byte] = 0x0101010101010101u * (bits >> (16 * half + 8 * byte) & 255);
    Bytes set;
    std::memcpy(&set, spread, 16);
    const Bytes whole = (half ? codes >> 4 : codes & 15) | ((Bytes)((set & places) == places) & 16);
    DFLASH_TAKE(half, MultiplyAdd(scale, Unsigned(whole, part), offset));
  }
#endif
}

struct Q5_0 {
  static constexpr int kInputs = 32, kBytes = 22;
  static constexpr bool kScaled = false;

  template <typename Take>
  static inline void Widen(const uint8_t* unit, float, const Take& take) {
    const Lanes scale = AllOfHalf(unit);
    TakeFives(unit + 2, unit + 6, scale, scale * -16.0f, take);
  }
};

struct Q5_1 {
  static constexpr int kInputs = 32, kBytes = 24;
  static constexpr bool kScaled = false;

  template <typename Take>
  static inline void Widen(const uint8_t* unit, float, const Take& take) {
    const TwoHalves both(unit);
    TakeFives(unit + 4, unit + 8, both.first, both.second, take);
  }
};

// The scales and offsets of 8 times 32 weights, packed in 6 bits each: of each sub-block scale * code + offset.
struct SubScales {
  float scale[16];  // and offsets

  explicit SubScales(const uint8_t* unit) {
    const float d = HalfAt(unit), least = -HalfAt(unit + 2);
    const uint32_t a = LoadWord(unit + 4), b = LoadWord(unit + 8), c = LoadWord(unit + 12);
    const uint32_t packed[4] = {a & 0x3f3f3f3f, (c & 0x0f0f0f0f) | (a >> 2 & 0x30303030), b & 0x3f3f3f3f,
                                (c >> 4 & 0x0f0f0f0f) | (b >> 2 & 0x30303030)};
    Bytes codes;
    std::memcpy(&codes, packed, 16);
#if defined(__AVX512F__)
    const __m512 sizes = _mm512_insertf32x8(_mm512_set1_ps(d), _mm256_set1_ps(least), 1);
    _mm512_storeu_ps(scale, _mm512_mul_ps(sizes, (__m512)Unsigned(codes, 0)));
#else
    for (int sub = 0; sub < 8; ++sub) {
      scale[sub] = d * codes[sub];
      scale[8 + sub] = least * codes[8 + sub];
    }
#endif
  }

  Lanes Scale(int sub) const { return All(scale[sub]); }
  Lanes Offset(int sub) const { return All(scale[8 + sub]); }
};

struct Q4_K {
  static constexpr int kInputs = 256, kBytes = 144;
  static constexpr bool kScaled = false;

  template <typename Take>
  static inline void Widen(const uint8_t* unit, float, const Take& take) {
    const SubScales scales(unit);
#pragma GCC unroll 4
    for (int pair = 0; pair < 4; ++pair) {
      const uint8_t* at = unit + 16 + 32 * pair;
      const Nibbles low(scales.Scale(2 * pair), scales.Offset(2 * pair));
      low.Low(at, 4 * pair, take);
      low.Low(at + 16, 4 * pair + 1, take);
      const Nibbles high(scales.Scale(2 * pair + 1), scales.Offset(2 * pair + 1));
      high.High(at, 4 * pair + 2, take);
      high.High(at + 16, 4 * pair + 3, take);
    }
  }
};

struct Q5_K {
  static constexpr int kInputs = 256, kBytes = 176;
  static constexpr bool kScaled = false;

  template <typename Take>
  static inline void Widen(const uint8_t* unit, float, const Take& take) {
    const SubScales scales(unit);
#pragma GCC unroll 8
    for (int sub = 0; sub < 8; ++sub) {
      const Lanes scale = scales.Scale(sub), offset = scales.Offset(sub);
      for (int half = 0; half < 2; ++half) {
        const Bytes codes = LoadBytes(unit + 48 + 32 * (sub / 2) + 16 * half) >> (sub % 2 * 4) & 15;
        const Bytes fifth = (LoadBytes(unit + 16 + 16 * half) >> sub & 1) << 4;
        DFLASH_TAKE(2 * sub + half, MultiplyAdd(scale, Unsigned(codes | fifth, part), offset));
      }
    }
  }
};

struct Q6_K {
  static constexpr int kInputs = 256, kBytes = 210;
  static constexpr bool kScaled = false;

  template <typename Take>
  static inline void Widen(const uint8_t* unit, float, const Take& take) {
    const float d = HalfAt(unit + 208);
#pragma GCC unroll 16
    for (int group = 0; group < 16; ++group) {  // of 16 weights with a scale of their own
      const int half = group / 8, quarter = group / 2 % 4, side = group % 2;
      const Bytes low = LoadBytes(unit + 64 * half + 32 * (quarter % 2) + 16 * side) >> (quarter / 2 * 4) & 15;
      const Bytes high = LoadBytes(unit + 128 + 32 * half + 16 * side) >> (2 * quarter) & 3;
      const Bytes codes = (low | high << 4) - 32;
      const Lanes scale = All(d * static_cast<int8_t>(unit[192 + group]));
      DFLASH_TAKE(group, scale * Signed(codes, part));
    }
  }
};

struct Int8 {
  static constexpr int kInputs = 16, kBytes = 16;
  static constexpr bool kScaled = true;

  template <typename Take>
  static inline void Widen(const uint8_t* unit, float scale, const Take& take) {
    const Bytes codes = LoadBytes(unit);
    DFLASH_TAKE(0, All(scale) * Signed(codes, part));
  }
};

// A float of 8 bits, 4 of exponent and no infinities; 0x7f and 0xff are no numbers.
struct E4M3 {
  static constexpr int kInputs = 16, kBytes = 16;
  static constexpr bool kScaled = true;

  template <typename Take>
  static inline void Widen(const uint8_t* unit, float scale, const Take& take) {
    // Moved into place they are floats of 16 bits, whose exponent counts from 8 less.
    const Lanes whole = All(scale * 256.0f);
    for (int part = 0; part < kParts; ++part) take(part, whole * Shifted(unit + part * kLanes));
  }

  static inline Lanes Shifted(const uint8_t* at) {
#if defined(__AVX512F__)
    const __m256i moved = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))), 7);
    const __m256i none = _mm256_cmpeq_epi16(_mm256_and_si256(moved, _mm256_set1_epi16(0x3f80)), _mm256_set1_epi16(0x3f80));
    const __m256i bits = _mm256_and_si256(moved, _mm256_set1_epi16(static_cast<int16_t>(0xbfff)));
    return (Lanes)_mm512_cvtph_ps(_mm256_or_si256(bits, _mm256_srli_epi16(none, 1)));
#elif defined(__AVX2__) && defined(__F16C__)
    const __m128i moved = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))), 7);
    const __m128i none = _mm_cmpeq_epi16(_mm_and_si128(moved, _mm_set1_epi16(0x3f80)), _mm_set1_epi16(0x3f80));
    const __m128i bits = _mm_and_si128(moved, _mm_set1_epi16(static_cast<int16_t>(0xbfff)));
    return (Lanes)_mm256_cvtph_ps(_mm_or_si128(bits, _mm_srli_epi16(none, 1)));
#else
    Lanes value;
    for (int lane = 0; lane < kLanes; ++lane) {
      const uint8_t code = at[lane], size = code & 0x7f;
      value[lane] = size == 0x7f ? std::numeric_limits<float>::quiet_NaN()
                                 : HalfValue(static_cast<uint16_t>((code & 0x80) << 8 | size << 7));
    }
    return value;
#endif
  }
};

struct Float16 {
  static constexpr int kInputs = 16, kBytes = 32;
  static constexpr bool kScaled = false;

  template <typename Take>
  static inline void Widen(const uint8_t* unit, float, const Take& take) {
    for (int part = 0; part < kParts; ++part) {
#if defined(__AVX512F__)
      take(part, (Lanes)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(unit))));
#elif defined(__F16C__) && defined(__AVX__)
      take(part, (Lanes)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(unit) + part)));
#else
      Lanes value;
      for (int lane = 0; lane < kLanes; ++lane) value[lane] = HalfAt(unit + 2 * (part * kLanes + lane));
      take(part, value);
#endif
    }
  }
};

struct Float32 {
  static constexpr int kInputs = 16, kBytes = 64;
  static constexpr bool kScaled = false;

  template <typename Take>
  static inline void Widen(const uint8_t* unit, float, const Take& take) {
    for (int part = 0; part < kParts; ++part) take(part, Load(reinterpret_cast<const float*>(unit) + part * kLanes));
  }
};

struct Brain16 {
  static constexpr int kInputs = 16, kBytes = 32;
  static constexpr bool kScaled = false;

  template <typename Take>
  static inline void Widen(const uint8_t* unit, float, const Take& take) {
    for (int part = 0; part < kParts; ++part) take(part, Load(reinterpret_cast<const BFloat16*>(unit) + part * kLanes));
  }
};

}  // namespace dflash

#endif  // DFLASH_JAX_WEIGHTS_H_
