#include "capi/sequence.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>
#include <string>

#include "capi/failure.h"
#include "capi/order.h"
#include "capi/read_failure.h"
#include "core/error.h"

namespace headrace::capi {
namespace {

// A read that the device never answers must not hold up the program's end.
constexpr double kCloseSeconds = 5;
constexpr uint64_t kBatchMax = uint64_t{1} << 31;
constexpr uint64_t kBatchesAheadMax = 4096;
// Beside the one that is asked for next.
constexpr size_t kDecodedAhead = 2;
// Windows of a blocked order that are read beside the one that is cut up.
constexpr uint64_t kWindowsAhead = 2;
// Batches that windows are cut into: of more, a window is read in pieces.
constexpr size_t kBatchesOfWindowsMax = 65536;

// Numbers a thread for good. The system gives a thread's identity to another when it has ended.
uint64_t this_thread() {
  static std::atomic<uint64_t> threads{0};
  thread_local const uint64_t number = threads.fetch_add(1, std::memory_order_relaxed);
  return number;
}

constexpr uint64_t epoch_behind(uint64_t epoch) { return epoch < kEpochMax ? epoch + 1 : 0; }

}  // namespace

Sequence::Sequence(std::shared_ptr<Mounted> mounted, uint64_t seed, uint32_t rank, uint32_t world)
    : mounted_(std::move(mounted)), seed_(seed) {
  if (world == 0 || rank >= world) {
    refuse("rank is " + std::to_string(rank) + " of a world of " + std::to_string(world) +
           ", expected 0 to world - 1");
  }
  mounted_->refuse_foreign();
  slices_ = {mounted_->catalog->samples(), rank, world, world == 1 ? Tail::kExact : Tail::kPad};
  if (slices_.length == 0) refuse(mounted_->where + ": a sequence needs a sample at least");
  order_ = make_order(*mounted_, seed, HR_ORDER_INIT);
}

Sequence::~Sequence() { drop_locked(); }

// For all threads: what they were still to be told is forgotten.
void Sequence::begin_locked(uint64_t epoch, uint64_t position) {
  epoch_ = epoch;
  position_ = position;
  over_ = false;
  passed_ = 0;
  ends_.clear();
}

// What was submitted from there on is not waited for. What is before keeps its windows.
void Sequence::forget_locked(size_t from) {
  ahead_.resize(std::min(from, ahead_.size()));
  if (ahead_.empty()) open_.reset();
  submit_open_locked();
}

void Sequence::drop_locked() {
  ahead_.clear();
  open_.reset();
  if (reader_ == nullptr) return;
  reader_->close(kCloseSeconds);
  reader_.reset();
}

void Sequence::set(int what, uint64_t value) {
  const std::lock_guard lock(mutex_);
  const auto expect = [&](bool right, const char* name, const std::string& expected) {
    if (!right) {
      refuse(std::string(name) + " is " + std::to_string(value) + ", expected " + expected);
    }
  };
  switch (what) {
    case HR_SET_EPOCH:
      expect(value <= kEpochMax, "the epoch", "0 to 2^32 - 1");
      begin_locked(value, 0);
      break;
    case HR_SET_POSITION:
      expect(value <= slices_.length, "the position", "0 to " + std::to_string(slices_.length));
      begin_locked(over_ ? epoch_behind(epoch_) : epoch_, value);
      break;
    case HR_SET_TAIL:
      expect(value >= HR_TAIL_EXACT && value <= HR_TAIL_DROP, "the tail", "one of HR_TAIL_*");
      slices_.tail = static_cast<Tail>(value);
      break;
    case HR_SET_ON_ERROR:
      expect(value == HR_ON_ERROR_FAIL || value == HR_ON_ERROR_MARK, "on_error",
             "one of HR_ON_ERROR_*");
      marks_failed_ = value == HR_ON_ERROR_MARK;
      return;
    case HR_SET_BUFFER_BYTES:
      expect(value > 0, "the buffer's size in bytes", "1 or more");
      buffer_bytes_ = value;
      if (reader_ != nullptr) reader_->turn(std::nullopt, value);
      return;
    case HR_SET_READS_IN_FLIGHT:
      expect(value <= 65536, "the number of reads in flight", "0 to 65536");
      reads_in_flight_ = value;
      drop_locked();
      return;
    default:
      refuse("nothing has the number " + std::to_string(what) + ", expected one of HR_SET_*");
  }
  forget_locked();
}

uint64_t Sequence::get(int what) const {
  const std::lock_guard lock(mutex_);
  switch (what) {
    case HR_SET_EPOCH:
      return over_ ? epoch_behind(epoch_) : epoch_;
    case HR_SET_POSITION:
      return over_ ? 0 : position_;
    case HR_SET_TAIL:
      return static_cast<uint64_t>(slices_.tail);
    case HR_SET_ON_ERROR:
      return marks_failed_ ? HR_ON_ERROR_MARK : HR_ON_ERROR_FAIL;
    case HR_SET_BUFFER_BYTES:
      return buffer_bytes_;
    case HR_SET_READS_IN_FLIGHT:
      return reads_in_flight_;
    default:
      refuse("nothing has the number " + std::to_string(what) + ", expected one of HR_SET_*");
  }
}

void Sequence::order(const hr_order& described) {
  const std::lock_guard lock(mutex_);
  if (begun_) {
    refuse(
        "a batch was asked for, and the order stays what it was then: set it before, or make "
        "another sequence");
  }
  order_ = make_order(*mounted_, seed_, described);
  blocked_ = dynamic_cast<const BlockedOrder*>(order_.get());
}

void Sequence::decode(std::optional<pixels::Recipe> recipe, uint64_t part, unsigned threads) {
  const std::lock_guard lock(mutex_);
  const size_t parts = mounted_->catalog->part_names().size();
  if (recipe && part >= parts) {
    refuse("part is " + std::to_string(part) + ", and samples have " + std::to_string(parts));
  }
  forget_locked();
  pool_.reset();
  recipe_ = std::move(recipe);
  picture_part_ = part;
  if (!recipe_) return;
  if (threads == 0) {
    cpu_set_t own;
    threads =
        sched_getaffinity(0, sizeof own, &own) == 0 ? static_cast<unsigned>(CPU_COUNT(&own)) : 1;
  }
  pool_ = std::make_unique<pixels::DecodePool>(threads, buffer_bytes_);
}

Sequence::Delivery Sequence::next(uint64_t n) {
  if (n == 0 || n > kBatchMax) {
    refuse("a batch of " + std::to_string(n) + " samples, expected 1 to 2^31");
  }
  mounted_->refuse_foreign();
  const std::lock_guard lock(mutex_);
  begun_ = true;
  uint64_t& ends = ends_[this_thread()];
  if (ends > passed_) {  // it was told that this epoch is over, and asks again
    ++passed_;
    end_position_ = position_;
    epoch_ = epoch_behind(epoch_);
    position_ = 0;
    over_ = false;
  }
  if (ends < passed_) {  // others have gone on
    const uint64_t epoch = (epoch_ + kEpochMax + 1 - (passed_ - ends)) & kEpochMax;
    ++ends;
    return {nullptr, epoch, end_position_};
  }
  const Span span = slices_.next(position_, n);
  if (span.end) {
    over_ = true;
    ++ends;
    return {nullptr, epoch_, position_};
  }
  fill_locked(n);
  Delivery delivery = take_locked();
  delivery.epoch = epoch_;
  delivery.position = span.start;
  batch_bytes_ += 0.1 * (static_cast<double>(delivery.batch->bytes) - batch_bytes_);
  position_ = span.after;
  try {
    fill_locked(n);
  } catch (...) {  // this batch is delivered: what those behind it meet, the next call meets again
    forget_locked();
  }
  return delivery;
}

// Whether it was read until then; then it is being decoded.
bool Sequence::read_locked(Ahead* ahead, Clock::time_point until) {
  if (ahead->batch != nullptr) return true;
  std::vector<io::Piece> pieces;
  for (const Part& part : ahead->parts) {
    const auto& [indices, job, batch] = *part.reading;
    if (batch == nullptr) {
      const std::chrono::duration<double> left = until - Clock::now();
      if (job == nullptr || (left.count() <= 0 && !job->done())) return false;
      part.reading->batch = job->wait(std::max(0.0, left.count()));
      if (batch == nullptr) return false;
    }
    pieces.push_back({batch, part.start, part.stop});
  }
  const bool whole =
      pieces.size() == 1 && pieces[0].start == 0 && pieces[0].stop == pieces[0].batch->samples;
  ahead->batch = whole ? ahead->parts[0].reading->batch : reader_->gather(pieces);
  ahead->parts.clear();
  // Before threads look at it: of what was not read nothing is decoded.
  for (const io::Failure& failure : ahead->batch->failures)
    ahead->batch->lengths[failure.slot] = -1;
  if (pool_ != nullptr) {
    ahead->pixels = pool_->submit({.recipes = {*recipe_},
                                   .batch = ahead->batch,
                                   .part = picture_part_,
                                   .seed = seed_,
                                   .epoch = ahead->epoch});
  }
  return true;
}

// The batch in front. One that fails is read anew when it is asked for again, one that is late is
// waited for.
Sequence::Delivery Sequence::take_locked() {
  const double timeout_s = mounted_->options.timeout_s;
  const auto until = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                        std::chrono::duration<double>(std::min(timeout_s, 1e9)));
  bool whole = false;
  try {
    whole = read_locked(&ahead_.front(), until);
    for (size_t i = 1; pool_ != nullptr && whole && i < std::min(ahead_.size(), 1 + kDecodedAhead);
         ++i) {
      if (ahead_[i].pixels != nullptr) continue;
      try {
        if (!read_locked(&ahead_[i], Clock::time_point{})) break;
      } catch (...) {  // those from here on are read anew, and fail in their turn
        forget_locked(i);
      }
    }
    if (whole) {
      Delivery delivery{ahead_.front().batch, 0, 0, ahead_.front().pixels};
      whole = delivery.pixels == nullptr || delivery.pixels->wait(timeout_s);
      if (whole) {
        check_delivery(&delivery);
        ahead_.pop_front();
        return delivery;
      }
    }
  } catch (...) {
    forget_locked();
    throw;
  }
  std::string waits_for = "its pictures to be decoded. Ask for it again.";
  for (const Part& part : ahead_.front().parts) {
    if (part.reading->batch != nullptr) continue;
    waits_for = part.reading->job->waiting_for() + ". Ask for it again, or look at the storage.";
    break;
  }
  throw Failure(HR_ERR_TIMEOUT, mounted_->where + ": a batch was not read and decoded within " +
                                    std::to_string(timeout_s) + " s; it waits for " + waits_for);
}

