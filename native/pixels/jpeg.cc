// JPEG by libjpeg-turbo: only the rows and columns that are needed, at 1/1, 1/2, 1/4 or 1/8.
//
// Columns are cut at the edges of iMCUs, where fancy upsampling would look at a neighbour that is
// not there: a margin of one iMCU on each side, which nobody looks at, makes the rest equal to a
// whole decode. Rows below the region are not decoded at all. The slow integer DCT and fancy
// upsampling, as Pillow has them.
#if HEADRACE_HAVE_JPEG

#include <algorithm>
#include <cstring>

#include "pixels/baseline_jpeg.h"
#include "pixels/jpeg_errors.h"
#include "pixels/picture.h"

namespace headrace::pixels {
namespace {

// A progressive file may repeat its scans without end, each a walk over the whole picture.
constexpr int kScansMax = 200;

void note(j_common_ptr common, int level) {
  if (level >= 0) return;
  auto* errors = reinterpret_cast<JpegErrors*>(common->err);
  errors->warned = true;
  if (errors->base.msg_code == JWRN_EXTRANEOUS_DATA) return;  // between markers, no pixel is lost
  if (!errors->damaged) errors->base.format_message(common, errors->message);
  errors->damaged = true;
}

void count_scans(j_common_ptr common) {
  if (reinterpret_cast<j_decompress_ptr>(common)->input_scan_number <= kScansMax) return;
  auto* errors = reinterpret_cast<JpegErrors*>(common->err);
  std::snprintf(errors->message, sizeof errors->message, "more than %d scans", kScansMax);
  JpegErrors::give_up(common);
}

// As Pillow converts: Adobe's files hold their inks inverted, and so do all others that are met.
void inks_to_rgb(uint8_t* row, int width) {
  for (int x = 0; x < width; ++x, row += kPixelBytes) {
    for (int c = 0; c < 3; ++c) row[c] = level_of(row[c] * row[3]);
  }
}

class JpegDecoder final : public Decoder {
 public:
  JpegDecoder() { info_.err = errors_.init(); }
  ~JpegDecoder() override { jpeg_destroy_decompress(&info_); }
  JpegDecoder(const JpegDecoder&) = delete;
  JpegDecoder& operator=(const JpegDecoder&) = delete;

  bool shrinks() const override { return true; }

  Reason open(std::span<const uint8_t> bytes, bool orientation, Header* header) override {
    bytes_ = bytes;
    errors_.clear();
    if (setjmp(errors_.escape) != 0) return reason();
    // Tables of the picture before would be taken for those that this one lacks.
    jpeg_destroy_decompress(&info_);
    jpeg_create_decompress(&info_);
    info_.progress = &errors_.progress;
    jpeg_mem_src(&info_, bytes.data(), bytes.size());
    jpeg_save_markers(&info_, JPEG_APP0 + 1, orientation ? 0xffff : 0);
    jpeg_read_header(&info_, TRUE);
    header->width = static_cast<int>(info_.image_width);
    header->height = static_cast<int>(info_.image_height);
    header->orientation = orientation ? orientation_of(info_.marker_list) : 1;
    return {};
  }

  Reason decode(const Region& region, int shift, Picture* picture) override {
#if defined(__x86_64__)
    if (baseline_.decode(info_, region, shift, picture)) return {};
#endif
    if (setjmp(errors_.escape) != 0) {
      jpeg_abort_decompress(&info_);
      return reason();
    }
    inks_ = info_.jpeg_color_space == JCS_CMYK || info_.jpeg_color_space == JCS_YCCK;
    info_.out_color_space = inks_ ? JCS_CMYK : JCS_EXT_RGBX;
    info_.scale_num = 1;
    info_.scale_denom = 1u << shift;
    info_.dct_method = JDCT_ISLOW;
    info_.do_fancy_upsampling = TRUE;
    jpeg_start_decompress(&info_);
    read(region, picture);
    if (info_.output_scanline < info_.output_height && !ends()) {
      std::snprintf(errors_.message, sizeof errors_.message,
                    "the file is cut off: it has no end marker");
      errors_.damaged = true;
    }
    jpeg_abort_decompress(&info_);
    return errors_.damaged ? reason() : Reason();
  }

 private:
  Reason reason() const { return errors_.message[0] != 0 ? errors_.message : "libjpeg gave up"; }

  static int orientation_of(const jpeg_marker_struct* marker) {
    for (; marker != nullptr; marker = marker->next) {
      const std::span<const uint8_t> data(marker->data, marker->data_length);
      if (data.size() > 6 && std::memcmp(data.data(), "Exif\0\0", 6) == 0) {
        return exif_orientation(data.subspan(6));
      }
    }
    return 1;
  }

  // Not a scope with destructors: libjpeg jumps out of it.
  void read(const Region& region, Picture* picture) {
    const int margin = info_.max_h_samp_factor * info_.min_DCT_scaled_size;
    auto left = static_cast<JDIMENSION>(std::max(0, region.left - margin));
    const auto right = static_cast<JDIMENSION>(region.right + margin);
    JDIMENSION width = std::min(right, info_.output_width) - left;
    if (width < info_.output_width) jpeg_crop_scanline(&info_, &left, &width);
    const auto first = static_cast<int>(left);
    picture->allocate({first, region.top, first + static_cast<int>(width), region.bottom});
    if (region.top > 0) jpeg_skip_scanlines(&info_, static_cast<JDIMENSION>(region.top));
    for (int y = region.top; y < region.bottom; ++y) {
      JSAMPROW row = picture->row(y);
      jpeg_read_scanlines(&info_, &row, 1);
      if (inks_) inks_to_rgb(row, picture->width);
    }
  }

  // Whether an end marker follows what was decoded; files without one were cut off.
  bool ends() const {
    const size_t left = info_.src->bytes_in_buffer;
    const uint8_t* from = info_.src->next_input_byte;
    for (size_t i = left; i >= 2; --i) {
      if (from[i - 2] == 0xff && from[i - 1] == JPEG_EOI) return true;
    }
    // The decoder may have looked ahead, past the marker.
    return bytes_.size() >= 2 && bytes_[bytes_.size() - 2] == 0xff && bytes_.back() == JPEG_EOI;
  }

  jpeg_decompress_struct info_{};
  JpegErrors errors_{};
  BaselineJpeg baseline_;
  std::span<const uint8_t> bytes_;
  bool inks_ = false;
};

}  // namespace

jpeg_error_mgr* JpegErrors::init() {
  jpeg_std_error(&base);
  base.error_exit = give_up;
  base.emit_message = note;
  base.output_message = [](j_common_ptr) {};
  progress.progress_monitor = count_scans;
  clear();
  return &base;
}

void JpegErrors::give_up(j_common_ptr common) {
  auto* errors = reinterpret_cast<JpegErrors*>(common->err);
  if (errors->message[0] == 0) errors->base.format_message(common, errors->message);
  std::longjmp(errors->escape, 1);
}

std::unique_ptr<Decoder> make_jpeg_decoder() { return std::make_unique<JpegDecoder>(); }

}  // namespace headrace::pixels

#endif
