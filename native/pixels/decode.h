// Decoding one picture into its place in a batch: header, crop, region, resize, layout.
//
// A `Worker` keeps the memory and the libraries' state from picture to picture; it belongs to one
// thread.
#pragma once

#include <array>
#include <memory>
#include <span>

#include "pixels/picture.h"
#include "pixels/recipe.h"
#include "pixels/resize.h"

namespace headrace::pixels {

class Worker {
 public:
  // Writes `recipe.output_bytes()` bytes to `out`, or says why not; then `out` is zeros, not what
  // was there before.
  Reason decode(const Recipe& recipe, const Draw& draw, std::span<const uint8_t> bytes, void* out);

  // The header alone.
  Reason open(std::span<const uint8_t> bytes, bool orientation, Header* header);

  // The same as `decode` for a picture that somebody else decoded: rows of red, green, blue.
  // REQUIRES sides of at least 1 and below 2^30. Never fails but for want of memory.
  void resize(const Recipe& recipe, const Draw& draw, const uint8_t* rgb, int width, int height,
              void* out);

 private:
  Reason decoded(const Recipe& recipe, const Draw& draw, std::span<const uint8_t> bytes, void* out);
  Reason opened(std::span<const uint8_t> bytes, bool orientation, Header* header,
                Decoder** decoder);
  Decoder& decoder_of(Format format);

  std::array<std::unique_ptr<Decoder>, 4> decoders_;
  Resizer resizer_;
  Scratch memory_;
};

}  // namespace headrace::pixels
