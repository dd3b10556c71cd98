#include "fabric/initiator.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "fabric/backlog.h"
#include "fabric/initiator_loop.h"

namespace headrace::fabric {

struct Initiator::Parts {
  explicit Parts(const InitiatorOptions& options)
      : options(options), backlog({options.read_deadline_s, options.command_bytes}, &counters) {
    for (unsigned i = 0; i < std::max(1u, options.loops); ++i) {
      loops.push_back(std::make_unique<InitiatorLoop>(
          LoopOptions{options.command_timeout_s, options.attempts}, &backlog, &lost, &counters));
    }
    for (const auto& loop : loops) loop->start();
  }

  // Each loop that has queues gets an equal part.
  void share_depth() {
    const unsigned users = std::max(1u, backlog.loops_in_use());
    const unsigned total = std::max(1u, depth.load());
    for (const auto& loop : loops) loop->turn((total + users - 1) / users);
  }

  const InitiatorOptions options;
  std::atomic<unsigned> depth = options.reads_in_flight;
  InitiatorCounters counters;
  LostQueues lost;
  Backlog backlog;
  std::vector<std::unique_ptr<InitiatorLoop>> loops;
};

Initiator::Initiator(const InitiatorOptions& options)
    : owner_pid_(::getpid()), parts_(std::make_unique<Parts>(options)) {}

Initiator::~Initiator() {
  if (foreign()) {
    static_cast<void>(parts_.release());
  } else {
    close();
  }
}

bool Initiator::foreign() const { return ::getpid() != owner_pid_; }

uint64_t Initiator::add_target(uint32_t transfer_max) {
  return parts_->backlog.add_target(transfer_max);
}

void Initiator::add_volume(const std::string& url, uint64_t target,
                           const NamespaceGeometry& geometry) {
  parts_->backlog.add_volume(url, target, geometry);
}

void Initiator::attach(uint64_t target, uint16_t label, int fd, const QpairOptions& options) {
  const unsigned loop = parts_->backlog.open_queue(target);
  parts_->share_depth();
  parts_->loops[loop]->attach({target, label, fd, options});
}

void Initiator::give_up(uint64_t target, int error) { parts_->backlog.give_up(target, error); }
std::vector<LostQueue> Initiator::take_lost() { return parts_->lost.take(); }
int Initiator::lost_event() const { return parts_->lost.event(); }
InitiatorFigures Initiator::figures() const { return parts_->counters.figures(); }

void Initiator::close() {
  if (foreign()) return;
  parts_->backlog.close();
  for (const auto& loop : parts_->loops) loop->stop();
}

void Initiator::read(std::shared_ptr<io::RemoteRequests> requests) {
  if (!foreign()) return parts_->backlog.put(std::move(requests));
  for (size_t i = 0; i < requests->requests().size(); ++i) requests->finish(i, 0, ECANCELED);
}

void Initiator::turn(unsigned reads_in_flight) {
  parts_->depth = reads_in_flight;
  parts_->share_depth();
}

}  // namespace headrace::fabric
