// Decoding: one call submits a batch that was read, one call takes its pixels; the GIL is free
// meanwhile.
#include "bindings/pixels.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>

#include "bindings/arrays.h"
#include "bindings/choice.h"
#include "bindings/gil.h"
#include "core/error.h"
#include "pixels/decode.h"
#include "pixels/pool.h"
#include "pixels/rewrite.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace::bindings {
namespace {

using pixels::DecodeJob;
using pixels::DecodePool;
using pixels::Recipe;

// Joins its threads without the interpreter. A forked child has no such threads to wait for, and
// their locks may be held for ever: there the pool is left alone.
struct PoolHandle {
  std::unique_ptr<DecodePool> pool;
  std::shared_ptr<Arena> encoded;  // of pictures that come one by one
  const pid_t owner = getpid();
  PoolHandle(unsigned threads, uint64_t retained_bytes, uint64_t kept_bytes, bool shared,
             int done_fd)
      : pool(std::make_unique<DecodePool>(threads, retained_bytes, kept_bytes,
                                          shared ? Memory::kShared : Memory::kPrivate, done_fd)),
        encoded(Arena::make(retained_bytes)) {}
  ~PoolHandle() {
    if (getpid() != owner) {
      (void)pool.release();
      return;
    }
    const WithoutGil released;
    pool.reset();
  }
  PoolHandle(const PoolHandle&) = delete;
  PoolHandle& operator=(const PoolHandle&) = delete;
};

// A field of headrace.Images. Throws Error(kInvalidArgument) where it has another type.
template <class T>
T field(nb::handle images, const char* name) {
  const nb::object value = images.attr(name);
  T result;
  if (nb::try_cast(value, result)) return result;
  throw Error(ErrorKind::kInvalidArgument, std::string(name) + " is " + nb::repr(value).c_str() +
                                               ", which has the wrong type or is out of bounds");
}

// Fields that `images` leaves open, or has in another form, are given beside it.
Recipe make_recipe(nb::handle images, int height, int width, double flip, double flip_vertical,
                   int short_side, int keep_short, int32_t background, int blur_kernel,
                   int32_t erase_value) {
  using pixels::Crop, pixels::Filter, pixels::Type, pixels::Policy;
  using Pair = std::array<double, 2>;
  const auto word = [&](const char* name) { return field<std::string>(images, name); };
  Recipe recipe;
  recipe.height = height;
  recipe.width = width;
  recipe.crop = choice<Crop>(
      word("crop"),
      {{"random", Crop::kRandom}, {"center", Crop::kCenter}, {"stretch", Crop::kStretch}}, "crop");
  recipe.short_side = short_side;
  recipe.area = field<Pair>(images, "scale");
  recipe.aspect = field<Pair>(images, "ratio");
  recipe.flip = flip;
  recipe.flip_vertical = flip_vertical;
  recipe.filter = choice<Filter>(word("filter"),
                                 {{"box", Filter::kBox},
                                  {"bilinear", Filter::kBilinear},
                                  {"hamming", Filter::kHamming},
                                  {"bicubic", Filter::kBicubic},
                                  {"lanczos", Filter::kLanczos}},
                                 "filter");
  recipe.type = choice<Type>(word("dtype"),
                             {{"uint8", Type::kUint8},
                              {"float16", Type::kFloat16},
                              {"bfloat16", Type::kBfloat16},
                              {"float32", Type::kFloat32}},
                             "dtype");
  recipe.planar = choice<bool>(word("layout"), {{"nchw", true}, {"nhwc", false}}, "layout");
  recipe.scaled = !field<bool>(images, "exact");
  recipe.orient = field<bool>(images, "orient");
  recipe.keep_short = keep_short;
  recipe.background = background;
  recipe.pixels_max = field<uint64_t>(images, "max_pixels");
  recipe.mean = field<std::array<float, 3>>(images, "mean");
  recipe.deviation = field<std::array<float, 3>>(images, "std");
  const auto policy = field<std::optional<std::string>>(images, "augment");
  recipe.augmentations = {
      .padding = field<int>(images, "padding"),
      .policy = policy ? choice<Policy>(*policy,
                                        {{"randaugment", Policy::kRandAugment},
                                         {"trivialaugment", Policy::kTrivialAugment}},
                                        "augment")
                       : Policy::kNone,
      .operations = field<int>(images, "operations"),
      .magnitude = field<int>(images, "magnitude"),
      .jitter = field<std::array<double, 4>>(images, "jitter"),
      .grey = field<double>(images, "grey"),
      .blur = field<double>(images, "blur"),
      .blur_sigma = field<Pair>(images, "blur_sigma"),
      .blur_kernel = blur_kernel,
      .erase = field<double>(images, "erase"),
      .erase_scale = field<Pair>(images, "erase_scale"),
      .erase_ratio = field<Pair>(images, "erase_ratio"),
      .erase_value = erase_value};
  recipe.check();
  return recipe;
}

// For pictures that come one by one, in the calling thread; its memory is kept, as a pool's threads
// keep theirs.
pixels::Worker& own_worker() {
  thread_local pixels::Worker worker;
  return worker;
}

using PixelBytes = nb::ndarray<nb::numpy, uint8_t, nb::ndim<2>>;

const DecodeJob& finished(nb::handle_t<DecodeJob> self) {
  const auto& job = nb::cast<const DecodeJob&>(self);
  expect(job.done(), "the batch is not decoded yet");
  return job;
}

// Writable: the buffers are this batch's alone, until its last array goes.
PixelBytes pixel_bytes(nb::handle_t<DecodeJob> self, uint64_t output) {
  const DecodeJob& job = finished(self);
  expect(output < job.recipes.size(), "the batch has no such output");
  return PixelBytes(reinterpret_cast<uint8_t*>(job.at(0, output)),
                    {job.batch->samples, job.recipes[output].output_bytes()}, self,
                    {static_cast<int64_t>(job.sample_bytes()), 1});
}

PixelBytes mask_bytes(nb::handle_t<DecodeJob> self) {
  const DecodeJob& job = finished(self);
  expect(job.masks != nullptr, "the batch has no masks");
  return PixelBytes(reinterpret_cast<uint8_t*>(job.masks->data),
                    {job.batch->samples, job.recipes.back().output_pixels()}, self);
}

using Mappings = nb::ndarray<nb::numpy, const double, nb::ndim<2>>;

Mappings mappings(nb::handle_t<DecodeJob> self) {
  const DecodeJob& job = finished(self);
  return Mappings(job.mappings.data(), {job.batch->samples, 6}, self);
}

using StepsIn = nb::ndarray<const double, nb::shape<-1, -1, sizeof(pixels::Step) / sizeof(double)>,
                            nb::c_contig, nb::device::cpu>;

// (pictures, steps of each, 7); None: there are no steps.
std::vector<pixels::Step> steps_of(const std::optional<StepsIn>& steps, uint64_t pictures) {
  if (!steps || pictures == 0) return {};
  expect(steps->shape(0) == pictures, "there are not augmentations for each picture");
  const auto* first = reinterpret_cast<const pixels::Step*>(steps->data());
  return {first, first + steps->shape(0) * steps->shape(1)};
}

std::vector<pixels::Step> drawn(const Recipe& recipe, uint64_t seed, uint64_t epoch,
                                std::span<const int64_t> indices) {
  return pixels::draw_steps(recipe.augmentations, recipe.width, recipe.height, seed, epoch,
                            indices);
}

using StepsOut = nb::ndarray<nb::numpy, const double, nb::ndim<3>>;

std::optional<StepsOut> recipe_steps(const Recipe& recipe, uint64_t seed, uint64_t epoch,
                                     const ArrayIn<int64_t>& indices) {
  const size_t each = recipe.augmentations.count();
  if (each == 0) return std::nullopt;
  auto* steps = new std::vector(drawn(recipe, seed, epoch, view(indices)));
  const nb::capsule owner(
      steps, [](void* p) noexcept { delete static_cast<std::vector<pixels::Step>*>(p); });
  constexpr size_t kNumbers = sizeof(pixels::Step) / sizeof(double);
  return StepsOut(steps->data(), {indices.size(), each, kNumbers}, owner);
}

using RgbIn = nb::ndarray<const uint8_t, nb::shape<-1, -1, 3>, nb::c_contig, nb::device::cpu>;

// What this library could not decode and somebody else did.
pixels::Reason replace(DecodeJob& job, uint64_t sample, const RgbIn& rgb, uint64_t output) {
  expect(job.done() && sample < job.batch->samples && output < job.recipes.size(),
         "the batch is not decoded yet, or has no such sample or output");
  expect(rgb.size() != 0 && rgb.shape(0) < pixels::kInputMax && rgb.shape(1) < pixels::kInputMax,
         "the picture has no pixels, or a side of 2^30 and more");
  const auto width = static_cast<int>(rgb.shape(1)), height = static_cast<int>(rgb.shape(0));
  const pixels::Output one = job.output(sample, output);
  expect(one.recipe->fits(width, height, one.draw.index),
         "the picture's size is not the one that was given");
  const WithoutGil released;
  own_worker().resize(one, rgb.data(), width, height);
  return job.follow(own_worker(), sample);
}

template <class T>
void blend(const nb::ndarray<T, nb::c_contig, nb::device::cpu>& one,
           const nb::ndarray<T, nb::c_contig, nb::device::cpu>& other, double share) {
  expect(one.size() == other.size() && share >= 0 && share <= 1,
         "pictures of two sizes, or a share that is not between 0 and 1");
  const WithoutGil released;
  pixels::blend(std::span(one.data(), one.size()), std::span(other.data(), other.size()), share);
}

using CutsIn = nb::ndarray<const int32_t, nb::shape<-1, sizeof(pixels::Cut) / sizeof(int32_t)>,
                           nb::c_contig, nb::device::cpu>;

// The tuple keeps its bytes while they are copied.
std::shared_ptr<DecodeJob> submit_given(
    PoolHandle& handle, std::vector<Recipe> recipes,
    const nb::typed<nb::tuple, nb::bytes, nb::ellipsis>& pictures, const CutsIn& cuts,
    const std::optional<StepsIn>& given_steps) {
  const size_t outputs = pictures.size() * recipes.size();
  expect(!recipes.empty() && cuts.shape(0) == outputs,
         "there is not one cut for each output of a picture");
  std::vector<std::span<const std::byte>> encoded;
  for (const nb::handle picture : pictures) {
    const auto bytes = nb::cast<nb::bytes>(picture);
    encoded.emplace_back(static_cast<const std::byte*>(bytes.data()), bytes.size());
  }
  std::vector<pixels::Step> steps = steps_of(given_steps, outputs);
  const auto* first = reinterpret_cast<const pixels::Cut*>(cuts.data());
  const WithoutGil released;
  for (size_t k = 0; k < recipes.size(); ++k) {
    std::vector<pixels::Cut> own;
    for (size_t i = k; i < outputs; i += recipes.size()) own.push_back(first[i]);
    recipes[k].crop = pixels::Crop::kGiven;
    recipes[k].cuts = std::make_shared<const std::vector<pixels::Cut>>(std::move(own));
    recipes[k].check();
  }
  auto batch = std::make_shared<io::Batch>();
  batch->samples = encoded.size();
  for (const auto& picture : encoded) {
    batch->offsets.push_back(static_cast<int64_t>(batch->bytes));
    batch->lengths.push_back(static_cast<int64_t>(picture.size()));
    batch->bytes += picture.size();
  }
  batch->indices.resize(encoded.size());
  std::iota(batch->indices.begin(), batch->indices.end(), 0);
  batch->buffer = handle.encoded->acquire(std::max<size_t>(1, batch->bytes));
  for (size_t i = 0; i < encoded.size(); ++i) {
    if (encoded[i].empty()) continue;
    std::memcpy(batch->buffer->data + batch->offsets[i], encoded[i].data(), encoded[i].size());
  }
  return handle.pool->submit(
      {.recipes = std::move(recipes), .batch = std::move(batch), .steps = std::move(steps)});
}

std::optional<std::pair<int, int>> picture_size(const nb::bytes& encoded) {
  pixels::Header header;
  const auto* first = static_cast<const uint8_t*>(encoded.data());
  const WithoutGil released;
  if (!own_worker().open({first, encoded.size()}, false, &header).empty()) return std::nullopt;
  return std::pair(header.width, header.height);
}

// Pictures back to back, of `lengths` bytes each.
nb::tuple rewrite_pictures(const ArrayIn<uint8_t>& pictures, const ArrayIn<uint64_t>& lengths,
                           int short_side, int quality, bool decoded) {
  const pixels::RewriteRecipe recipe{short_side, quality, decoded};
  recipe.check();
  std::vector<uint8_t> all;
  std::vector<uint64_t> sizes;
  std::vector<uint8_t> outcomes;
  {
    const WithoutGil released;
    const std::span<const uint8_t> bytes = view(pictures);
    size_t at = 0;
    all.reserve(bytes.size());
    for (const uint64_t length : view(lengths)) {
      if (length > bytes.size() - at) break;
      std::span<const uint8_t> picture = bytes.subspan(at, length);
      at += length;
      outcomes.push_back(static_cast<uint8_t>(pixels::rewrite(recipe, picture, &picture)));
      sizes.push_back(picture.size());
      all.insert(all.end(), picture.begin(), picture.end());
    }
    expect(at == bytes.size() && sizes.size() == lengths.size(),
           "the lengths do not add up to the pictures' bytes");
  }
  return nb::make_tuple(own(std::move(all)), own(std::move(sizes)), own(std::move(outcomes)));
}

nb::dict pool_stats(const PoolHandle& handle) {
  const pixels::DecodeStats stats = handle.pool->stats();
  nb::dict d;
  d["busy_s"] = stats.busy_s;
  d["wait_input_s"] = stats.idle_s;
  d["samples"] = stats.pictures;
  d["bytes"] = stats.bytes;
  d["buffered_bytes"] = stats.buffered_bytes;
  return d;
}

nb::bytes decode_one(const Recipe& recipe, const nb::bytes& encoded, uint64_t seed, uint64_t epoch,
                     uint64_t index, const std::optional<StepsIn>& given_steps) {
  const std::array indices = {static_cast<int64_t>(index)};
  const std::vector<pixels::Step> steps =
      given_steps ? steps_of(given_steps, 1) : drawn(recipe, seed, epoch, indices);
  check(steps, recipe.width, recipe.height);
  std::vector<uint8_t> out(recipe.output_bytes());
  const std::span<const uint8_t> bytes(static_cast<const uint8_t*>(encoded.data()), encoded.size());
  pixels::Reason reason;
  {
    const WithoutGil released;
    reason = own_worker().decode({&recipe, {seed, epoch, index, steps}, out.data()}, bytes);
  }
  if (!reason.empty()) throw Error(ErrorKind::kInvalidArgument, reason);
  return nb::bytes(out.data(), out.size());
}

}  // namespace

