// Sequence: one rank's batches of a shuffled order, read ahead.
//
// Batches of the size that was asked for last are submitted ahead; a batch of another size, another
// epoch or another position drops what was. Thread-safe: each call takes the next batch.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>

#include "capi/mounted.h"
#include "capi/slices.h"
#include "core/permutation.h"
#include "io/reader.h"

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

  struct Delivery {
    std::shared_ptr<io::Batch> batch;  // null at the end of an epoch
    uint64_t epoch = 0;
    uint64_t position = 0;
  };
  Delivery next(uint64_t n);

 private:
  struct Ahead {
    Span span;
    uint64_t epoch;
    std::shared_ptr<io::Job> job;
  };

  void open_reader_locked();
  void drop_locked();
  void fill_locked(uint64_t n);
  std::shared_ptr<io::Batch> take_locked();
  unsigned batches_ahead_locked() const;
  const Permutation& order_locked(uint64_t epoch);
  void check_delivery(io::Batch* batch) const;

  const std::shared_ptr<Mounted> mounted_;
  const uint64_t seed_;
  mutable std::mutex mutex_;
  Slices slices_;
  uint64_t epoch_ = 0;
  uint64_t position_ = 0;
  bool marks_failed_ = false;
  uint64_t buffer_bytes_ = uint64_t{64} << 20;
  uint64_t reads_in_flight_ = 0;

  std::shared_ptr<io::Reader> reader_;
  uint64_t ahead_n_ = 0;
  double batch_bytes_ = 0;  // lately
  std::deque<Ahead> ahead_;
  std::optional<Permutation> order_;
  uint64_t order_epoch_ = 0;
};

}  // namespace headrace::capi
