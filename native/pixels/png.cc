// PNG (ISO/IEC 15948): libdeflate inflates, the filters are undone here, and only the region
// becomes pixels.
//
// All colour types, depths and interlaced files, but for grey with 16 bits, whose conversion Pillow
// has definitions of its own for. The fourth byte of a pixel is its alpha where there is one.
#if HEADRACE_HAVE_DEFLATE

#include <libdeflate.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "pixels/picture.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define HEADRACE_AVX2 __attribute__((target("avx2")))
#endif

namespace headrace::pixels {
namespace {

constexpr size_t kSignature = 8;
constexpr uint32_t kSideLargest = 1u << 30;

enum Colour { kGrey = 0, kTrue = 2, kPalette = 3, kGreyAlpha = 4, kTrueAlpha = 6 };

uint32_t big_endian(const uint8_t* p) {
  return uint32_t{p[0]} << 24 | uint32_t{p[1]} << 16 | uint32_t{p[2]} << 8 | p[3];
}

constexpr uint32_t tag(const char (&name)[5]) {
  return static_cast<uint32_t>(name[0]) << 24 | static_cast<uint32_t>(name[1]) << 16 |
         static_cast<uint32_t>(name[2]) << 8 | static_cast<uint32_t>(name[3]);
}

// Of Adam7: where a pass begins, and how far apart its pixels are.
struct Pass {
  uint32_t x, y, step_x, step_y;
};
constexpr std::array<Pass, 7> kAdam7{{{0, 0, 8, 8},
                                      {4, 0, 8, 8},
                                      {0, 4, 4, 8},
                                      {2, 0, 4, 4},
                                      {0, 2, 2, 4},
                                      {1, 0, 2, 2},
                                      {0, 1, 1, 2}}};
constexpr std::array<Pass, 1> kWhole{{{0, 0, 1, 1}}};

uint8_t paeth(int a, int b, int c) {
  const int pa = std::abs(b - c), pb = std::abs(a - c), pc = std::abs(a + b - 2 * c);
  return static_cast<uint8_t>(pa <= pb && pa <= pc ? a : pb <= pc ? b : c);
}

#if defined(__x86_64__)
// Pixels of 3 or 4 bytes: each depends on the one before, so a vector holds one pixel. Four bytes
// are read in any case, so rows need one more behind their end. (Three bytes that are put together
// in memory would wait for their way through the store buffer, which takes longer than all the
// rest.)
__m128i load_pixel(const uint8_t* p) {
  uint32_t value;
  std::memcpy(&value, p, sizeof value);
  return _mm_cvtsi32_si128(static_cast<int>(value));
}
template <int kBytes>
void store_pixel(uint8_t* p, __m128i pixel) {
  const auto value = static_cast<uint32_t>(_mm_cvtsi128_si32(pixel));
  if constexpr (kBytes == 4) {
    std::memcpy(p, &value, sizeof value);
  } else {
    const auto low = static_cast<uint16_t>(value);
    std::memcpy(p, &low, sizeof low);
    p[2] = static_cast<uint8_t>(value >> 16);
  }
}

// One row's Paeth filter from left to right; numbers of 16 bits.
struct Paeth {
  __m128i a = _mm_setzero_si128(), c = _mm_setzero_si128();  // to the left; above that