// Throws for the first sample that failed, or marks and counts all of them.
void Sequence::check_delivery(Delivery* delivery) const {
  io::Batch& batch = *delivery->batch;
  delivery->failed = batch.failures.size();
  if (!marks_failed_ && !batch.failures.empty()) {
    const io::Failure& failure = batch.failures.front();
    fail_read(*mounted_, batch.indices[failure.slot / batch.parts], failure);
  }
  if (delivery->pixels == nullptr) return;
  for (const pixels::DecodeFailure& failure : delivery->pixels->failures) {
    int64_t& length = batch.lengths[failure.sample * batch.parts + picture_part_];
    if (length < 0) continue;
    if (!marks_failed_) fail_picture(*mounted_, batch.indices[failure.sample], failure.reason);
    length = -1;
    ++delivery->failed;
  }
}

void Sequence::open_reader_locked() {
  if (reader_ != nullptr) return;
  io::ReaderOptions options;
  options.budget_bytes = buffer_bytes_;
  options.reads_in_flight = static_cast<unsigned>(reads_in_flight_);
  options.remote_deadline_s = mounted_->options.timeout_s;
  std::vector<int> parts(mounted_->catalog->part_names().size());
  std::iota(parts.begin(), parts.end(), 0);
  reader_ = io::Reader::make(mounted_->catalog, options, std::move(parts));
}

