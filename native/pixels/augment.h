// Augmentations: operators on a crop's 8-bit pixels, between its resize and its layout.
//
// Each is Pillow's operator of the same name, equal to the last bit; the blur is torchvision's,
// within a level. Which of them a picture gets, and how strongly, was drawn before: steps.h.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace headrace::pixels {

enum class Op : int {
  kNone,
  kBrightness,    // factor
  kContrast,      // factor
  kColour,        // factor; Pillow's Color; 0: ITU-R 601's grey, as Pillow's "L"
  kHue,           // levels of 256 that the hue is turned by
  kSharpness,     // factor
  kPosterize,     // bits that are left
  kSolarize,      // level from which on values are inverted
  kAutocontrast,  //
  kEqualize,      //
  kAffine,        // the six numbers of Pillow's transform; nearest neighbour, black outside
  kErase,  // left, top, width, height; red, green and blue as 0xBBGGRR, -1: noise; the noise's seed
  kAffineBilinear,  // likewise, between the four nearest
  kBlur,            // columns and rows of the Gaussian kernel, both odd; its deviations, in pixels
  kCount,
};

// As Python gives it: a row of float64.
struct Step {
  double op = 0;  // an Op
  std::array<double, 6> values{};
};

// Throws Error(kInvalidArgument) for what is no step of an output of this size.
void check(std::span<const Step> steps, int width, int height);

// Moves pixels by Pillow's affine transform, nearest neighbour; `fill` comes from outside.
template <class T>
void move_affine(const std::array<double, 6>& numbers, const T* in, int width, int height, T fill,
                 T* out);

// Gives each of two pictures of equal size its share of itself, 0 to 1, and the rest of the other.
// Bytes are rounded to the nearest, by whole 256ths.
void blend(std::span<uint8_t> one, std::span<uint8_t> other, double share);
void blend(std::span<float> one, std::span<float> other, double share);

class Augmenter {
 public:
  // Pixels of an output, row by row without gaps: red, green, blue and nothing, from the low byte
  // on. To be filled before `run`.
  std::vector<uint32_t> pixels;

  // REQUIRES steps that `check` accepts, and width * height pixels.
  void run(std::span<const Step> steps, int width, int height);

 private:
  void blur(const std::array<double, 6>& values, int width, int height);

  std::vector<uint32_t> other_;
  std::vector<float> sums_;
};

}  // namespace headrace::pixels
