// Steps: which augmentations a picture gets beside its crop and flips, and how strongly.
//
// Pure functions of (augmentations, output's size, seed, epoch, index); the distributions are
// torchvision's. Pictures of one recipe have equally many steps: one that a picture does not get is
// kNone. Number k of a picture is always used for the same thing, so that no step changes others.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "pixels/augment.h"

namespace headrace::pixels {

enum class Policy : int { kNone, kRandAugment, kTrivialAugment };

inline constexpr int kMagnitudeMax = 30;  // torchvision's 31 bins

// In the order in which they are done. headrace/plane/images.py says what each means.
struct Augmentations {
  int padding = 0;
  Policy policy = Policy::kNone;
  int operations = 2;  // of kRandAugment, as is the magnitude
  int magnitude = 9;
  std::array<double, 4> jitter{};  // brightness, contrast, saturation, hue
  double grey = 0;                 // probability
  double blur = 0;                 // probability
  std::array<double, 2> blur_sigma{0.1, 2.0};
  int blur_kernel = 23;
  double erase = 0;  // probability
  std::array<double, 2> erase_scale{0.02, 0.33};
  std::array<double, 2> erase_ratio{0.3, 3.3};
  int32_t erase_value = 0;  // red, green and blue as 0xBBGGRR; -1: noise

  // Throws Error(kInvalidArgument).
  void check() const;
  // Steps of each picture.
  size_t count() const;
};

// As many steps of each picture as `count` says, of outputs of this size, one picture after the
// other.
std::vector<Step> draw_steps(const Augmentations& augmentations, int width, int height,
                             uint64_t seed, uint64_t epoch, std::span<const int64_t> indices);

// One of the operators of torchvision's policies, by its name there. The magnitude has
// torchvision's unit and sign: a share that is added to 1, a slope, pixels, degrees
// counter-clockwise, bits that are left, or a level. Throws Error(kInvalidArgument) for another
// name.
Step operator_step(std::string_view name, double magnitude, int width, int height);

}  // namespace headrace::pixels
