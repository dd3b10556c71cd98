#include "pixels/picture.h"

#include <algorithm>
#include <cstring>

namespace headrace::pixels {
namespace {

#if defined(__x86_64__)
// Eight pixels at a time; returns how many are done. What is left has fewer than 32 bytes.
HEADRACE_AVX2 size_t to_pixels_avx2(const uint8_t* rgb, size_t count, uint8_t* out) {
  const __m256i halves = _mm256_setr_epi32(0, 1, 2, 2, 3, 4, 5, 5);
  const __m256i bytes = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1));
  size_t i = 0;
  for (; 3 * (count - i) >= 32; i += 8) {
    const __m256i in = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rgb + 3 * i));
    const __m256i four = _mm256_shuffle_epi8(_mm256_permutevar8x32_epi32(in, halves), bytes);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + kPixelBytes * i), four);
  }
  return i;
}
#endif

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

void Picture::allocate(const Region& part) {
  left = part.left, top = part.top;
  width = part.right - part.left, height = part.bottom - part.top;
  stride = (static_cast<size_t>(width) * kPixelBytes + kSlack + 63) / 64 * 64;
  // One more row: vectors read pairs of them, and the taps of a row's last columns beyond its end.
  data = memory_.get(stride * (static_cast<size_t>(height) + 1));
}

void to_pixels(const uint8_t* rgb, size_t count, uint8_t* out) {
  size_t i = 0;
#if defined(__x86_64__)
  if (has_avx2) i = to_pixels_avx2(rgb, count, out);
#endif
  for (; i < count; ++i) {
    std::memcpy(out + kPixelBytes * i, rgb + 3 * i, 3);
    out[kPixelBytes * i + 3] = 0;  // rows are compared whole
  }
}

Format format_of(std::span<const uint8_t> bytes) {
  if (HEADRACE_HAVE_JPEG && begins(bytes, 0, "\xff\xd8\xff", 3)) return Format::kJpeg;
  if (HEADRACE_HAVE_DEFLATE && begins(bytes, 0, "\x89PNG\r\n\x1a\n", 8)) return Format::kPng;
  const bool webp = begins(bytes, 0, "RIFF", 4) && begins(bytes, 8, "WEBP", 4);
  if (HEADRACE_HAVE_WEBP && webp) return Format::kWebp;
  return begins(bytes, 0, "P6", 2) ? Format::kPpm : Format::kUnknown;
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

std::string ppm_head(int width, int height) {
  return "P6\n" + std::to_string(width) + " " + std::to_string(height) + "\n255\n";
}

}  // namespace headrace::pixels
