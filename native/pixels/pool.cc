#include "pixels/pool.h"

#include <sys/eventfd.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <utility>

#include "core/error.h"

namespace headrace::pixels {
namespace {

double seconds_of(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace

bool DecodeJob::wait(double seconds) const {
  std::unique_lock lock(mutex_);
  return ended_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return done(); });
}

std::span<const uint8_t> DecodeJob::encoded(uint64_t sample, uint64_t of_part) const {
  const uint64_t slot = sample * batch->parts + of_part;
  return {reinterpret_cast<const uint8_t*>(batch->buffer->data) + batch->offsets[slot],
          static_cast<size_t>(std::max<int64_t>(0, batch->lengths[slot]))};
}

size_t DecodeJob::place(size_t output) const {
  if (recipes.size() == 1) return output * recipes.front().output_bytes();
  size_t at = 0;
  for (size_t i = 0; i < output; ++i)
    at += (recipes[i].output_bytes() + 3) / 4 * 4;  // floats lie so
  return at;
}

Reason DecodeJob::follow(Worker& worker, uint64_t sample) {
  const Recipe& recipe = recipes.back();
  mappings[sample] = worker.mapping(recipe);
  if (!masks) return {};
  const size_t each = recipe.output_pixels();
  auto* out = reinterpret_cast<uint8_t*>(masks->data + sample * each);
  return worker.mask(recipe, encoded(sample, *mask_part), mask_fill, out);
}

void DecodeJob::clear(uint64_t sample) {
  if (reduces) return;
  std::fill_n(at(sample), sample_bytes(), std::byte{0});
  const size_t each = recipes.back().output_pixels();
  if (masks) std::fill_n(masks->data + sample * each, each, std::byte{mask_fill});
}

Output DecodeJob::output(uint64_t sample, size_t output) const {
  const size_t outputs = recipes.size(), each = steps.size() / batch->samples / outputs;
  return {&recipes[output],
          {seed, epoch, static_cast<uint64_t>(batch->indices[sample]),
           std::span(steps).subspan((sample * outputs + output) * each, each)},
          at(sample, output)};
}

// A header may say anything. What is longer than its short side by more than this, or makes more of
// its bytes than deflate can, is passed on as it is.
constexpr uint64_t kLongestSides = 16;
constexpr uint64_t kMostOfByte = 1100;

void DecodeJob::lay_out(Worker& worker, Arena& arena) {
  const Recipe& recipe = recipes.front();
  const uint64_t short_side = static_cast<uint64_t>(recipe.keep_short);
  wholes_.resize(batch->samples);
  for (uint64_t sample = 0; sample < batch->samples; ++sample) {
    Recipe& whole = wholes_[sample];
    const auto bytes = encoded(sample, part);
    const uint64_t most =
        std::min(3 * kLongestSides * short_side * short_side, kMostOfByte * bytes.size());
    if (!worker.reduction(recipe, bytes, &whole).empty() || whole.output_bytes() > most) {
      whole.width = 0;
    }
  }
  reduced = room_for_reduced(arena);
}

std::shared_ptr<io::Batch> DecodeJob::room_for_reduced(Arena& arena) const try {
  auto result = std::make_shared<io::Batch>(*batch);
  result->bytes = 0;
  for (uint64_t slot = 0; slot < batch->lengths.size(); ++slot) {
    const Recipe& whole = wholes_[slot / batch->parts];
    if (slot % batch->parts == part && whole.width != 0) {
      const size_t size = ppm_head(whole.width, whole.height).size() + whole.output_bytes();
      result->lengths[slot] = static_cast<int64_t>(size);
    }
    result->offsets[slot] = static_cast<int64_t>(result->bytes);
    result->bytes += static_cast<uint64_t>(result->lengths[slot]);
  }
  result->buffer = arena.acquire(std::max<size_t>(1, result->bytes));
  return result;
} catch (const Error&) {
  return nullptr;
} catch (const std::bad_alloc&) {
  return nullptr;
}

void DecodeJob::reduce(Worker& worker, uint64_t sample, Arena& arena) {
  std::call_once(laid_out_, [&] { lay_out(worker, arena); });
  if (!reduced) return;
  for (uint64_t of_part = 0; of_part < batch->parts; ++of_part) {
    const uint64_t slot = sample * batch->parts + of_part;
    std::byte* to = reduced->buffer->data + reduced->offsets[slot];
    const auto bytes = encoded(sample, of_part);
    if (of_part == part && wholes_[sample].width != 0) {
      const Recipe& whole = wholes_[sample];
      const std::string head = ppm_head(whole.width, whole.height);
      std::memcpy(to, head.data(), head.size());
      // Why it cannot be decoded, its reader finds out as well.
      if (!worker.decode({&whole, {}, to + head.size()}, bytes).empty()) {
        wholes_[sample].width = 0;
        damaged_ = true;
      }
    } else if (!bytes.empty()) {
      std::memcpy(to, bytes.data(), bytes.size());
    }
  }
  if (unreduced_.fetch_sub(1, std::memory_order_acq_rel) == 1 && damaged_) make_good(arena);
}

// Damaged pictures have no room for their own bytes: a batch that has.
void DecodeJob::make_good(Arena& arena) {
  const auto before = std::exchange(reduced, room_for_reduced(arena));
  if (!reduced) return;
  for (uint64_t slot = 0; slot < batch->lengths.size(); ++slot) {
    const bool is_picture = slot % batch->parts == part;
    const bool as_it_was = is_picture && wholes_[slot / batch->parts].width == 0;
    const io::Batch& from = as_it_was ? *batch : *before;
    if (reduced->lengths[slot] == 0) continue;
    std::memcpy(reduced->buffer->data + reduced->offsets[slot],
                from.buffer->data + from.offsets[slot],
                static_cast<size_t>(reduced->lengths[slot]));
  }
}

void DecodeJob::let_go() {
  auto rest = std::make_shared<io::Batch>();
  rest->samples = batch->samples;
  rest->parts = batch->parts;
  rest->indices = batch->indices;
  batch = std::move(rest);
}

DecodePool::DecodePool(unsigned threads, size_t retained_bytes, size_t kept_bytes, Memory memory,
                       int done_fd)
    : done_fd_(done_fd), arena_(Arena::make(retained_bytes, memory)), kept_(kept_bytes) {
  turn(threads);
}

DecodePool::~DecodePool() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  for (const auto& job : jobs_) {
    const std::lock_guard lock(job->mutex_);
    const uint64_t open = job->batch->samples - job->next_;
    for (uint64_t i = job->next_; i < job->batch->samples; ++i) {
      job->clear(i);
      job->reduced = nullptr;
      job->failures.push_back({i, "decoding was stopped", false});
    }
    job->left_ -= open;
    job->ended_.notify_all();
  }
}

