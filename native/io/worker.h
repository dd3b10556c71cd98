// Worker: the engines of one thread, and how a plan is carried out with them.
//
// Gathers what is resident, reads the rest, compares every sample with its checksum, and gives what
// went wrong a second try. Belongs to the thread that made it. Knows no queue and no budget.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_set>

#include "core/arena.h"
#include "io/catalog.h"
#include "io/engine.h"
#include "io/plan.h"
#include "io/planner.h"
#include "io/reader_options.h"
#include "io/remote_reads.h"

namespace headrace::io {

class Worker {
 public:
  Worker(const Catalog& catalog, const Planner& planner, const ReaderOptions& options,
         std::shared_ptr<Arena> arena);
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Unregisters buffers that are gone. Before each batch.
  void forget_unmapped();
  // Fills `plan.data` and completes `plan.batch`; what could not be read is among its failures.
  void perform(Plan& plan);

  // The engine for what is not resident and, where it is not io_uring, why. Empty before it is
  // made.
  std::string engine_name() const {
    return async_ ? async_->name() : remote_ ? remote_->name() : "";
  }
  const std::string& engine_reason() const { return reason_; }

 private:
  void gather(Plan& plan);
  void read(Plan& plan);
  void read_remote(Plan& plan);
  void read_done(Plan& plan, Read& read) const;
  void run_done(Plan& plan, const Run& run) const;
  void check_tails(Plan& plan) const;
  void check_slot(Plan& plan, uint32_t slot, bool crc_known, uint32_t crc) const;
  int slow_down(const Slot& slot) const;
  void try_again(Plan& plan) const;
  void finish(Plan& plan) const;
  void count_way(Plan& plan) const;
  void make_known(const Buffer& buffer);

  const Catalog& catalog_;
  const Planner& planner_;
  const ReaderOptions& options_;
  const std::shared_ptr<Arena> arena_;
  const std::unique_ptr<Engine> gather_ = make_mmap_engine();
  const int listener_;  // the last that is taken when a worker is made: what fails takes nothing
  std::unique_ptr<Engine> async_;
  std::string reason_;
  std::shared_ptr<RemoteEngine> remote_engine_;
  RemoteReads* remote_reads_ = nullptr;  // is `remote_`, or what it slows down
  std::unique_ptr<Engine> remote_;
  std::unordered_set<uint64_t> known_;  // buffers that `async_` was told of
};

}  // namespace headrace::io
