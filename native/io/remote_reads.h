// RemoteReads: a RemoteEngine as an engine of the reader: places in flight, a deadline, and an end
// when the reader closes.
//
// Reads name their volume (`Read::volume`); `use` says what memory they lie in and must outlive
// late answers. A read without an answer at the deadline is ETIMEDOUT, one that the closing reader
// gave up ECANCELED.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "io/catalog.h"
#include "io/engine.h"
#include "io/remote_engine.h"

namespace headrace::io {

class RemoteReads final : public Engine {
 public:
  RemoteReads(std::shared_ptr<RemoteEngine> engine, const Catalog& catalog,
              const EngineOptions& options, double deadline_s);

  void use(std::shared_ptr<const void> memory) { memory_ = std::move(memory); }
  const char* name() const override { return name_.c_str(); }
  void read(std::span<Read> reads, const OnDone& on_done) override;

 private:
  void read_all(std::span<Read> reads, const OnDone& on_done);
  void start(std::span<Read> reads, size_t first, size_t count);
  size_t take(std::span<Read> reads, RemoteInbox::Clock::time_point deadline,
              const OnDone& on_done);
  void give_up(std::span<Read> reads, int error, const OnDone& on_done);

  const std::shared_ptr<RemoteEngine> engine_;
  const Catalog& catalog_;
  const unsigned own_depth_;
  const std::shared_ptr<InFlight> in_flight_;
  const double deadline_s_;
  const std::string name_;
  std::shared_ptr<const void> memory_;

  // One call of `read`.
  std::shared_ptr<RemoteInbox> inbox_;
  std::vector<std::shared_ptr<RemoteRequests>> batches_;
  std::vector<InFlight::Time> started_;  // of each read
  std::vector<bool> answered_;
  size_t begun_ = 0;
  size_t open_ = 0;  // begun and not answered
};

}  // namespace headrace::io
