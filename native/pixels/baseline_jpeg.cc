#include "pixels/baseline_jpeg.h"

#if HEADRACE_HAVE_JPEG && defined(__x86_64__)

#include <algorithm>
#include <bit>
#include <cstring>

#include "pixels/jpeg_errors.h"  // and libjpeg's headers

namespace headrace::pixels {
namespace {

// Bits of the buffer that a look-up does not see.
constexpr int kUnseen = 64 - kLook;
// An MCU of damaged bytes may read so far behind its segment before that is seen.
constexpr size_t kOverrun = 4096;

constexpr std::array<uint8_t, 64> kNatural = {
    0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48,
    41, 34, 27, 20, 13, 6,  7,  14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23,
    30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63};

// What a look-up gives: bits 0 to 5, how many bits are used up; bits 8 to 15, how far the next
// coefficient lies from the last; bits 16 to 31, its value. With kSlow the value did not fit: its
// number of bits is in its place. With kSlow and no bits, the code itself did not.
constexpr uint32_t kSlow = 0x80;
constexpr uint32_t kUsed = 63;
constexpr uint32_t kEndOfBlock = 128;  // as a distance
// What it gives where values do not matter: of as many symbols as fit, bits 0 to 5, bits used; 8 to
// 14, the distance; 15, whether the block ends with them. No bits used: not one fits.
constexpr uint32_t kEnds = 0x8000;

uint32_t entry(uint32_t bits, uint32_t distance, int32_t value) {
  return bits | distance << 8 | static_cast<uint32_t>(value) << 16;
}

// T.81, figure F.12.
int extended(uint32_t value, uint32_t bits) {
  return static_cast<int>(value) - (value >> (bits - 1) == 0 ? (1 << bits) - 1 : 0);
}

int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

// The bits of a scan without its stuffed zeros, the next one on top.
struct Bits {
  uint64_t buffer;
  uint32_t count;  // valid ones in the buffer
  const uint8_t* next;

  explicit Bits(const uint8_t* from) : buffer(0), count(0), next(from) {}

