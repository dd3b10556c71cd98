#include "pixels/recipe.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/error.h"
#include "core/permutation.h"
#include "pixels/random.h"

namespace headrace::pixels {
namespace {

// Sets the part of a picture: ten tries for a random area and aspect that fit, then the middle, as
// torchvision's RandomResizedCrop does.
void cut_at_random(const Recipe& recipe, Random& random, Cut* cut) {
  const int width = cut->width, height = cut->height;
  const double whole = static_cast<double>(width) * height;
  const double low = std::log(recipe.aspect[0]), high = std::log(recipe.aspect[1]);
  for (int i = 0; i < 10; ++i) {
    const double area = whole * random.uniform(recipe.area[0], recipe.area[1]);
    const double aspect = std::exp(random.uniform(low, high));
    const double w = std::nearbyint(std::sqrt(area * aspect));
    const double h = std::nearbyint(std::sqrt(area / aspect));
    if (w >= 1 && w <= width && h >= 1 && h <= height) {
      cut->columns = static_cast<int>(w), cut->rows = static_cast<int>(h);
      cut->top = random.below(height - cut->rows + 1);
      cut->left = random.below(width - cut->columns + 1);
      return;
    }
  }
  const double aspect = static_cast<double>(width) / height;
  if (aspect < recipe.aspect[0]) {
    cut->rows = std::clamp(static_cast<int>(std::nearbyint(width / recipe.aspect[0])), 1, height);
  } else if (aspect > recipe.aspect[1]) {
    cut->columns =
        std::clamp(static_cast<int>(std::nearbyint(height * recipe.aspect[1])), 1, width);
  }
  cut->left = (width - cut->columns) / 2, cut->top = (height - cut->rows) / 2;
}

// `outputs` from `first` on of a part that is resized to `resized` pixels.
Axis axis_of(int start, int length, int resized, int first, int outputs) {
  return {.low = start,
          .high = start + length,
          .origin = static_cast<double>(start),
          .scale = static_cast<double>(length) / resized,
          .first = first,
          .count = outputs};
}

// Where the middle begins.
int middle(int side, int part) { return static_cast<int>(std::nearbyint((side - part) / 2.0)); }

// Whether `part` pixels from `begin` on lie within a side, which is a picture's.
bool within(int32_t begin, int32_t part, int32_t side) {
  return begin >= 0 && part >= 1 && side >= 1 && side < kInputMax && begin <= side - part;
}

double sinc(double x) {
  if (x == 0.0) return 1.0;
  const double angle = x * std::numbers::pi;
  return std::sin(angle) / angle;
}

}  // namespace

Recipe Recipe::reduction(int picture_width, int picture_height) const {
  const int shorter = std::min(picture_width, picture_height);
  const auto reduced = [&](int side) {
    if (shorter <= keep_short) return side;
    return std::max(1, static_cast<int>(std::lround(1.0 * keep_short * side / shorter)));
  };
  Recipe whole;
  whole.width = reduced(picture_width);
  whole.height = reduced(picture_height);
  whole.crop = Crop::kStretch;
  whole.filter = filter;
  whole.planar = false;
  whole.scaled = scaled;
  whole.orient = orient;
  whole.background = background;
  whole.pixels_max = pixels_max;
  return whole;
}

void Recipe::check() const {
  expect(width >= 1 && width <= kSideMax && height >= 1 && height <= kSideMax,
         "a side of the output is not between 1 and 16,384 pixels");
  expect(crop != Crop::kCenter || short_side >= std::max(width, height),
         "the short side is smaller than the output that is cut out of its middle");
  expect(keep_short == 0 || keep_short >= std::max(width, height),
         "keep_short is smaller than the output that is cut out");
  expect(keep_short <= kSideMax, "keep_short is larger than 16,384 pixels");
  expect(short_side <= kSideMax, "the short side is larger than 16,384 pixels");
  expect(area[0] > 0 && area[0] <= area[1] && area[1] <= 1,
         "the areas are not 0 < low <= high <= 1");
  expect(aspect[0] > 0 && aspect[0] <= aspect[1] && std::isfinite(aspect[1]),
         "the aspect ratios are not 0 < low <= high");
  expect(flip >= 0 && flip <= 1 && flip_vertical >= 0 && flip_vertical <= 1,
         "the probability of a flip is not between 0 and 1");
  expect(pixels_max >= 1 && pixels_max < uint64_t{1} << 32,
         "max_pixels is not between 1 and 2^32 - 1");
  for (int c = 0; c < 3; ++c) {
    expect(std::isfinite(mean[c]) && std::isfinite(deviation[c]) && deviation[c] > 0,
           "a mean is not finite, or a deviation not positive");
  }
  augmentations.check();
  expect((crop == Crop::kGiven) == (cuts != nullptr),
         "cuts are given without a crop that uses them");
  for (size_t i = 0; cuts && i < cuts->size(); ++i) {
    const Cut& cut = (*cuts)[i];
    expect(within(cut.left, cut.columns, cut.width) && within(cut.top, cut.rows, cut.height),
           "a cut does not lie within its picture");
    expect(within(cut.x, width, cut.resized_width) && within(cut.y, height, cut.resized_height),
           "an output does not lie within what its cut was resized to");
  }
}

bool Recipe::fits(int picture_width, int picture_height, uint64_t index) const {
  if (crop != Crop::kGiven) return true;
  if (index >= cuts->size()) return false;
  const Cut& cut = (*cuts)[index];
  return cut.width == picture_width && cut.height == picture_height;
}

Axis Axis::shrunk(int shift) const {
  const double factor = 1.0 / (1 << shift);
  Axis small = *this;
  small.low = low >> shift;
  small.high = (high + (1 << shift) - 1) >> shift;
  small.origin = origin * factor;
  small.scale = scale * factor;
  return small;
}

std::array<int, 2> Axis::inputs(Filter filter) const {
  const double reach = support_of(filter) * std::max(1.0, scale);
  const double begin = origin + (first + 0.5) * scale - reach;
  const double end = origin + (first + count - 0.5) * scale + reach;
  const int from = std::clamp(static_cast<int>(std::floor(begin)) - 4, low, high - 1);
  return {from, std::clamp(static_cast<int>(std::ceil(end)) + 1, from + 1, high)};
}

int Plan::shift() const {
  // A block's mean is a coarser filter than Pillow's: left to it alone, edges differ by up to 19
  // levels. With half as much again to be resized, they differ by 6.
  const double scale = std::min(x.scale, y.scale) / 1.5;
  return scale >= 8 ? 3 : scale >= 4 ? 2 : scale >= 2 ? 1 : 0;
}

Plan draw(const Recipe& recipe, int width, int height, const Draw& what) {
  Random random(derive_key(what.seed, Purpose::kPictures, {what.epoch, what.index}));
  Cut cut{.width = width,
          .height = height,
          .columns = width,
          .rows = height,
          .resized_width = recipe.width,
          .resized_height = recipe.height};
  if (recipe.crop == Crop::kRandom) cut_at_random(recipe, random, &cut);
  if (recipe.crop == Crop::kCenter) {
    // The long side is cut off to a whole pixel, as torchvision does.
    const auto [shorter, longer] = std::minmax(width, height);
    const int64_t s = recipe.short_side;
    const auto long_side = static_cast<int>(std::min<int64_t>(s * longer / shorter, kInputMax));
    cut.resized_width = width > height ? long_side : recipe.short_side;
    cut.resized_height = width > height ? recipe.short_side : long_side;
    cut.x = middle(cut.resized_width, recipe.width);
    cut.y = middle(cut.resized_height, recipe.height);
  }
  if (recipe.crop == Crop::kGiven) {
    cut = (*recipe.cuts)[what.index];
  } else {
    cut.flip = random.uniform() < recipe.flip;
    cut.flip_vertical = random.uniform() < recipe.flip_vertical;
  }
  return {.x = axis_of(cut.left, cut.columns, cut.resized_width, cut.x, recipe.width),
          .y = axis_of(cut.top, cut.rows, cut.resized_height, cut.y, recipe.height),
          .flip = cut.flip != 0,
          .flip_vertical = cut.flip_vertical != 0,
          .steps = what.steps};
}

double support_of(Filter filter) {
  constexpr std::array kSupports = {0.5, 1.0, 1.0, 2.0, 3.0};
  return kSupports[static_cast<size_t>(filter)];
}

double weight_of(Filter filter, double x) {
  switch (filter) {
    case Filter::kBox:
      return x > -0.5 && x <= 0.5 ? 1.0 : 0.0;
    case Filter::kBilinear:
      return std::max(0.0, 1.0 - std::abs(x));
    case Filter::kHamming:
      x = std::abs(x);
      return x < 1.0 ? sinc(x) * (0.54 + 0.46 * std::cos(x * std::numbers::pi)) : 0.0;
    case Filter::kBicubic: {
      constexpr double a = -0.5;
      x = std::abs(x);
      if (x < 1.0) return ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0;
      return x < 2.0 ? (((x - 5.0) * x + 8.0) * x - 4.0) * a : 0.0;
    }
    case Filter::kLanczos:
      return x > -3.0 && x < 3.0 ? sinc(x) * sinc(x / 3.0) : 0.0;
  }
  return 0;
}

}  // namespace headrace::pixels
