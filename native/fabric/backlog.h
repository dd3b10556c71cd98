// Backlog: what an initiator is to read, by target, and which of its loops serve it.
//
// Callers put requests in, cut into pieces on their own thread; loops take as many as their queues
// have room for. A loop that found too few is hungry: it is woken when there are more, and not
// before. Pieces of a lost queue come back here, for any loop that has a queue of their target;
// while none has, they wait until their deadline.
//
// Thread-safe.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "fabric/answers.h"
#include "fabric/poller.h"
#include "fabric/read_pieces.h"

namespace headrace::fabric {

int64_t now_ns();  // of the clock of all deadlines here

struct BacklogOptions {
  double read_deadline_s = 60;
  uint32_t command_bytes = 256 << 10;
};

class Backlog {
 public:
  Backlog(const BacklogOptions& options, InitiatorCounters* counters)
      : options_(options), counters_(counters) {}

  // A loop that takes pieces, and how it is woken. Before any of the others.
  unsigned add_loop(Poller* poller);
  uint64_t add_target(uint32_t transfer_max);
  void add_volume(const std::string& url, uint64_t target, const NamespaceGeometry& geometry);

  // A queue of a target: which loop is to have it. Its target is back, if it was away.
  unsigned open_queue(uint64_t target);
  void close_queue(uint64_t target, unsigned loop);
  // Loops that have a queue of anything.
  unsigned loops_in_use() const;

  void put(std::shared_ptr<io::RemoteRequests> requests);
  // Up to `most` pieces of a target, whose readers still wait; remembers a hungry loop.
  void take(uint64_t target, unsigned loop, size_t most, std::vector<Piece>* pieces);
  // A piece is to be read again.
  void put_back(uint64_t target, Piece piece, Answers* answers);

  // The target will not come back: its reads fail with this errno value, until it does.
  void give_up(uint64_t target, int error);
  // Ends what is overdue. True while pieces wait.
  bool keep_time(int64_t now_ns);
  // Everything that waits, and that comes, fails with ECANCELED.
  void close();

 private:
  struct Target {
    uint32_t transfer_max = 0;
    std::deque<Piece> waiting;
    std::vector<unsigned> queues;  // by loop
    std::vector<bool> hungry;      // loops
    int error = 0;                 // given up
    int64_t lost_ns = 0;           // when its last queue went; 0: it has one, or never had
  };
  struct Volume {
    uint64_t target = 0;
    NamespaceGeometry geometry;
  };

  Target& target(uint64_t number);
  bool away(const Target& target, int64_t now) const;
  int find(const std::string& url, int64_t now, Volume* volume, uint32_t* command_bytes);
  void put_run(const std::shared_ptr<ReadBatch>& batch, size_t first, size_t end, int64_t now);
  void fail_all(Target* target, int error, Answers* answers);
  void wake_for(Target* target);

  const BacklogOptions options_;
  InitiatorCounters* const counters_;
  mutable std::mutex mutex_;
  std::vector<Poller*> loops_;
  std::vector<unsigned> queues_;  // by loop, of all targets
  std::unordered_map<std::string, Volume> volumes_;
  std::map<uint64_t, Target> targets_;
  bool closed_ = false;
};

}  // namespace headrace::fabric
