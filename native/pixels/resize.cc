#include "pixels/resize.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

namespace headrace::pixels {
namespace {

// Weights are multiples of 2^-22, as Pillow's: the sum of 255 times as many fits 32 bits.
constexpr int kBits = 22;
// A vector multiplies 16-bit numbers, so a weight is two of them: weight = high * 2^11 + low. Sums
// of both parts are put together at the end, and are Pillow's to the last bit.
constexpr int kLowBits = 11;

constexpr ptrdiff_t kPixel = kPixelBytes;  // forwards or backwards

uint8_t clipped(int32_t sum) { return static_cast<uint8_t>(std::clamp(sum >> kBits, 0, 255)); }

int32_t weight(const int16_t* weights, int size, int k) {
  return weights[k] * (1 << kLowBits) + weights[size + k];
}

// One row's columns. `in` is the row from the picture's first column on.
void narrow_plain(const Taps& taps, const uint8_t* in, int count, uint8_t* out) {
  for (int i = 0; i < count; ++i) {
    const int16_t* weights = taps.of(i);
    const uint8_t* p = in + kPixelBytes * taps.first[i];
    int32_t r = 1 << (kBits - 1), g = r, b = r;
    for (int k = 0; k < taps.size; ++k, p += kPixelBytes) {
      const int32_t w = weight(weights, taps.size, k);
      r += w * p[0];
      g += w * p[1];
      b += w * p[2];
    }
    uint8_t* o = out + kPixelBytes * i;
    o[0] = clipped(r), o[1] = clipped(g), o[2] = clipped(b), o[3] = 0;
  }
}

// Rounds to the nearest, ties to even, as IEEE 754 does.
uint16_t half_of(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t rest = bits & 0x7fffffff;
  if (rest >= 0x47800000) return static_cast<uint16_t>(sign | 0x7c00);  // too large
  if (rest < 0x38800000) {                                              // below the normal ones
    const float scaled = std::bit_cast<float>(rest) * 0x1p24f;
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::nearbyint(scaled)));
  }
  const uint32_t rounded = rest + 0xfff + (rest >> 13 & 1);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000) >> 13));
}

uint16_t brain_of(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// What the 256 levels of each channel become.
template <class T>
using Levels = std::array<std::array<T, 256>, 3>;

template <class T>
Levels<T> levels_of(const Recipe& recipe) {
  Levels<T> levels;
  for (size_t c = 0; c < 3; ++c) {
    for (size_t v = 0; v < 256; ++v) {
      const float value = (static_cast<float>(v) / 255.0f - recipe.mean[c]) / recipe.deviation[c];
      if constexpr (std::is_same_v<T, uint8_t>) levels[c][v] = static_cast<uint8_t>(v);
      if constexpr (std::is_same_v<T, float>) levels[c][v] = value;
      if constexpr (std::is_same_v<T, uint16_t>)
        levels[c][v] = recipe.type == Type::kFloat16 ? half_of(value) : brain_of(value);
    }
  }
  return levels;
}

#if defined(__x86_64__)
// Two 16-bit weights for each 32-bit lane.
HEADRACE_AVX2 inline __m256i pair_of(const int16_t* weights) {
  int32_t pair;
  std::memcpy(&pair, weights, sizeof pair);
  return _mm256_set1_epi32(pair);
}

// Two rows at once, one in each half: the weights are the same. At the high edge, where outputs
// have fewer taps, reads on into the next row, of which nothing weighs anything.
HEADRACE_AVX2 void narrow_avx2(const Taps& taps, const uint8_t* in0, const uint8_t* in1, int count,
                               uint8_t* out0, uint8_t* out1) {
  const __m256i half = _mm256_set1_epi32(1 << (kBits - 1));
  // Channels of two neighbouring pixels side by side, as 16-bit numbers.
  const __m256i first_two = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, -1, 4, -1, 1, -1, 5, -1, 2, -1, 6, -1, 3, -1, 7, -1));
  const __m256i last_two = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(8, -1, 12, -1, 9, -1, 13, -1, 10, -1, 14, -1, 11, -1, 15, -1));
  const int size = taps.size;
  const int16_t* weights = taps.weights.data();
  for (int i = 0; i < count; ++i, weights += 2 * size) {
    const uint8_t* p0 = in0 + kPixelBytes * taps.first[i];
    const uint8_t* p1 = in1 + kPixelBytes * taps.first[i];
    __m256i high = _mm256_setzero_si256(), low = half;
    for (int k = 0; k < size; k += 4, p0 += 4 * kPixelBytes, p1 += 4 * kPixelBytes) {
      const __m256i pixels = _mm256_inserti128_si256(
          _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p0))),
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(p1)), 1);
      const __m256i a = _mm256_shuffle_epi8(pixels, first_two);
      const __m256i b = _mm256_shuffle_epi8(pixels, last_two);
      const int16_t* w = weights + k;
      high = _mm256_add_epi32(high, _mm256_madd_epi16(a, pair_of(w)));
      high = _mm256_add_epi32(high, _mm256_madd_epi16(b, pair_of(w + 2)));
      low = _mm256_add_epi32(low, _mm256_madd_epi16(a, pair_of(w + size)));
      low = _mm256_add_epi32(low, _mm256_madd_epi16(b, pair_of(w + size + 2)));
    }
    __m256i sum = _mm256_add_epi32(_mm256_slli_epi32(high, kLowBits), low);
    sum = _mm256_srai_epi32(sum, kBits);
    sum = _mm256_packs_epi32(sum, sum);
    sum = _mm256_packus_epi16(sum, sum);
    const int pixel0 = _mm256_extract_epi32(sum, 0), pixel1 = _mm256_extract_epi32(sum, 4);
    std::memcpy(out0 + kPixelBytes * i, &pixel0, kPixelBytes);
    std::memcpy(out1 + kPixelBytes * i, &pixel1, kPixelBytes);
  }
}