  // The pixel from its filtered bytes and the one above it.
  HEADRACE_AVX2 __m128i next(__m128i filtered, __m128i above) {
    const __m128i b = _mm_cvtepu8_epi16(above);
    const __m128i to_a = _mm_sub_epi16(b, c), to_b = _mm_sub_epi16(a, c);
    const __m128i pa = _mm_abs_epi16(to_a), pb = _mm_abs_epi16(to_b),
                  pc = _mm_abs_epi16(_mm_add_epi16(to_a, to_b));
    const __m128i least = _mm_min_epi16(pc, _mm_min_epi16(pa, pb));
    const __m128i b_or_c = _mm_blendv_epi8(c, b, _mm_cmpeq_epi16(least, pb));
    const __m128i guess = _mm_blendv_epi8(b_or_c, a, _mm_cmpeq_epi16(least, pa));
    const __m128i sum = _mm_add_epi8(filtered, _mm_packus_epi16(guess, guess));
    a = _mm_cvtepu8_epi16(sum);
    c = b;
    return sum;
  }
};

template <int kBytes>
HEADRACE_AVX2 void unfilter_paeth(uint8_t* row, const uint8_t* above, size_t bytes) {
  Paeth paeth;
  for (size_t i = 0; i + kBytes <= bytes; i += kBytes) {
    store_pixel<kBytes>(row + i, paeth.next(load_pixel(row + i), load_pixel(above + i)));
  }
}

// Two such rows, the second one pixel behind the first: each row alone waits for its own last
// pixel.
template <int kBytes>
HEADRACE_AVX2 void unfilter_paeth_pair(uint8_t* row, uint8_t* below, const uint8_t* above,
                                       size_t bytes) {
  Paeth first, second;
  __m128i last = _mm_setzero_si128();
  for (size_t i = 0; i + kBytes <= bytes; i += kBytes) {
    const __m128i pixel = first.next(load_pixel(row + i), load_pixel(above + i));
    if (i != 0) {
      uint8_t* behind = below + i - kBytes;
      store_pixel<kBytes>(behind, second.next(load_pixel(behind), last));
    }
    store_pixel<kBytes>(row + i, pixel);
    last = pixel;
  }
  uint8_t* behind = below + bytes - kBytes;
  store_pixel<kBytes>(behind, second.next(load_pixel(behind), last));
}

template <int kBytes>
void unfilter_average(uint8_t* row, const uint8_t* above, size_t bytes) {
  const __m128i one = _mm_set1_epi8(1);
  __m128i a = _mm_setzero_si128();
  for (size_t i = 0; i + kBytes <= bytes; i += kBytes) {
    const __m128i b = load_pixel(above + i);
    // avg_epu8 rounds up, PNG down.
    const __m128i mean = _mm_sub_epi8(_mm_avg_epu8(a, b), _mm_and_si128(_mm_xor_si128(a, b), one));
    a = _mm_add_epi8(load_pixel(row + i), mean);
    store_pixel<kBytes>(row + i, a);
  }
}

template <int kBytes>
void unfilter_sub(uint8_t* row, size_t bytes) {
  __m128i a = _mm_setzero_si128();
  for (size_t i = 0; i + kBytes <= bytes; i += kBytes) {
    a = _mm_add_epi8(a, load_pixel(row + i));
    store_pixel<kBytes>(row + i, a);
  }
}
#endif

// False: the filter does not exist. `above` is the row before, zeros for the first. REQUIRES a
// readable byte behind both rows.
bool unfilter(int filter, uint8_t* row, const uint8_t* above, size_t bytes, size_t pixel) {
  switch (filter) {
    case 0:
      return true;
    case 1:
#if defined(__x86_64__)
      if (pixel == 3) return unfilter_sub<3>(row, bytes), true;
      if (pixel == 4) return unfilter_sub<4>(row, bytes), true;
#endif
      for (size_t i = pixel; i < bytes; ++i) row[i] = static_cast<uint8_t>(row[i] + row[i - pixel]);
      return true;
    case 2:
      for (size_t i = 0; i < bytes; ++i) row[i] = static_cast<uint8_t>(row[i] + above[i]);
      return true;
    case 3:
#if defined(__x86_64__)
      if (pixel == 3) return unfilter_average<3>(row, above, bytes), true;
      if (pixel == 4) return unfilter_average<4>(row, above, bytes), true;
#endif
      for (size_t i = 0; i < bytes; ++i) {
        const int left = i >= pixel ? row[i - pixel] : 0;
        row[i] = static_cast<uint8_t>(row[i] + ((left + above[i]) >> 1));
      }
      return true;
    case 4:
#if defined(__x86_64__)
      if (pixel == 3) return unfilter_paeth<3>(row, above, bytes), true;
      if (pixel == 4) return unfilter_paeth<4>(row, above, bytes), true;
#endif
      for (size_t i = 0; i < bytes; ++i) {
        const int left = i >= pixel ? row[i - pixel] : 0,
                  corner = i >= pixel ? above[i - pixel] : 0;
        row[i] = static_cast<uint8_t>(row[i] + paeth(left, above[i], corner));
      }
      return true;
    default:
      return false;
  }
}

// The same for a row and the one below where that is faster; false: nothing was done.
bool unfilter_two([[maybe_unused]] uint8_t* row, [[maybe_unused]] const uint8_t* above,
                  [[maybe_unused]] size_t bytes, [[maybe_unused]] size_t pixel) {
#if defined(__x86_64__)
  uint8_t* below = row + bytes + 1;
  if (row[0] != 4 || below[0] != 4) return false;
  if (pixel == 3) return unfilter_paeth_pair<3>(row + 1, below + 1, above, bytes), true;
  if (pixel == 4) return unfilter_paeth_pair<4>(row + 1, below + 1, above, bytes), true;
#endif
  return false;
}

class PngDecoder final : public Decoder {
 public:
  PngDecoder() : inflater_(libdeflate_alloc_decompressor()) {
    if (inflater_ == nullptr) throw std::bad_alloc();
  }
  ~PngDecoder() override { libdeflate_free_decompressor(inflater_); }
  PngDecoder(const PngDecoder&) = delete;
  PngDecoder& operator=(const PngDecoder&) = delete;

