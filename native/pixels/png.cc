// PNG (ISO/IEC 15948): libdeflate inflates, the filters are undone here, and only the region
// becomes pixels.
//
// All colour types, depths and interlaced files, but for grey with 16 bits, whose conversion Pillow
// has definitions of its own for. The fourth byte of a pixel is its alpha where there is one.
#if HEADRACE_HAVE_DEFLATE

#include <libdeflate.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "pixels/picture.h"

namespace headrace::pixels {
namespace {

constexpr size_t kSignature = 8;

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
  int x, y, step_x, step_y;
};
constexpr Pass kAdam7[] = {{0, 0, 8, 8}, {4, 0, 8, 8}, {0, 4, 4, 8}, {2, 0, 4, 4},
                           {0, 2, 2, 4}, {1, 0, 2, 2}, {0, 1, 1, 2}};
constexpr Pass kWhole[] = {{0, 0, 1, 1}};

// Whose filters are undone together.
constexpr int kRowsAtOnce = 8;

uint8_t paeth(int a, int b, int c) {
  const int pa = std::abs(b - c), pb = std::abs(a - c), pc = std::abs(a + b - 2 * c);
  return static_cast<uint8_t>(pa <= pb && pa <= pc ? a : pb <= pc ? b : c);
}

#if defined(__x86_64__)
// Up to eight rows at once, of pixels of 3 or 4 bytes, each row behind the one above it: alone a
// row waits for its own last pixel. Row r lies in lane r. Rows 4 to 7, in the register's upper
// half, are one pixel further behind, since pixels take a step longer to get there.
template <int kBytes>
class RowsAtOnce {
 public:
  HEADRACE_INLINE RowsAtOnce(uint8_t* first, size_t stride, int count, const uint8_t* above,
                             int columns)
      : above_(above), count_(count), columns_(columns) {
    alignas(32) int32_t of[5][kRowsAtOnce] = {};
    for (int r = 0; r < count; ++r) {
      rows_[r] = first + static_cast<size_t>(r) * stride + 1;
      of[rows_[r][-1]][r] = -1;
    }
    for (int i = 0; i < 4; ++i)
      filters_[i] = _mm256_load_si256(reinterpret_cast<__m256i*>(of[i + 1]));
    takes_a_ = _mm256_or_si256(filters_[0], filters_[3]);
    others_ = _mm256_cmpeq_epi32(filters_[3], _mm256_setzero_si256());
  }

  HEADRACE_AVX2 void run() {
    const int inside = count_ == kRowsAtOnce ? columns_ - 2 : 0;  // here all rows are under way
    int t = 0;
    __m256i filtered = load<true>(0);
    while (t < columns_ + behind(count_ - 1)) {
      if (t >= behind(kRowsAtOnce - 1) && t < inside) {
        for (; t < inside; ++t) filtered = step<false>(t, filtered);
      } else {
        filtered = step<true>(t, filtered);
        ++t;
      }
    }
  }

 private:
  static constexpr int behind(int row) { return row + (row >= 4 ? 1 : 0); }

  template <bool kEdge>
  HEADRACE_INLINE bool has(int t, int r) const {
    return !kEdge || (r < count_ && t >= behind(r) && t - behind(r) < columns_);
  }

  template <bool kEdge>
  HEADRACE_INLINE int32_t four_bytes(int t, int r) const {
    int32_t value = 0;
    if (has<kEdge>(t, r)) std::memcpy(&value, rows_[r] + (t - behind(r)) * kBytes, sizeof value);
    return value;
  }

  template <bool kEdge>
  HEADRACE_INLINE __m256i load(int t) const {
    return _mm256_setr_epi32(four_bytes<kEdge>(t, 0), four_bytes<kEdge>(t, 1),
                             four_bytes<kEdge>(t, 2), four_bytes<kEdge>(t, 3),
                             four_bytes<kEdge>(t, 4), four_bytes<kEdge>(t, 5),
                             four_bytes<kEdge>(t, 6), four_bytes<kEdge>(t, 7));
  }