// REQUIRES rows that are padded to a multiple of 32 bytes, and `used` to be even.
HEADRACE_AVX2 void blend_avx2(const int16_t* weights, int size, int used, const uint8_t* in,
                              size_t stride, size_t bytes, uint8_t* out) {
  const __m256i half = _mm256_set1_epi32(1 << (kBits - 1));
  const __m256i zero = _mm256_setzero_si256();
  for (size_t i = 0; i < bytes; i += 32) {
    __m256i high[4] = {zero, zero, zero, zero}, low[4] = {half, half, half, half};
    for (int k = 0; k < used; k += 2) {
      const uint8_t* p = in + static_cast<size_t>(k) * stride + i;
      const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
      const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + stride));
      const __m256i first = _mm256_unpacklo_epi8(a, b), second = _mm256_unpackhi_epi8(a, b);
      const __m256i numbers[4] = {
          _mm256_unpacklo_epi8(first, zero), _mm256_unpackhi_epi8(first, zero),
          _mm256_unpacklo_epi8(second, zero), _mm256_unpackhi_epi8(second, zero)};
      const __m256i upper = pair_of(weights + k), lower = pair_of(weights + size + k);
      for (int n = 0; n < 4; ++n) {
        high[n] = _mm256_add_epi32(high[n], _mm256_madd_epi16(numbers[n], upper));
        low[n] = _mm256_add_epi32(low[n], _mm256_madd_epi16(numbers[n], lower));
      }
    }
    __m256i sums[4];
    for (int n = 0; n < 4; ++n) {
      sums[n] = _mm256_add_epi32(_mm256_slli_epi32(high[n], kLowBits), low[n]);
      sums[n] = _mm256_srai_epi32(sums[n], kBits);
    }
    const __m256i words = _mm256_packs_epi32(sums[0], sums[1]);
    const __m256i more = _mm256_packs_epi32(sums[2], sums[3]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm256_packus_epi16(words, more));
  }
}

