// What Python's tests cannot see: the plain code beside AVX2's, bounds of the region, a pool that
// is turned and ended while it works. Pixels are compared with Pillow's in
// tests/plane/test_images.py.
#include "pixels/decode.h"

#include <doctest/doctest.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>

#include "core/error.h"
#include "pixels/pool.h"
#include "pixels/resize.h"

using namespace headrace;
using namespace headrace::pixels;

namespace {

std::vector<uint8_t> noise(size_t bytes, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<uint8_t> values(bytes);
  for (uint8_t& value : values) value = static_cast<uint8_t>(random());
  return values;
}

// A picture with two rows and columns of other values around it, which nothing may look at.
struct Inside {
  Picture picture;
  Inside(int width, int height, unsigned seed) {
    picture.allocate({0, 0, width, height});
    const auto bytes = noise(picture.stride * static_cast<size_t>(height + 1), seed);
    std::memcpy(picture.data, bytes.data(), bytes.size());
  }
};

std::vector<uint8_t> resized(const Recipe& recipe, const Plan& plan, const Picture& picture) {
  Resizer resizer;
  std::vector<uint8_t> out(recipe.output_bytes());
  resizer.run(recipe, plan, picture, out.data());
  return out;
}

struct WithoutAvx2 {
  const bool had = std::exchange(has_avx2, false);
  ~WithoutAvx2() { has_avx2 = had; }
};

std::shared_ptr<io::Batch> batch_of(const std::vector<std::vector<uint8_t>>& pictures) {
  auto batch = std::make_shared<io::Batch>();
  size_t bytes = 1;
  for (const auto& picture : pictures) bytes += picture.size();
  batch->buffer = Arena::make(0)->acquire(bytes);
  batch->samples = pictures.size();
  int64_t at = 0;
  for (const auto& picture : pictures) {
    if (!picture.empty()) std::memcpy(batch->buffer->data + at, picture.data(), picture.size());
    batch->offsets.push_back(at);
    batch->lengths.push_back(static_cast<int64_t>(picture.size()));
    batch->indices.push_back(static_cast<int64_t>(batch->indices.size()));
    at += static_cast<int64_t>(picture.size());
  }
  batch->bytes = static_cast<uint64_t>(at);
  return batch;
}

}  // namespace

TEST_CASE("AVX2 gives the bytes of the plain code, for every filter, crop, layout and type") {
  std::mt19937 random(5);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  for (int i = 0; i < 400; ++i) {
    Recipe recipe;
    recipe.width = 1 + below(90);
    recipe.height = 1 + below(90);
    recipe.short_side = 90 + below(90);
    recipe.crop = static_cast<Crop>(below(3));
    recipe.filter = static_cast<Filter>(below(5));
    recipe.type = static_cast<Type>(below(4));
    recipe.planar = below(2) != 0;
    recipe.flip = recipe.flip_vertical = 0.5;
    recipe.check();
    const int width = 1 + below(300), height = 1 + below(300);
    Inside inside(width, height, static_cast<unsigned>(i));
    const Plan plan = draw(recipe, width, height, {1, 2, static_cast<uint64_t>(i)});
    const auto out = resized(recipe, plan, inside.picture);
    const WithoutAvx2 without;
    CHECK(resized(recipe, plan, inside.picture) == out);
  }
}

TEST_CASE("Augmentations give the same bytes with AVX2 and without, for every operator") {
  std::mt19937 random(6);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  for (int i = 0; i < 400; ++i) {
    const int width = 1 + below(70), height = 1 + below(70);
    std::array<Step, 3> steps{};
    for (Step& step : steps) {
      step.op = below(static_cast<int>(Op::kCount));
      for (double& value : step.values) value = below(200) / 100.0;
      if (step.op == static_cast<int>(Op::kErase)) step.values = {0, 0, 1, 1, -1, 9};
      if (step.op == static_cast<int>(Op::kBlur)) {
        step.values = {1.0 + 2 * below(width), 1.0 + 2 * below(height), 0.3 + below(90) / 9.0, 1.5};
      }
      if (step.op == static_cast<int>(Op::kHue)) step.values[0] = below(512) - 256;
    }
    check(steps, width, height);
    Augmenter one, other;
    for (int p = 0; p < width * height; ++p) one.pixels.push_back(random() & 0xffffff);
    other.pixels = one.pixels;
    one.run(steps, width, height);
    const WithoutAvx2 without;
    other.run(steps, width, height);
    CHECK(one.pixels == other.pixels);
  }
}

