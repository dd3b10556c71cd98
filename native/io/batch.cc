#include "io/batch.h"

#include <algorithm>

namespace headrace::io {
namespace {

// The earlier of two moments that are known.
int64_t earlier(int64_t one, int64_t other) {
  if (one == 0 || other == 0) return std::max(one, other);
  return std::min(one, other);
}

}  // namespace

void BatchWay::add(const BatchWay& more, double share) {
  const auto of = [share](auto sum) {
    return static_cast<decltype(sum)>(share * static_cast<double>(sum));
  };
  submitted_ns = earlier(submitted_ns, more.submitted_ns);
  taken_ns = earlier(taken_ns, more.taken_ns);
  planned_ns = earlier(planned_ns, more.planned_ns);
  begun_ns = earlier(begun_ns, more.begun_ns);
  ready_ns = std::max(ready_ns, more.ready_ns);
  read_ns += of(more.read_ns);
  open_ns += of(more.open_ns);
  reads += of(more.reads);
  depth += of(more.depth);
  quiet_ns += of(more.quiet_ns);
  quiet_reads += of(more.quiet_reads);
  held_ns = std::max(held_ns, more.held_ns);
  for (size_t i = 0; i < kTiers; ++i) tier_bytes[i] += of(more.tier_bytes[i]);
}

}  // namespace headrace::io