  // The filtered bytes of the next step are loaded before these pixels are stored: four bytes, of
  // which the last may be the next pixel's.
  template <bool kEdge>
  HEADRACE_INLINE __m256i step(int t, __m256i filtered) {
    int32_t first = 0;
    if (!kEdge || t < columns_) std::memcpy(&first, above_ + t * kBytes, sizeof first);
    // What is to the left, above, and to the left of that.
    const __m256i a = left_, c = corner_;
    const __m256i from_outside =
        _mm256_or_si256(crossing_, _mm256_zextsi128_si256(_mm_cvtsi32_si128(first)));
    const __m256i b = _mm256_or_si256(_mm256_slli_si256(a, 4), from_outside);
    // Paeth's choice in 8 bits. Of a distance to c one direction is always 0. Where both point the
    // same way, their sum is the largest of the three distances, and may as well stop at 255.
    const __m256i a_up = _mm256_subs_epu8(a, c), a_down = _mm256_subs_epu8(c, a);
    const __m256i b_up = _mm256_subs_epu8(b, c), b_down = _mm256_subs_epu8(c, b);
    const __m256i up = _mm256_adds_epu8(a_up, b_up), down = _mm256_adds_epu8(a_down, b_down);
    const __m256i pa = _mm256_or_si256(b_up, b_down), pb = _mm256_or_si256(a_up, a_down),
                  pc = _mm256_or_si256(_mm256_subs_epu8(up, down), _mm256_subs_epu8(down, up));
    const __m256i pb_or_pc = _mm256_min_epu8(pb, pc);
    const __m256i b_or_c = _mm256_blendv_epi8(c, b, _mm256_cmpeq_epi8(pb_or_pc, pb));
    const __m256i is_a = _mm256_cmpeq_epi8(_mm256_min_epu8(pb_or_pc, pa), pa);
    // Rows with another filter get that one's guess in the place of a, and are made to choose it.
    const __m256i odd = _mm256_and_si256(_mm256_xor_si256(a, b), _mm256_set1_epi8(1));
    const __m256i mean = _mm256_sub_epi8(_mm256_avg_epu8(a, b), odd);
    const __m256i a_or_other = _mm256_or_si256(
        _mm256_or_si256(_mm256_and_si256(a, takes_a_), _mm256_and_si256(b, filters_[1])),
        _mm256_and_si256(mean, filters_[2]));
    const __m256i guess = _mm256_blendv_epi8(b_or_c, a_or_other, _mm256_or_si256(is_a, others_));
    // Of row 3 to the lane of row 4, for the next step but one.
    crossing_ = _mm256_srli_si256(_mm256_permute2x128_si256(a, a, 0x08), 12);
    left_ = _mm256_add_epi8(filtered, guess);
    corner_ = b;
    const __m256i next = load<kEdge>(t + 1);
    const __m128i halves[2] = {_mm256_castsi256_si128(left_), _mm256_extracti128_si256(left_, 1)};
    for (int r = 0; r < kRowsAtOnce; r += 2) {
      const __m128i half = halves[r / 4];
      const auto two =
          static_cast<uint64_t>(r % 4 == 0 ? _mm_cvtsi128_si64(half) : _mm_extract_epi64(half, 1));
      for (int k = r; k < r + 2; ++k) {
        if (!has<kEdge>(t, k)) continue;
        const auto pixel = static_cast<uint32_t>(two >> (32 * (k - r)));
        std::memcpy(rows_[k] + (t - behind(k)) * kBytes, &pixel, kEdge ? kBytes : sizeof pixel);
      }
    }
    return next;
  }

