#include "pixels/decode.h"

#include <algorithm>
#include <cassert>
#include <climits>
#include <cstring>
#include <new>
#include <utility>

namespace headrace::pixels {
namespace {

// A drawn plan is of the picture as it is looked at. What lies in the file may be mirrored, which
// its output then is as well, and turned.
Plan in_file(Plan plan, int orientation, int width, int height) {
  const auto mirror = [](Axis& axis, bool& flip, int side) {
    const Axis old = axis;
    axis.low = side - old.high;
    axis.high = side - old.low;
    // Output i of the mirrored axis is output count - 1 - i of the old one.
    const double last = old.origin + (old.first + old.count) * old.scale;
    axis.origin = side - last;
    axis.first = 0;
    flip = !flip;
  };
  if (orientation == 2 || orientation == 3 || orientation == 6 || orientation == 7)
    mirror(plan.x, plan.flip, width);
  if (orientation == 3 || orientation == 4 || orientation == 7 || orientation == 8)
    mirror(plan.y, plan.flip_vertical, height);
  plan.turned = orientation >= 5;
  if (plan.turned) std::swap(plan.x, plan.y);
  return plan;
}

// Width and height as the picture is looked at.
std::pair<int, int> upright(const Header& header) {
  if (header.orientation >= 5) return {header.height, header.width};
  return {header.width, header.height};
}

// Which column or row of the picture each one of the output is. Pillow adds up positions, and cuts
// them off.
std::vector<int> nearest(const Axis& axis, bool flip) {
  std::vector<int> places;
  double at = axis.origin - axis.low + axis.scale * 0.5;
  for (int i = 0; i < axis.first + axis.count; ++i, at += axis.scale) {
    if (i < axis.first) continue;
    places.push_back(axis.low + std::clamp(static_cast<int>(at), 0, axis.high - axis.low - 1));
  }
  if (flip) std::ranges::reverse(places);
  return places;
}

bool is_affine(const Step& step) {
  const Op op = static_cast<Op>(static_cast<int>(step.op));
  return op == Op::kAffine || op == Op::kAffineBilinear;
}

std::string size_of(const Header& header) {
  return std::to_string(header.width) + " x " + std::to_string(header.height) + " pixels";
}

// What `body` says, or that it needs more memory than there is.
template <class Body>
Reason within_memory(Body body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return "there is no memory for it";
  }
}

// Blends pixels with what lies behind them.
void lay_over(int background, Picture* picture) {
  for (int y = picture->top; y < picture->top + picture->height; ++y) {
    uint8_t* p = picture->row(y);
    for (int x = 0; x < picture->width; ++x, p += kPixelBytes) {
      for (int c = 0; c < 3; ++c) {
        const int behind = background >> (16 - 8 * c) & 255;
        p[c] = level_of(p[c] * p[3] + behind * (255 - p[3]));
      }
    }
  }
}

// PPM (netpbm's P6) of 8 bits: pixels that were decoded before.
class PpmDecoder final : public Decoder {
 public:
  PpmDecoder() = default;
  // The same without a file: rows of red, green, blue, `width` pixels each.
  PpmDecoder(const uint8_t* rgb, int width) : rgb_(rgb), width_(width) {}

  Reason open(std::span<const uint8_t> bytes, bool /*orientation*/, Header* header) override {
    size_t at = 2;
    std::array<int, 3> numbers{};
    const auto blank = [&] {
      return at < bytes.size() && (bytes[at] == ' ' || (bytes[at] >= '\t' && bytes[at] <= '\r'));
    };
    for (int& number : numbers) {
      if (!blank()) return "its header is damaged";
      while (blank()) ++at;
      const size_t first = at;
      for (; at < bytes.size() && bytes[at] >= '0' && bytes[at] <= '9'; ++at) {
        if (at - first == 8) return "its header is damaged";
        number = 10 * number + (bytes[at] - '0');
      }
      if (number == 0) return "its header is damaged, or has a comment";
    }
    if (!blank() || numbers[2] != 255) return "its pixels are not of 8 bits";
    const auto rgb = bytes.subspan(at + 1);
    rgb_ = rgb.data();
    header->width = width_ = numbers[0];
    header->height = numbers[1];
    if (rgb.size() / 3 / static_cast<size_t>(width_) < static_cast<size_t>(numbers[1])) {
      return "it is truncated";
    }
    return {};
  }

  Reason decode(const Region& region, int /*shift*/, Picture* picture) override {
    picture->allocate(region);
    for (int y = region.top; y < region.bottom; ++y) {
      const size_t first =
          static_cast<size_t>(y) * static_cast<size_t>(width_) + static_cast<size_t>(region.left);
      to_pixels(rgb_ + 3 * first, static_cast<size_t>(picture->width), picture->row(y));
    }
    return {};
  }