  Reason open(std::span<const uint8_t> bytes, bool orientation, Header* header) override {
    colours_ = 0;
    transparent_ = false;
    data_.clear();
    exif_ = {};
    if (Reason reason = read_chunks(bytes); !reason.empty()) return reason;
    header->width = static_cast<int>(width_);
    header->height = static_cast<int>(height_);
    header->orientation = orientation ? exif_orientation(exif_) : 1;
    const bool channel = colour_ == kGreyAlpha || colour_ == kTrueAlpha;
    header->alpha = channel || (transparent_ && colour_ == kPalette) ? Alpha::kPixels
                    : transparent_                                   ? Alpha::kColour
                                                                     : Alpha::kNone;
    return {};
  }

  Reason decode(const Region& region, int /* shift */, Picture* picture) override {
    picture->shift = 0;
    picture->whole_width = static_cast<int>(width_);
    picture->whole_height = static_cast<int>(height_);
    picture->left = region.left;
    picture->top = region.top;
    picture->width = region.right - region.left;
    picture->height = region.bottom - region.top;
    if (Reason reason = inflate(); !reason.empty()) return reason;
    picture->allocate(memory_);
    uint8_t* at = rows_;
    for (const Pass& pass : passes()) {
      const uint32_t columns = extent(width_, pass.x, pass.step_x);
      const uint32_t rows = extent(height_, pass.y, pass.step_y);
      if (columns == 0 || rows == 0) continue;
      if (!read_pass(pass, columns, rows, &at, region, picture))
        return "a row has an unknown filter";
    }
    return {};
  }

 private:
  static uint32_t extent(uint32_t side, uint32_t start, uint32_t step) {
    return side <= start ? 0 : (side - start + step - 1) / step;
  }
  size_t row_bytes(uint32_t columns) const {
    return (static_cast<size_t>(columns) * bits_ + 7) / 8;
  }
  std::span<const Pass> passes() const {
    return interlaced_ ? std::span<const Pass>(kAdam7) : std::span<const Pass>(kWhole);
  }

