// Planner: turns the indices of a batch into a plan: where each sample lies, by which route its
// bytes come, what is read in one request, and where in the buffer it goes.
//
// Asks the directories and the page cache, and opens volumes. Reads no sample and allocates no
// batch memory: `plan` says how much the batch needs, and after the buffer is there `ask` writes
// down the requests. Thread-safe.
//
// Invariants:
//   - an extent that leaves its volume is refused before its length is added to anything
//   - slots of one run lie in the buffer as they lie in the volume, gaps included
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "io/catalog.h"
#include "io/plan.h"
#include "io/reader_options.h"

namespace headrace::io {

// Gathered slots start at cache lines: a copy to an unaligned place costs a fifth more.
inline constexpr uint64_t kGatherAlignment = 64;

inline uint64_t align_up(uint64_t value, uint64_t alignment) {
  return (value + alignment - 1) & ~(alignment - 1);
}

class Planner {
 public:
  // `parts`: numbers in Catalog::part_names() to read, in this order.
  Planner(std::shared_ptr<const Catalog> catalog, const ReaderOptions& options,
          std::vector<int> parts);

  // Places the samples of `plan.batch->indices`; returns the bytes that the buffer needs. Throws
  // what the directory or a volume is guilty of.
  uint64_t plan(Plan& plan) const;
  // Writes down what is to be read into `plan.data`. After this the plan's lists stay as they are,
  // so that `Job::waiting_for` may look at them while the reads run.
  void ask(Plan& plan) const;
  // A gather from this volume met pages that were not resident: look closer next time.
  void doubt(uint32_t volume) const;

  const std::vector<int>& parts() const { return parts_; }

 private:
  // What each volume taught us. Written by workers without order: these are hints.
  struct VolumeHint {
    std::atomic<bool> doubtful{false};
  };

  void cut(const Range& range, uint64_t index, Slot* slot) const;
  void locate(Plan& plan) const;
  void choose(Plan& plan) const;
  void choose_volume(Plan& plan, std::span<uint32_t> slots, uint32_t volume) const;
  uint64_t lay_out(Plan& plan) const;
  void lay_out_runs(Plan& plan, uint64_t* bytes) const;
  void ask_each(Plan& plan) const;
  void ask_path(Plan& plan, uint32_t slot) const;
  void ask_runs(Plan& plan) const;

  const std::shared_ptr<const Catalog> held_;
  const Catalog& catalog_;
  const ReaderOptions options_;
  const std::vector<int> parts_;
  std::vector<std::vector<int>> slots_of_part_;  // per segment: part -> position in parts_ or -1
  const std::unique_ptr<VolumeHint[]> hints_;
};

}  // namespace headrace::io