// Eight values of a channel, the first in the lowest byte, as they are or as their levels.
HEADRACE_AVX2 inline void store_eight(int64_t values, const uint8_t* /*levels*/, uint8_t* out) {
  std::memcpy(out, &values, 8);
}
// Floats go past the caches, which a batch of them is too large for: a fence follows them.
HEADRACE_AVX2 inline void store_eight(int64_t values, const float* levels, float* out) {
  const __m256i at = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(values));
  const __m256 floats = _mm256_i32gather_ps(levels, at, sizeof(float));
  if (reinterpret_cast<uintptr_t>(out) % sizeof floats == 0) {
    _mm256_stream_ps(out, floats);
  } else {
    _mm256_storeu_ps(out, floats);
  }
}
HEADRACE_AVX2 inline void store_eight(int64_t values, const uint16_t* levels, uint16_t* out) {
  for (int i = 0; i < 8; ++i, values >>= 8) out[i] = levels[static_cast<size_t>(values & 255)];
}

// As many of a row's pixels as fill vectors, in three planes; returns how many. Each lies `step`
// bytes behind the one before: four, or four before it.
template <class T>
HEADRACE_AVX2 size_t planes_avx2(const uint8_t* in, ptrdiff_t step, size_t count,
                                 const Levels<T>& levels, T* out, size_t plane) {
  const bool flip = step < 0;
  const __m256i by_channel = _mm256_broadcastsi128_si256(
      flip ? _mm_setr_epi8(12, 8, 4, 0, 13, 9, 5, 1, 14, 10, 6, 2, 15, 11, 7, 3)
           : _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  const __m256i joined =
      flip ? _mm256_setr_epi32(4, 0, 5, 1, 6, 2, 7, 3) : _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  if (flip) in += 7 * step;
  size_t x = 0;
  for (; x + 8 <= count; x += 8, in += 8 * step) {
    const __m256i pixels = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in));
    const __m256i sorted =
        _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(pixels, by_channel), joined);
    store_eight(_mm256_extract_epi64(sorted, 0), levels[0].data(), out + x);
    store_eight(_mm256_extract_epi64(sorted, 1), levels[1].data(), out + plane + x);
    store_eight(_mm256_extract_epi64(sorted, 2), levels[2].data(), out + 2 * plane + x);
  }
  return x;
}
#endif

// Output pixel (x, y) lies at `first + x * dx + y * dy` in the picture as it was resized.
struct Walk {
  const uint8_t* first;
  ptrdiff_t dx, dy;  // bytes
};