void DecodePool::turn(unsigned threads) {
  const std::lock_guard lock(mutex_);
  wanted_ = std::clamp(threads, 1u, kThreadsMax);
  while (threads_.size() < wanted_) {
    threads_.emplace_back(
        [this, number = static_cast<unsigned>(threads_.size())] { work(number); });
  }
  wake_.notify_all();
}

std::shared_ptr<DecodeJob> DecodePool::submit(DecodeRequest request) {
  auto job = std::make_shared<DecodeJob>(std::move(request));
  for (const uint64_t each : {job->part, job->mask_part.value_or(job->part)}) {
    if (each < job->batch->parts) continue;
    throw Error(ErrorKind::kInvalidArgument, "the batch has no part " + std::to_string(each));
  }
  const uint64_t samples = job->batch->samples, outputs = samples * job->recipes.size();
  expect(outputs == 0 ? job->steps.empty() : job->steps.size() % outputs == 0,
         "there are not as many augmentations of each picture");
  expect(!job->reduces || (job->recipes.size() == 1 && job->recipes.front().keep_short != 0),
         "pictures are reduced by one recipe with keep_short");
  job->left_ = job->unreduced_ = samples;
  if (!job->reduces) {
    job->pixels = arena_->acquire(std::max<size_t>(1, samples * job->sample_bytes()));
    job->mappings.resize(samples);
  }
  for (uint64_t i = 0; i < outputs && !job->reduces; ++i) {
    const auto [recipe, draw, out] = job->output(i / job->recipes.size(), i % job->recipes.size());
    check(draw.steps, recipe->width, recipe->height);
  }
  if (job->mask_part) {
    const size_t each = job->recipes.back().output_pixels();
    job->masks = arena_->acquire(std::max<size_t>(1, samples * each));
  }
  job->begun_s = job->ended_s = seconds_of(CLOCK_MONOTONIC);
  const std::lock_guard lock(mutex_);
  std::erase_if(held_, [](const auto& held) { return held.expired(); });
  held_.push_back(job);
  if (job->left_ == 0) return job;
  jobs_.push_back(job);
  wake_.notify_all();
  return job;
}

