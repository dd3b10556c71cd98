// The pixels of our own JPEG decoder are libjpeg's, for every sampling, size, region and restart
// interval; what it cannot vouch for it leaves alone.
#if HEADRACE_HAVE_JPEG && defined(__x86_64__)

#include "pixels/baseline_jpeg.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <random>

#include "testing/jpeg.h"

using namespace headrace::pixels;
using headrace::testing::Bytes;
using headrace::testing::encoded;
using File = headrace::testing::JpegFile;
using Kind = headrace::testing::JpegKind;

namespace {

// The largest difference of a region from libjpeg's pixels; -1: the file was left alone.
int difference(BaselineJpeg& decoder, const Bytes& bytes, const Region& region, int shift) {
  File file(bytes);
  Picture picture;
  if (!decoder.decode(file.info, region, shift, &picture)) return -1;
  int width, height, largest = 0;
  const Bytes expected = file.whole(shift, &width, &height);
  REQUIRE(region.right <= width);
  REQUIRE(region.bottom <= height);
  REQUIRE(picture.left <= region.left);
  REQUIRE(picture.left + picture.width >= region.right);
  for (int y = region.top; y < region.bottom; ++y) {
    for (int x = region.left; x < region.right; ++x) {
      for (int c = 0; c < 3; ++c) {
        const int ours = picture.row(y)[4 * (x - picture.left) + c];
        const int theirs = expected[static_cast<size_t>(4 * (y * width + x) + c)];
        largest = std::max(largest, std::abs(ours - theirs));
      }
    }
  }
  return largest;
}

}  // namespace

TEST_CASE("Pixels are libjpeg's, and nearly so where they are scaled") {
  if (!has_avx2) return;
  std::mt19937 random(11);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  BaselineJpeg decoder;
  for (unsigned i = 0; i < 600; ++i) {
    Kind kind{.width = 1 + below(200), .height = 1 + below(200)};
    kind.columns = 1 + below(2);
    kind.rows = kind.columns == 2 ? 1 + below(2) : 1;
    kind.quality = 30 + below(71);
    kind.interval = below(3) == 0 ? 1 + below(30) : 0;
    kind.grey = below(6) == 0;
    kind.optimised = below(2) == 0;
    const int shift = below(2) == 0 ? 0 : below(4);
    const int width = (kind.width + (1 << shift) - 1) >> shift,
              height = (kind.height + (1 << shift) - 1) >> shift;
    const int left = below(width), top = below(height);
    const Region region{left, top, left + 1 + below(width - left), top + 1 + below(height - top)};
    CAPTURE(i);
    CAPTURE(shift);
    const int largest = difference(decoder, encoded(kind, i), region, shift);
    const bool halved = kind.columns == 2 && !kind.grey;
    if (largest < 0) {
      // Chroma of one or two columns has no fancy upsampling.
      CHECK(halved);
      CHECK((kind.width <= 32 || shift == 3));
      continue;
    }
    CHECK(largest <= (shift == 0 ? 0 : 4));
  }
}

TEST_CASE("What is not baseline, whole and plain is left to libjpeg") {
  if (!has_avx2) return;
  BaselineJpeg decoder;
  const Region all{0, 0, 90, 70};
  CHECK(difference(decoder, encoded({.width = 90, .height = 70}, 1), all, 0) == 0);
  CHECK(difference(decoder, encoded({.width = 90, .height = 70, .progressive = true}, 1), all, 0) ==
        -1);
  CHECK(difference(decoder, encoded({.width = 90, .height = 70, .columns = 1, .rows = 2}, 1), all,
                   0) == -1);
  const Bytes whole = encoded({.width = 90, .height = 70, .interval = 4}, 1);
  const auto taken = [&](const Bytes& bytes) {
    File file(bytes);
    Picture picture;
    return decoder.decode(file.info, all, 0, &picture);
  };
  REQUIRE(taken(whole));
  // Headers end with the start of the scan: before that, libjpeg itself sees that a file is cut
  // off.
  const auto scan = static_cast<size_t>(
      std::search(whole.begin(), whole.end(), "\xff\xda", "\xff\xda" + 2,
                  [](uint8_t a, char b) { return a == static_cast<uint8_t>(b); }) -
      whole.begin());
  for (size_t size = scan + 14; size < whole.size(); ++size) {
    CHECK_FALSE(taken(Bytes(whole.begin(), whole.begin() + static_cast<ptrdiff_t>(size))));
  }
  int refused = 0, tried = 0;
  for (size_t at = scan + 14; at + 2 < whole.size(); ++at) {
    // A restart marker with a number that is not its turn, lost, or doubled.
    if (whole[at] != 0xff || whole[at + 1] < 0xd0 || whole[at + 1] > 0xd7) continue;
    Bytes other = whole;
    other[at + 1] ^= 1;
    CHECK_FALSE(taken(other));
    other = whole;
    other.erase(other.begin() + static_cast<ptrdiff_t>(at),
                other.begin() + static_cast<ptrdiff_t>(at) + 2);
    CHECK_FALSE(taken(other));
    // Bits that are lost leave most segments too short or too long.
    other = whole;
    other.erase(other.begin() + static_cast<ptrdiff_t>(at) - 8,
                other.begin() + static_cast<ptrdiff_t>(at) - 2);
    refused += taken(other) ? 0 : 1;
    ++tried;
  }
  CHECK(tried > 3);
  CHECK(refused > tried / 2);
}

TEST_CASE("Any bytes in the scan are survived") {
  BaselineJpeg decoder;
  std::mt19937 random(3);
  int taken = 0;
  for (unsigned i = 0; i < 3000; ++i) {
    Kind kind{.width = 40 + static_cast<int>(i % 90), .height = 33};
    kind.columns = kind.rows = 1 + static_cast<int>(i % 2);
    kind.interval = static_cast<int>(i % 5);
    Bytes bytes = encoded(kind, i);
    for (unsigned k = 0; k < 1 + i % 6; ++k) {
      bytes[bytes.size() / 2 + random() % (bytes.size() / 2)] = static_cast<uint8_t>(random());
    }
    File file(bytes);
    Picture picture;
    taken += decoder.decode(file.info, {0, 0, 40, 33}, 0, &picture) ? 1 : 0;
  }
  CHECK(taken < 3000);
}

#endif
