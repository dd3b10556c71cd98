// Rewriting: a JPEG as it is quicker to decode, for stores that are packed once and read often.
//
// Without loss: the same DCT coefficients in one baseline scan, with Huffman codes made for it and
// a restart marker every 128 pixels, so that a crop is found without decoding what lies above it or
// beside it. Or reduced until the short side has so many pixels, and coded anew in the same way.
//
// All metadata are kept, byte for byte and in their order. What is odd with a file (see `Outcome`)
// leaves it as it is. Or pictures of every kind as their pixels (PPM), reduced likewise or not,
// which cost no decoding at all.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace headrace::pixels {

enum class Outcome : uint8_t {
  kOther,  // no JPEG
  kRewritten,
  kAlready,      // it would be rewritten to the same bytes
  kSmall,        // its short side has no more pixels than it may have
  kDamaged,      // libjpeg warns, or gives up
  kUnusual,      // coded as baseline cannot say it: 12 bits, arithmetic, not all bits there, inks
  kMore,         // further pictures, or bytes behind the end, which offsets may point at
  kTooLarge,     // more memory than `kCoefficientBytesMax`
  kGrows,        // rewritten, it would be larger: many times without loss, or at all with loss
  kTurned,       // EXIF turns it, which PPM cannot say
  kTransparent,  // nor this
};
inline constexpr std::array<const char*, 11> kOutcomeNames = {
    "no JPEG",
    "rewritten",
    "as it would be rewritten already",
    "small enough",
    "damaged",
    "coded in an unusual way",
    "with further pictures, or bytes behind the end",
    "too large for the memory that rewriting may take",
    "larger if rewritten",
    "turned by EXIF",
    "transparent"};

inline constexpr size_t kCoefficientBytesMax = size_t{256} << 20;

struct RewriteRecipe {
  int short_side = 0;    // pixels; 0: without loss
  int quality = 92;      // libjpeg's, 1 to 100; with loss alone
  bool decoded = false;  // to PPM
  // Throws Error(kInvalidArgument).
  void check() const;
};

// kRewritten: `result` is what `bytes` became, in memory of this thread, valid until its next call.
// Whatever the bytes are, nothing outside is read. No exception but std::bad_alloc.
Outcome rewrite(const RewriteRecipe& recipe, std::span<const uint8_t> bytes,
                std::span<const uint8_t>* result);

}  // namespace headrace::pixels
