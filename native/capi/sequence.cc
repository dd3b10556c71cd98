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

void Sequence::drop_locked() {
  ahead_.clear();
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
  ahead_.clear();
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
}

void Sequence::decode(std::optional<pixels::Recipe> recipe, uint64_t part, unsigned threads) {
  const std::lock_guard lock(mutex_);
  const size_t parts = mounted_->catalog->part_names().size();
  if (recipe && part >= parts) {
    refuse("part is " + std::to_string(part) + ", and samples have " + std::to_string(parts));
  }
  ahead_.clear();
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
  fill_locked(n);
  return delivery;
}

// Whether it was read, after at most so many seconds; then it is being decoded.
bool Sequence::read_locked(Ahead* ahead, double seconds) {
  if (ahead->batch != nullptr) return true;
  ahead->batch = ahead->job->wait(seconds);
  if (ahead->batch == nullptr) return false;
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
  const std::shared_ptr<io::Job> job = ahead_.front().job;
  bool whole = false;
  try {
    whole = read_locked(&ahead_.front(), timeout_s);
    for (size_t i = 1; pool_ != nullptr && whole && i < std::min(ahead_.size(), 1 + kDecodedAhead);
         ++i) {
      if (ahead_[i].pixels != nullptr) continue;
      if (!ahead_[i].job->done()) break;
      try {
        read_locked(&ahead_[i], 0);
      } catch (...) {  // those from here on are read anew, and fail in their turn
        ahead_.resize(i);
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
    ahead_.clear();
    throw;
  }
  throw Failure(
      HR_ERR_TIMEOUT,
      mounted_->where + ": a batch was not read and decoded within " + std::to_string(timeout_s) +
          " s; it waits for " +
          (job->done() ? "its pictures to be decoded. Ask for it again."
                       : job->waiting_for() + ". Ask for it again, or look at the storage."));
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

// Submits the batch at hand and those behind it, in this epoch and the next.
void Sequence::fill_locked(uint64_t n) {
  if (ahead_n_ != n) ahead_.clear();
  ahead_n_ = n;
  open_reader_locked();
  uint64_t epoch = ahead_.empty() ? epoch_ : ahead_.back().epoch;
  uint64_t position = ahead_.empty() ? position_ : ahead_.back().span.after;
  while (ahead_.size() <= batches_ahead_locked()) {
    Span span = slices_.next(position, n);
    if (span.end) {
      if (position == 0 || epoch == kEpochMax || epoch > epoch_)
        return;  // one epoch ahead is enough
      ++epoch;
      position = 0;
      continue;
    }
    auto indices = wrapped(*order_, slices_.length, epoch, span.start, span.stop);
    ahead_.push_back({span, epoch, reader_->submit(std::move(indices))});
    position = span.after;
  }
}

}  // namespace headrace::capi