  // At least 56 afterwards.
  HEADRACE_INLINE void refill() {
    uint64_t word;
    std::memcpy(&word, next, sizeof word);
    buffer |= __builtin_bswap64(word) >> count;
    next += (63 - count) >> 3;
    count |= 56;
  }
  HEADRACE_INLINE void drop(uint32_t bits) {
    buffer <<= bits;
    count -= bits;
  }
  HEADRACE_INLINE uint32_t take(uint32_t bits) {
    const auto value = static_cast<uint32_t>(buffer >> (64 - bits));
    drop(bits);
    return value;
  }
  // The first byte of which no bit was used.
  const uint8_t* reached() const { return next - (count >> 3); }
};

// One symbol and its value, of which at most 31 bits are there. False: there is no such code.
HEADRACE_INLINE bool slow_symbol(Bits& bits, const HuffmanTable& table, uint32_t seen, bool ac,
                                 uint32_t* distance, int* value) {
  uint32_t size = seen >> 16;
  *distance = seen >> 8 & 0xff;
  if ((seen & kUsed) != 0) {
    bits.drop(seen & kUsed);
  } else {
    const auto code = static_cast<uint32_t>(bits.buffer >> 48);
    uint32_t length = 1;
    while (length <= 16 && code >= table.limits[length]) ++length;
    if (length > 16) return false;
    const auto at = static_cast<int>(code >> (16 - length)) + table.offsets[length];
    const uint32_t symbol = table.symbols[static_cast<size_t>(at)];
    bits.drop(length);
    size = ac ? symbol & 15 : symbol;
    *distance = (symbol >> 4) + 1;
    if (ac && size == 0) {
      if (symbol != 0 && symbol != 0xf0) return false;
      *distance = symbol == 0 ? kEndOfBlock : 16;
    }
  }
  *value = size == 0 ? 0 : extended(bits.take(size), size);
  return true;
}

// The coefficients of a block but for the first, in natural order. Returns the index of the last
// one, in zigzag order; -1: the bits are none of a block.
HEADRACE_INLINE int read_ac(Bits& bits, const HuffmanTable& table, int16_t* block) {
  uint32_t at = 0;
  while (true) {
    bits.refill();
    uint64_t seen = table.pairs[bits.buffer >> kUnseen];
    if ((seen & kSlow) != 0) [[unlikely]] {
      uint32_t distance;
      int value;
      const auto low = static_cast<uint32_t>(seen);
      if (!slow_symbol(bits, table, low, true, &distance, &value)) return -1;
      at += distance;
      if (at > 63) break;
      block[kNatural[at]] = static_cast<int16_t>(value);
      if (at == 63) return 63;
      continue;
    }
    // Bits for four look-ups are there.
    for (int i = 0; i < 4 && (seen & kSlow) == 0; ++i) {
      const uint32_t first = at + (seen >> 8 & 0xff);
      if (first >= 63) {  // the block's end: what comes behind it is of the next
        bits.drop((seen & kUsed) - (seen >> 40 & 0xff));
        at = first;
        if (at != 63) goto end;
        block[63] = static_cast<int16_t>(seen >> 16);
        return 63;
      }
      bits.drop(seen & kUsed);
      block[kNatural[first]] = static_cast<int16_t>(seen >> 16);
      at = first + (seen >> 32 & 0xff);
      if (at > 63) goto end;
      block[kNatural[at]] = static_cast<int16_t>(seen >> 48);
      if (at == 63) return 63;
      seen = table.pairs[bits.buffer >> kUnseen];
    }
  }
end:
  return at >= kEndOfBlock ? static_cast<int>(at - kEndOfBlock) : -1;
}

// The same where nobody wants them: several symbols at a time.
HEADRACE_INLINE bool skip_ac(Bits& bits, const HuffmanTable& table) {
  uint32_t at = 0;
  while (true) {
    bits.refill();
    bool short_ones = true;
    for (int i = 0; i < 4; ++i) {
      const uint32_t seen = table.skips[bits.buffer >> kUnseen], distance = seen >> 8 & 0x7f;
      // At coefficient 63 a block ends without saying so.
      if ((seen & kUsed) == 0 || at + distance >= 63) {
        short_ones = false;
        break;
      }
      bits.drop(seen & kUsed);
      at += distance;
      if ((seen & kEnds) != 0) return true;
    }
    if (short_ones) continue;
    bits.refill();
    const uint32_t seen = table.fast[bits.buffer >> kUnseen];
    uint32_t distance = seen >> 8 & 0xff;
    if ((seen & kSlow) != 0) {
      int value;
      if (!slow_symbol(bits, table, seen, true, &distance, &value)) return false;
    } else {
      bits.drop(seen & kUsed);
    }
    at += distance;
    if (at >= 63) return at == 63 || at >= kEndOfBlock;
  }
}

HEADRACE_INLINE bool read_dc(Bits& bits, const HuffmanTable& table, int* difference) {
  bits.refill();
  const uint32_t seen = table.fast[bits.buffer >> kUnseen];
  if ((seen & kSlow) != 0) [[unlikely]] {
    uint32_t distance;
    return slow_symbol(bits, table, seen, false, &distance, difference);
  }
  bits.drop(seen & kUsed);
  *difference = static_cast<int16_t>(seen >> 16);
  return true;
}

// -- inverse transforms -------------------------------------------------------------------------

HEADRACE_INLINE __m128i load(const void* p) {
  return _mm_loadu_si128(static_cast<const __m128i*>(p));
}

// Both numbers of each column side by side, eight columns.
HEADRACE_INLINE __m256i paired(__m128i a, __m128i b) {
  return _mm256_set_m128i(_mm_unpackhi_epi16(a, b), _mm_unpacklo_epi16(a, b));
}

HEADRACE_INLINE __m128i weights(int16_t a, int16_t b) {
  return _mm_set1_epi32(static_cast<int>(static_cast<uint16_t>(a) |
                                         static_cast<uint32_t>(static_cast<uint16_t>(b)) << 16));
}

HEADRACE_INLINE __m256i weighed(__m256i pairs, int16_t a, int16_t b) {
  return _mm256_madd_epi16(pairs, _mm256_broadcastsi128_si256(weights(a, b)));
}

HEADRACE_INLINE void dequantise(const int16_t* block, const uint16_t* quantisers, __m128i rows[8]) {
  for (int i = 0; i < 8; ++i) {
    rows[i] = _mm_mullo_epi16(load(block + 8 * i), load(quantisers + 8 * i));
  }
}

// What even and odd coefficients give together, for a row and for its mirror image.
template <int kShift>
HEADRACE_INLINE void mirrored(__m256i even, __m256i odd, __m128i* row, __m128i* image) {
  const __m256i sum = _mm256_srai_epi32(_mm256_add_epi32(even, odd), kShift);
  const __m256i difference = _mm256_srai_epi32(_mm256_sub_epi32(even, odd), kShift);
  const __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi32(sum, difference), 0b11011000);
  *row = _mm256_castsi256_si128(both);
  *image = _mm256_extracti128_si256(both, 1);
}

// One pass over eight columns; the halves of its sums are rounded up.
template <int kShift>
HEADRACE_INLINE void pass(const __m128i in[8], __m128i out[8]) {
  // Loeffler, Ligtenberg, Moschytz 1989, as libjpeg's accurate integer transform has it, with the
  // products of each input put together: the sums are the same integers. Constants times 2^13.
  const __m256i even = paired(in[0], in[4]), turned = paired(in[2], in[6]);
  const __m256i half = _mm256_set1_epi32(1 << (kShift - 1));
  const __m256i t0 = _mm256_add_epi32(weighed(even, 8192, 8192), half);
  const __m256i t1 = _mm256_add_epi32(weighed(even, 8192, -8192), half);
  const __m256i t2 = weighed(turned, 4433, -10704), t3 = weighed(turned, 10703, 4433);
  const __m256i e[4] = {_mm256_add_epi32(t0, t3), _mm256_add_epi32(t1, t2),
                        _mm256_sub_epi32(t1, t2), _mm256_sub_epi32(t0, t3)};
  const __m256i high = paired(in[7], in[5]), low = paired(in[3], in[1]);
  const __m256i o[4] = {_mm256_add_epi32(weighed(high, 2260, 6437), weighed(low, 9633, 11363)),
                        _mm256_add_epi32(weighed(high, -6436, -11362), weighed(low, -2259, 9633)),
                        _mm256_add_epi32(weighed(high, 9633, 2261), weighed(low, -11362, 6437)),
                        _mm256_add_epi32(weighed(high, -11363, 9633), weighed(low, -6436, 2260))};
  for (int i = 0; i < 4; ++i) {
    mirrored<kShift>(e[i], o[i], &out[i], &out[7 - i]);
  }
}

HEADRACE_INLINE void transpose(__m128i rows[8]) {
  __m128i a[8], b[8];
  for (int i = 0; i < 4; ++i) {
    a[2 * i] = _mm_unpacklo_epi16(rows[2 * i], rows[2 * i + 1]);
    a[2 * i + 1] = _mm_unpackhi_epi16(rows[2 * i], rows[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {
    b[4 * i] = _mm_unpacklo_epi32(a[4 * i], a[4 * i + 2]);
    b[4 * i + 1] = _mm_unpackhi_epi32(a[4 * i], a[4 * i + 2]);
    b[4 * i + 2] = _mm_unpacklo_epi32(a[4 * i + 1], a[4 * i + 3]);
    b[4 * i + 3] = _mm_unpackhi_epi32(a[4 * i + 1], a[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    rows[2 * i] = _mm_unpacklo_epi64(b[i], b[i + 4]);
    rows[2 * i + 1] = _mm_unpackhi_epi64(b[i], b[i + 4]);
  }
}

HEADRACE_AVX2 void inverse_8(const int16_t* block, const uint16_t* quantisers, uint8_t* out,
                             size_t stride) {
  __m128i rows[8];
  dequantise(block, quantisers, rows);
  __m128i columns[8];
  pass<11>(rows, columns);
  transpose(columns);
  pass<18>(columns, rows);
  transpose(rows);
  const __m128i middle = _mm_set1_epi16(128);
  for (int i = 0; i < 8; i += 2) {
    const __m128i bytes =
        _mm_packus_epi16(_mm_adds_epi16(rows[i], middle), _mm_adds_epi16(rows[i + 1], middle));
    const int64_t first = _mm_cvtsi128_si64(bytes), second = _mm_extract_epi64(bytes, 1);
    std::memcpy(out + static_cast<size_t>(i) * stride, &first, 8);
    std::memcpy(out + static_cast<size_t>(i + 1) * stride, &second, 8);
  }
}

// At 1/2 and 1/4, pixels are means of 2 x 2 and of 4 x 4 of the whole transform's. The weights of
// coefficients 0 to 7, times 2^15, for the first half of the pixels; the others mirror them.
constexpr int16_t kMeans2[1][8] = {{11585, 10498, 0, -3686, 0, 2463, 0, -2088}};
constexpr int16_t kMeans4[2][8] = {{11585, 14846, 10703, 5213, 0, -3483, -4433, -2953},
                                   {11585, 6149, -10703, -12586, 0, 8410, 4433, -1223}};

template <int kSide>
HEADRACE_AVX2 void inverse_means(const int16_t* block, const uint16_t* quantisers, uint8_t* out,
                                 size_t stride) {
  constexpr auto kMeans = kSide == 2 ? kMeans2 : kMeans4;
  __m128i in[8];
  dequantise(block, quantisers, in);
  const __m256i pairs[4] = {paired(in[0], in[2]), paired(in[4], in[6]), paired(in[1], in[3]),
                            paired(in[5], in[7])};
  __m128i rows[4] = {};
  const __m256i half = _mm256_set1_epi32(1 << 12);
  for (int i = 0; i < kSide / 2; ++i) {
    const int16_t* w = kMeans[i];
    const __m256i even = _mm256_add_epi32(
        half, _mm256_add_epi32(weighed(pairs[0], w[0], w[2]), weighed(pairs[1], w[4], w[6])));
    const __m256i odd =
        _mm256_add_epi32(weighed(pairs[2], w[1], w[3]), weighed(pairs[3], w[5], w[7]));
    mirrored<13>(even, odd, &rows[i], &rows[kSide - 1 - i]);
  }
  // Columns two by two, four rows each.
  const __m128i a = _mm_unpacklo_epi16(rows[0], rows[1]), b = _mm_unpackhi_epi16(rows[0], rows[1]);
  const __m128i c = _mm_unpacklo_epi16(rows[2], rows[3]), d = _mm_unpackhi_epi16(rows[2], rows[3]);
  const __m128i columns[4] = {_mm_unpacklo_epi32(a, c), _mm_unpackhi_epi32(a, c),
                              _mm_unpacklo_epi32(b, d), _mm_unpackhi_epi32(b, d)};
  const __m128i narrow[4] = {
      _mm_unpacklo_epi16(columns[0], columns[1]), _mm_unpacklo_epi16(columns[2], columns[3]),
      _mm_unpackhi_epi16(columns[0], columns[1]), _mm_unpackhi_epi16(columns[2], columns[3])};
  __m128i results[4] = {};
  for (int i = 0; i < kSide / 2; ++i) {
    const int16_t* w = kMeans[i];
    const __m128i even =
        _mm_add_epi32(_mm_set1_epi32((1 << 16) + (128 << 17)),
                      _mm_add_epi32(_mm_madd_epi16(narrow[0], weights(w[0], w[2])),
                                    _mm_madd_epi16(narrow[1], weights(w[4], w[6]))));
    const __m128i odd = _mm_add_epi32(_mm_madd_epi16(narrow[2], weights(w[1], w[3])),
                                      _mm_madd_epi16(narrow[3], weights(w[5], w[7])));
    results[i] = _mm_srai_epi32(_mm_add_epi32(even, odd), 17);
    results[kSide - 1 - i] = _mm_srai_epi32(_mm_sub_epi32(even, odd), 17);
  }
  const __m128i bytes =
      _mm_shuffle_epi8(_mm_packus_epi16(_mm_packs_epi32(results[0], results[1]),
                                        _mm_packs_epi32(results[2], results[3])),
                       _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  alignas(16) uint8_t pixels[16];
  _mm_store_si128(reinterpret_cast<__m128i*>(pixels), bytes);
  for (size_t i = 0; i < kSide; ++i) std::memcpy(out + i * stride, pixels + 4 * i, kSide);
}

// -- rows ---------------------------------------------------------------------------------------

// Twice as many columns, as libjpeg's fancy upsampling has them: three parts of the nearer, one of
// the other. `sums` has `count` values and room for one on either side.
template <int kShift>
HEADRACE_AVX2 void widen(uint16_t* __restrict sums, int count, uint8_t* __restrict out) {
  constexpr int kLow = kShift == 4 ? 8 : 1, kHigh = kShift == 4 ? 7 : 2;
  sums[-1] = sums[0];
  sums[count] = sums[count - 1];
  for (int i = 0; i < count; ++i) {
    const int left = (3 * sums[i] + sums[i - 1] + kLow) >> kShift;
    const int right = (3 * sums[i] + sums[i + 1] + kHigh) >> kShift;
    const auto both = static_cast<uint16_t>(left | right << 8);
    std::memcpy(out + 2 * i, &both, sizeof both);
  }
}

HEADRACE_AVX2 void add_rows(const uint8_t* __restrict near, const uint8_t* __restrict far,
                            int count, uint16_t* __restrict sums) {
  for (int i = 0; i < count; ++i) sums[i] = static_cast<uint16_t>(3 * near[i] + far[i]);
}

// Sixteen pixels at a time, as libjpeg's tables round: a constant above 1 is a whole number and a
// product that keeps the upper 16 bits.
HEADRACE_AVX2 void to_rgb(const uint8_t* y, const uint8_t* cb, const uint8_t* cr, int width,
                          uint8_t* out) {
  const __m256i middle = _mm256_set1_epi16(128), one = _mm256_set1_epi16(1);
  const __m256i greens = _mm256_set1_epi32(static_cast<int>(0x492ea7e6));  // 18734, -22554
  const __m256i half = _mm256_set1_epi32(1 << 15);
  for (int i = 0; i < width; i += 16, out += 64) {
    const __m256i l = _mm256_cvtepu8_epi16(load(y + i));
    const __m256i b = _mm256_sub_epi16(_mm256_cvtepu8_epi16(load(cb + i)), middle);
    const __m256i r = _mm256_sub_epi16(_mm256_cvtepu8_epi16(load(cr + i)), middle);
    const __m256i twice_b = _mm256_add_epi16(b, b), twice_r = _mm256_add_epi16(r, r);
    const __m256i red_part = _mm256_srai_epi16(
        _mm256_add_epi16(_mm256_mulhi_epi16(twice_r, _mm256_set1_epi16(26345)), one), 1);
    const __m256i blue_part = _mm256_srai_epi16(
        _mm256_add_epi16(_mm256_mulhi_epi16(twice_b, _mm256_set1_epi16(-14942)), one), 1);
    const __m256i low = _mm256_madd_epi16(_mm256_unpacklo_epi16(b, r), greens);
    const __m256i high = _mm256_madd_epi16(_mm256_unpackhi_epi16(b, r), greens);
    const __m256i green_part =
        _mm256_packs_epi32(_mm256_srai_epi32(_mm256_add_epi32(low, half), 16),
                           _mm256_srai_epi32(_mm256_add_epi32(high, half), 16));
    const __m256i red = _mm256_add_epi16(_mm256_add_epi16(l, r), red_part);
    const __m256i green = _mm256_add_epi16(_mm256_sub_epi16(l, r), green_part);
    const __m256i blue = _mm256_add_epi16(_mm256_add_epi16(l, twice_b), blue_part);
    const __m256i red_blue = _mm256_packus_epi16(red, blue);
    const __m256i green_none = _mm256_packus_epi16(green, middle);
    const __m256i upper = _mm256_unpacklo_epi8(red_blue, green_none);
    const __m256i lower = _mm256_unpackhi_epi8(red_blue, green_none);
    const __m256i first = _mm256_unpacklo_epi16(upper, lower);
    const __m256i second = _mm256_unpackhi_epi16(upper, lower);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                        _mm256_permute2x128_si256(first, second, 0x20));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 32),
                        _mm256_permute2x128_si256(first, second, 0x31));
  }
}

}  // namespace

bool HuffmanTable::build(const uint8_t* of_length, const uint8_t* values, bool ac) {
  // Most files have the same tables.
  if (std::memcmp(counts.data(), of_length, counts.size()) == 0 &&
      std::memcmp(symbols.data(), values, symbols.size()) == 0) {
    return true;
  }
  counts.fill(0);  // of no table, until this one is whole
  fast.fill(kSlow);
  limits.fill(0);
  uint32_t code = 0;
  int at = 0;
  for (uint32_t length = 1; length <= 16; ++length) {
    offsets[length] = at - static_cast<int>(code);
    const int count = of_length[length];
    if (at + count > 256 || code + static_cast<uint32_t>(count) > 1u << length) return false;
    for (int i = 0; i < count; ++i, ++at, ++code) {
      const uint32_t symbol = values[at], size = ac ? symbol & 15 : symbol;
      if (size > 15) return false;
      if (length > kLook) continue;
      const uint32_t spare = kLook - length;
      uint32_t* first = &fast[code << spare];
      const uint32_t distance = (symbol >> 4) + 1;
      if (ac && size == 0 && symbol != 0 && symbol != 0xf0) continue;  // nobody knows such codes
      if (size == 0) {
        std::fill_n(first, 1u << spare, entry(length, symbol == 0 ? kEndOfBlock : 16, 0));
      } else if (size > spare) {
        std::fill_n(first, 1u << spare, entry(length, distance, static_cast<int>(size)) | kSlow);
      } else {
        for (uint32_t value = 0; value < 1u << size; ++value) {
          std::fill_n(first + (value << (spare - size)), 1u << (spare - size),
                      entry(length + size, distance, extended(value, size)));
        }
      }
    }
    limits[length] = code << (16 - length);
    code <<= 1;
  }
  for (uint32_t look = 0; ac && look < skips.size(); ++look) {
    const uint32_t one = fast[look], used1 = one & kUsed;
    const uint32_t two = fast[(look << used1) % fast.size()], used2 = two & kUsed;
    uint64_t pair = one;
    if ((one & kSlow) == 0) {
      if ((two & kSlow) == 0 && used1 + used2 <= kLook && (one >> 8 & 0xff) < kEndOfBlock) {
        pair += used2 | uint64_t{used2} << 40 | (uint64_t{two} >> 8 & 0xff) << 32 |
                uint64_t{two} >> 16 << 48;
      } else {
        pair |= uint64_t{one} >> 16 << 48;
      }
    }
    pairs[look] = pair;
    uint32_t used = 0, distance = 0, ends = 0;
    while (ends == 0) {
      const uint32_t seen = fast[(look << used) % fast.size()];
      if ((seen & kSlow) != 0 || used + (seen & kUsed) > kLook) break;
      used += seen & kUsed;
      if ((seen >> 8 & 0xff) >= kEndOfBlock) {
        ends = kEnds;
      } else {
        distance += seen >> 8 & 0xff;
      }
    }
    skips[look] = static_cast<uint16_t>(used | std::min(distance, 0x7fu) << 8 | ends);
  }
  std::memcpy(symbols.data(), values, symbols.size());
  std::memcpy(counts.data(), of_length, counts.size());
  return true;
}

bool BaselineJpeg::choose(const jpeg_decompress_struct& info, int shift) {
  count_ = static_cast<size_t>(info.num_components);
  const bool grey = info.jpeg_color_space == JCS_GRAYSCALE && count_ == 1;
  const bool colour = info.jpeg_color_space == JCS_YCbCr && count_ == 3;
  if (info.progressive_mode || info.arith_code || info.data_precision != 8 || !(grey || colour) ||
      info.comps_in_scan != info.num_components || info.Ss != 0 || info.Se != 63 || info.Ah != 0 ||
      info.Al != 0) {
    return false;
  }
  for (size_t i = 0; i < count_; ++i) {
    const jpeg_component_info& from = info.comp_info[i];
    if (info.cur_comp_info[i] != &from) return false;
    Component& to = components_[i];
    to.columns = grey ? 1 : from.h_samp_factor;
    to.rows = grey ? 1 : from.v_samp_factor;
    const int columns = components_[0].columns, rows = components_[0].rows;
    if (i == 0 ? columns > 2 || rows > columns : to.columns != 1 || to.rows != 1) return false;
    to.side = 8 >> shift;
    // Chroma of half the size is scaled by half as much.
    if (i > 0 && shift > 0 && columns == 2 && rows == 2) to.side *= 2;
    to.width = ceil_div(int64_t{info.image_width} * to.columns * to.side, 8 * columns);
    to.height = ceil_div(int64_t{info.image_height} * to.rows * to.side, 8 * rows);
    // Where libjpeg has no fancy upsampling.
    if (i > 0 && columns * components_[0].side != to.side && (to.width <= 2 || shift == 3)) {
      return false;
    }
    const JQUANT_TBL* quantisers = info.quant_tbl_ptrs[from.quant_tbl_no & 3];
    const auto dc = static_cast<size_t>(from.dc_tbl_no & 3),
               ac = static_cast<size_t>(from.ac_tbl_no & 3);
    const JHUFF_TBL *codes = info.dc_huff_tbl_ptrs[dc], *more = info.ac_huff_tbl_ptrs[ac];
    if (quantisers == nullptr || codes == nullptr || more == nullptr) return false;
    for (size_t k = 0; k < 64; ++k) {
      if (quantisers->quantval[k] > 255) return false;
      to.quantisers[k] = quantisers->quantval[k];
    }
    if (!tables_[0][dc].build(codes->bits, codes->huffval, false) ||
        !tables_[1][ac].build(more->bits, more->huffval, true)) {
      return false;
    }
    to.dc = &tables_[0][dc];
    to.ac = &tables_[1][ac];
  }
  return true;
}

// Takes the scan's stuffed zeros out, and notes where segments begin. False unless all are there,
// and the end marker.
HEADRACE_AVX2 bool BaselineJpeg::unpack(std::span<const uint8_t> scan, size_t segments) {
  uint8_t* const begin = scan_.get(scan.size() + kOverrun + kSlack);
  uint8_t* out = begin;
  const uint8_t *in = scan.data(), *end = in + scan.size();
  starts_.assign(1, 0);
  const __m256i marker = _mm256_set1_epi8(-1);
  while (true) {
    uint32_t hits = 0;
    while (end - in >= 32) {
      const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), bytes);
      hits = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(bytes, marker)));
      const int clean = hits == 0 ? 32 : std::countr_zero(hits);
      in += clean;
      out += clean;
      if (hits != 0) break;
    }
    if (hits == 0) {
      while (in < end && *in != 0xff) *out++ = *in++;
    }
    if (end - in < 2) return false;
    const uint8_t code = in[1];
    in += 2;
    if (code == 0) {
      *out++ = 0xff;
    } else if (code == JPEG_EOI) {
      break;
    } else {
      if (code != JPEG_RST0 + ((starts_.size() - 1) & 7) || starts_.size() >= segments)
        return false;
      starts_.push_back(static_cast<size_t>(out - begin));
    }
  }
  if (starts_.size() != segments) return false;
  starts_.push_back(static_cast<size_t>(out - begin));
  std::memset(out, 0, kOverrun);
  packed_ = begin;
  return true;
}

