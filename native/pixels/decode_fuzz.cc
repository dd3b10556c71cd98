// Any bytes as a picture: the first two choose the recipe. No crash, nothing read or written
// outside, and what cannot be decoded leaves zeros. What can be rewritten without loss has the
// same coefficients afterwards, and is not rewritten twice.
#include <cstdint>
#include <cstdlib>
#include <utility>
#include <vector>

#include "core/error.h"
#include "pixels/decode.h"
#include "pixels/rewrite.h"
#if HEADRACE_HAVE_JPEG
#include "testing/jpeg.h"
#endif

using namespace headrace::pixels;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  static Worker* const worker = new Worker;
  Recipe recipe;
  recipe.height = 1 + data[0] % 40;
  recipe.width = 1 + data[1] % 40;
  recipe.crop = static_cast<Crop>(data[0] % 3);
  recipe.short_side = 40;
  recipe.filter = static_cast<Filter>(data[1] % 5);
  recipe.type = static_cast<Type>(data[0] / 40 % 4);
  recipe.planar = (data[1] & 64) != 0;
  recipe.orient = (data[1] & 128) != 0;
  recipe.scaled = (data[0] & 128) != 0;
  recipe.flip = recipe.flip_vertical = 0.5;
  if (data[1] % 3 == 0) recipe.keep_short = 40;
  recipe.pixels_max = 1 << 20;
  if ((data[0] & 1) != 0) recipe.background = 0x20ff80;
  recipe.check();
  const std::span<const uint8_t> bytes(data + 2, size - 2);
  std::vector<uint8_t> out(recipe.output_bytes(), 0xee);
  // Whatever its numbers are, what `check` accepts stays inside.
  Step step{.op = static_cast<double>(size % 15), .values = {}};
  for (double& value : step.values) value = data[size - 1] - 20.0;
  std::span<const Step> steps(&step, 1);
  try {
    check(steps, recipe.width, recipe.height);
  } catch (const headrace::Error&) {
    steps = {};
  }
  const Draw draw{1, 2, data[0], steps};
  const Reason reason = worker->decode({&recipe, draw, out.data()}, bytes);
  if (!reason.empty()) {
    for (const uint8_t byte : out) {
      if (byte != 0) std::abort();
    }
  }
  // A second output of another size changes nothing of the first.
  if (recipe.keep_short == 0) {
    Recipe other = recipe;
    std::swap(other.width, other.height);
    other.flip = 0;
    std::vector<uint8_t> again(recipe.output_bytes(), 0xee), second(other.output_bytes(), 0xee);
    const Output outputs[] = {{&recipe, draw, again.data()}, {&other, {3, 4, 5}, second.data()}};
    // More of the picture is needed for it, which may be damaged.
    const bool made = worker->decode(outputs, bytes).empty();
    if (made && reason.empty() && !recipe.scaled && again != out) std::abort();
    for (const uint8_t byte : second) {
      if (!made && byte != 0) std::abort();
    }
    // Masks are of what was decoded last.
    if (reason.empty()) (void)worker->decode({&recipe, draw, out.data()}, bytes);
  }
  // The same bytes as the mask of what they were decoded to.
  if (reason.empty()) {
    std::vector<uint8_t> mask(recipe.output_pixels());
    const bool made = worker->mask(recipe, bytes, 7, mask.data()).empty();
    for (const uint8_t number : mask) {
      if (!made && number != 7) std::abort();
    }
  }
#if HEADRACE_HAVE_JPEG
  std::span<const uint8_t> result;
  const bool reduce = (data[0] & 2) != 0;
  const Outcome outcome = rewrite({reduce ? 1 + data[1] % 40 : 0, 80}, bytes, &result);
  if (outcome != Outcome::kRewritten || reduce) return 0;
  using headrace::testing::coefficients;
  const std::vector<uint8_t> before(bytes.begin(), bytes.end()),
      after(result.begin(), result.end());
  if (coefficients(after) != coefficients(before)) std::abort();
  if (rewrite({}, after, &result) != Outcome::kAlready) std::abort();
#endif
  return 0;
}