TEST_CASE("Pixels outside the region that a plan names change nothing") {
  for (int i = 0; i < 100; ++i) {
    Recipe recipe;
    recipe.width = recipe.height = 20;
    recipe.filter = static_cast<Filter>(i % 5);
    const Plan plan = draw(recipe, 200, 150, {3, 0, static_cast<uint64_t>(i)});
    Inside one(200, 150, 1), other(200, 150, 2);
    const auto columns = plan.x.inputs(recipe.filter), rows = plan.y.inputs(recipe.filter);
    for (int y = rows[0]; y < rows[1]; ++y) {
      std::memcpy(other.picture.row(y) + columns[0] * 4, one.picture.row(y) + columns[0] * 4,
                  static_cast<size_t>(columns[1] - columns[0]) * 4);
    }
    CHECK(resized(recipe, plan, one.picture) == resized(recipe, plan, other.picture));
  }
}

TEST_CASE("A recipe that contradicts itself is refused") {
  const auto refused = [](auto&& change) {
    Recipe recipe;
    change(recipe);
    CHECK_THROWS_AS(recipe.check(), Error);
  };
  refused([](Recipe& r) { r.width = 0; });
  refused([](Recipe& r) { r.height = kSideMax + 1; });
  refused([](Recipe& r) { r.crop = Crop::kCenter, r.short_side = 223; });
  refused([](Recipe& r) { r.area = {0.5, 0.4}; });
  refused([](Recipe& r) { r.area = {0, 1}; });
  refused([](Recipe& r) { r.aspect = {-1, 1}; });
  refused([](Recipe& r) { r.flip = 1.5; });
  refused([](Recipe& r) { r.deviation[1] = 0; });
  refused([](Recipe& r) { r.pixels_max = 0; });
}

TEST_CASE("A cut that is given is the plan, and is of a picture of its size alone") {
  Recipe recipe;
  recipe.width = 6, recipe.height = 5;
  recipe.crop = Crop::kGiven;
  CHECK_THROWS_AS(recipe.check(), Error);  // no cuts
  const auto give = [&recipe](Cut cut) {
    recipe.cuts = std::make_shared<const std::vector<Cut>>(1, cut);
    recipe.check();
  };
  const Cut cut{100, 80, 20, 30, 40, 50, 20, 10, 14, 5, 1, 0};
  give(cut);
  CHECK(recipe.fits(100, 80, 0));
  CHECK_FALSE(recipe.fits(80, 100, 0));
  CHECK_FALSE(recipe.fits(100, 80, 1));
  const Plan plan = draw(recipe, 100, 80, {9, 9, 0});
  CHECK(plan.x.low == 20);
  CHECK(plan.x.high == 60);
  CHECK(plan.x.scale == 2.0);
  CHECK(plan.x.first == 14);
  CHECK(plan.y.count == 5);
  CHECK(plan.y.scale == 5.0);
  CHECK(plan.flip);
  CHECK_FALSE(plan.flip_vertical);
  for (int field = 0; field < 10; ++field) {
    Cut wrong = cut;
    (&wrong.width)[field] = field < 2 || field > 3 ? std::numeric_limits<int32_t>::max() : -1;
    CHECK_THROWS_AS(give(wrong), Error);
  }
}

TEST_CASE("A pool decodes all pictures of all batches, while its threads are turned") {
  DecodePool pool(1, 1 << 20);
  std::vector<std::shared_ptr<DecodeJob>> jobs;
  Recipe recipe;
  recipe.width = recipe.height = 8;
  for (unsigned i = 0; i < 40; ++i) {
    // Not pictures: every one has its reason, and zeros.
    jobs.push_back(
        pool.submit({.recipes = {recipe}, .batch = batch_of({noise(100, i), {}, noise(7, i)})}));
    pool.turn(1 + i % 5);
  }
  for (const auto& job : jobs) {
    REQUIRE(job->wait(60));
    REQUIRE(job->failures.size() == 3);
    CHECK(job->failures[1].sample == 1);
    CHECK(job->failures[1].reason == "it is empty");
    for (size_t i = 0; i < 3 * recipe.output_bytes(); ++i) {
      REQUIRE(job->pixels->data[i] == std::byte{0});
    }
  }
  CHECK(pool.stats().pictures == 120);
}