template <bool kWanted, class Bits>
HEADRACE_AVX2 bool BaselineJpeg::read_block(Bits* at, const Component& component, int* dc,
                                            int16_t* block, uint8_t* out) {
  Bits bits = *at;
  int difference;
  if (!read_dc(bits, *component.dc, &difference)) return false;
  *dc = static_cast<int16_t>(*dc + difference);
  if constexpr (!kWanted) {
    if (!skip_ac(bits, *component.ac)) return false;
    *at = bits;
  } else {
    const int last = read_ac(bits, *component.ac, block);
    *at = bits;
    if (last < 0) return false;
    const size_t stride = component.stride;
    const auto side = static_cast<size_t>(component.side);
    if (last == 0 || side == 1) {
      const int level = ((*dc * component.quantisers[0] + 4) >> 3) + 128;
      for (size_t i = 0; i < side; ++i) {
        std::memset(out + i * stride, std::clamp(level, 0, 255), side);
      }
      if (last == 0) return true;
    } else {
      block[0] = static_cast<int16_t>(*dc);
      const uint16_t* quantisers = component.quantisers.data();
      if (side == 8) {
        inverse_8(block, quantisers, out, stride);
      } else if (side == 4) {
        inverse_means<4>(block, quantisers, out, stride);
      } else {
        inverse_means<2>(block, quantisers, out, stride);
      }
    }
    for (int i = 0; i < 64; i += 16) {
      _mm256_store_si256(reinterpret_cast<__m256i*>(block + i), _mm256_setzero_si256());
    }
  }
  return true;
}