void register_pixels(nb::module_& m) {
  static_assert(SharedNatively<DecodeJob>);
  m.def("decode_picture", &decode_one, "recipe"_a, "encoded"_a, "seed"_a, "epoch"_a, "index"_a,
        "steps"_a = nb::none(),
        "One picture, in the calling thread. ValueError: why it cannot be decoded.");
  m.def(
      "augmentation",
      [](const std::string& name, double magnitude, int width, int height) {
        const pixels::Step step = pixels::operator_step(name, magnitude, width, height);
        std::vector<double> numbers{step.op};
        numbers.insert(numbers.end(), step.values.begin(), step.values.end());
        return numbers;
      },
      "name"_a, "magnitude"_a, "width"_a, "height"_a,
      "The step of one of the operators of torchvision's policies: see steps.h.");
  // Of a copy with another type or layout, nobody would see the result.
  constexpr const char* kBlends =
      "Gives each of two pictures its share of itself and the rest of the other, in place.";
  m.def("blend_pictures", &blend<uint8_t>, "one"_a.noconvert(), "other"_a.noconvert(), "share"_a,
        kBlends);
  m.def("blend_pictures", &blend<float>, "one"_a.noconvert(), "other"_a.noconvert(), "share"_a,
        kBlends);
  m.def("picture_size", &picture_size, "encoded"_a,
        "Width and height, as the header says; None: it cannot be read here.");
  m.def(
      "rewrite_pictures", &rewrite_pictures, "pictures"_a, "lengths"_a, "short_side"_a, "quality"_a,
      "decoded"_a = false,
      nb::sig("def rewrite_pictures(pictures: bytes | bytearray | memoryview, lengths: "
              "numpy.typing.NDArray[numpy.uint64], short_side: int, quality: int, decoded: bool = "
              "False) -> "
              "tuple[numpy.typing.NDArray[numpy.uint8], numpy.typing.NDArray[numpy.uint64], "
              "numpy.typing.NDArray[numpy.uint8]]"),
      "Pictures as they are quicker to decode, everything else as it is: their bytes back to back, "
      "their lengths, and an index into `rewrite_outcomes` of each. See rewrite.h.");
  m.attr("rewrite_outcomes") = nb::tuple(nb::cast(pixels::kOutcomeNames));
  nb::class_<Recipe>(m, "PictureRecipe", "What pictures become: see recipe.h.")
      .def_static("make", &make_recipe, "images"_a, nb::kw_only(), "height"_a, "width"_a, "flip"_a,
                  "flip_vertical"_a, "short_side"_a, "keep_short"_a, "background"_a,
                  "blur_kernel"_a, "erase_value"_a,
                  "Of a headrace.Images. ValueError: it cannot be done.")
      .def_prop_ro("output_bytes", &Recipe::output_bytes)
      .def(
          "draw",
          [](const Recipe& recipe, int width, int height, uint64_t seed, uint64_t epoch,
             uint64_t index) {
            expect(width >= 1 && height >= 1, "no pixels");
            const pixels::Plan plan = pixels::draw(recipe, width, height, {seed, epoch, index});
            return nb::make_tuple(plan.x.origin, plan.y.origin, plan.x.scale, plan.y.scale,
                                  plan.x.first, plan.y.first, plan.flip, plan.flip_vertical);
          },
          "width"_a, "height"_a, "seed"_a, "epoch"_a, "index"_a,
          nb::sig("def draw(self, width: int, height: int, seed: int, epoch: int, index: int) -> "
                  "tuple[float, float, float, float, int, int, bool, bool]"),
          "Where a picture of this size is cut: origin, scale and first output of x and y; flips.")
      .def("steps", &recipe_steps, "seed"_a, "epoch"_a, "indices"_a,
           "What is done to pictures after that: float64, shape (pictures, steps, 7), in the order "
           "of augment.h's Step; None: nothing ever is.");
  nb::class_<DecodeJob>(m, "DecodeJob", "A batch that is being decoded.")
      .def("wait", &DecodeJob::wait, "seconds"_a, nb::call_guard<WithoutGil>(),
           "Whether it is done, after at most so many seconds.")
      .def_prop_ro("done", &DecodeJob::done)
      .def_prop_ro(
          "pixels", [](nb::handle_t<DecodeJob> self) { return pixel_bytes(self, 0); },
          "uint8, shape (samples, bytes of one), once it is done.")
      .def("output", &pixel_bytes, "output"_a, "The same of each picture's n-th output.")
      .def(
          "let_go",
          [](nb::handle_t<DecodeJob> self) {
            (void)finished(self);
            nb::cast<DecodeJob&>(self).let_go();
          },
          "Lets go of the encoded bytes; no picture can be replaced any more.")
      .def_prop_ro(
          "reduced",
          [](nb::handle_t<DecodeJob> self) {
            const DecodeJob& job = finished(self);
            return job.reduced ? job.reduced : job.batch;
          },
          nb::sig("def reduced(self, /) -> Batch"),
          "The batch with its pictures as PPM, reduced, but for those that cannot be decoded here.")
      .def_prop_ro("masks", &mask_bytes, "uint8, shape (samples, pixels of one), likewise.")
      .def_prop_ro("mappings", &mappings, "float64, shape (samples, 6): see decode.h.")
      .def_prop_ro(
          "failures",
          [](const DecodeJob& job) {
            nb::list list;
            for (const auto& failure : job.failures) {
              list.append(nb::make_tuple(failure.sample, failure.reason, failure.of_mask));
            }
            return list;
          },
          nb::sig("def failures(self, /) -> list[tuple[int, str, bool]]"),
          "Samples that could not be decoded, why, and whether that is their masks' fault. Their "
          "pixels are zeros.")
      .def("replace", &replace, "sample"_a, "rgb"_a, "output"_a = 0,
           "Puts a picture that was decoded elsewhere in a sample's place: uint8, shape (height, "
           "width, 3). Returns why its mask could not be decoded; '': it was, or there is none.")
      .def_prop_ro(
          "times",
          [](const DecodeJob& job) {
            return nb::make_tuple(job.begun_s, job.ended_s, job.busy_s, job.cpu_s);
          },
          nb::sig("def times(self, /) -> tuple[float, float, float, float]"),
          "When it began and ended, monotonic; seconds of threads and of processors that it took.");
  nb::class_<PoolHandle>(m, "DecodePool", "Threads that decode pictures.")
      .def(nb::init<unsigned, uint64_t, uint64_t, bool, int>(), "threads"_a, "retained_bytes"_a,
           "kept_bytes"_a = 0, "shared"_a = false, "done_fd"_a = -1)
      .def_prop_ro(
          "kept", [](const PoolHandle& handle) { return handle.pool->kept().held(); },
          "Pictures that are kept decoded, and their bytes.")
      .def(
          "keeps",
          [](const PoolHandle& handle, const ArrayIn<int64_t>& indices) {
            return own(handle.pool->kept().have(view(indices)));
          },
          "indices"_a, "Whether each of these pictures is kept: uint8, 1 or 0.")
      .def(
          "submit",
          [](PoolHandle& handle, const Recipe& recipe, uint64_t seed, uint64_t epoch,
             std::shared_ptr<io::Batch> batch, uint64_t part, std::optional<uint64_t> mask_part,
             uint8_t mask_fill) {
            pixels::DecodeRequest request{.recipes = {recipe},
                                          .batch = std::move(batch),
                                          .part = part,
                                          .seed = seed,
                                          .epoch = epoch,
                                          .steps = {},
                                          .mask_part = mask_part,
                                          .mask_fill = mask_fill};
            const WithoutGil released;
            request.steps = drawn(recipe, seed, epoch, request.batch->indices);
            return handle.pool->submit(std::move(request));
          },
          "recipe"_a, "seed"_a, "epoch"_a, "batch"_a, "part"_a, "mask_part"_a = nb::none(),
          "mask_fill"_a = 0, "Queues one batch; returns at once.")
      .def(
          "reduce",
          [](PoolHandle& handle, const Recipe& recipe, std::shared_ptr<io::Batch> batch,
             uint64_t part) {
            const WithoutGil released;
            return handle.pool->submit(
                {.recipes = {recipe}, .batch = std::move(batch), .part = part, .reduces = true});
          },
          "recipe"_a, "batch"_a, "part"_a,
          "Queues a batch whose pictures become what `keep_short` keeps of them; see "
          "`DecodeJob.reduced`.")
      .def(
          "submit_given", &submit_given, "recipes"_a, "pictures"_a, "cuts"_a,
          "steps"_a = nb::none(),
          "The same for encoded pictures, bytes each, of which each is decoded once and becomes an "
          "output by each recipe, cut as given: int32, shape (pictures x recipes, 12), in the "
          "order of recipe.h's Cut; steps: float64, shape (pictures x recipes, of each, 7), in "
          "the order of augment.h's Step.")
      .def(
          "turn", [](PoolHandle& handle, unsigned threads) { handle.pool->turn(threads); },
          "threads"_a)
      .def_prop_ro("mapped_bytes",
                   [](const PoolHandle& handle) { return handle.pool->mapped_bytes(); })
      .def("stats", &pool_stats, nb::sig("def stats(self) -> dict[str, typing.Any]"));
}

}  // namespace headrace::bindings
