#include "pixels/pool.h"

#include <time.h>

#include <algorithm>
#include <chrono>

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

DecodePool::DecodePool(unsigned threads, size_t retained_bytes, size_t kept_bytes)
    : arena_(Arena::make(retained_bytes)), kept_(kept_bytes) {
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
  job->pixels = arena_->acquire(std::max<size_t>(1, samples * job->sample_bytes()));
  for (uint64_t i = 0; i < outputs; ++i) {
    const auto [recipe, draw, out] = job->output(i / job->recipes.size(), i % job->recipes.size());
    check(draw.steps, recipe->width, recipe->height);
  }
  if (job->mask_part) {
    const size_t each = job->recipes.back().output_pixels();
    job->masks = arena_->acquire(std::max<size_t>(1, samples * each));
  }
  job->mappings.resize(samples);
  job->left_ = samples;
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
  const std::lock_guard lock(mutex_);
  DecodeStats stats = stats_;
  for (const auto& held : held_) {
    if (const auto job = held.lock()) stats.buffered_bytes += job->pixels->capacity;
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
    const std::shared_ptr<DecodeJob> job = jobs_.front();
    const uint64_t sample = job->next_++;
    if (sample == 0) job->begun_s = seconds_of(CLOCK_MONOTONIC);
    if (job->next_ == job->batch->samples) jobs_.pop_front();
    lock.unlock();
    const double begun_s = seconds_of(CLOCK_MONOTONIC), cpu_s = seconds_of(CLOCK_THREAD_CPUTIME_ID);
    const auto encoded = job->encoded(sample, job->part);
    outputs.clear();
    for (size_t i = 0; i < job->recipes.size(); ++i) outputs.push_back(job->output(sample, i));
    Reason reason = worker.decode(outputs, encoded, &kept_);
    const bool of_mask = reason.empty();
    if (of_mask) reason = job->follow(worker, sample);
    if (!reason.empty()) job->clear(sample);
    const double ended_s = seconds_of(CLOCK_MONOTONIC);
    const double used_s = seconds_of(CLOCK_THREAD_CPUTIME_ID) - cpu_s;
    lock.lock();
    // Before its consumer hears of it: who was given a batch finds it counted.
    stats_.busy_s += ended_s - begun_s;
    ++stats_.pictures;
    stats_.bytes += encoded.size();
    const std::lock_guard of_job(job->mutex_);
    if (!reason.empty()) job->failures.push_back({sample, std::move(reason), of_mask});
    job->busy_s += ended_s - begun_s;
    job->cpu_s += used_s;
    if (job->left_ == 1) {
      job->ended_s = ended_s;
      std::ranges::sort(job->failures, {}, &DecodeFailure::sample);
    }
    job->left_.fetch_sub(1, std::memory_order_release);
    job->ended_.notify_all();
  }
}

}  // namespace headrace::pixels