template <class T>
void write_pixels(const Recipe& recipe, const Walk& walk, void* to) {
  const Levels<T> levels = levels_of<T>(recipe);
  const auto level = [&](size_t of, uint8_t value) {
    if constexpr (std::is_same_v<T, uint8_t>) return value;
    return levels[of][value];
  };
  const auto columns = static_cast<size_t>(recipe.width);
  // How far apart are a pixel's channels, and a row's pixels.
  const size_t channel = recipe.planar ? recipe.output_pixels() : 1, beside = recipe.planar ? 1 : 3;
  for (int y = 0; y < recipe.height; ++y) {
    const uint8_t* p = walk.first + y * walk.dy;
    T* out = static_cast<T*>(to) + static_cast<size_t>(y) * columns * beside;
    size_t x = 0;
#if defined(__x86_64__)
    if (has_avx2 && recipe.planar && (walk.dx == kPixel || walk.dx == -kPixel)) {
      x = planes_avx2(p, walk.dx, columns, levels, out, channel);
      p += static_cast<ptrdiff_t>(x) * walk.dx;
    }
#endif
    for (T* o = out + x * beside; x < columns; ++x, p += walk.dx, o += beside) {
      const T red = level(0, p[0]), green = level(1, p[1]), blue = level(2, p[2]);
      o[0] = red, o[channel] = green, o[2 * channel] = blue;
    }
  }
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// The weights of an axis, as Pillow's precompute_coeffs has them.
void make_taps(const Axis& axis, Filter filter, std::vector<double>* sums, Taps* taps) {
  const double scale = std::max(1.0, axis.scale), reach = support_of(filter) * scale;
  const double narrower = 1.0 / scale;
  // A multiple of 4, which is what a vector takes at once.
  taps->size = (static_cast<int>(std::ceil(reach)) * 2 + 1 + 3) / 4 * 4;
  const auto size = static_cast<size_t>(taps->size), count = static_cast<size_t>(axis.count);
  taps->first.resize(count);
  sums->assign(size * count, 0.0);
  // In coordinates of the axis' own low end, as Pillow computes a crop that was cut out before.
  const double origin = axis.origin - axis.low;
  const int length = axis.high - axis.low;
  int used = 1;
  for (size_t i = 0; i < count; ++i) {
    const double centre =
        origin + (static_cast<double>(axis.first) + static_cast<double>(i) + 0.5) * axis.scale;
    const int from = std::clamp(static_cast<int>(centre - reach + 0.5), 0, length - 1);
    const int to = std::clamp(static_cast<int>(centre + reach + 0.5), from + 1, length);
    double* weights = &(*sums)[i * size];
    double total = 0;
    for (int k = 0; k < to - from; ++k) {
      weights[k] = weight_of(filter, (k + from - centre + 0.5) * narrower);
      total += weights[k];
    }
    if (total == 0) weights[0] = total = 1;  // a box that lies between two pixels
    for (int k = 0; k < to - from; ++k) weights[k] /= total;
    used = std::max(used, to - from);
    taps->first[i] = axis.low + from;
  }
  // Fewer taps than Pillow has room for are often enough.
  const auto needed = static_cast<size_t>((used + 3) / 4 * 4);
  taps->size = static_cast<int>(needed);
  taps->weights.assign(2 * needed * count, 0);
  for (size_t i = 0; i < count; ++i) {
    int16_t* weights = &taps->weights[2 * needed * i];
    for (size_t k = 0; k < std::min(needed, size); ++k) {
      const double scaled = (*sums)[i * size + k] * (1 << kBits);
      const auto rounded = static_cast<int32_t>(scaled < 0 ? scaled - 0.5 : scaled + 0.5);
      weights[k] = static_cast<int16_t>(rounded >> kLowBits);
      weights[needed + k] = static_cast<int16_t>(rounded & ((1 << kLowBits) - 1));
    }
  }
}

// Bytes of a row of so many pixels: whole vectors.
size_t padded(int pixels) { return (static_cast<size_t>(pixels) * kPixelBytes + 31) / 32 * 32; }

// Which pass comes first, by the rule of Pillow 13 (those before it always begin with the columns):
// it was found by comparing results, and the order shows where a filter's overshoot is cut off at 0
// or 255.
bool rows_first(const Plan& plan) {
  const auto lost = [](const Axis& axis) {
    const int length = axis.high - axis.low;
    return length - static_cast<int>(std::lround(length / axis.scale));
  };
  return lost(plan.y) > 0 && lost(plan.y) > 2 * lost(plan.x);
}

// The columns of the rows that `out` has.
void narrow(const Taps& taps, const Picture& in, const Picture& out) {
  const ptrdiff_t back = kPixel * in.left;
  const size_t bytes = kPixelBytes * static_cast<size_t>(in.width);
  const int end = out.top + out.height;
  for (int row = out.top; row < end; row += 2) {
    // Of an odd number the last is done twice.
    const int other = std::min(row + 1, end - 1);
    // Half of a drawing's rows equal the one above.
    const auto repeats = [&](int y) { return std::memcmp(in.row(y), in.row(row - 1), bytes) == 0; };
    if (row > out.top && repeats(row) && repeats(other)) {
      for (const int y : {row, other})
        std::memcpy(out.row(y), out.row(row - 1), kPixelBytes * static_cast<size_t>(out.width));
      continue;
    }
    const uint8_t *first = in.row(row) - back, *second = in.row(other) - back;
#if defined(__x86_64__)
    if (has_avx2) {
      narrow_avx2(taps, first, second, out.width, out.row(row), out.row(other));
      continue;
    }
#endif
    narrow_plain(taps, first, out.width, out.row(row));
    narrow_plain(taps, second, out.width, out.row(other));
  }
}

// A row of `out`, of input rows from `in` on, which are `stride` bytes apart.
void blend(const Taps& taps, int row, const uint8_t* in, size_t stride, const Picture& out) {
  const int16_t* weights = taps.of(row);
  const int used = taps.used(row);
  const size_t bytes = padded(out.width);
  uint8_t* to = out.row(row);
#if defined(__x86_64__)
  if (has_avx2) return blend_avx2(weights, taps.size, used, in, stride, bytes, to);
#endif
  for (size_t i = 0; i < bytes; ++i) {
    int32_t sum = 1 << (kBits - 1);
    for (int k = 0; k < used; ++k) {
      sum += weight(weights, taps.size, k) * in[static_cast<size_t>(k) * stride + i];
    }
    to[i] = clipped(sum);
  }
}

}  // namespace

