#include "pixels/decode.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <new>
#include <utility>

namespace headrace::pixels {
namespace {

// A drawn plan is of the picture as it is looked at. What lies in the file may be turned: its axes.
Plan in_file(Plan plan, int orientation, int width, int height) {
  const auto mirror = [](Axis& axis, int side) {
    const Axis old = axis;
    axis.low = side - old.high;
    axis.high = side - old.low;
    // Output i of the mirrored axis is output count - 1 - i of the old one.
    const double last = old.origin + (old.first + old.count) * old.scale;
    axis.origin = side - last;
    axis.first = 0;
  };
  if (orientation == 2 || orientation == 3 || orientation == 6 || orientation == 7)
    mirror(plan.x, width);
  if (orientation == 3 || orientation == 4 || orientation == 7 || orientation == 8)
    mirror(plan.y, height);
  if (orientation >= 5) std::swap(plan.x, plan.y);
  return plan;
}

// Blends pixels with what lies behind them, rounded to the nearest.
void lay_over(uint32_t background, Picture* picture) {
  const std::array<int, 3> behind = {static_cast<int>(background >> 16 & 255),
                                     static_cast<int>(background >> 8 & 255),
                                     static_cast<int>(background & 255)};
  for (int y = picture->top; y < picture->top + picture->height; ++y) {
    uint8_t* p = picture->row(y);
    for (int x = 0; x < picture->width; ++x, p += kPixelBytes) {
      const int alpha = p[3];
      for (size_t c = 0; c < behind.size(); ++c) {
        const int sum = p[c] * alpha + behind[c] * (255 - alpha) + 128;
        p[c] = static_cast<uint8_t>((sum + (sum >> 8)) >> 8);
      }
    }
  }
}

}  // namespace

Decoder& Worker::decoder_of(Format format) {
  std::unique_ptr<Decoder>& decoder = decoders_[static_cast<size_t>(format)];
  if (decoder) return *decoder;
  switch (format) {
#if HEADRACE_HAVE_JPEG
    case Format::kJpeg:
      decoder = make_jpeg_decoder();
      break;
#endif
#if HEADRACE_HAVE_DEFLATE
    case Format::kPng:
      decoder = make_png_decoder();
      break;
#endif
#if HEADRACE_HAVE_WEBP
    case Format::kWebp:
      decoder = make_webp_decoder();
      break;
#endif
    default:
      assert(false);
  }
  return *decoder;
}

Reason Worker::decode(const Recipe& recipe, const Draw& draw, std::span<const uint8_t> bytes,
                      void* out) {
  Reason reason;
  try {
    reason = decoded(recipe, draw, bytes, out);
  } catch (const std::bad_alloc&) {
    reason = "there is no memory for it";
  }
  if (!reason.empty()) std::memset(out, 0, recipe.output_bytes());
  return reason;
}

Reason Worker::open(std::span<const uint8_t> bytes, bool orientation, Header* header) {
  try {
    Decoder* decoder = nullptr;
    return opened(bytes, orientation, header, &decoder);
  } catch (const std::bad_alloc&) {
    return "there is no memory for it";
  }
}

Reason Worker::opened(std::span<const uint8_t> bytes, bool orientation, Header* header,
                      Decoder** decoder) {
  if (bytes.empty()) return "it is empty";
  const Format format = format_of(bytes);
  if (format == Format::kUnknown) return "it is none of the formats that are decoded here";
  *decoder = &decoder_of(format);
  return (*decoder)->open(bytes, orientation, header);
}

Reason Worker::decoded(const Recipe& recipe, const Draw& what, std::span<const uint8_t> bytes,
                       void* out) {
  Header header;
  Decoder* opened_by = nullptr;
  Reason unread = opened(bytes, recipe.orient, &header, &opened_by);
  if (!unread.empty()) return unread;
  Decoder& decoder = *opened_by;
  const uint64_t pixels =
      static_cast<uint64_t>(header.width) * static_cast<uint64_t>(header.height);
  if (pixels > recipe.pixels_max) {
    return "it has " + std::to_string(header.width) + " x " + std::to_string(header.height) +
           " pixels, more than the " + std::to_string(recipe.pixels_max) + " of max_pixels";
  }
  if (recipe.background >= 0 && header.alpha == Alpha::kColour) {
    return "one of its colours is transparent";
  }
  int width = header.width, height = header.height;
  if (header.orientation >= 5) std::swap(width, height);
  if (!recipe.fits(width, height, what.index)) return "its size is not the one that was given";
  Plan plan = draw(recipe, width, height, what);
  // Axes are mirrored while they are still the upright picture's.
  plan = in_file(plan, header.orientation, width, height);
  const int shift = recipe.scaled && decoder.shrinks() ? plan.shift() : 0;
  const auto shrunk = [&](const Axis& axis, int side) {
    return shift == 0 ? axis : axis.shrunk(shift, (side + (1 << shift) - 1) >> shift);
  };
  const auto columns = shrunk(plan.x, header.width).inputs(recipe.filter);
  const auto rows = shrunk(plan.y, header.height).inputs(recipe.filter);
  Picture picture;
  const Region region{columns[0], rows[0], columns[1], rows[1]};
  if (Reason reason = decoder.decode(region, shift, &picture); !reason.empty()) return reason;
  if (recipe.background >= 0 && header.alpha == Alpha::kPixels) {
    lay_over(static_cast<uint32_t>(recipe.background), &picture);
  }
  resizer_.run(recipe, plan, header.orientation, picture, out);
  return {};
}

void Worker::resize(const Recipe& recipe, const Draw& what, const uint8_t* rgb, int width,
                    int height, void* out) {
  Picture picture;
  picture.width = picture.whole_width = width;
  picture.height = picture.whole_height = height;
  picture.allocate(memory_);
  for (int y = 0; y < height; ++y) {
    uint8_t* row = picture.row(y);
    for (int x = 0; x < width; ++x, rgb += 3, row += kPixelBytes) std::memcpy(row, rgb, 3);
  }
  resizer_.run(recipe, draw(recipe, width, height, what), 1, picture, out);
}

}  // namespace headrace::pixels
