// Recipe: what a picture becomes on its way into a batch, and which part of it that takes.
//
// A recipe is plain data. `draw` is a pure function of (recipe, picture's size, seed, epoch,
// index): the same picture gets the same crop and the same flip on any number of ranks and threads,
// and after any resume. headrace/plane/images.py is its reference.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "pixels/augment.h"
#include "pixels/steps.h"

namespace headrace::pixels {

enum class Crop : int {
  kRandom,   // RandomResizedCrop: a region of random area and aspect, resized to the output
  kCenter,   // the short side is resized to `short_side`, then the middle is cut out
  kStretch,  // the whole picture, resized to the output
  kGiven,    // as `Recipe::cuts` says, which somebody else drew
};

// Pillow's filters, with its definitions.
enum class Filter : int { kBox, kBilinear, kHamming, kBicubic, kLanczos };

enum class Type : int { kUint8, kFloat16, kBfloat16, kFloat32 };

constexpr size_t bytes_of(Type type) {
  return type == Type::kUint8 ? 1 : type == Type::kFloat32 ? 4 : 2;
}

inline constexpr int kSideMax = 1 << 14;   // of an output
inline constexpr int kInputMax = 1 << 30;  // sides of what is cut are smaller

// What becomes of one picture of `width` x `height` pixels: `columns` x `rows` of them from (left,
// top) on are resized to `resized_width` x `resized_height`; the output begins at (x, y) of that.
struct Cut {
  int32_t width = 0, height = 0;
  int32_t left = 0, top = 0, columns = 0, rows = 0;
  int32_t resized_width = 0, resized_height = 0;
  int32_t x = 0, y = 0;
  int32_t flip = 0, flip_vertical = 0;  // of the output; 0 or 1
};

struct Recipe {
  int height = 224;
  int width = 224;
  Crop crop = Crop::kRandom;
  int short_side = 256;  // kCenter alone
  std::array<double, 2> area{0.08, 1.0};
  std::array<double, 2> aspect{3.0 / 4.0, 4.0 / 3.0};
  double flip = 0;           // probability
  double flip_vertical = 0;  // probability
  Filter filter = Filter::kBilinear;
  Type type = Type::kUint8;
  bool planar = true;   // channel, row, column; else row, column, channel
  bool scaled = true;   // a JPEG may be decoded at 1/2, 1/4 or 1/8 where the region is large enough
  bool orient = false;  // as EXIF says
  // Pictures are first reduced until their short side has so many pixels, and that may be kept for
  // later epochs; 0: they are not.
  int keep_short = 0;
  // What shines through transparent pixels, 0xRRGGBB; -1: transparency is left out.
  int32_t background = -1;
  uint64_t pixels_max = 89'478'485;
  // (value / 255 - mean) / deviation, of all types but kUint8.
  std::array<float, 3> mean{0, 0, 0};
  std::array<float, 3> deviation{1, 1, 1};
  Augmentations augmentations{};                 // of the output, once it is upright and flipped
  std::shared_ptr<const std::vector<Cut>> cuts;  // kGiven alone: by `Draw::index`

  // Throws Error(kInvalidArgument).
  void check() const;
  // Of `keep_short`: what a picture is reduced to, before this recipe.
  Recipe reduction(int picture_width, int picture_height) const;
  // False: the cut that was given for this picture is of one with another size.
  bool fits(int picture_width, int picture_height, uint64_t index) const;
  size_t output_pixels() const { return static_cast<size_t>(width) * static_cast<size_t>(height); }
  size_t output_bytes() const { return 3 * bytes_of(type) * output_pixels(); }
};

// Which random numbers a picture gets, and what was drawn with others: steps that `check` accepts,
// by `draw_steps` or by somebody else.
struct Draw {
  uint64_t seed = 0;
  uint64_t epoch = 0;
  uint64_t index = 0;
  std::span<const Step> steps{};
};

// One axis of a resize. Output i lies at input pixel `origin + (i + first + 0.5) * scale`; nothing
// outside [low, high) is looked at.
struct Axis {
  int low = 0;
  int high = 0;
  double origin = 0;
  double scale = 1;
  int first = 0;
  int count = 0;

  // The same for a picture decoded at 1 / 2^shift.
  Axis shrunk(int shift) const;
  // Pixels that the outputs depend on with this filter, and a few that vectors read.
  std::array<int, 2> inputs(Filter filter) const;
};

inline constexpr int kShiftMax = 3;

// What to do with one picture.
struct Plan {
  Axis x;
  Axis y;
  bool flip = false;
  bool flip_vertical = false;
  bool turned = false;            // the output's rows are the picture's columns
  std::span<const Step> steps{};  // of the output, once it is upright and flipped

  // The power of two that the picture may be shrunk by while it is decoded, at most `kShiftMax`:
  // the region stays one and a half times as large as the output.
  int shift() const;
};

// REQUIRES width, height >= 1, below kInputMax, and that the recipe fits them. Never fails: a
// picture that is too narrow for the aspects gets its middle, as RandomResizedCrop does.
Plan draw(const Recipe& recipe, int width, int height, const Draw& draw);

double support_of(Filter filter);
double weight_of(Filter filter, double x);

}  // namespace headrace::pixels