bool BaselineJpeg::entropy(const Grid& grid, int interval) {
  const int across = grid.across, left = grid.left, right = grid.right, top = grid.top;
  const int end = (grid.bottom - 1) * across + right;
  // The first MCU from this one on that is wanted.
  const auto wanted_from = [&](int mcu) {
    const int row = mcu / across, column = mcu % across;
    if (row < top) return top * across + left;
    return column < left ? row * across + left : column < right ? mcu : (row + 1) * across + left;
  };
  alignas(32) int16_t block[64] = {};
  for (size_t segment = 0; segment + 1 < starts_.size(); ++segment) {
    const int first = static_cast<int>(segment) * interval;
    const int behind = std::min(first + interval, across * grid.down);
    if (wanted_from(first) >= std::min(behind, end)) continue;
    const uint8_t* limit = packed_ + starts_[segment + 1];
    Bits bits(packed_ + starts_[segment]);
    std::array<int, 3> dc{};
    int row = first / across, column = first % across, mcu = first;
    for (; mcu < std::min(behind, end); ++mcu) {
      const bool wanted = row >= top && column >= left && column < right;
      for (size_t c = 0; c < count_; ++c) {
        const Component& component = components_[c];
        for (int y = 0; y < component.rows; ++y) {
          for (int x = 0; x < component.columns; ++x) {
            if (!wanted) {
              if (!read_block<false>(&bits, component, &dc[c], block, nullptr)) return false;
              continue;
            }
            const int block_x = (column - left) * component.columns + x;
            const int block_y = (row - top) * component.rows + y;
            uint8_t* out =
                component.plane + (block_y * component.stride + block_x) * component.side;
            if (!read_block<true>(&bits, component, &dc[c], block, out)) return false;
          }
        }
      }
      if (bits.reached() > limit) return false;
      if (++column == across) column = 0, ++row;
      // What follows in this segment may be wanted by nobody.
      if (column == right && wanted_from(mcu + 1) >= behind) break;
    }
    // A segment that ends early has lost bits on the way.
    if (mcu == behind && bits.reached() != limit) return false;
  }
  return true;
}

