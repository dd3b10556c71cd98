// Answers: what became of requests, told to those who wait once per turn of a loop instead of once
// per request: waking a thread costs more than a small read.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "fabric/initiator_figures.h"
#include "fabric/read_pieces.h"

namespace headrace::fabric {

class Answers {
 public:
  explicit Answers(InitiatorCounters* counters) : counters_(counters) {}
  ~Answers() { tell(); }
  Answers(const Answers&) = delete;
  Answers& operator=(const Answers&) = delete;

  // A command ended, well or with an errno value.
  void ended(const Piece& piece, int error);
  // A request that came to no command.
  void finished(const std::shared_ptr<ReadBatch>& batch, size_t number, int error);
  void tell();

 private:
  void add(const std::shared_ptr<ReadBatch>& batch, const io::RemoteResult& result);

  InitiatorCounters* const counters_;
  // Consecutive ones are of the same batch as a rule.
  std::vector<std::pair<std::shared_ptr<ReadBatch>, std::vector<io::RemoteResult>>> told_;
};

}  // namespace headrace::fabric
