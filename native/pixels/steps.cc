#include "pixels/steps.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>

#include "core/error.h"
#include "pixels/random.h"

namespace headrace::pixels {
namespace {

// An operator of a policy, and the largest magnitude of RandAugment and of TrivialAugmentWide. Of
// translations they are shares of the side and pixels; of Posterize, bits that are taken away.
struct Operator {
  std::string_view name;
  Op op;
  double narrow;
  double wide;
};

constexpr double kTranslated = 150.0 / 331.0;

// In torchvision's order. AutoAugment alone has the last one: policies do not draw it.
constexpr std::array kOperators = {
    Operator{"Identity", Op::kNone, 0, 0},
    Operator{"ShearX", Op::kAffine, 0.3, 0.99},
    Operator{"ShearY", Op::kAffine, 0.3, 0.99},
    Operator{"TranslateX", Op::kAffine, kTranslated, 32},
    Operator{"TranslateY", Op::kAffine, kTranslated, 32},
    Operator{"Rotate", Op::kAffine, 30, 135},
    Operator{"Brightness", Op::kBrightness, 0.9, 0.99},
    Operator{"Color", Op::kColour, 0.9, 0.99},
    Operator{"Contrast", Op::kContrast, 0.9, 0.99},
    Operator{"Sharpness", Op::kSharpness, 0.9, 0.99},
    Operator{"Posterize", Op::kPosterize, 4, 6},
    Operator{"Solarize", Op::kSolarize, 255, 255},
    Operator{"AutoContrast", Op::kAutocontrast, 0.9, 0.99},
    Operator{"Equalize", Op::kEqualize, 0.9, 0.99},
    Operator{"Invert", Op::kSolarize, 0, 0},
};
constexpr int kDrawn = kOperators.size() - 1;

Step step_of(Op op, std::array<double, 6> values) { return {static_cast<double>(op), values}; }

// Pillow's rotate: about the middle, by sines and cosines of 15 decimals.
Step rotation(double degrees, double width, double height) {
  double whole = std::fmod(degrees, 360);
  if (whole < 0) whole += 360;
  const double angle = -(whole * (std::numbers::pi / 180)), x = width / 2, y = height / 2;
  const double cos = std::nearbyint(std::cos(angle) * 1e15) / 1e15;
  const double sin = std::nearbyint(std::sin(angle) * 1e15) / 1e15;
  return step_of(Op::kAffine,
                 {cos, sin, cos * -x + sin * -y + x, -sin, cos, -sin * -x + cos * -y + y});
}

Step step_of(const Operator& one, double magnitude, int width, int height) {
  if (one.name == "Rotate") return rotation(magnitude, width, height);
  if (one.name == "ShearX") return step_of(one.op, {1, magnitude, 0, 0, 1, 0});
  if (one.name == "ShearY") return step_of(one.op, {1, 0, 0, magnitude, 1, 0});
  if (one.name == "TranslateX") return step_of(one.op, {1, 0, -std::trunc(magnitude), 0, 1, 0});
  if (one.name == "TranslateY") return step_of(one.op, {1, 0, 0, 0, 1, -std::trunc(magnitude)});
  if (one.name == "Identity" || one.name == "Invert") return step_of(one.op, {});
  const bool is_factor = one.op == Op::kBrightness || one.op == Op::kColour ||
                         one.op == Op::kContrast || one.op == Op::kSharpness;
  return step_of(one.op, {is_factor ? 1 + magnitude : magnitude});
}

class Drawing {
 public:
  Drawing(const Augmentations& augmentations, int width, int height, uint64_t key,
          std::vector<Step>* steps)
      : augmentations_(augmentations),
        width_(width),
        height_(height),
        random_(key),
        steps_(*steps) {}

  void draw() {
    if (augmentations_.padding != 0) pad();
    const bool once = augmentations_.policy == Policy::kTrivialAugment;
    const int operations = once ? 1 : augmentations_.operations;
    for (int i = 0; i < operations && augmentations_.policy != Policy::kNone; ++i) operate();
    jitter();
    if (augmentations_.grey != 0) {  // by a factor of 0
      steps_.push_back(
          step_of(random_.uniform() < augmentations_.grey ? Op::kColour : Op::kNone, {}));
    }
    if (augmentations_.blur != 0) blur();
    if (augmentations_.erase != 0) erase();  // the last one: it takes as many numbers as it needs
  }

 private:
  void pad() {
    const int most = augmentations_.padding;
    const int x = random_.below(2 * most + 1) - most, y = random_.below(2 * most + 1) - most;
    steps_.push_back(step_of(Op::kAffine, {1, 0, 1.0 * x, 0, 1, 1.0 * y}));
  }

  void operate() {
    const auto& one = kOperators[random_.below(kDrawn)];
    const int drawn = random_.below(kMagnitudeMax + 1);
    const double sign = random_.uniform() < 0.5 ? -1 : 1;
    const bool wide = augmentations_.policy == Policy::kTrivialAugment;
    const double level = (wide ? drawn : augmentations_.magnitude) / (1.0 * kMagnitudeMax);
    double most = wide ? one.wide : one.narrow;
    if (most == kTranslated) most *= one.name == "TranslateX" ? width_ : height_;
    double magnitude = level * most * sign;
    if (one.op == Op::kPosterize) magnitude = 8 - std::nearbyint(level * most);
    if (one.op == Op::kSolarize) magnitude = most * (1 - level);
    steps_.push_back(step_of(one, magnitude, width_, height_));
  }