TEST_CASE("A pool reduces pictures for other processes, and rings when a batch is done") {
  std::vector<uint8_t> ppm(3 * 60 * 40);
  const auto pixels = noise(ppm.size(), 1);
  const std::string head = "P6\n60 40\n255\n";
  ppm.assign(head.begin(), head.end());
  ppm.insert(ppm.end(), pixels.begin(), pixels.end());
  const auto junk = noise(100, 2);
  Recipe recipe;
  recipe.width = recipe.height = 1;
  recipe.keep_short = 20;
  const int rung = eventfd(0, EFD_CLOEXEC);
  {
    DecodePool pool(3, 1 << 20, 0, Memory::kShared, rung);
    std::vector<std::shared_ptr<DecodeJob>> jobs;
    for (int i = 0; i < 20; ++i) {
      jobs.push_back(
          pool.submit({.recipes = {recipe}, .batch = batch_of({ppm, junk, {}}), .reduces = true}));
    }
    for (const auto& job : jobs) {
      REQUIRE(job->wait(60));
      REQUIRE(job->reduced);
      const io::Batch& batch = *job->reduced;
      const auto* data = reinterpret_cast<const char*>(batch.buffer->data);
      const std::string small = "P6\n30 20\n255\n";
      CHECK(batch.buffer->fd >= 0);
      CHECK(std::string(data + batch.offsets[0], small.size()) == small);
      CHECK(batch.lengths ==
            std::vector<int64_t>{static_cast<int64_t>(small.size()) + 3 * 30 * 20, 100, 0});
      CHECK(std::memcmp(data + batch.offsets[1], junk.data(), junk.size()) == 0);
    }
    uint64_t count = 0;
    REQUIRE(eventfd_read(rung, &count) == 0);
    CHECK(count == 20);
    Recipe keeps_none;
    CHECK_THROWS_AS(
        (void)pool.submit({.recipes = {keeps_none}, .batch = batch_of({ppm}), .reduces = true}),
        Error);
  }
  // Without a file descriptor left, no memory can be shared: whoever asked has what was read.
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  const rlimit none{0, before.rlim_max};
  DecodePool poor(1, 0, 0, Memory::kShared);
  setrlimit(RLIMIT_NOFILE, &none);
  const auto job = poor.submit({.recipes = {recipe}, .batch = batch_of({ppm}), .reduces = true});
  CHECK(job->wait(60));
  setrlimit(RLIMIT_NOFILE, &before);
  CHECK(!job->reduced);
  close(rung);
}

TEST_CASE("A pool that ends leaves no job waiting") {
  std::vector<std::shared_ptr<DecodeJob>> jobs;
  {
    DecodePool pool(2, 0);
    for (unsigned i = 0; i < 50; ++i) {
      jobs.push_back(pool.submit(
          {.recipes = {Recipe()}, .batch = batch_of({noise(1000, i), noise(1000, i)})}));
    }
  }
  for (const auto& job : jobs) {
    CHECK(job->done());
    CHECK(job->failures.size() == 2);
  }
}

TEST_CASE("A part that the batch lacks, and a batch without samples") {
  DecodePool pool(1, 0);
  CHECK_THROWS_AS((void)pool.submit({.recipes = {Recipe()}, .batch = batch_of({}), .part = 1}),
                  Error);
  CHECK(pool.submit({.recipes = {Recipe()}, .batch = batch_of({})})->done());
  // Three steps are not as many of each of two pictures.
  const std::vector<Step> steps(3);
  CHECK_THROWS_AS(
      (void)pool.submit({.recipes = {Recipe()}, .batch = batch_of({{}, {}}), .steps = steps}),
      Error);
}
