// RankBarrier: where the processes of one host meet at every step of a benchmark, in memory that
// they share.
//
// Each brings the moment at which its step ended, on the host's clock, and takes away the latest of
// all. So what the meeting itself costs (a wake-up, a busy processor) is in no step: all go on from
// the same moment, however late they learn of it. A second moment travels with it: when the step
// would have ended had the harness not held it up.
//
// Ranks of several hosts meet in two stages: whoever leads a host waits for all of it, asks the
// other hosts, and then lets its host go on.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace headrace {

// Nanoseconds of CLOCK_MONOTONIC.
struct StepEnds {
  int64_t end_ns;        // when the step ended
  int64_t undelayed_ns;  // when it would have, without the harness's own delays
};

class RankBarrier {
 public:
  // New memory for so many processes; `led`: nobody goes on before `release`.
  // Throws Error(kInvalidArgument) for no processes or too many, Error(kVolume) if the system gives
  // none.
  static std::unique_ptr<RankBarrier> create(uint32_t ranks, bool led);
  // That of another process, by its descriptor, which may be closed afterwards; this one is the
  // `index`-th there, who made it is the first. Throws Error(kInvalidArgument) if it is no
  // barrier's memory, or nobody's place.
  static std::unique_ptr<RankBarrier> attach(int fd, uint32_t index);
  ~RankBarrier();
  RankBarrier(const RankBarrier&) = delete;
  RankBarrier& operator=(const RankBarrier&) = delete;

  // For others to open; -1 where the memory is another process's.
  int fd() const { return fd_; }

  // Says that this process's step has ended. Once each turn.
  void arrive(StepEnds ends);
  // The latest of all, once they may go on. False: not before `until_ns`, or a signal came; call
  // again.
  bool await(int64_t until_ns, StepEnds* latest);
  // For the leader: the latest of this host, once all are there. False as for `await`.
  bool await_host(int64_t until_ns, StepEnds* latest);
  // For the leader: lets all go on, with the latest of all hosts.
  void release(StepEnds latest);
  // The first process that has not arrived in this turn; -1: all have.
  int64_t missing() const;

 private:
  struct Memory;
  RankBarrier(Memory* memory, size_t nbytes, int fd, uint32_t index);
  // The turn's moments; the next turn's are cleared while nobody can be in it.
  StepEnds latest() const;
  void raise(StepEnds ends);
  void go_on();

  Memory* memory_;
  size_t nbytes_;
  int fd_;
  uint32_t index_;
  uint32_t turn_ = 0;
};

}  // namespace headrace
