#include "pixels/picture.h"

#include <algorithm>
#include <cstring>

namespace headrace::pixels {
namespace {

bool begins(std::span<const uint8_t> bytes, size_t at, const char* magic, size_t size) {
  return bytes.size() >= at + size && std::memcmp(bytes.data() + at, magic, size) == 0;
}

}  // namespace

uint8_t* Scratch::get(size_t bytes) {
  if (bytes > capacity_) {
    memory_.reset();
    capacity_ = 0;
    memory_.reset(new uint8_t[bytes]);
    capacity_ = bytes;
  }
  return memory_.get();
}

void Picture::allocate(Scratch& scratch) {
  stride = (static_cast<size_t>(width) * kPixelBytes + kSlack + 63) / 64 * 64;
  // One more row: vectors read pairs of them.
  data = scratch.get(stride * (static_cast<size_t>(height) + 1));
}

Format format_of(std::span<const uint8_t> bytes) {
#if HEADRACE_HAVE_JPEG
  if (begins(bytes, 0, "\xff\xd8\xff", 3)) return Format::kJpeg;
#endif
#if HEADRACE_HAVE_DEFLATE
  if (begins(bytes, 0, "\x89PNG\r\n\x1a\n", 8)) return Format::kPng;
#endif
#if HEADRACE_HAVE_WEBP
  if (begins(bytes, 0, "RIFF", 4) && begins(bytes, 8, "WEBP", 4)) return Format::kWebp;
#endif
  if (begins(bytes, 0, "P6", 2)) return Format::kPpm;
  return Format::kUnknown;
}

// TIFF's first directory (TIFF 6.0, section 2): tag 0x0112, one SHORT.
int exif_orientation(std::span<const uint8_t> tiff) {
  const bool big = begins(tiff, 0, "MM\0*", 4);
  if (!big && !begins(tiff, 0, "II*\0", 4)) return 1;
  const auto number = [&](size_t at, size_t size) -> uint32_t {
    uint32_t value = 0;
    for (size_t i = 0; i < size; ++i) {
      value |= static_cast<uint32_t>(tiff[at + i]) << 8 * (big ? size - 1 - i : i);
    }
    return value;
  };
  if (tiff.size() < 8) return 1;
  const size_t at = number(4, 4);
  if (at > tiff.size() || tiff.size() - at < 2) return 1;
  const size_t entries = std::min<size_t>(number(at, 2), (tiff.size() - at - 2) / 12);
  for (size_t i = 0; i < entries; ++i) {
    const size_t entry = at + 2 + 12 * i;
    if (number(entry, 2) != 0x0112 || number(entry + 2, 2) != 3) continue;
    const uint32_t value = number(entry + 8, 2);
    return value >= 1 && value <= 8 ? static_cast<int>(value) : 1;
  }
  return 1;
}

}  // namespace headrace::pixels
