// Picture: the pixels of a part of a picture, as decoders give them and the resize takes them.
//
// Four bytes a pixel: red, green, blue and one that is alpha or that nobody looks at. Four fit a
// vector register where three do not. Rows have `kSlack` readable bytes behind their end. The
// memory is kept for the next picture: fresh memory costs more than a small picture's decoding.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "pixels/recipe.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define HEADRACE_AVX2 __attribute__((target("avx2,bmi2")))
#define HEADRACE_INLINE __attribute__((target("avx2,bmi2"), always_inline)) inline
#define HEADRACE_HAS_AVX2 (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2"))
#else
#define HEADRACE_AVX2
#define HEADRACE_HAS_AVX2 false
#endif

namespace headrace::pixels {

// Whether this processor runs what is marked so. Tests say that it does not.
inline bool has_avx2 = HEADRACE_HAS_AVX2;

inline constexpr size_t kPixelBytes = 4;
inline constexpr size_t kSlack = 64;

// Recycled memory, not initialised.
class Scratch {
 public:
  // At least so many bytes, valid until the next call. Throws std::bad_alloc.
  uint8_t* get(size_t bytes);

 private:
  std::unique_ptr<uint8_t[]> memory_;
  size_t capacity_ = 0;
};

// A sum of products of levels, of which 255 is the whole: rounded to the nearest.
constexpr uint8_t level_of(int sum) {
  return static_cast<uint8_t>((sum + 128 + ((sum + 128) >> 8)) >> 8);
}

// Which part is needed, in pixels of the whole picture.
struct Region {
  int left, top, right, bottom;
};

struct Picture {
  // Its columns [left, left + width) and rows [top, top + height) are in memory, of the picture as
  // it was decoded: at 1 / 2^shift of its size.
  int left = 0, top = 0, width = 0, height = 0;
  int shift = 0;
  size_t stride = 0;
  uint8_t* data = nullptr;

  uint8_t* row(int y) const { return data + static_cast<size_t>(y - top) * stride; }
  // Makes room for a part of a picture. Throws std::bad_alloc.
  void allocate(const Region& part);

 private:
  Scratch memory_;
};

// Rows of red, green, blue as four bytes each.
void to_pixels(const uint8_t* rgb, size_t count, uint8_t* out);

enum class Format : int { kUnknown, kJpeg, kPng, kWebp, kPpm };

// The formats that this build can decode, by the first bytes.
Format format_of(std::span<const uint8_t> bytes);

// How a picture says what is transparent: by the fourth byte of its pixels, or by a colour.
enum class Alpha { kNone, kPixels, kColour };

// What a header says.
struct Header {
  int width = 0;
  int height = 0;
  int orientation = 1;  // EXIF's; 1 where it is not asked for, or not there
  Alpha alpha = Alpha::kNone;
};

// Why a picture could not be decoded; empty: it was.
using Reason = std::string;

// Each decoder of its own format. `open` reads the header; `decode` fills `picture` with at least
// the region, shrunk by 2^shift. One picture at a time; the bytes must stay. No exception but
// std::bad_alloc; whatever the bytes are, nothing outside the given memory is read or written.
class Decoder {
 public:
  virtual ~Decoder() = default;
  virtual Reason open(std::span<const uint8_t> bytes, bool orientation, Header* header) = 0;
  // REQUIRES the region for this shift: `Plan` and `Axis::shrunk` say it. No shift but 0 where the
  // format does not shrink.
  virtual Reason decode(const Region& region, int shift, Picture* picture) = 0;
  virtual bool shrinks() const { return false; }
  // Between the two: `decode` gives each pixel's number as it is stored, as red, and no colours.
  virtual Reason numbers() { return "it is no PNG"; }
};

std::unique_ptr<Decoder> make_jpeg_decoder();
std::unique_ptr<Decoder> make_png_decoder();
std::unique_ptr<Decoder> make_webp_decoder();

// What stands before the pixels of a PPM file of 8 bits: rows of red, green, blue.
std::string ppm_head(int width, int height);

// EXIF's orientation in the bytes of an APP1 or eXIf block, from "II" or "MM" on; 1 if it says
// none.
int exif_orientation(std::span<const uint8_t> tiff);

}  // namespace headrace::pixels