  std::array<uint8_t*, kRowsAtOnce> rows_{};
  const uint8_t* above_;
  int count_, columns_;
  // Of rows with each filter; of Sub's and Paeth's, and of all but Paeth's.
  __m256i filters_[4], takes_a_, others_;
  __m256i left_ = _mm256_setzero_si256(), corner_ = left_, crossing_ = left_;
};

template <int kBytes>
HEADRACE_AVX2 void unfilter_at_once(uint8_t* first, size_t stride, int count, const uint8_t* above,
                                    int columns) {
  RowsAtOnce<kBytes>(first, stride, count, above, columns).run();
}
#endif

void unfilter(int filter, uint8_t* row, const uint8_t* above, size_t bytes, size_t pixel) {
  for (size_t i = 0; filter == 2 && i < bytes; ++i)
    row[i] = static_cast<uint8_t>(row[i] + above[i]);
  if (filter == 0 || filter == 2) return;
  for (size_t i = 0; i < bytes; ++i) {
    const int left = i >= pixel ? row[i - pixel] : 0, corner = i >= pixel ? above[i - pixel] : 0;
    const int guess = filter == 1   ? left
                      : filter == 3 ? (left + above[i]) >> 1
                                    : paeth(left, above[i], corner);
    row[i] = static_cast<uint8_t>(row[i] + guess);
  }
}

// Undoes the filters of the first of up to eight rows: returns of how many; 0: there is no such
// filter. Only the first `columns` pixels of each are looked at, which `bytes` bytes hold. `above`
// is the row before them, zeros for the first. REQUIRES a readable byte behind all rows.
int unfilter_some(uint8_t* first, size_t stride, int count, const uint8_t* above, int columns,
                  size_t bytes, size_t pixel) {
  for (int r = 0; r < count; ++r) {
    if (first[static_cast<size_t>(r) * stride] > 4) count = r;
  }
#if defined(__x86_64__)
  if (has_avx2 && count > 0 && first[0] != 0 && first[0] != 2 && (pixel == 3 || pixel == 4)) {
    (pixel == 3 ? unfilter_at_once<3> : unfilter_at_once<4>)(first, stride, count, above, columns);
    return count;
  }
#endif
  if (count == 0) return 0;
  unfilter(first[0], first + 1, above, bytes, pixel);
  return 1;
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
    transparent_ = false;
    data_.clear();
    exif_ = {};
    if (Reason reason = read_chunks(bytes); !reason.empty()) return reason;
    header->width = width_;
    header->height = height_;
    header->orientation = orientation ? exif_orientation(exif_) : 1;
    const bool channel = colour_ == kGreyAlpha || colour_ == kTrueAlpha;
    header->alpha = channel || (transparent_ && colour_ == kPalette) ? Alpha::kPixels
                    : transparent_                                   ? Alpha::kColour
                                                                     : Alpha::kNone;
    return {};
  }

  Reason numbers() override {
    if (bits_ > 8) return "it is no PNG of 8 bits and one channel";
    for (size_t i = 0; i < palette_.size(); ++i) palette_[i][0] = static_cast<uint8_t>(i);
    return {};
  }

  Reason decode(const Region& region, int /* shift */, Picture* picture) override {
    if (Reason reason = inflate(); !reason.empty()) return reason;
    picture->allocate(region);
    uint8_t* rows = rows_;
    for (const Pass& pass : passes()) {
      if (!read_pass(pass, rows, region, picture)) return "a row has an unknown filter";
      rows += bytes_of(pass);
    }
    return {};
  }

 private:
  static int extent(int side, int start, int step) {
    return side <= start ? 0 : (side - start + step - 1) / step;
  }
  size_t row_bytes(int columns) const { return (static_cast<size_t>(columns) * bits_ + 7) / 8; }
  // Of a row of a pass, with its filter before it; and of all of them.
  size_t stride_of(const Pass& pass) const {
    return row_bytes(extent(width_, pass.x, pass.step_x)) + 1;
  }
  size_t bytes_of(const Pass& pass) const {
    const int rows = pass.x < width_ ? extent(height_, pass.y, pass.step_y) : 0;
    return stride_of(pass) * static_cast<size_t>(rows);
  }
  std::span<const Pass> passes() const {
    return interlaced_ ? std::span<const Pass>(kAdam7) : std::span<const Pass>(kWhole);
  }

  Reason read_chunks(std::span<const uint8_t> bytes) {
    bool has_header = false, ended = false;
    size_t colours = 0, at = kSignature;
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
        colours = std::min<size_t>(length / 3, 256);
        for (auto& colour : palette_) colour = {0, 0, 0, 255};
        for (size_t i = 0; i < colours; ++i) std::memcpy(palette_[i].data(), &body[3 * i], 3);
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
    if (colour_ == kPalette && colours == 0) return "it has no palette";
    for (size_t i = 0; colour_ == kGrey && i < size_t{1} << depth_; ++i) {
      palette_[i].fill(static_cast<uint8_t>(i * 255 / ((size_t{1} << depth_) - 1)));
    }
    return {};
  }

