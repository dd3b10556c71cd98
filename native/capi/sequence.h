// Sequence: one rank's batches of an order, read ahead.
//
// Batches of the size that was asked for last are submitted ahead; a batch of another size, another
// epoch or another position drops what was. Of a blocked order, windows are read instead, and
// batches are cut out of them. Thread-safe: each call takes the next batch.
//
// Threads that share a sequence go through its epochs together. Each is told the end of every epoch
// once, counted from the sequence's beginning or from the last HR_SET_EPOCH or HR_SET_POSITION,
// whether it took part or began late; and who asks again after the end of the current epoch begins
// the next.
//
// Invariant: no thread takes a batch of an epoch before it was told the end of those before.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "capi/headrace.h"
#include "capi/mounted.h"
#include "capi/slices.h"
#include "core/order.h"
#include "io/reader.h"
#include "pixels/pool.h"

namespace headrace::capi {

class Sequence {
 public:
  Sequence(std::shared_ptr<Mounted> mounted, uint64_t seed, uint32_t rank, uint32_t world);
  ~Sequence();
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;

  // One of HR_SET_*. Both throw Failure(HR_ERR_ARGUMENT) for what there is not.
  void set(int what, uint64_t value);
  uint64_t get(int what) const;
  // What comes when. Throws Failure(HR_ERR_ARGUMENT), also after the first call of `next`.
  void order(const hr_order& described);
  // Batches have pixels from now on; no recipe: they have none. Throws Failure(HR_ERR_ARGUMENT).
  void decode(std::optional<pixels::Recipe> recipe, uint64_t part, unsigned threads);

  struct Delivery {
    std::shared_ptr<io::Batch> batch;  // null at the end of an epoch
    uint64_t epoch = 0;
    uint64_t position = 0;
    std::shared_ptr<pixels::DecodeJob> pixels = nullptr;
    uint64_t failed = 0;  // samples that are marked
  };
  Delivery next(uint64_t n);

 private:
  using Clock = std::chrono::steady_clock;
  // What is read together: a batch, or this rank's batches of a window.
  struct Reading {
    std::vector<int64_t> indices = {};  // until it is submitted
    std::shared_ptr<io::Job> job = nullptr;
    std::shared_ptr<io::Batch> batch = nullptr;  // once it was read
  };
  struct Part {
    std::shared_ptr<Reading> reading;
    uint64_t start;
    uint64_t stop;
  };
  struct Ahead {
    Span span;
    uint64_t epoch;
    uint64_t first_window = 0;                   // of a blocked order: which it begins in
    std::vector<Part> parts = {};                // until it was read
    std::shared_ptr<io::Batch> batch = nullptr;  // once it was read
    std::shared_ptr<pixels::DecodeJob> pixels = nullptr;
  };

  void begin_locked(uint64_t epoch, uint64_t position);
  void open_reader_locked();
  void drop_locked();
  void forget_locked(size_t from = 0);
  void fill_locked(uint64_t n);
  bool wants_more_locked() const;
  void add_locked(const Span& span, uint64_t epoch);
  void submit_open_locked();
  Delivery take_locked();
  bool read_locked(Ahead* ahead, Clock::time_point until);
  unsigned batches_ahead_locked() const;
  void check_delivery(Delivery* delivery) const;

  const std::shared_ptr<Mounted> mounted_;
  const uint64_t seed_;
  mutable std::mutex mutex_;
  Slices slices_;
  std::unique_ptr<const Order> order_;
  const BlockedOrder* blocked_ = nullptr;  // the order, if it has windows
  bool begun_ = false;                     // somebody asked for a batch: the order stays
  uint64_t epoch_ = 0;
  uint64_t position_ = 0;
  bool over_ = false;          // somebody was told the end of this epoch
  uint64_t passed_ = 0;        // epochs that were over before this one, since the beginning
  uint64_t end_position_ = 0;  // of the last of them
  std::unordered_map<uint64_t, uint64_t> ends_;  // that each thread was told
  bool marks_failed_ = false;
  uint64_t buffer_bytes_ = uint64_t{64} << 20;
  uint64_t reads_in_flight_ = 0;

  std::shared_ptr<io::Reader> reader_;
  std::optional<pixels::Recipe> recipe_;
  uint64_t picture_part_ = 0;
  std::unique_ptr<pixels::DecodePool> pool_;
  uint64_t ahead_n_ = 0;
  double batch_bytes_ = 0;  // lately
  std::deque<Ahead> ahead_;
  std::shared_ptr<Reading> open_;              // a window of which more batches may come
  std::pair<uint64_t, Interval> open_window_;  // its epoch and positions
  uint64_t windows_ = 0;                       // that were begun
};

}  // namespace headrace::capi
