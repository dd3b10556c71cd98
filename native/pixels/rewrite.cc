#include "pixels/rewrite.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <mutex>
#include <string>

#include "core/error.h"
#include "pixels/decode.h"
#if HEADRACE_HAVE_JPEG
#include "pixels/jpeg_errors.h"
#endif

namespace headrace::pixels {

void RewriteRecipe::check() const {
  expect(HEADRACE_HAVE_JPEG,
         "this build of headrace has no libjpeg-turbo, and rewrites no pictures");
  expect(short_side >= 0 && short_side <= kSideMax,
         "the short side is not between 1 and 16,384 pixels");
  expect(quality >= 1 && quality <= 100, "the quality is not between 1 and 100");
}

#if HEADRACE_HAVE_JPEG
namespace {

// Between restart markers, in a row of MCUs. With markers at each row alone a crop needs what lies
// to its left: 1.27 times as fast as without any at 2000 x 1500, 1.4 with these. 64 pixels take 0.3
// % more bytes, and gain little.
constexpr int kRestartPixels = 128;
// Pictures that take more are rewritten one at a time, by all threads together.
constexpr size_t kAloneBytes = size_t{64} << 20;
// What a file may grow by without loss: a progressive one says that a large area is flat in fewer
// bits than there are blocks.
constexpr size_t bound_of(size_t bytes) { return 2 * bytes + (size_t{64} << 10); }

// The whole picture, decoded at its full size and reduced to `short_side` pixels; 0: not reduced.
Recipe whole_picture(int short_side, int width, int height) {
  Recipe whole;
  whole.keep_short = short_side != 0 ? short_side : std::numeric_limits<int>::max();
  whole.scaled = false;
  whole.pixels_max = kCoefficientBytesMax / 2;
  return whole.reduction(width, height);
}

bool begins(const jpeg_marker_struct& marker, const char* magic, size_t size) {
  return marker.data_length >= size && std::memcmp(marker.data, magic, size) == 0;
}

// One thread's. Its memory is kept from picture to picture.
struct Rewriter {
  jpeg_decompress_struct in{};
  jpeg_compress_struct out{};
  jpeg_destination_mgr destination{};
  JpegErrors errors{};
  Worker worker;
  Scratch memory, pixels;
  size_t capacity = 0;

  Rewriter() {
    in.err = out.err = errors.init();
    destination.init_destination = [](j_compress_ptr) {};
    destination.empty_output_buffer = [](j_compress_ptr info) -> boolean {
      ERREXIT(info, JERR_BUFFER_SIZE);
      return FALSE;
    };
    destination.term_destination = [](j_compress_ptr) {};
  }
  ~Rewriter() { close(); }
  Rewriter(const Rewriter&) = delete;
  Rewriter& operator=(const Rewriter&) = delete;

  Outcome rewrite(const RewriteRecipe& recipe, std::span<const uint8_t> bytes,
                  std::span<const uint8_t>* result) {
    if (recipe.decoded) return decoded(recipe, bytes, result);
    if (format_of(bytes) != Format::kJpeg) return Outcome::kOther;
    Outcome outcome = open(bytes);
    {
      // Until the memory is given back.
      static std::mutex large_ones;
      std::unique_lock alone(large_ones, std::defer_lock);
      const bool usual = outcome == Outcome::kRewritten;
      if (usual && coefficient_bytes() > kAloneBytes) alone.lock();
      if (usual && recipe.short_side != 0) {
        outcome = reduced(recipe, bytes);
      } else if (usual) {
        const size_t room = bound_of(bytes.size());
        outcome = transcode(memory.get(room), room);
      }
      close();
    }
    if (outcome != Outcome::kRewritten) return outcome;
    const std::span<const uint8_t> file{memory.get(written()), written()};
    if (std::ranges::equal(file, bytes)) return Outcome::kAlready;
    *result = file;
    return outcome;
  }