  // In an order that is one of all permutations.
  void jitter() {
    constexpr std::array kOps = {Op::kBrightness, Op::kContrast, Op::kColour, Op::kHue};
    std::vector<Step> drawn;
    for (size_t i = 0; i < kOps.size(); ++i) {
      const double strength = augmentations_.jitter[i], share = random_.uniform();
      const bool is_hue = kOps[i] == Op::kHue;
      const double low = is_hue ? -strength : std::max(0.0, 1 - strength);
      const double factor = low + share * ((is_hue ? strength : 1 + strength) - low);
      // Hues are turned by whole levels of 8 bits.
      if (strength != 0)
        drawn.push_back(step_of(kOps[i], {is_hue ? std::trunc(factor * 255) : factor}));
    }
    if (drawn.empty()) return;
    int orders = 1;
    for (size_t i = 2; i <= drawn.size(); ++i) orders *= static_cast<int>(i);
    for (int place = random_.below(orders); !drawn.empty();) {
      orders /= static_cast<int>(drawn.size());
      const auto next = drawn.begin() + place / orders;
      place %= orders;
      steps_.push_back(*next);
      drawn.erase(next);
    }
  }

  void blur() {
    const bool wanted = random_.uniform() < augmentations_.blur;
    const auto [low, high] = augmentations_.blur_sigma;
    const double sigma = random_.uniform(low, high), side = augmentations_.blur_kernel;
    steps_.push_back(step_of(wanted ? Op::kBlur : Op::kNone, {side, side, sigma, sigma}));
  }

  // Of ten random areas and ratios the first that leaves something of the picture.
  void erase() {
    const Augmentations& a = augmentations_;
    const bool wanted = random_.uniform() < a.erase;
    const double noise = random_.uniform() * 0x1p52;
    const double low = std::log(a.erase_ratio[0]), high = std::log(a.erase_ratio[1]);
    for (int i = 0; i < 10 && wanted; ++i) {
      const double area =
          1.0 * height_ * width_ * random_.uniform(a.erase_scale[0], a.erase_scale[1]);
      const double ratio = std::exp(random_.uniform(low, high));
      const double rows = std::nearbyint(std::sqrt(area * ratio));
      const double columns = std::nearbyint(std::sqrt(area / ratio));
      const auto place = [this](int side, double part) {
        return 1.0 * random_.below(part < side ? side - static_cast<int>(part) + 1 : 1);
      };
      const double top = place(height_, rows), left = place(width_, columns);
      if (rows >= height_ || columns >= width_) continue;
      steps_.push_back(step_of(Op::kErase, {left, top, columns, rows, 1.0 * a.erase_value, noise}));
      return;
    }
    steps_.push_back({});
  }

  const Augmentations& augmentations_;
  const int width_, height_;
  Random random_;
  std::vector<Step>& steps_;
};

}  // namespace

void Augmentations::check() const {
  const auto probability = [](double p) { return p >= 0 && p <= 1; };
  const auto strength = [](double s) { return s >= 0 && s <= 100; };
  const auto bounds = [](std::array<double, 2> pair) {
    return pair[0] > 0 && pair[0] <= pair[1] && std::isfinite(pair[1]);
  };
  expect(padding >= 0 && padding < 1 << 15 && operations >= 1 && operations <= 16 &&
             magnitude >= 0 && magnitude <= kMagnitudeMax &&
             std::ranges::all_of(jitter, strength) && probability(grey) && probability(blur) &&
             probability(erase) && bounds(blur_sigma) && bounds(erase_scale) && bounds(erase_ratio),
         "augmentations are out of bounds");
}

size_t Augmentations::count() const {
  const auto jitters = std::ranges::count_if(jitter, [](double strength) { return strength != 0; });
  const int operators = policy == Policy::kNone          ? 0
                        : policy == Policy::kRandAugment ? operations
                                                         : 1;
  return (padding != 0) + static_cast<size_t>(operators) + static_cast<size_t>(jitters) +
         (grey != 0) + (blur != 0) + (erase != 0);
}

std::vector<Step> draw_steps(const Augmentations& augmentations, int width, int height,
                             uint64_t seed, uint64_t epoch, std::span<const int64_t> indices) {
  std::vector<Step> steps;
  const size_t each = augmentations.count();
  if (each == 0) return steps;
  steps.reserve(each * indices.size());
  for (const int64_t index : indices) {
    const uint64_t key =
        derive_key(seed, Purpose::kAugmentations, {epoch, static_cast<uint64_t>(index)});
    Drawing(augmentations, width, height, key, &steps).draw();
  }
  return steps;
}

Step operator_step(std::string_view name, double magnitude, int width, int height) {
  const auto one = std::ranges::find(kOperators, name, &Operator::name);
  if (one == kOperators.end()) {
    throw Error(ErrorKind::kInvalidArgument, "there is no operator " + std::string(name));
  }
  return step_of(*one, magnitude, width, height);
}

}  // namespace headrace::pixels
