// Baseline JPEG (ITU-T T.81) without libjpeg's entropy decoder, which takes most of a picture's
// time. With AVX2 alone.
//
// For the files that nearly all are: one Huffman-coded scan of 8-bit grey or YCbCr, chroma at full
// size, at half the columns, or at half of both. Whatever else it meets, and whatever is odd with a
// file, it leaves to libjpeg, which says what is wrong. Where nothing is scaled the pixels are
// libjpeg's to the last bit.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "pixels/picture.h"

struct jpeg_decompress_struct;

namespace headrace::pixels {

// Bits that one look-up sees. Most codes fit with the value that follows them.
inline constexpr int kLook = 11;

struct HuffmanTable {
  std::array<uint8_t, 17> counts{};
  std::array<uint8_t, 256> symbols{};
  // See `entry` in baseline_jpeg.cc.
  std::array<uint32_t, 1 << kLook> fast;
  std::array<uint16_t, 1 << kLook> skips;
  std::array<uint64_t, 1 << kLook> pairs;
  // Of codes of each length: the first 16 bits that are beyond them, and where symbols begin.
  std::array<uint32_t, 18> limits;
  std::array<int, 17> offsets;

  // False: no such codes can be.
  bool build(const uint8_t* counts, const uint8_t* symbols, bool ac);
};

// One thread's. Its memory and its tables are kept from picture to picture.
class BaselineJpeg {
 public:
  // Fills at least the region of a picture whose header libjpeg has read. False: this is not such a
  // file, or not a whole one, and `picture` is as good as before.
  bool decode(const jpeg_decompress_struct& info, const Region& region, int shift,
              Picture* picture);

 private:
  struct Component {
    int columns, rows;  // blocks in an MCU
    int side;           // pixels of a block, after scaling
    int width, height;  // of the whole picture, in this component's pixels
    const HuffmanTable *dc, *ac;
    alignas(32) std::array<uint16_t, 64> quantisers;  // in natural order
    size_t stride;
    uint8_t* plane;
  };

  // Where MCUs of a picture lie, and which of them are wanted.
  struct Grid {
    int across, down, left, right, top, bottom;
  };

  bool choose(const jpeg_decompress_struct& info, int shift);
  bool unpack(std::span<const uint8_t> scan, size_t segments);
  template <bool kWanted, class Bits>
  bool read_block(Bits* bits, const Component& component, int* dc, int16_t* block, uint8_t* out);
  bool entropy(const Grid& grid, int interval);
  void convert(const Grid& grid, Picture* picture);
  const uint8_t* chroma_row(const Component& component, const Grid& grid, int y, int left,
                            uint16_t* sums, uint8_t* row) const;

  std::array<Component, 3> components_{};
  size_t count_ = 0;                                     // of components
  std::array<std::array<HuffmanTable, 4>, 2> tables_{};  // DC and AC
  Scratch scan_, rows_;
  std::array<Scratch, 3> planes_;
  std::vector<size_t> starts_;  // of what lies between restart markers, and the end
  const uint8_t* packed_ = nullptr;
};

}  // namespace headrace::pixels