// A row of chroma with as many columns as the picture, whose first in memory is column `left`.
const uint8_t* BaselineJpeg::chroma_row(const Component& component, const Grid& grid, int y,
                                        int left, uint16_t* sums, uint8_t* row) const {
  const Component& luma = components_[0];
  const int low = grid.top * component.side;
  const auto at = [&](int line) {
    const int inside = std::clamp(line, 0, component.height - 1) - low;
    return component.plane + static_cast<size_t>(inside) * component.stride;
  };
  const bool halved = luma.rows * luma.side != component.side;
  if (luma.columns * luma.side == component.side) return at(y);
  const int count = std::min((grid.right - grid.left) * component.side, component.width - left / 2);
  if (!halved) {
    std::copy_n(at(y), count, sums);
    widen<2>(sums, count, row);
  } else {
    const uint8_t *near = at(y / 2), *far = at(y % 2 != 0 ? y / 2 + 1 : y / 2 - 1);
    add_rows(near, far, count, sums);
    widen<4>(sums, count, row);
  }
  return row;
}

bool BaselineJpeg::decode(const jpeg_decompress_struct& info, const Region& region, int shift,
                          Picture* picture) {
  if (!has_avx2 || !choose(info, shift)) return false;
  const Component& luma = components_[0];
  const int mcu_width = luma.columns * luma.side, mcu_height = luma.rows * luma.side;
  Grid grid;
  grid.across = ceil_div(info.image_width, 8 * luma.columns);
  grid.down = ceil_div(info.image_height, 8 * luma.rows);
  // Upsampling looks at a neighbour on each side.
  grid.left = std::max(0, region.left - 2) / mcu_width;
  grid.top = std::max(0, region.top - 2) / mcu_height;
  grid.right = std::min(grid.across, ceil_div(region.right + 2, mcu_width));
  grid.bottom = std::min(grid.down, ceil_div(region.bottom + 2, mcu_height));
  const int mcus = grid.across * grid.down;
  const int interval = info.restart_interval == 0 ? mcus : static_cast<int>(info.restart_interval);
  const std::span<const uint8_t> scan{info.src->next_input_byte, info.src->bytes_in_buffer};
  if (!unpack(scan, static_cast<size_t>(ceil_div(mcus, interval)))) return false;
  for (size_t i = 0; i < count_; ++i) {
    Component& component = components_[i];
    const int columns = (grid.right - grid.left) * component.columns * component.side;
    const int rows = (grid.bottom - grid.top) * component.rows * component.side;
    component.stride = (static_cast<size_t>(columns) + kSlack + 63) / 64 * 64;
    component.plane = planes_[i].get(component.stride * static_cast<size_t>(rows) + kSlack);
  }
  if (!entropy(grid, interval)) return false;
  const int right = std::min(grid.right * mcu_width, ceil_div(info.image_width, 1 << shift));
  picture->allocate({grid.left * mcu_width, region.top, right, region.bottom});
  convert(grid, picture);
  return true;
}

void BaselineJpeg::convert(const Grid& grid, Picture* picture) {
  const Component& luma = components_[0];
  const auto width = static_cast<size_t>(picture->width) + kSlack;
  uint8_t* rows = rows_.get(8 * width);
  auto* sums = reinterpret_cast<uint16_t*>(rows + 2 * width) + 16;
  std::memset(rows, 128, 2 * width);  // grey has no chroma
  for (int y = picture->top; y < picture->top + picture->height; ++y) {
    const auto line = static_cast<size_t>(y - grid.top * luma.rows * luma.side);
    const uint8_t *cb = rows, *cr = rows + width;
    if (count_ == 3) {
      cb = chroma_row(components_[1], grid, y, picture->left, sums, rows);
      cr = chroma_row(components_[2], grid, y, picture->left, sums, rows + width);
    }
    to_rgb(luma.plane + line * luma.stride, cb, cr, picture->width, picture->row(y));
  }
}

}  // namespace headrace::pixels

#endif