// What reads never runs dry, and the buffer can be filled.
unsigned Sequence::batches_ahead_locked() const {
  const uint64_t filling =
      batch_bytes_ > 0
          ? 1 + static_cast<uint64_t>(static_cast<double>(buffer_bytes_) / batch_bytes_)
          : 0;
  return std::max(reader_->batches_ahead(),
                  static_cast<unsigned>(std::min(filling, kBatchesAheadMax)));
}

bool Sequence::wants_more_locked() const {
  if (ahead_.size() <= batches_ahead_locked()) return true;
  return blocked_ != nullptr && ahead_.size() < kBatchesOfWindowsMax &&
         windows_ <= ahead_.front().first_window + kWindowsAhead;
}

// Submits the batch at hand and those behind it, in this epoch and the next.
void Sequence::fill_locked(uint64_t n) {
  if (ahead_n_ != n) forget_locked();
  ahead_n_ = n;
  open_reader_locked();
  uint64_t epoch = ahead_.empty() ? epoch_ : ahead_.back().epoch;
  uint64_t position = ahead_.empty() ? position_ : ahead_.back().span.after;
  while (wants_more_locked()) {
    Span span = slices_.next(position, n);
    if (span.end) {
      if (position == 0 || epoch == kEpochMax || epoch > epoch_) {  // one epoch ahead is enough
        submit_open_locked();
        return;
      }
      ++epoch;
      position = 0;
      continue;
    }
    add_locked(span, epoch);
    position = span.after;
  }
  // The batch in front is read in any case.
  const std::vector<Part>& parts = ahead_.front().parts;
  if (!parts.empty() && parts.back().reading == open_) submit_open_locked();
}

// Adds a batch: its reading, or its parts of windows, of which those that it leaves are submitted.
void Sequence::add_locked(const Span& span, uint64_t epoch) {
  Ahead ahead{span, epoch};
  if (blocked_ == nullptr) {
    auto reading = std::make_shared<Reading>();
    reading->job = reader_->submit(wrapped(*order_, slices_.length, epoch, span.start, span.stop));
    ahead.parts.push_back({std::move(reading), 0, span.stop - span.start});
  }
  for (uint64_t at = span.start; blocked_ != nullptr && at < span.stop;) {
    const uint64_t position = at % slices_.length;
    const std::pair window{epoch, blocked_->window_at(epoch, position)};
    if (open_ == nullptr || open_window_ != window) {
      submit_open_locked();
      open_ = std::make_shared<Reading>();
      open_window_ = window;
      ++windows_;
    }
    if (at == span.start) ahead.first_window = windows_;
    const uint64_t count = std::min(span.stop - at, window.second.second - position);
    const uint64_t first = open_->indices.size();
    open_->indices.resize(first + count);
    blocked_->indices(epoch, position, position + count, open_->indices.data() + first);
    ahead.parts.push_back({open_, first, first + count});
    at += count;
  }
  ahead_.push_back(std::move(ahead));
}

void Sequence::submit_open_locked() {
  if (open_ == nullptr) return;
  open_->job = reader_->submit(open_->indices);  // a copy: where it fails, it is tried again
  open_->indices = {};
  open_.reset();
}

}  // namespace headrace::capi