DecodeStats DecodePool::stats() const {
  std::vector<std::shared_ptr<DecodeJob>> jobs;  // the last to hold one lets go without the lock
  const std::lock_guard lock(mutex_);
  DecodeStats stats = stats_;
  for (const auto& held : held_) {
    jobs.push_back(held.lock());
    if (jobs.back() && jobs.back()->pixels) {
      stats.buffered_bytes += jobs.back()->pixels->capacity;
    }
  }
  return stats;
}

void DecodePool::work(unsigned number) {
  Worker worker;
  std::vector<Output> outputs;
  std::unique_lock lock(mutex_);
  while (true) {
    const double asleep_s = seconds_of(CLOCK_MONOTONIC);
    wake_.wait(lock, [&] { return closed_ || (number < wanted_ && !jobs_.empty()); });
    if (number < wanted_) stats_.idle_s += seconds_of(CLOCK_MONOTONIC) - asleep_s;
    if (closed_) return;
    std::shared_ptr<DecodeJob> job = jobs_.front();
    const uint64_t sample = job->next_++;
    if (sample == 0) job->begun_s = seconds_of(CLOCK_MONOTONIC);
    if (job->next_ == job->batch->samples) jobs_.pop_front();
    lock.unlock();
    const double begun_s = seconds_of(CLOCK_MONOTONIC), cpu_s = seconds_of(CLOCK_THREAD_CPUTIME_ID);
    const auto encoded = job->encoded(sample, job->part);
    Reason reason;
    bool of_mask = false;
    if (job->reduces) {
      job->reduce(worker, sample, *arena_);
    } else {
      outputs.clear();
      for (size_t i = 0; i < job->recipes.size(); ++i) outputs.push_back(job->output(sample, i));
      reason = worker.decode(outputs, encoded, &kept_);
      of_mask = reason.empty();
      if (of_mask) reason = job->follow(worker, sample);
      if (!reason.empty()) job->clear(sample);
    }
    const double ended_s = seconds_of(CLOCK_MONOTONIC);
    const double used_s = seconds_of(CLOCK_THREAD_CPUTIME_ID) - cpu_s;
    lock.lock();
    // Before its consumer hears of it: who was given a batch finds it counted.
    stats_.busy_s += ended_s - begun_s;
    ++stats_.pictures;
    stats_.bytes += encoded.size();
    {
      const std::lock_guard of_job(job->mutex_);
      if (!reason.empty()) job->failures.push_back({sample, std::move(reason), of_mask});
      job->busy_s += ended_s - begun_s;
      job->cpu_s += used_s;
      if (job->left_ == 1) {
        job->ended_s = ended_s;
        std::ranges::sort(job->failures, {}, &DecodeFailure::sample);
      }
      if (job->left_.fetch_sub(1, std::memory_order_release) == 1 && done_fd_ >= 0) {
        eventfd_write(done_fd_, 1);
      }
      job->ended_.notify_all();
    }
    // What it read may be Python's to give back, which may wait for who waits for this lock.
    lock.unlock();
    job.reset();
    lock.lock();
  }
}

}  // namespace headrace::pixels