  Outcome decoded(const RewriteRecipe& recipe, std::span<const uint8_t> bytes,
                  std::span<const uint8_t>* result) {
    const Format format = format_of(bytes);
    if (format == Format::kUnknown) return Outcome::kOther;
    Header header;
    if (!worker.open(bytes, true, &header).empty()) return Outcome::kDamaged;
    if (header.orientation != 1) return Outcome::kTurned;
    if (header.alpha != Alpha::kNone) return Outcome::kTransparent;
    const Recipe whole = whole_picture(recipe.short_side, header.width, header.height);
    if (format == Format::kPpm && whole.width == header.width && whole.height == header.height) {
      return Outcome::kAlready;
    }
    if (std::max(whole.width, whole.height) > kSideMax) return Outcome::kTooLarge;
    const std::string head = ppm_head(whole.width, whole.height);
    const size_t size = head.size() + whole.output_bytes();
    if (size > kCoefficientBytesMax) return Outcome::kTooLarge;
    uint8_t* room = pixels.get(size);
    std::memcpy(room, head.data(), head.size());
    if (!worker.decode({&whole, {}, room + head.size()}, bytes).empty()) return Outcome::kDamaged;
    *result = {room, size};
    return Outcome::kRewritten;
  }

  Outcome reduced(const RewriteRecipe& recipe, std::span<const uint8_t> bytes) {
    const int width = static_cast<int>(in.image_width), height = static_cast<int>(in.image_height);
    if (std::min(width, height) <= recipe.short_side) return Outcome::kSmall;
    if (in.jpeg_color_space != JCS_GRAYSCALE && in.jpeg_color_space != JCS_YCbCr &&
        in.jpeg_color_space != JCS_RGB) {
      return Outcome::kUnusual;  // inks, whose profile would not fit what they become
    }
    // Where the picture ends is not known here without reading it all.
    if (bytes.size() < 4 || bytes[bytes.size() - 2] != 0xff || bytes.back() != JPEG_EOI) {
      return Outcome::kMore;
    }
    const Recipe whole = whole_picture(recipe.short_side, width, height);
    if (std::max(whole.width, whole.height) > kSideMax) return Outcome::kTooLarge;
    uint8_t* rgb = pixels.get(whole.output_bytes());
    if (!worker.decode({&whole, {}, rgb}, bytes).empty()) return Outcome::kDamaged;
    return compress(rgb, whole.width, whole.height, recipe.quality, memory.get(bytes.size()),
                    bytes.size());
  }

  // Nothing of one picture, be it tables that the next one lacks, or memory, is kept for the next.
  void close() {
    jpeg_destroy_compress(&out);
    jpeg_destroy_decompress(&in);
  }

  Outcome failure() const {
    return errors.base.msg_code == JERR_BUFFER_SIZE ? Outcome::kGrows : Outcome::kDamaged;
  }

  // Reads the header. kRewritten: nothing was odd so far.
  Outcome open(std::span<const uint8_t> bytes) {
    errors.clear();
    if (setjmp(errors.escape) != 0) return failure();
    close();
    jpeg_create_compress(&out);
    out.dest = &destination;
    jpeg_create_decompress(&in);
    in.progress = &errors.progress;
    jpeg_save_markers(&in, JPEG_COM, 0xffff);
    for (int i = 0; i < 16; ++i) jpeg_save_markers(&in, JPEG_APP0 + i, 0xffff);
    jpeg_mem_src(&in, bytes.data(), bytes.size());
    jpeg_read_header(&in, TRUE);
    if (errors.warned) return Outcome::kDamaged;
    if (in.arith_code || in.data_precision != 8) return Outcome::kUnusual;
    for (const jpeg_marker_struct* m = in.marker_list; m != nullptr; m = m->next) {
      if (m->marker == JPEG_APP0 + 2 && begins(*m, "MPF", 4)) return Outcome::kMore;
    }
    if (coefficient_bytes() > kCoefficientBytesMax) return Outcome::kTooLarge;
    return Outcome::kRewritten;
  }

  size_t coefficient_bytes() const {
    size_t bytes = 0;
    for (int i = 0; i < in.num_components; ++i) {
      const jpeg_component_info& c = in.comp_info[i];
      const size_t columns = size_t{c.width_in_blocks} + static_cast<size_t>(c.h_samp_factor);
      const size_t rows = size_t{c.height_in_blocks} + static_cast<size_t>(c.v_samp_factor);
      bytes += columns * rows * sizeof(JBLOCK);
    }
    return bytes;
  }

  void write_to(uint8_t* room, size_t bytes) {
    capacity = bytes;
    destination.next_output_byte = room;
    destination.free_in_buffer = bytes;
  }
  size_t written() const { return capacity - destination.free_in_buffer; }