  Reason read_header(std::span<const uint8_t> body) {
    if (body.size() != 13) return "its header is not 13 bytes long";
    width_ = static_cast<int>(big_endian(&body[0]));
    height_ = static_cast<int>(big_endian(&body[4]));
    depth_ = body[8];
    colour_ = body[9];
    if (width_ <= 0 || height_ <= 0 || width_ >= kInputMax || height_ >= kInputMax) {
      return "its header gives it no size";
    }
    if (body[10] != 0 || body[11] != 0 || body[12] > 1) return "its header names unknown methods";
    interlaced_ = body[12] == 1;
    // Of each colour type: channels, and the sum of the depths that it may have.
    constexpr std::array<std::array<uint8_t, 2>, 7> kKinds = {
        {{1, 31}, {}, {3, 24}, {1, 15}, {2, 24}, {}, {4, 24}}};
    if (static_cast<size_t>(colour_) >= kKinds.size() || !std::has_single_bit(depth_) ||
        (kKinds[static_cast<size_t>(colour_)][1] & depth_) == 0) {
      return "its header names an unknown kind of pixels";
    }
    const size_t channels = kKinds[static_cast<size_t>(colour_)][0];
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
    for (const Pass& pass : passes()) bytes += bytes_of(pass);
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

  // Of what lies right of the region or below it no pixel depends.
  bool read_pass(const Pass& pass, uint8_t* row, const Region& region, Picture* picture) {
    const size_t stride = stride_of(pass), pixel = std::max<size_t>(1, bits_ / 8);
    const int rows = extent(height_, pass.y, pass.step_y);
    const int left = extent(region.right, pass.x, pass.step_x);
    const int end = extent(region.bottom, pass.y, pass.step_y);
    const size_t bytes = row_bytes(left);
    zeros_.assign(bytes + 1, 0);
    const uint8_t* above = zeros_.data();
    for (int i = 0; left > 0 && i < end;) {
      const int most = std::min(kRowsAtOnce, rows - i);
      const int some = unfilter_some(row, stride, most, above, left, bytes, pixel);
      if (some == 0) return false;
      for (int k = 0; k < some; ++k, ++i, row += stride) {
        const int y = pass.y + i * pass.step_y;
        if (y >= region.top && i < end) convert_row(pass, row + 1, region, picture->row(y));
      }
      above = row - stride + 1;
    }
    return true;
  }

  void convert_row(const Pass& pass, const uint8_t* row, const Region& region, uint8_t* out) const {
    // Columns of this pass that lie in the region.
    int i = extent(region.left, pass.x, pass.step_x);
    const int end = extent(region.right, pass.x, pass.step_x);
    if (i >= end) return;
    out += kPixelBytes * static_cast<size_t>(pass.x + i * pass.step_x - region.left);
    const size_t step = kPixelBytes * static_cast<size_t>(pass.step_x);
    const auto each = [&](auto&& convert) {
      for (; i < end; ++i, out += step) convert(i, out);
    };
    const size_t pixel = bits_ / 8, wide = depth_ / 8;  // 0: less than a byte
    if (colour_ == kTrue || colour_ == kTrueAlpha) {
      const auto count = static_cast<size_t>(end - i);
      if (pixel == 3 && !interlaced_) return to_pixels(row + i * pixel, count, out);
      if (pixel == kPixelBytes && !interlaced_) {
        std::memcpy(out, row + i * pixel, count * pixel);
        return;
      }
      each([&](size_t x, uint8_t* o) {
        const uint8_t* p = row + x * pixel;
        o[0] = p[0], o[1] = p[wide], o[2] = p[2 * wide], o[3] = p[3 * wide];
      });
    } else if (colour_ == kGreyAlpha) {
      each([&](size_t x, uint8_t* o) { o[0] = o[1] = o[2] = row[2 * x], o[3] = row[2 * x + 1]; });
    } else {
      each([&](size_t x, uint8_t* o) {
        std::memcpy(o, palette_[wide != 0 ? row[x] : small(row, x)].data(), kPixelBytes);
      });
    }
  }

  // A value of less than 8 bits.
  unsigned small(const uint8_t* row, size_t x) const {
    const size_t bit = x * depth_;
    return row[bit / 8] >> (8 - depth_ - bit % 8) & ((1u << depth_) - 1);
  }

  libdeflate_decompressor* inflater_;
  Scratch joined_, inflated_;
  uint8_t* rows_ = nullptr;
  std::vector<uint8_t> zeros_;
  std::vector<std::span<const uint8_t>> data_;
  std::span<const uint8_t> exif_;
  std::array<std::array<uint8_t, 4>, 256> palette_{};
  int width_ = 0, height_ = 0;
  size_t bits_ = 0, depth_ = 0;
  int colour_ = 0;
  bool interlaced_ = false, transparent_ = false;
};

}  // namespace

std::unique_ptr<Decoder> make_png_decoder() { return std::make_unique<PngDecoder>(); }

}  // namespace headrace::pixels

#endif