 private:
  const uint8_t* rgb_ = nullptr;
  int width_ = 0;
};

// REQUIRES a format that `format_of` gives.
std::unique_ptr<Decoder> make_decoder(Format format) {
#if HEADRACE_HAVE_JPEG
  if (format == Format::kJpeg) return make_jpeg_decoder();
#endif
#if HEADRACE_HAVE_DEFLATE
  if (format == Format::kPng) return make_png_decoder();
#endif
#if HEADRACE_HAVE_WEBP
  if (format == Format::kWebp) return make_webp_decoder();
#endif
  assert(format == Format::kPpm);
  return std::make_unique<PpmDecoder>();
}

}  // namespace

std::shared_ptr<const KeptPictures::Kept> KeptPictures::find(uint64_t index) const {
  const std::lock_guard lock(mutex_);
  const auto at = pictures_.find(index);
  return at == pictures_.end() ? nullptr : at->second;
}

std::vector<uint8_t> KeptPictures::have(std::span<const int64_t> indices) const {
  std::vector<uint8_t> each(indices.size());
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < each.size(); ++i) {
    each[i] = pictures_.contains(static_cast<uint64_t>(indices[i]));
  }
  return each;
}

void KeptPictures::add(uint64_t index, std::shared_ptr<const Kept> picture) {
  const std::lock_guard lock(mutex_);
  const size_t bytes = picture->rgb.size();
  if (bytes > budget_ - bytes_) return;
  if (pictures_.emplace(index, std::move(picture)).second) bytes_ += bytes;
}

std::pair<size_t, size_t> KeptPictures::held() const {
  const std::lock_guard lock(mutex_);
  return {pictures_.size(), bytes_};
}

Reason Worker::decode(std::span<const Output> outputs, std::span<const uint8_t> bytes,
                      KeptPictures* kept) {
  const Output& first = outputs.front();
  const Recipe& recipe = *first.recipe;
  const Reason reason = within_memory([&]() -> Reason {
    if (recipe.keep_short != 0 && kept != nullptr) {
      if (const auto picture = kept->find(first.draw.index)) {
        PpmDecoder pixels(picture->rgb.data(), picture->width);
        return decoded(outputs, {.width = picture->width, .height = picture->height}, pixels);
      }
    }
    Header header;
    if (Reason odd = open_within(recipe, bytes, &header); !odd.empty()) return odd;
    return reduced(outputs, header, *open_, kept);
  });
  if (reason.empty()) return {};
  for (const Output& each : outputs) std::memset(each.out, 0, each.recipe->output_bytes());
  return reason;
}

Reason Worker::open_within(const Recipe& recipe, std::span<const uint8_t> bytes, Header* header) {
  if (Reason odd = open(bytes, recipe.orient, header); !odd.empty()) return odd;
  if (uint64_t{1} * header->width * header->height <= recipe.pixels_max) return {};
  return "it has " + size_of(*header) + ", more than the " + std::to_string(recipe.pixels_max) +
         " of max_pixels";
}

Reason Worker::reduction(const Recipe& recipe, std::span<const uint8_t> bytes, Recipe* whole) {
  return within_memory([&]() -> Reason {
    Header header;
    if (Reason odd = open_within(recipe, bytes, &header); !odd.empty()) return odd;
    const auto [width, height] = upright(header);
    *whole = recipe.reduction(width, height);
    return {};
  });
}

Reason Worker::reduced(std::span<const Output> outputs, const Header& header, Decoder& decoder,
                       KeptPictures* kept) {
  const Output& first = outputs.front();
  const auto [width, height] = upright(header);
  // Pixels that somebody else has reduced.
  const bool done = &decoder == decoders_[static_cast<size_t>(Format::kPpm)].get() &&
                    std::min(width, height) <= first.recipe->keep_short &&
                    (kept == nullptr || kept->keeps_none());
  if (first.recipe->keep_short == 0 || done) return decoded(outputs, header, decoder);
  const Recipe reduction = first.recipe->reduction(width, height);
  auto picture = std::make_shared<KeptPictures::Kept>(KeptPictures::Kept{
      reduction.width, reduction.height, std::vector<uint8_t>(reduction.output_bytes())});
  const Output whole{&reduction, {}, picture->rgb.data()};
  if (Reason reason = decoded({&whole, 1}, header, decoder); !reason.empty()) return reason;
  if (kept != nullptr) kept->add(first.draw.index, picture);
  PpmDecoder pixels(picture->rgb.data(), picture->width);
  return decoded(outputs, {.width = picture->width, .height = picture->height}, pixels);
}