  // Behind jpeg_write_coefficients or jpeg_start_compress. libjpeg's own JFIF and Adobe markers are
  // off: which colours these are is said as it was.
  void write_markers(bool adobe) {
    for (const jpeg_marker_struct* m = in.marker_list; m != nullptr; m = m->next) {
      if (!adobe && m->marker == JPEG_APP0 + 14 && begins(*m, "Adobe", 5)) continue;
      jpeg_write_marker(&out, m->marker, m->data, m->data_length);
    }
  }

  void baseline_scan() {
    out.optimize_coding = TRUE;
    int columns = 1;  // blocks of an MCU
    for (int i = 0; i < out.num_components && out.num_components > 1; ++i) {
      columns = std::max(columns, out.comp_info[i].h_samp_factor);
    }
    out.restart_interval = static_cast<unsigned>(kRestartPixels / (DCTSIZE * columns));
    out.write_JFIF_header = FALSE;
    out.write_Adobe_marker = FALSE;
  }

  // Of an open file.
  Outcome transcode(uint8_t* room, size_t bytes) {
    if (setjmp(errors.escape) != 0) return failure();
    const jpeg_marker_struct* last = last_marker();
    jvirt_barray_ptr* coefficients = jpeg_read_coefficients(&in);
    // libjpeg goes on after damage, with coefficients that the file does not say.
    if (errors.warned) return Outcome::kDamaged;
    if (in.src->bytes_in_buffer != 0) return Outcome::kMore;
    // A marker between scans would stand before them all, and may mean another thing there.
    if (last_marker() != last || !complete()) return Outcome::kUnusual;
    write_to(room, bytes);
    jpeg_copy_critical_parameters(&in, &out);
    baseline_scan();
    jpeg_write_coefficients(&out, coefficients);
    write_markers(true);
    jpeg_finish_compress(&out);
    return errors.warned ? Outcome::kDamaged : Outcome::kRewritten;
  }

  const jpeg_marker_struct* last_marker() const {
    const jpeg_marker_struct* m = in.marker_list;
    while (m != nullptr && m->next != nullptr) m = m->next;
    return m;
  }

  // Whether all bits of all coefficients were there. Of progressive files that lack some, libjpeg
  // guesses smooth pixels, which it would not for baseline.
  bool complete() const {
    if (!in.progressive_mode) return true;
    for (int i = 0; i < in.num_components; ++i) {
      const int* bits = in.coef_bits[i];
      if (std::any_of(bits, bits + DCTSIZE2, [](int missing) { return missing != 0; }))
        return false;
    }
    return true;
  }

  // Of an open file, whose reduced pixels are rows of red, green, blue.
  Outcome compress(uint8_t* rgb, int width, int height, int quality, uint8_t* room, size_t bytes) {
    if (setjmp(errors.escape) != 0) return failure();
    const bool grey = in.jpeg_color_space == JCS_GRAYSCALE;
    write_to(room, bytes);
    out.image_width = static_cast<JDIMENSION>(width);
    out.image_height = static_cast<JDIMENSION>(height);
    out.input_components = grey ? 1 : 3;
    out.in_color_space = grey ? JCS_GRAYSCALE : JCS_RGB;
    jpeg_set_defaults(&out);
    jpeg_set_quality(&out, quality, TRUE);
    baseline_scan();
    jpeg_start_compress(&out, TRUE);
    write_markers(false);
    const size_t row_bytes = 3 * static_cast<size_t>(width);
    while (out.next_scanline < out.image_height) {
      uint8_t* row = rgb + row_bytes * out.next_scanline;
      for (size_t i = 1; grey && i < static_cast<size_t>(width); ++i) row[i] = row[3 * i];
      jpeg_write_scanlines(&out, &row, 1);
    }
    jpeg_finish_compress(&out);
    return Outcome::kRewritten;
  }
};

}  // namespace

Outcome rewrite(const RewriteRecipe& recipe, std::span<const uint8_t> bytes,
                std::span<const uint8_t>* result) {
  thread_local Rewriter rewriter;
  return rewriter.rewrite(recipe, bytes, result);
}
#else
Outcome rewrite(const RewriteRecipe&, std::span<const uint8_t>, std::span<const uint8_t>*) {
  return Outcome::kOther;
}
#endif

}  // namespace headrace::pixels
