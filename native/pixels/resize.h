// Resizer: one antialiased resize of a picture's region, flipped and laid out for a batch.
//
// Pillow's resampling: columns first, then rows, each pass rounded to 8 bits, with its weights:
// results are equal to the last bit. With AVX2 where the processor has it.
#pragma once

#include <cstdint>
#include <vector>

#include "pixels/augment.h"
#include "pixels/picture.h"
#include "pixels/recipe.h"

namespace headrace::pixels {

// The weights of an axis.
struct Taps {
  int size = 0;                  // of each output, a multiple of 4
  std::vector<int32_t> first;    // the first input of each output
  std::vector<int16_t> weights;  // of each output: `size` high parts, then as many low ones

  const int16_t* of(int output) const { return &weights[static_cast<size_t>(output) * 2 * size]; }
  // How many taps weigh anything, rounded up to an even number.
  int used(int output) const;
};

class Resizer {
 public:
  // The plan's axes are the picture's as it lies in the file. Writes `recipe.output_bytes()` bytes.
  // REQUIRES that the picture has the plan's region.
  void run(const Recipe& recipe, const Plan& plan, const Picture& picture, void* out);

 private:
  void write(const Recipe& recipe, const Plan& plan, void* out);

  Taps x_, y_;
  std::vector<double> sums_;
  Picture half_, small_;  // resized along one axis, and along both
  Augmenter augmenter_;
};

}  // namespace headrace::pixels
