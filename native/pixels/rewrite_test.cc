// What is rewritten has the same coefficients in one baseline scan with a restart marker every
// 128 pixels; what is odd is left alone; any bytes are survived.
#if HEADRACE_HAVE_JPEG

#include "pixels/rewrite.h"

#include <doctest/doctest.h>

#include <cstring>
#include <random>
#include <string>

#include "core/error.h"
#include "testing/jpeg.h"

using namespace headrace::pixels;
using headrace::testing::Bytes;
using headrace::testing::coefficients;
using headrace::testing::encoded;
using File = headrace::testing::JpegFile;
using Kind = headrace::testing::JpegKind;

namespace {

struct Result {
  Outcome outcome;
  Bytes bytes;
};

Result rewritten(const Bytes& bytes, const RewriteRecipe& recipe = {}) {
  std::span<const uint8_t> result = bytes;
  const Outcome outcome = rewrite(recipe, bytes, &result);
  CHECK((outcome == Outcome::kRewritten || result.data() == bytes.data()));
  return {outcome, Bytes(result.begin(), result.end())};
}

Kind random_kind(std::mt19937& random, int side) {
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  Kind kind{.width = 1 + below(side), .height = 1 + below(side)};
  kind.columns = 1 + below(4);
  kind.rows = 1 + below(kind.columns == 4 ? 2 : 4);
  if (kind.columns * kind.rows > 8) kind.rows = 2;
  kind.quality = 5 + below(96);
  kind.interval = below(3) == 0 ? 1 + below(30) : 0;
  kind.grey = below(6) == 0;
  kind.progressive = below(2) == 0;
  kind.optimised = below(2) == 0;
  return kind;
}

}  // namespace

TEST_CASE("Coefficients stay, in one baseline scan with a restart marker every 128 pixels") {
  std::mt19937 random(5);
  for (unsigned i = 0; i < 400; ++i) {
    const Bytes before = encoded(random_kind(random, 150), i);
    CAPTURE(i);
    const Result after = rewritten(before);
    REQUIRE((after.outcome == Outcome::kRewritten || after.outcome == Outcome::kAlready));
    File file(after.bytes);
    CHECK_FALSE(file.info.progressive_mode);
    CHECK(file.info.comps_in_scan == file.info.num_components);
    const int columns = file.info.num_components == 1 ? 1 : file.info.max_h_samp_factor;
    CHECK(file.info.restart_interval == 128u / static_cast<unsigned>(8 * columns));
    CHECK(coefficients(after.bytes) == coefficients(before));
    CHECK(rewritten(after.bytes).outcome == Outcome::kAlready);
  }
}

TEST_CASE("A file that is cut off anywhere, or goes on behind its end, is left alone") {
  for (const bool progressive : {false, true}) {
    const Bytes whole =
        encoded({.width = 60, .height = 45, .interval = 3, .progressive = progressive}, 1);
    for (size_t size = 0; size < whole.size(); ++size) {
      const Result cut = rewritten({whole.begin(), whole.begin() + static_cast<long>(size)});
      CHECK(cut.outcome == (size < 3 ? Outcome::kOther : Outcome::kDamaged));
    }
    for (const std::string& more :
         {std::string("\0", 1), std::string("more"), std::string(5, '\xff')}) {
      Bytes longer = whole;
      longer.insert(longer.end(), more.begin(), more.end());
      CHECK(rewritten(longer).outcome == Outcome::kMore);
      CHECK(rewritten(longer, {20, 90}).outcome == Outcome::kMore);
    }
    CHECK(rewritten(whole).outcome == Outcome::kRewritten);
  }
}

TEST_CASE("Arithmetic coding is left alone") {
  const Bytes bytes = encoded({.width = 60, .height = 45, .arithmetic = true}, 1);
  CHECK(rewritten(bytes).outcome == Outcome::kUnusual);
  CHECK(rewritten(bytes, {20, 90}).outcome == Outcome::kUnusual);
}

TEST_CASE("Sizes that lie are refused before memory is taken for them") {
  Bytes lying = encoded({.width = 60, .height = 45}, 1);
  for (size_t at = 0; at + 8 < lying.size(); ++at) {
    if (lying[at] != 0xff || lying[at + 1] != 0xc0) continue;
    std::memset(&lying[at + 5], 0xf0, 4);
    break;
  }
  CHECK(rewritten(lying).outcome == Outcome::kTooLarge);
  CHECK(rewritten(lying, {20, 90}).outcome == Outcome::kTooLarge);
}

TEST_CASE("Any bytes are survived, and what is rewritten has the coefficients that it had") {
  std::mt19937 random(9);
  int changed = 0;
  for (unsigned i = 0; i < 4000; ++i) {
    Bytes bytes = encoded(random_kind(random, 60), i);
    for (unsigned k = 0; k < 1 + i % 6; ++k) {
      bytes[random() % bytes.size()] = static_cast<uint8_t>(random());
    }
    CAPTURE(i);
    const Result after = rewritten(bytes, {i % 4 == 3 ? 20 : 0, 90});
    if (after.outcome != Outcome::kRewritten || i % 4 == 3) continue;
    ++changed;
    CHECK(coefficients(after.bytes) == coefficients(bytes));
  }
  CHECK(changed > 100);
}

TEST_CASE("Pictures are reduced to a short side, and small ones left alone") {
  for (const bool grey : {false, true}) {
    const Bytes before = encoded({.width = 300, .height = 200, .quality = 95, .grey = grey}, 1);
    const Result after = rewritten(before, {64, 90});
    REQUIRE(after.outcome == Outcome::kRewritten);
    File file(after.bytes);
    CHECK(file.info.image_width == 96);
    CHECK(file.info.image_height == 64);
    CHECK(file.info.num_components == (grey ? 1 : 3));
    CHECK(file.info.restart_interval == (grey ? 16 : 8));
    CHECK(rewritten(after.bytes, {64, 90}).outcome == Outcome::kSmall);
    CHECK(
        rewritten(encoded({.width = 300, .height = 200, .quality = 1, .grey = grey}, 1), {190, 100})
            .outcome == Outcome::kGrows);
  }
  CHECK_THROWS_AS((RewriteRecipe{-1, 90}.check()), headrace::Error);
  CHECK_THROWS_AS((RewriteRecipe{0, 101}.check()), headrace::Error);
}

#endif