int Taps::used(int output) const {
  const int16_t* weights = of(output);
  int used = size;
  while (used > 2 && (weights[used - 1] | weights[used - 2] | weights[size + used - 1] |
                      weights[size + used - 2]) == 0) {
    used -= 2;
  }
  return used;
}

void Resizer::run(const Recipe& recipe, const Plan& plan, const Picture& picture, void* out) {
  const Axis x = plan.x.shrunk(picture.shift), y = plan.y.shrunk(picture.shift);
  make_taps(x, recipe.filter, &sums_, &x_);
  make_taps(y, recipe.filter, &sums_, &y_);
  // What the outputs need of the picture.
  const int low = *std::ranges::min_element(y_.first), left = *std::ranges::min_element(x_.first);
  int high = low;
  for (int i = 0; i < y.count; ++i) high = std::max(high, y_.first[i] + y_.used(i));
  high = std::min(high, picture.top + picture.height);
  const int right =
      std::min(*std::ranges::max_element(x_.first) + x_.size, picture.left + picture.width);
  assert(low >= picture.top && low < high && left >= picture.left && left < right);
  small_.allocate({0, 0, x.count, y.count});
  if (rows_first(plan)) {
    half_.allocate({left, 0, right, y.count});
    for (int i = 0; i < y.count; ++i) {
      const uint8_t* in = picture.row(y_.first[i]) + kPixel * (left - picture.left);
      blend(y_, i, in, picture.stride, half_);
    }
    narrow(x_, half_, small_);
  } else {
    half_.allocate({0, low, x.count, high});
    narrow(x_, picture, half_);
    for (int i = 0; i < y.count; ++i) {
      blend(y_, i, half_.row(y_.first[i]), half_.stride, small_);
    }
  }
  write(recipe, plan, out);
}

void Resizer::write(const Recipe& recipe, const Plan& plan, void* out) {
  Walk walk{small_.data, kPixel, static_cast<ptrdiff_t>(small_.stride)};
  if (plan.turned) std::swap(walk.dx, walk.dy);
  if (plan.flip) walk.first += (recipe.width - 1) * walk.dx, walk.dx = -walk.dx;
  if (plan.flip_vertical) walk.first += (recipe.height - 1) * walk.dy, walk.dy = -walk.dy;
  if (!plan.steps.empty()) {
    std::vector<uint32_t>& upright = augmenter_.pixels;
    upright.resize(recipe.output_pixels());
    uint32_t* to = upright.data();
    for (int y = 0; y < recipe.height; ++y) {
      const uint8_t* p = walk.first + y * walk.dy;
      for (int x = 0; x < recipe.width; ++x, p += walk.dx) std::memcpy(to++, p, kPixelBytes);
    }
    augmenter_.run(plan.steps, recipe.width, recipe.height);
    walk = {reinterpret_cast<const uint8_t*>(upright.data()), kPixel, kPixel * recipe.width};
  }
  switch (recipe.type) {
    case Type::kUint8:
      return write_pixels<uint8_t>(recipe, walk, out);
    case Type::kFloat32:
      return write_pixels<float>(recipe, walk, out);
    case Type::kFloat16:
    case Type::kBfloat16:
      return write_pixels<uint16_t>(recipe, walk, out);
  }
}

}  // namespace headrace::pixels