  Reason read_chunks(std::span<const uint8_t> bytes) {
    bool has_header = false, ended = false;
    size_t at = kSignature;
    while (!ended) {
      if (bytes.size() - at < 12 || bytes.size() < at) return "the file is cut off";
      const size_t length = big_endian(&bytes[at]);
      if (length > bytes.size() - at - 12) return "the file is cut off";
      const uint32_t type = big_endian(&bytes[at + 4]);
      const auto body = bytes.subspan(at + 8, length);
#ifndef FUZZING_BUILD_MODE_UNSAFE_FOR_PRODUCTION  // no fuzzer guesses a checksum
      if (libdeflate_crc32(0, &bytes[at + 4], length + 4) != big_endian(&bytes[at + 8 + length])) {
        return "a chunk differs from its checksum";
      }
#endif
      at += 12 + length;
      if (!has_header && type != tag("IHDR")) return "it does not begin with a header";
      if (type == tag("IHDR")) {
        if (has_header) return "it has two headers";
        has_header = true;
        if (Reason reason = read_header(body); !reason.empty()) return reason;
      } else if (type == tag("PLTE")) {
        colours_ = std::min<size_t>(length / 3, 256);
        for (auto& colour : palette_) colour = {0, 0, 0, 255};
        for (size_t i = 0; i < colours_; ++i) std::memcpy(palette_[i].data(), &body[3 * i], 3);
      } else if (type == tag("tRNS")) {
        transparent_ = true;
        for (size_t i = 0; i < std::min(length, palette_.size()); ++i) palette_[i][3] = body[i];
      } else if (type == tag("IDAT")) {
        data_.push_back(body);
      } else if (type == tag("eXIf")) {
        exif_ = body;
      } else if (type == tag("acTL")) {
        return "it is an animation";
      } else if (type == tag("IEND")) {
        ended = true;
      }
    }
    if (data_.empty()) return "it has no pixels";
    if (colour_ == kPalette && colours_ == 0) return "it has no palette";
    return {};
  }

  Reason read_header(std::span<const uint8_t> body) {
    if (body.size() != 13) return "its header is not 13 bytes long";
    width_ = big_endian(&body[0]);
    height_ = big_endian(&body[4]);
    depth_ = body[8];
    colour_ = body[9];
    if (width_ == 0 || height_ == 0 || width_ >= kSideLargest || height_ >= kSideLargest) {
      return "its header gives it no size";
    }
    if (body[10] != 0 || body[11] != 0 || body[12] > 1) return "its header names unknown methods";
    interlaced_ = body[12] == 1;
    const bool powers = depth_ == 1 || depth_ == 2 || depth_ == 4;
    const bool bytes = depth_ == 8 || depth_ == 16;
    const size_t channels = colour_ == kTrue        ? 3
                            : colour_ == kGreyAlpha ? 2
                            : colour_ == kTrueAlpha ? 4
                                                    : 1;
    const bool known = colour_ == kGrey      ? powers || bytes
                       : colour_ == kPalette ? powers || depth_ == 8
                       : colour_ == kTrue || colour_ == kGreyAlpha || colour_ == kTrueAlpha ? bytes
                                                                                            : false;
    if (!known) return "its header names an unknown kind of pixels";
    if (depth_ == 16 && (colour_ == kGrey || colour_ == kGreyAlpha))
      return "it is grey with 16 bits";
    bits_ = channels * depth_;
    return {};
  }

  // REQUIRES that the picture's size was accepted.
  Reason inflate() {
    std::span<const uint8_t> packed = data_.front();
    if (data_.size() > 1) {
      size_t bytes = 0;
      for (const auto& part : data_) bytes += part.size();
      uint8_t* joined = joined_.get(bytes);
      for (const auto& part : data_) {
        std::memcpy(joined, part.data(), part.size());
        joined += part.size();
      }
      packed = {joined - bytes, bytes};
    }
    size_t bytes = 0;
    for (const Pass& pass : passes()) {
      const uint32_t columns = extent(width_, pass.x, pass.step_x);
      if (columns != 0) bytes += (row_bytes(columns) + 1) * extent(height_, pass.y, pass.step_y);
    }
    // A picture that claims more pixels than its bytes can hold gets no memory: deflate packs at
    // most 1,032 to 1.
    if (bytes / 1040 > packed.size()) return "it has fewer bytes than its size takes";
    rows_ = inflated_.get(bytes + kSlack);
    const libdeflate_result result =
        libdeflate_zlib_decompress(inflater_, packed.data(), packed.size(), rows_, bytes, nullptr);
    switch (result) {
      case LIBDEFLATE_SUCCESS:
        return {};
      case LIBDEFLATE_SHORT_OUTPUT:
        return "it has fewer pixels than its size takes";
      case LIBDEFLATE_INSUFFICIENT_SPACE:
        return "it has more pixels than its size takes";
      default:
        return "its compressed pixels are damaged";
    }
  }

