// The functions of headrace.h: each checks its arguments, calls the library, and lets no exception
// out.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "capi/failure.h"
#include "capi/headrace.h"
#include "capi/mounted.h"
#include "capi/sample.h"
#include "capi/sequence.h"
#include "core/crc32c.h"

struct hr_mount_handle {
  std::shared_ptr<headrace::capi::Mounted> mounted;
};
struct hr_sample_handle {
  headrace::capi::Sample sample;
};
struct hr_sequence_handle {
  headrace::capi::Sequence sequence;
};

namespace {

using namespace headrace::capi;

template <class T>
T& checked(T* pointer, const char* what) {
  if (pointer == nullptr) refuse(std::string(what) + " is null");
  return *pointer;
}

// Structures grow at their end. One of an older header ends early; one of a newer header may say
// nothing that we do not know.
template <class T>
T understood(const T* given, size_t least, const char* what) {
  const size_t size = checked(given, what).size;
  if (size < least || size > 4096) {
    refuse(std::string(what) + "'s size is " + std::to_string(size) + ", expected " +
           std::to_string(sizeof(T)) + ": begin with its _INIT value");
  }
  const auto* bytes = reinterpret_cast<const char*>(given);
  for (size_t i = sizeof(T); i < size; ++i) {
    if (bytes[i] == 0) continue;
    throw Failure(HR_ERR_VERSION, std::string(what) +
                                      " is of a newer headrace.h, and sets what this "
                                      "library does not know. Install the newer libheadrace.so.");
  }
  T out{};
  std::memcpy(&out, given, std::min(size, sizeof(T)));
  return out;
}

// For what we fill in: as much of it as the caller has.
template <class T>
void hand_over(const T& from, T* to) {
  const size_t size = std::min(to->size, sizeof(T));
  T filled = from;
  filled.size = to->size;
  std::memcpy(to, &filled, size);
}

double seconds(double value, const char* what) {
  if (std::isfinite(value) && value > 0) return value;
  refuse(std::string(what) + " is " + std::to_string(value) + ", expected a number above 0");
}

MountOptions options_of(const hr_mount_options* given) {
  MountOptions out;
  if (given == nullptr) return out;
  const hr_mount_options options = understood(given, sizeof(hr_mount_options), "options");
  out.timeout_s = seconds(options.timeout_s, "timeout_s");
  out.give_up_s = seconds(options.give_up_s, "give_up_s");
  out.queues = options.queues;
  if (out.queues < 1 || out.queues > 64) {
    refuse("queues is " + std::to_string(out.queues) + ", expected 1 to 64");
  }
  out.digests = options.no_digests == 0;
  if (options.host_nqn != nullptr) out.host_nqn = options.host_nqn;
  if (options.job_folder != nullptr) out.job_folder = options.job_folder;
  return out;
}

namespace pixels = headrace::pixels;

pixels::Recipe recipe_of(const hr_images& given) {
  const auto one_of = [](uint32_t value, uint32_t last, const char* what) {
    if (value <= last) return value;
    refuse(std::string(what) + " is " + std::to_string(value) + ", expected 0 to " +
           std::to_string(last) + ": see headrace.h");
  };
  const auto side = [](uint32_t value, const char* what) {
    if (value <= static_cast<uint32_t>(pixels::kSideMax)) return static_cast<int>(value);
    refuse(std::string(what) + " is " + std::to_string(value) + ", expected at most " +
           std::to_string(pixels::kSideMax));
  };
  pixels::Recipe recipe;
  recipe.height = side(given.height, "height");
  recipe.width = side(given.width, "width");
  recipe.crop = static_cast<pixels::Crop>(one_of(given.crop, HR_CROP_STRETCH, "crop"));
  const int usual =
      static_cast<int>(std::nearbyint(std::max(recipe.height, recipe.width) * 8 / 7.0));
  recipe.short_side = given.short_side == 0 ? usual : side(given.short_side, "short_side");
  recipe.area = {given.scale[0], given.scale[1]};
  recipe.aspect = {given.ratio[0], given.ratio[1]};
  recipe.flip = given.flip;
  recipe.flip_vertical = given.flip_vertical;
  recipe.filter = static_cast<pixels::Filter>(one_of(given.filter, HR_FILTER_LANCZOS, "filter"));
  recipe.type = static_cast<pixels::Type>(one_of(given.dtype, HR_FLOAT32, "dtype"));
  recipe.planar = one_of(given.channels_last, 1, "channels_last") == 0;
  recipe.scaled = one_of(given.exact, 1, "exact") == 0;
  recipe.orient = one_of(given.orient, 1, "orient") == 1;
  if (given.background < -1 || given.background > 0xffffff) {
    refuse("background is " + std::to_string(given.background) + ", expected 0xRRGGBB or -1");
  }
  recipe.background = given.background;
  recipe.pixels_max = given.max_pixels;
  std::copy_n(given.mean, 3, recipe.mean.begin());
  std::copy_n(given.std, 3, recipe.deviation.begin());
  recipe.check();
  return recipe;
}

// What a batch that was handed over owns.
struct Owned {
  std::shared_ptr<headrace::io::Batch> batch;
  std::shared_ptr<pixels::DecodeJob> pixels;
};

hr_batch batch_of(Sequence::Delivery delivery) {
  auto* owner = new Owned{std::move(delivery.batch), std::move(delivery.pixels)};
  const headrace::io::Batch& batch = *owner->batch;
  hr_batch out = HR_BATCH_INIT;
  out.samples = batch.samples;
  out.parts = batch.parts;
  out.buffer = reinterpret_cast<const uint8_t*>(batch.buffer->data);
  out.buffer_bytes = batch.bytes;
  out.offsets = batch.offsets.data();
  out.lengths = batch.lengths.data();
  out.labels = batch.labels.data();
  out.indices = batch.indices.data();
  out.epoch = delivery.epoch;
  out.position = delivery.position;
  out.failed = delivery.failed;
  out.owner = owner;
  if (owner->pixels != nullptr) {
    out.pixels = owner->pixels->pixels->data;
    out.pixel_bytes = owner->pixels->sample_bytes();
  }
  return out;
}

}  // namespace

