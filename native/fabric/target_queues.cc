#include "fabric/target_queues.h"

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include "fabric/cold_reads.h"
#include "fabric/target_loop.h"

namespace headrace::fabric {

class TargetQueues::Shared {
 public:
  explicit Shared(const TargetQueuesOptions& options) : cold_reads(options.readers) {
    for (unsigned i = 0; i < std::max(1u, options.loops); ++i) {
      loops.push_back(std::make_unique<TargetLoop>(options, &cold_reads));
    }
  }
  // Loops give work to readers, and readers give it back.
  ~Shared() { stop(); }
  void stop() {
    for (const auto& loop : loops) loop->stop();
  }

  std::vector<std::unique_ptr<TargetLoop>> loops;
  ColdReads cold_reads;
  std::atomic<size_t> next{0};
};

TargetQueues::TargetQueues(const TargetQueuesOptions& options)
    : shared_(std::make_unique<Shared>(options)) {}
TargetQueues::~TargetQueues() = default;

void TargetQueues::adopt(int fd, const TargetQpairOptions& options,
                         std::shared_ptr<const Exports> exports, uint64_t association,
                         std::span<const std::byte> before) {
  TargetLoop& loop = *shared_->loops[shared_->next++ % shared_->loops.size()];
  loop.adopt({fd, options, std::move(exports), association, {before.begin(), before.end()}});
}

void TargetQueues::close() { shared_->stop(); }

void TargetQueues::drop(uint64_t association) {
  for (const auto& loop : shared_->loops) loop->drop(association);
}

TargetFigures TargetQueues::figures() const {
  TargetFigures figures;
  for (const auto& loop : shared_->loops) loop->add_figures(&figures);
  return figures;
}

}  // namespace headrace::fabric