  bool read_pass(const Pass& pass, uint32_t columns, uint32_t rows, uint8_t** at,
                 const Region& region, Picture* picture) {
    const size_t bytes = row_bytes(columns), pixel = std::max<size_t>(1, bits_ / 8);
    zeros_.assign(bytes + 1, 0);
    const uint8_t* above = zeros_.data();
    uint8_t* row = *at;
    bool ahead = false;  // this row was done with the one above
    for (uint32_t i = 0; i < rows; ++i, row += bytes + 1) {
      const auto y = static_cast<int>(pass.y + i * pass.step_y);
      // Below the region no row is needed, but for the passes that come after.
      if (!interlaced_ && y >= region.bottom) break;
      if (ahead) {
        ahead = false;
      } else if (i + 1 < rows && unfilter_two(row, above, bytes, pixel)) {
        ahead = true;
      } else if (!unfilter(row[0], row + 1, above, bytes, pixel)) {
        return false;
      }
      above = row + 1;
      if (y >= region.top && y < region.bottom) convert_row(pass, row + 1, region, picture->row(y));
    }
    *at += (bytes + 1) * rows;
    return true;
  }

  void convert_row(const Pass& pass, const uint8_t* row, const Region& region, uint8_t* out) const {
    // Columns of this pass that lie in the region.
    const auto left = static_cast<uint32_t>(region.left),
               right = static_cast<uint32_t>(region.right);
    uint32_t i = left <= pass.x ? 0 : (left - pass.x + pass.step_x - 1) / pass.step_x;
    const uint32_t end = extent(right, pass.x, pass.step_x);
    if (i >= end) return;
    out += kPixelBytes * (pass.x + static_cast<size_t>(i) * pass.step_x - left);
    const size_t step = kPixelBytes * pass.step_x;
    const auto each = [&](auto&& convert) {
      for (; i < end; ++i, out += step) convert(i, out);
    };
    const size_t wide = depth_ / 8;  // bytes of a channel; 0 below 8 bits
    switch (colour_) {
      case kTrue:
      case kTrueAlpha: {
        const size_t pixel = bits_ / 8;
        if (wide == 1) {  // four bytes at once: the last are of the next pixel, or alpha
          each([&](uint32_t x, uint8_t* o) { std::memcpy(o, row + x * pixel, kPixelBytes); });
          return;
        }
        each([&](uint32_t x, uint8_t* o) {
          const uint8_t* p = row + x * pixel;
          o[0] = p[0], o[1] = p[wide], o[2] = p[2 * wide], o[3] = p[3 * wide];
        });
        return;
      }
      case kGreyAlpha:
        each([&](uint32_t x, uint8_t* o) {
          o[0] = o[1] = o[2] = row[2 * x], o[3] = row[2 * x + 1];
        });
        return;
      case kGrey:
        if (wide != 0) {
          each([&](uint32_t x, uint8_t* o) { o[0] = o[1] = o[2] = row[x]; });
          return;
        }
        each([&](uint32_t x, uint8_t* o) {
          o[0] = o[1] = o[2] = static_cast<uint8_t>(small(row, x) * (255u / ((1u << depth_) - 1)));
        });
        return;
      default:
        each([&](uint32_t x, uint8_t* o) {
          std::memcpy(o, palette_[wide != 0 ? row[x] : small(row, x)].data(), kPixelBytes);
        });
    }
  }

  // A value of less than 8 bits.
  unsigned small(const uint8_t* row, uint32_t x) const {
    const size_t bit = static_cast<size_t>(x) * depth_;
    return row[bit / 8] >> (8 - depth_ - bit % 8) & ((1u << depth_) - 1);
  }

  libdeflate_decompressor* inflater_;
  Scratch memory_, joined_, inflated_;
  uint8_t* rows_ = nullptr;
  std::vector<uint8_t> zeros_;
  std::vector<std::span<const uint8_t>> data_;
  std::span<const uint8_t> exif_;
  std::array<std::array<uint8_t, 4>, 256> palette_{};
  size_t colours_ = 0;
  uint32_t width_ = 0, height_ = 0;
  size_t bits_ = 0, depth_ = 0;
  int colour_ = 0;
  bool interlaced_ = false, transparent_ = false;
};

}  // namespace

std::unique_ptr<Decoder> make_png_decoder() { return std::make_unique<PngDecoder>(); }

}  // namespace headrace::pixels

#endif