extern "C" {

uint32_t hr_abi_version(void) { return HR_ABI_VERSION; }

const char* hr_code_name(int code) {
  static constexpr const char* kNames[] = {
      "HR_OK",
      "HR_ERR_ARGUMENT",
      "HR_ERR_NO_STORE",
      "HR_ERR_NO_SAMPLE",
      "HR_ERR_CORRUPT_STORE",
      "HR_ERR_CORRUPT_SAMPLE",
      "HR_ERR_SOURCE_CHANGED",
      "HR_ERR_IO",
      "HR_ERR_TIMEOUT",
      "HR_ERR_FABRIC",
      "HR_ERR_UNSUPPORTED",
      "HR_ERR_VERSION",
      "HR_ERR_MEMORY",
      "HR_ERR_INTERNAL",
      "HR_ERR_PICTURE",
  };
  if (code == HR_END) return "HR_END";
  return code <= 0 && code >= HR_ERR_PICTURE ? kNames[-code] : "an unknown code";
}

const char* hr_last_error(void) { return last_error(); }
int hr_last_errno(void) { return last_errno(); }

int hr_mount(const char* where, const hr_mount_options* options, hr_mount_t** mount) {
  return guarded([&] {
    checked(mount, "mount") = nullptr;
    checked(where, "where");
    auto mounted = headrace::capi::mount(where, options_of(options));
    *mount = new hr_mount_handle{std::move(mounted)};
    return int{HR_OK};
  });
}

int hr_unmount(hr_mount_t* mount) {
  return guarded([&] {
    delete &checked(mount, "mount");
    return int{HR_OK};
  });
}

int hr_stat(hr_mount_t* mount, hr_store_info* info) {
  return guarded([&] {
    const Mounted& mounted = *checked(mount, "mount").mounted;
    if (checked(info, "info").size < sizeof(hr_store_info)) {
      refuse("info's size is " + std::to_string(info->size) + ": begin with HR_STORE_INFO_INIT");
    }
    hr_store_info out = HR_STORE_INFO_INIT;
    out.samples = mounted.catalog->samples();
    out.parts = static_cast<uint32_t>(mounted.catalog->part_names().size());
    out.segments = static_cast<uint32_t>(mounted.catalog->segments().size());
    mounted.fingerprint.copy(out.fingerprint, sizeof out.fingerprint - 1);
    hand_over(out, info);
    return int{HR_OK};
  });
}

int hr_find(hr_mount_t* mount, const char* name, uint64_t* index) {
  return guarded([&] {
    checked(name, "name");
    checked(index, "index") = find_sample(*checked(mount, "mount").mounted, name);
    return int{HR_OK};
  });
}

int hr_open(hr_mount_t* mount, const char* name, hr_sample_t** sample) {
  uint64_t index = 0;
  if (const int code = hr_find(mount, name, &index); code != HR_OK) {
    if (sample != nullptr) *sample = nullptr;
    return code;
  }
  return hr_open_index(mount, index, sample);
}

int hr_open_index(hr_mount_t* mount, uint64_t index, hr_sample_t** sample) {
  return guarded([&] {
    checked(sample, "sample") = nullptr;
    *sample = new hr_sample_handle{Sample(checked(mount, "mount").mounted, index)};
    return int{HR_OK};
  });
}

int64_t hr_sample_index(const hr_sample_t* sample) {
  return guarded([&] { return static_cast<int64_t>(checked(sample, "sample").sample.index()); });
}

int64_t hr_sample_bytes(const hr_sample_t* sample) {
  return guarded([&] { return static_cast<int64_t>(checked(sample, "sample").sample.bytes()); });
}

int hr_sample_label(const hr_sample_t* sample, int64_t* label) {
  return guarded([&] {
    checked(label, "label") = checked(sample, "sample").sample.label();
    return int{HR_OK};
  });
}

int64_t hr_read(hr_sample_t* sample, uint64_t offset, void* buffer, size_t bytes) {
  return guarded([&] {
    if (bytes > 0) checked(static_cast<std::byte*>(buffer), "buffer");
    auto* dest = static_cast<std::byte*>(buffer);
    return static_cast<int64_t>(checked(sample, "sample").sample.read(offset, dest, bytes));
  });
}

int hr_close(hr_sample_t* sample) {
  return guarded([&] {
    delete &checked(sample, "sample");
    return int{HR_OK};
  });
}

int hr_sequence(hr_mount_t* mount, uint64_t seed, uint32_t rank, uint32_t world,
                hr_sequence_t** sequence) {
  return guarded([&] {
    checked(sequence, "sequence") = nullptr;
    *sequence = new hr_sequence_handle{{checked(mount, "mount").mounted, seed, rank, world}};
    return int{HR_OK};
  });
}

int hr_sequence_order(hr_sequence_t* sequence, const hr_order* order) {
  return guarded([&] {
    Sequence& of = checked(sequence, "sequence").sequence;
    of.order(understood(order, sizeof(hr_order), "order"));
    return int{HR_OK};
  });
}

int hr_sequence_set(hr_sequence_t* sequence, int what, uint64_t value) {
  return guarded([&] {
    checked(sequence, "sequence").sequence.set(what, value);
    return int{HR_OK};
  });
}

int hr_sequence_get(hr_sequence_t* sequence, int what, uint64_t* value) {
  return guarded([&] {
    checked(value, "value") = checked(sequence, "sequence").sequence.get(what);
    return int{HR_OK};
  });
}

int hr_sequence_close(hr_sequence_t* sequence) {
  return guarded([&] {
    delete &checked(sequence, "sequence");
    return int{HR_OK};
  });
}

int hr_sequence_images(hr_sequence_t* sequence, const hr_images* images) {
  return guarded([&] {
    Sequence& of = checked(sequence, "sequence").sequence;
    if (images == nullptr) {
      of.decode(std::nullopt, 0, 0);
      return int{HR_OK};
    }
    const hr_images given = understood(images, sizeof(hr_images), "images");
    if (given.threads > pixels::kThreadsMax) {
      refuse("threads is " + std::to_string(given.threads) + ", expected at most " +
             std::to_string(pixels::kThreadsMax));
    }
    of.decode(recipe_of(given), given.part, given.threads);
    return int{HR_OK};
  });
}

int hr_batch_read(hr_sequence_t* sequence, uint64_t n, hr_batch* batch) {
  return guarded([&] {
    if (checked(batch, "batch").size < offsetof(hr_batch, pixels)) {
      refuse("batch's size is " + std::to_string(batch->size) + ": begin with HR_BATCH_INIT");
    }
    if (batch->owner != nullptr) refuse("this batch was not released");
    hand_over(hr_batch HR_BATCH_INIT, batch);
    Sequence::Delivery delivery = checked(sequence, "sequence").sequence.next(n);
    if (delivery.batch == nullptr) {
      batch->epoch = delivery.epoch;
      batch->position = delivery.position;
      return int{HR_END};
    }
    hand_over(batch_of(std::move(delivery)), batch);
    return int{HR_OK};
  });
}

int hr_batch_release(hr_batch* batch) {
  return guarded([&] {
    delete static_cast<Owned*>(checked(batch, "batch").owner);
    hand_over(hr_batch HR_BATCH_INIT, batch);
    return int{HR_OK};
  });
}

uint32_t hr_crc32c(uint32_t crc, const void* data, size_t bytes) {
  return headrace::crc32c(crc, static_cast<const std::byte*>(data), bytes);
}
}
