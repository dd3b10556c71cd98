// JPEGs of every kind for tests, and libjpeg's own pixels of them.
#pragma once

#include <stdio.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <random>
#include <vector>

// After <stdio.h>, which it needs.
// clang-format off
#include <jpeglib.h>
// clang-format on

namespace headrace::testing {

using Bytes = std::vector<uint8_t>;

struct JpegKind {
  int width, height, columns = 2, rows = 2, quality = 90, interval = 0;
  bool grey = false, progressive = false, optimised = false, arithmetic = false;
};

[[noreturn]] inline void fail(j_common_ptr) { throw std::bad_alloc(); }

// Waves, edges and noise.
inline Bytes encoded(const JpegKind& kind, unsigned seed) {
  jpeg_compress_struct info;
  jpeg_error_mgr errors;
  info.err = jpeg_std_error(&errors);
  jpeg_create_compress(&info);
  unsigned char* out = nullptr;
  unsigned long size = 0;
  jpeg_mem_dest(&info, &out, &size);
  info.image_width = static_cast<JDIMENSION>(kind.width);
  info.image_height = static_cast<JDIMENSION>(kind.height);
  info.input_components = kind.grey ? 1 : 3;
  info.in_color_space = kind.grey ? JCS_GRAYSCALE : JCS_RGB;
  jpeg_set_defaults(&info);
  jpeg_set_quality(&info, kind.quality, TRUE);
  info.comp_info[0].h_samp_factor = kind.columns;
  info.comp_info[0].v_samp_factor = kind.rows;
  info.restart_interval = static_cast<unsigned>(kind.interval);
  info.optimize_coding = kind.optimised ? TRUE : FALSE;
  info.arith_code = kind.arithmetic ? TRUE : FALSE;
  if (kind.progressive) jpeg_simple_progression(&info);
  jpeg_start_compress(&info, TRUE);
  std::mt19937 random(seed);
  Bytes row(static_cast<size_t>(kind.width * info.input_components));
  for (int y = 0; y < kind.height; ++y) {
    for (size_t x = 0; x < row.size(); ++x) {
      const auto wave = static_cast<int>(100 + (x * 7 + static_cast<size_t>(y) * 3) % 97);
      const int edge = (x / 40 + static_cast<size_t>(y) / 30) % 2 != 0 ? 90 : -60;
      row[x] =
          static_cast<uint8_t>(std::clamp(wave + edge + static_cast<int>(random() % 25), 0, 255));
    }
    JSAMPROW at = row.data();
    jpeg_write_scanlines(&info, &at, 1);
  }
  jpeg_finish_compress(&info);
  jpeg_destroy_compress(&info);
  Bytes bytes(out, out + size);
  std::free(out);
  return bytes;
}

// A file whose header was read.
struct JpegFile {
  jpeg_decompress_struct info;
  jpeg_error_mgr errors;
  explicit JpegFile(const Bytes& bytes) {
    info.err = jpeg_std_error(&errors);
    errors.error_exit = fail;
    errors.emit_message = [](j_common_ptr, int) {};
    jpeg_create_decompress(&info);
    jpeg_mem_src(&info, bytes.data(), bytes.size());
    jpeg_read_header(&info, TRUE);
  }
  ~JpegFile() { jpeg_destroy_decompress(&info); }
  JpegFile(const JpegFile&) = delete;
  JpegFile& operator=(const JpegFile&) = delete;

  // The whole picture, by libjpeg.
  Bytes whole(int shift, int* width, int* height) {
    info.out_color_space = JCS_EXT_RGBX;
    info.scale_num = 1;
    info.scale_denom = 1u << shift;
    jpeg_start_decompress(&info);
    *width = static_cast<int>(info.output_width);
    *height = static_cast<int>(info.output_height);
    Bytes pixels(size_t{4} * info.output_width * info.output_height);
    while (info.output_scanline < info.output_height) {
      JSAMPROW row = &pixels[size_t{4} * info.output_width * info.output_scanline];
      jpeg_read_scanlines(&info, &row, 1);
    }
    return pixels;
  }
};

// All coefficients of a file, component by component, with its sizes before them.
inline std::vector<int> coefficients(const Bytes& bytes) {
  JpegFile file(bytes);
  jvirt_barray_ptr* arrays = jpeg_read_coefficients(&file.info);
  std::vector<int> all;
  for (int c = 0; c < file.info.num_components; ++c) {
    const jpeg_component_info& info = file.info.comp_info[c];
    for (const auto value : {info.width_in_blocks, info.height_in_blocks}) {
      all.push_back(static_cast<int>(value));
    }
    for (const auto value : info.quant_table->quantval) all.push_back(value);
    for (JDIMENSION y = 0; y < info.height_in_blocks; ++y) {
      const auto rows = file.info.mem->access_virt_barray(
          reinterpret_cast<j_common_ptr>(&file.info), arrays[c], y, 1, FALSE);
      for (JDIMENSION x = 0; x < info.width_in_blocks; ++x) {
        all.insert(all.end(), rows[0][x], rows[0][x] + DCTSIZE2);
      }
    }
  }
  return all;
}

}  // namespace headrace::testing
