#include "pixels/augment.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/permutation.h"
#include "pixels/picture.h"

namespace headrace::pixels {
namespace {

// Loops that the compiler makes vectors of, for processors with AVX2 and for others.
template <class Body>
HEADRACE_AVX2 void loop_avx2(size_t count, Body body) {
  for (size_t i = 0; i < count; ++i) body(i);
}

template <class Body>
void loop(size_t count, Body body) {
  if (has_avx2) return loop_avx2(count, body);
  for (size_t i = 0; i < count; ++i) body(i);
}

constexpr int red(uint32_t pixel) { return static_cast<int>(pixel & 255); }
constexpr int green(uint32_t pixel) { return static_cast<int>(pixel >> 8 & 255); }
constexpr int blue(uint32_t pixel) { return static_cast<int>(pixel >> 16 & 255); }
constexpr uint32_t joined(int r, int g, int b) {
  return static_cast<uint32_t>(r | g << 8 | b << 16);
}
constexpr int grey(uint32_t pixel) {
  return (19595 * red(pixel) + 38470 * green(pixel) + 7471 * blue(pixel) + 0x8000) >> 16;
}

// From `from` towards `to` and beyond, cut off at both ends.
inline int towards(int from, int to, float factor) {
  const float value = static_cast<float>(from) + factor * static_cast<float>(to - from);
  return static_cast<int>(std::min(255.0f, std::max(0.0f, value)));
}

inline uint32_t blended(uint32_t from, uint32_t to, float factor) {
  return joined(towards(red(from), red(to), factor), towards(green(from), green(to), factor),
                towards(blue(from), blue(to), factor));
}

// To hue, saturation and value in 8 bits each, and back. Quotients are computed in Pillow's
// precision, which shows where they are whole.
inline uint32_t turned(uint32_t pixel, int shift) {
  const int r = red(pixel), g = green(pixel), b = blue(pixel);
  const int value = std::max(r, std::max(g, b)), least = std::min(r, std::min(g, b));
  const auto range = static_cast<float>(std::max(value - least, 1));
  const float part = static_cast<float>(2 * value - r - g - b + least) / range;
  const float base = r == value ? 0.0f : g == value ? 2.0f : 4.0f;
  const int higher = r == value ? g : g == value ? b : r, lower = r + g + b - value - higher;
  const float sign = higher >= lower ? 1.0f : -1.0f, sixth = base + sign - sign * part;
  const float circle = sixth / 6.0f + (sixth < 0.0f ? 1.0f : 0.0f);
  const int hue = (static_cast<int>(circle * 255.0f) + shift) & 255;
  // 1e-9 vanishes beside 1 and more; a branch for black would keep the loop from being a vector's.
  const float rich = static_cast<float>(value - least) / (static_cast<float>(value) + 1e-9f);
  const int saturation = static_cast<int>(rich * 255.0f);
  // Back, in whole numbers, which floats hold exactly: no quotient lies half-way between two.
  const auto channel = [=](int sixths) {
    const int turn = 255 * sixths + 6 * hue, at = turn >= 1530 ? turn - 1530 : turn;
    const int away = std::min(255, std::max(0, std::min(at, 1020 - at)));
    const int scaled = value * (65025 - saturation * away) + 32512;
    return static_cast<int>(static_cast<float>(scaled) / 65025.0f);
  };
  return joined(channel(5), channel(3), channel(1));
}

using Levels = std::array<uint32_t, 256>;

// What becomes of each level of a channel that has so many pixels of each.
void stretch(Levels& levels) {
  int low = 0, high = 255;
  while (low < 255 && levels[static_cast<size_t>(low)] == 0) ++low;
  while (high > 0 && levels[static_cast<size_t>(high)] == 0) --high;
  const double scale = high > low ? 255.0 / (high - low) : 1.0;
  const double offset = high > low ? -low * scale : 0.0;
  for (size_t i = 0; i < 256; ++i) {
    levels[i] =
        static_cast<uint32_t>(std::clamp(static_cast<double>(i) * scale + offset, 0., 255.));
  }
}

void equalize(Levels& levels) {
  uint32_t total = 0, last = 0;
  for (const uint32_t count : levels) total += count, last = count != 0 ? count : last;
  const uint32_t step = (total - last) / 255;
  uint32_t sum = step / 2;
  for (uint32_t i = 0; i < 256; ++i) {
    const uint32_t count = levels[i];
    levels[i] = step == 0 ? i : std::min(255u, sum / step);
    sum += count;
  }
}

// Each pixel's neighbours with a weight of 1 and itself with one of 5; those at the edge stay.
void smooth(const uint32_t* in, int width, int height, uint32_t* out) {
  const auto columns = static_cast<size_t>(width);
  std::copy_n(in, columns * static_cast<size_t>(height), out);
  if (width < 3) return;
  for (size_t y = 1; y + 1 < static_cast<size_t>(height); ++y) {
    const uint32_t* row = in + y * columns + 1;
    loop(columns - 2, [=, to = out + y * columns + 1](size_t i) {
      uint32_t even = 0, odd = 0;  // red and blue, green: none overflows its 16 bits
      for (const uint32_t* p : {row + i - columns, row + i, row + i + columns}) {
        even += (p[-1] & 0xff00ff) + (p[0] & 0xff00ff) + (p[1] & 0xff00ff);
        odd += (p[-1] >> 8 & 255) + (p[0] >> 8 & 255) + (p[1] >> 8 & 255);
      }
      even += 4 * (row[i] & 0xff00ff), odd += 4 * (row[i] >> 8 & 255);
      const auto of_13 = [](uint32_t sum) { return (2 * sum + 13) / 26; };
      to[i] = of_13(even & 0xffff) | of_13(odd) << 8 | of_13(even >> 16) << 16;
    });
  }
}

// Between the four nearest pixels, in Pillow's precision; those at the edge count twice.
void move_bilinear(const std::array<double, 6>& numbers, const uint32_t* in, int width, int height,
                   uint32_t* out) {
  const auto& [a, b, c, d, e, f] = numbers;
  for (int y = 0; y < height; ++y) {
    for (int x = 0; x < width; ++x, ++out) {
      double column = a * (x + 0.5) + b * (y + 0.5) + c, row = d * (x + 0.5) + e * (y + 0.5) + f;
      *out = 0;
      if (!(column >= 0 && column < width && row >= 0 && row < height)) continue;
      column -= 0.5, row -= 0.5;
      const double left = std::floor(column), top = std::floor(row);
      const auto between = [](int from, int to, double part) { return from + (to - from) * part; };
      const auto pixel = [&](double down, double across) {
        const int at_x = std::clamp(static_cast<int>(left + across), 0, width - 1);
        const int at_y = std::clamp(static_cast<int>(top + down), 0, height - 1);
        return in[static_cast<size_t>(at_y) * static_cast<size_t>(width) +
                  static_cast<size_t>(at_x)];
      };
      const std::array<uint32_t, 4> near = {pixel(0, 0), pixel(0, 1), pixel(1, 0), pixel(1, 1)};
      const auto channel = [&](int (*of)(uint32_t)) {
        const double upper = between(of(near[0]), of(near[1]), column - left);
        const double lower = between(of(near[2]), of(near[3]), column - left);
        return static_cast<int>(upper + (lower - upper) * (row - top));
      };
      *out = joined(channel(red), channel(green), channel(blue));
    }
  }
}

// Half of the weights of a Gaussian kernel, from its middle on; all of them add up to 1.
std::vector<float> gaussian(int size, double deviation) {
  std::vector<double> weights;
  double sum = 0;
  for (int i = 0; i <= size / 2; ++i) {
    weights.push_back(std::exp(-0.5 * (i / deviation) * (i / deviation)));
    sum += weights.back() * (i == 0 ? 1 : 2);
  }
  for (double& weight : weights) weight /= sum;
  return {weights.begin(), weights.end()};
}

// What stands for a place beyond a side's ends: it is reflected, without the end itself.
int reflected(int at, int side) { return std::abs(at) < side ? std::abs(at) : 2 * (side - 1) - at; }

void erase(const std::array<double, 6>& values, int width, uint32_t* pixels) {
  const auto& [left, top, columns, rows, colour, seed] = values;
  auto state = static_cast<uint64_t>(seed);
  for (int y = 0; y < static_cast<int>(rows); ++y) {
    uint32_t* row = pixels + (static_cast<int>(top) + y) * width + static_cast<int>(left);
    for (int x = 0; x < static_cast<int>(columns); ++x) {
      row[x] = colour >= 0 ? static_cast<uint32_t>(colour) : mix64(state += kGolden) & 0xffffff;
    }
  }
}

}  // namespace

// In 16.16 fixed point, as Pillow does it.
template <class T>
void move_affine(const std::array<double, 6>& numbers, const T* in, int width, int height, T fill,
                 T* out) {
  const auto fixed = [](double x) { return static_cast<int64_t>(std::floor(x * 65536.0 + 0.5)); };
  const auto& [a, b, c, d, e, f] = numbers;
  int64_t x0 = fixed(c + a * 0.5 + b * 0.5), y0 = fixed(f + d * 0.5 + e * 0.5);
  for (int y = 0; y < height; ++y, x0 += fixed(b), y0 += fixed(e)) {
    int64_t from_x = x0, from_y = y0;
    for (int x = 0; x < width; ++x, from_x += fixed(a), from_y += fixed(d)) {
      const int64_t column = from_x >> 16, row = from_y >> 16;
      const bool inside = column >= 0 && column < width && row >= 0 && row < height;
      *out++ = inside ? in[row * width + column] : fill;
    }
  }
}
template void move_affine(const std::array<double, 6>&, const uint8_t*, int, int, uint8_t,
                          uint8_t*);

void Augmenter::blur(const std::array<double, 6>& values, int width, int height) {
  const std::array<std::vector<float>, 2> weights = {
      gaussian(static_cast<int>(values[0]), values[2]),
      gaussian(static_cast<int>(values[1]), values[3])};
  const size_t stride = 4 * static_cast<size_t>(width), edge = 4 * (weights[0].size() - 1);
  // A row of sums over columns, with what is reflected on both sides; then sums along it.
  sums_.resize(2 * (stride + edge));
  float* const down = sums_.data() + edge;
  float* const across = down + stride + edge;
  other_.resize(pixels.size());
  for (int y = 0; y < height; ++y) {
    const auto row = [&](int at) {
      at = reflected(at, height);
      return reinterpret_cast<const uint8_t*>(pixels.data()) + static_cast<size_t>(at) * stride;
    };
    loop(stride, [=, p = row(y), weight = weights[1][0]](size_t i) {
      down[i] = weight * static_cast<float>(p[i]);
    });
    for (int t = 1; t < static_cast<int>(weights[1].size()); ++t) {
      const float weight = weights[1][static_cast<size_t>(t)];
      loop(stride, [=, p = row(y - t), q = row(y + t)](size_t i) {
        down[i] += weight * static_cast<float>(p[i] + q[i]);
      });
    }
    for (int t = 1; t < static_cast<int>(weights[0].size()); ++t) {
      std::copy_n(down + 4 * reflected(-t, width), 4, down - 4 * t);
      std::copy_n(down + 4 * reflected(width - 1 + t, width), 4, down + 4 * (width - 1 + t));
    }
    loop(stride, [=, weight = weights[0][0]](size_t i) { across[i] = weight * down[i]; });
    for (size_t t = 1; t < weights[0].size(); ++t) {
      loop(stride, [=, weight = weights[0][t], p = down - 4 * t, q = down + 4 * t](size_t i) {
        across[i] += weight * (p[i] + q[i]);
      });
    }
    auto* out = reinterpret_cast<uint8_t*>(other_.data()) + static_cast<size_t>(y) * stride;
    loop(stride, [=](size_t i) { out[i] = static_cast<uint8_t>(across[i] + 0.5f); });
  }
  pixels.swap(other_);
}

void check(std::span<const Step> steps, int width, int height) {
  for (const auto& [op, v] : steps) {
    bool fits = op >= 0 && op < static_cast<int>(Op::kCount) && op == std::floor(op);
    const Op kind = fits ? static_cast<Op>(static_cast<int>(op)) : Op::kNone;
    for (size_t i = 0; i < v.size(); ++i) {
      fits &= std::abs(v[i]) < (kind == Op::kErase && i >= 4 ? 0x1p53 : 0x1p20);
    }
    if (kind == Op::kPosterize) fits &= v[0] >= 0 && v[0] <= 8;
    if (kind == Op::kErase) {
      fits &= std::min({v[0], v[1], v[2], v[3], v[5]}) >= 0 && v[0] + v[2] <= width &&
              v[1] + v[3] <= height && v[4] < 0x1p24;
    }
    if (kind == Op::kBlur) {
      const auto odd = [](double size) { return std::fmod(size, 2) == 1; };
      // What is reflected has to be there.
      fits &=
          odd(v[0]) && odd(v[1]) && v[0] < 2 * width && v[1] < 2 * height && v[2] > 0 && v[3] > 0;
    }
    expect(fits, "an augmentation is out of bounds");
  }
}

void blend(std::span<float> one, std::span<float> other, double share) {
  const auto own = static_cast<float>(share), rest = static_cast<float>(1 - share);
  loop(one.size(), [=, a = one.data(), b = other.data()](size_t i) {
    const float x = a[i], y = b[i];
    a[i] = x * own + y * rest;
    b[i] = y * own + x * rest;
  });
}

void blend(std::span<uint8_t> one, std::span<uint8_t> other, double share) {
  const auto own = static_cast<unsigned>(std::nearbyint(share * 256)), rest = 256 - own;
  loop(one.size(), [=, a = one.data(), b = other.data()](size_t i) {
    const unsigned x = a[i], y = b[i];
    a[i] = static_cast<uint8_t>((x * own + y * rest + 128) >> 8);
    b[i] = static_cast<uint8_t>((y * own + x * rest + 128) >> 8);
  });
}

void Augmenter::run(std::span<const Step> steps, int width, int height) {
  const size_t count = pixels.size();
  const auto each = [&](auto body) {
    loop(count, [p = pixels.data(), body](size_t i) { p[i] = body(p[i]); });
  };
  const auto each_channel = [&](void (*of_counts)(Levels&)) {
    Levels r{}, g{}, b{};
    for (const uint32_t p : pixels) ++r[p & 255], ++g[p >> 8 & 255], ++b[p >> 16 & 255];
    of_counts(r), of_counts(g), of_counts(b);
    for (uint32_t& p : pixels) p = r[p & 255] | g[p >> 8 & 255] << 8 | b[p >> 16 & 255] << 16;
  };
  for (const auto& [op, values] : steps) {
    const auto factor = static_cast<float>(values[0]);
    switch (static_cast<Op>(static_cast<int>(op))) {
      case Op::kBrightness:
        each([=](uint32_t p) { return blended(0, p, factor); });
        break;
      case Op::kContrast: {
        uint64_t sum = 0;
        loop(count,
             [&sum, p = pixels.data()](size_t i) { sum += static_cast<uint64_t>(grey(p[i])); });
        const auto mean = static_cast<uint32_t>((2 * sum + count) / (2 * count));
        each([=](uint32_t p) { return blended(0x10101u * mean, p, factor); });
        break;
      }
      case Op::kColour:
        each([=](uint32_t p) {
          return blended(0x10101u * static_cast<uint32_t>(grey(p)), p, factor);
        });
        break;
      case Op::kHue:
        each([shift = static_cast<int>(values[0])](uint32_t p) { return turned(p, shift); });
        break;
      case Op::kSharpness:
        other_.resize(count);
        smooth(pixels.data(), width, height, other_.data());
        loop(count, [=, p = pixels.data(), from = other_.data()](size_t i) {
          p[i] = blended(from[i], p[i], factor);
        });
        break;
      case Op::kPosterize:
        each([mask = 0x10101u * (0xff00u >> static_cast<int>(values[0]) & 255)](uint32_t p) {
          return p & mask;
        });
        break;
      case Op::kSolarize:
        each([level = static_cast<int>(std::ceil(std::clamp(values[0], 0.0, 256.0)))](uint32_t p) {
          const auto inverted = [=](int v) { return v < level ? v : 255 - v; };
          return joined(inverted(red(p)), inverted(green(p)), inverted(blue(p)));
        });
        break;
      case Op::kAutocontrast:
        each_channel(stretch);
        break;
      case Op::kEqualize:
        each_channel(equalize);
        break;
      case Op::kAffine:
        other_.resize(count);
        move_affine(values, pixels.data(), width, height, 0u, other_.data());
        pixels.swap(other_);
        break;
      case Op::kAffineBilinear:
        other_.resize(count);
        move_bilinear(values, pixels.data(), width, height, other_.data());
        pixels.swap(other_);
        break;
      case Op::kBlur:
        blur(values, width, height);
        break;
      case Op::kErase:
        erase(values, width, pixels.data());
        break;
      case Op::kNone:
      case Op::kCount:
        break;
    }
  }
}

}  // namespace headrace::pixels
