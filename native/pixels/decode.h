// Decoding one picture into its place in a batch: header, crop, region, resize, layout.
//
// A `Worker` keeps the memory and the libraries' state from picture to picture; it belongs to one
// thread.
#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "pixels/picture.h"
#include "pixels/recipe.h"
#include "pixels/resize.h"

namespace headrace::pixels {

// Pictures that are kept decoded for later epochs, as many as a budget holds. Thread-safe.
class KeptPictures {
 public:
  struct Kept {
    int width, height;
    std::vector<uint8_t> rgb;  // rows of red, green, blue
  };

  explicit KeptPictures(size_t budget_bytes) : budget_(budget_bytes) {}

  std::shared_ptr<const Kept> find(uint64_t index) const;
  // Whether each of some pictures is kept; nobody ever takes one out.
  std::vector<uint8_t> have(std::span<const int64_t> indices) const;
  // Where the budget is spent, nothing happens.
  void add(uint64_t index, std::shared_ptr<const Kept> picture);
  // How many, and their bytes.
  std::pair<size_t, size_t> held() const;
  bool keeps_none() const { return budget_ == 0; }

 private:
  const size_t budget_;
  mutable std::mutex mutex_;
  std::unordered_map<uint64_t, std::shared_ptr<const Kept>> pictures_;
  size_t bytes_ = 0;
};

// Something that becomes of a picture.
struct Output {
  const Recipe* recipe;
  Draw draw;
  void* out;  // `recipe->output_bytes()` bytes
};

class Worker {
 public:
  // Fills all outputs of a picture, which is decoded once, or says why not; then they are zeros,
  // not what was there before. With `keep_short`, begins with what `kept` has, and leaves it there.
  // REQUIRES that recipes of several outputs differ in nothing that is of the picture as a whole,
  // and keep none.
  Reason decode(std::span<const Output> outputs, std::span<const uint8_t> bytes,
                KeptPictures* kept = nullptr);
  Reason decode(const Output& one, std::span<const uint8_t> bytes, KeptPictures* kept = nullptr) {
    return decode(std::span(&one, 1), bytes, kept);
  }

  // What a recipe with `keep_short` keeps of a picture, as its header says, or why that is not
  // known.
  Reason reduction(const Recipe& recipe, std::span<const uint8_t> bytes, Recipe* whole);

  // The mask of the picture that was decoded or resized last: a PNG of one channel and at most 8
  // bits, as large as the picture is upright. Its numbers follow the picture's crop, flips and
  // affine steps, nearest neighbour as Pillow's; `fill` is what comes from outside. Writes a byte
  // for each pixel of the output, or says why not.
  Reason mask(const Recipe& recipe, std::span<const uint8_t> bytes, uint8_t fill, uint8_t* out);

  // Where that picture's pixels lie in the output: its column and row x, y come to
  // x * [0] + y * [1] + [2] and x * [3] + y * [4] + [5].
  std::array<double, 6> mapping(const Recipe& recipe) const;

  // The header alone.
  Reason open(std::span<const uint8_t> bytes, bool orientation, Header* header);

  // The same as `decode` for a picture that somebody else decoded: rows of red, green, blue.
  // REQUIRES sides of at least 1 and below 2^30. Never fails but for want of memory.
  void resize(const Output& one, const uint8_t* rgb, int width, int height);

 private:
  // Opens a picture that is not too large.
  Reason open_within(const Recipe& recipe, std::span<const uint8_t> bytes, Header* header);
  // Of an open picture; with `keep_short` from what it is reduced to.
  Reason reduced(std::span<const Output> outputs, const Header& header, Decoder& decoder,
                 KeptPictures* kept);
  Reason decoded(std::span<const Output> outputs, const Header& header, Decoder& decoder);

  std::array<std::unique_ptr<Decoder>, 5> decoders_;
  Decoder* open_ = nullptr;  // of what was opened last
  // Of the last picture's last output, upright; and of all outputs, as they lie in the file.
  Plan plan_;
  std::vector<Plan> plans_;
  int width_ = 0, height_ = 0;
  Picture picture_;  // its memory is kept
  Resizer resizer_;
  std::vector<uint8_t> moved_;
};

}  // namespace headrace::pixels