std::array<double, 6> Worker::mapping(const Recipe& recipe) const {
  const auto along = [](const Axis& axis, bool flip, int side) {
    const double scale = 1 / axis.scale, shift = -axis.origin * scale - axis.first;
    return flip ? std::array{-scale, side - shift} : std::array{scale, shift};
  };
  const auto x = along(plan_.x, plan_.flip, recipe.width);
  const auto y = along(plan_.y, plan_.flip_vertical, recipe.height);
  std::array<double, 6> to{x[0], 0, x[1], 0, y[0], y[1]};
  for (const auto& step : plan_.steps) {
    if (!is_affine(step)) continue;
    const auto& [a, b, c, d, e, f] = step.values;  // where an output comes from
    const double area = a * e - b * d;
    for (size_t i = 0; i < 3; ++i) {
      const double column = to[i] - (i == 2 ? c : 0), row = to[i + 3] - (i == 2 ? f : 0);
      to[i] = (e * column - b * row) / area;
      to[i + 3] = (a * row - d * column) / area;
    }
  }
  return to;
}

Reason Worker::mask(const Recipe& recipe, std::span<const uint8_t> bytes, uint8_t fill,
                    uint8_t* out) {
  const size_t count = recipe.output_pixels();
  const Reason reason = within_memory([&]() -> Reason {
    Header header;
    if (Reason odd = open(bytes, false, &header); !odd.empty()) return odd;
    if (header.width != width_ || header.height != height_) {
      return "it has " + size_of(header) + ", and the picture " + std::to_string(width_) + " x " +
             std::to_string(height_);
    }
    if (Reason odd = open_->numbers(); !odd.empty()) return odd;
    const std::vector<int> xs = nearest(plan_.x, plan_.flip),
                           ys = nearest(plan_.y, plan_.flip_vertical);
    const auto [left, right] = std::ranges::minmax(xs);
    const auto [top, bottom] = std::ranges::minmax(ys);
    Reason odd = open_->decode({left, top, right + 1, bottom + 1}, 0, &picture_);
    if (!odd.empty()) return odd;
    uint8_t* to = out;
    for (const int y : ys) {
      const uint8_t* row = picture_.row(y);
      for (const int x : xs) *to++ = row[kPixelBytes * static_cast<size_t>(x - picture_.left)];
    }
    for (const auto& step : plan_.steps) {
      if (!is_affine(step)) continue;
      moved_.assign(out, out + count);
      move_affine(step.values, moved_.data(), recipe.width, recipe.height, fill, out);
    }
    return {};
  });
  if (!reason.empty()) std::fill_n(out, count, fill);
  return reason;
}

Reason Worker::open(std::span<const uint8_t> bytes, bool orientation, Header* header) {
  return within_memory([&]() -> Reason {
    if (bytes.empty()) return "it is empty";
    const Format format = format_of(bytes);
    if (format == Format::kUnknown) return "it is none of the formats that are decoded here";
    std::unique_ptr<Decoder>& own = decoders_[static_cast<size_t>(format)];
    if (!own) own = make_decoder(format);
    open_ = own.get();
    return open_->open(bytes, orientation, header);
  });
}

Reason Worker::decoded(std::span<const Output> outputs, const Header& header, Decoder& decoder) {
  const int32_t background = outputs.front().recipe->background;
  if (background >= 0 && header.alpha == Alpha::kColour) {
    return "one of its colours is transparent";
  }
  const auto [width, height] = upright(header);
  width_ = width, height_ = height;
  plans_.clear();
  int shift = decoder.shrinks() ? kShiftMax : 0;
  for (const auto& [recipe, what, out] : outputs) {
    if (!recipe->fits(width, height, what.index)) return "its size is not the one that was given";
    plan_ = draw(*recipe, width, height, what);
    // Axes are mirrored while they are still the upright picture's.
    plans_.push_back(in_file(plan_, header.orientation, width, height));
    shift = recipe->scaled ? std::min(shift, plans_.back().shift()) : 0;
  }
  Region region{INT_MAX, INT_MAX, 0, 0};  // with all that outputs need
  for (size_t i = 0; i < outputs.size(); ++i) {
    const Filter filter = outputs[i].recipe->filter;
    const auto columns = plans_[i].x.shrunk(shift).inputs(filter);
    const auto rows = plans_[i].y.shrunk(shift).inputs(filter);
    region = {std::min(region.left, columns[0]), std::min(region.top, rows[0]),
              std::max(region.right, columns[1]), std::max(region.bottom, rows[1])};
  }
  picture_.shift = shift;
  if (Reason reason = decoder.decode(region, shift, &picture_); !reason.empty()) return reason;
  if (background >= 0 && header.alpha == Alpha::kPixels) {
    lay_over(background, &picture_);
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    resizer_.run(*outputs[i].recipe, plans_[i], picture_, outputs[i].out);
  }
  return {};
}

void Worker::resize(const Output& one, const uint8_t* rgb, int width, int height) {
  PpmDecoder pixels(rgb, width);
  (void)reduced({&one, 1}, {.width = width, .height = height}, pixels, nullptr);
}

}  // namespace headrace::pixels
