#include "io/worker.h"

#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "core/crc32c.h"
#include "core/error.h"
#include "io/engine_choice.h"
#include "io/slow_engine.h"

namespace headrace::io {
namespace {

long major_faults() {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_majflt;
}

// A storage that serves this share of the reads that it may be asked for is called idle.
constexpr unsigned kQuietShare = 8;

Failure failure_at(const Slot& slot) {
  return {0, FailureKind::kSystem, 0, 0, slot.crc, slot.volume, slot.offset, slot.length};
}

}  // namespace

Worker::Worker(const Catalog& catalog, const Planner& planner, const ReaderOptions& options,
               std::shared_ptr<Arena> arena)
    : catalog_(catalog),
      planner_(planner),
      options_(options),
      arena_(std::move(arena)),
      listener_(arena_->listen()),
      remote_engine_(options.remote ? options.remote : catalog.remote()) {}

Worker::~Worker() { arena_->stop_listening(listener_); }

void Worker::forget_unmapped() {
  for (const uint64_t id : arena_->take_unmapped(listener_)) {
    if (known_.erase(id) != 0) async_->forget_buffer(id);
  }
}

void Worker::make_known(const Buffer& buffer) {
  forget_unmapped();
  if (known_.insert(buffer.id).second) async_->know_buffer(buffer.id, buffer.memory());
}

void Worker::perform(Plan& plan) {
  gather(plan);
  read(plan);
  read_remote(plan);
  try_again(plan);
  finish(plan);
  count_way(plan);
}

// What the reads took; engines have written it beside each.
void Worker::count_way(Plan& plan) const {
  const EngineOptions& engine = options_.engine_options;
  const unsigned depth = engine.in_flight ? engine.in_flight->depth(engine.queue_depth) : 1;
  const unsigned quiet = std::max(1u, depth / kQuietShare);
  BatchWay& way = plan.batch->way;
  for (const std::vector<Read>* reads : {&plan.requests, &plan.remote}) {
    for (const Read& read : *reads) {
      if (read.resident && options_.slow == nullptr) plan.resident_bytes += read.done;
      way.read_ns += read.took_ns;
      way.open_ns += read.open_ns;
      ++way.reads;
      way.depth += read.others + 1;
      if (read.others > quiet) continue;
      way.quiet_ns += read.took_ns;
      ++way.quiet_reads;
    }
  }
  const uint64_t near = std::min(plan.gathered_bytes + plan.resident_bytes, plan.sample_bytes);
  way.tier_bytes[kTierPageCache] = near;
  way.tier_bytes[kTierSource] = plan.sample_bytes - near;
}

void Worker::gather(Plan& plan) {
  if (plan.gathers.empty()) return;
  const long faults = major_faults();
  gather_->read(plan.gathers, [&](Read& r) {
    if (r.error != 0 || r.done != r.length) {
      plan.slots[r.user].ok = false;
    } else {
      check_slot(plan, r.user, r.crc_done, r.crc);
    }
  });
  if (major_faults() != faults) {
    for (const Read& r : plan.gathers) planner_.doubt(plan.slots[r.user].volume);
  }
  check_tails(plan);
}

void Worker::read(Plan& plan) {
  if (plan.requests.empty()) return;
  if (async_ == nullptr) async_ = make_engine(options_, &reason_);
  make_known(*plan.batch->buffer);
  try {
    async_->read(plan.requests, [&](Read& r) { read_done(plan, r); });
  } catch (const ReadsLost& lost) {
    plan.batch->buffer->lost = true;
    const std::string why = std::strerror(lost.system_errno);
    throw Error(
        ErrorKind::kVolume,
        "io_uring_enter: " + why + ", with " + std::to_string(lost.reads) +
            " reads in flight. Their batch was given up; the next one gets a new ring. Look "
            "for what closes descriptors or installs seccomp filters in this process, or "
            "read with engine=\"threads\".",
        {}, -1, lost.system_errno);
  }
}

void Worker::read_remote(Plan& plan) {
  if (plan.remote.empty()) return;
  if (remote_ == nullptr) {
    if (remote_engine_ == nullptr) {
      throw Error(ErrorKind::kVolume,
                  "volume " + catalog_.volume(plan.remote.front().volume).path() +
                      " is remote, and the store was opened without an engine for it.",
                  {}, -1, ENOTSUP);
    }
    EngineOptions engine = options_.engine_options;
    if (options_.slow) engine.in_flight = std::make_shared<InFlight>();  // places are taken outside
    auto reads =
        std::make_unique<RemoteReads>(remote_engine_, catalog_, engine, options_.remote_deadline_s);
    remote_reads_ = reads.get();
    remote_ = std::move(reads);
    if (options_.slow) {
      remote_ = make_slow_engine(std::move(remote_), options_.slow, options_.engine_options);
    }
  }
  remote_reads_->use(plan.batch->buffer);
  remote_->read(plan.remote, [&](Read& r) { read_done(plan, r); });
  remote_reads_->use(nullptr);
  const bool cancelled = std::any_of(plan.remote.begin(), plan.remote.end(),
                                     [](const Read& r) { return r.error == ECANCELED; });
  if (cancelled) {
    throw Error(ErrorKind::kInvalidArgument, "the reader was closed while this batch was read");
  }
}

void Worker::read_done(Plan& plan, Read& r) const {
  plan.requests_done.fetch_add(1, std::memory_order_relaxed);
  if (r.path != nullptr) {
    if (r.error != 0 || r.done != r.length) {
      plan.slots[r.user].ok = false;
    } else {
      check_slot(plan, r.user, false, 0);
    }
    return;
  }
  Run& run = plan.runs[r.user];
  if (r.error != 0) run.error.store(r.error, std::memory_order_relaxed);
  if (r.done < r.length) {
    uint64_t seen = run.missing_from.load(std::memory_order_relaxed);
    const uint64_t here = r.offset + r.done;
    while (here < seen && !run.missing_from.compare_exchange_weak(seen, here)) {
    }
  }
  if (run.requests_left.fetch_sub(1, std::memory_order_acq_rel) == 1) run_done(plan, run);
}

void Worker::run_done(Plan& plan, const Run& run) const {
  for (uint32_t k = run.first; k < run.last; ++k) {
    Slot& slot = plan.slots[plan.sorted[k]];
    // The last direct request may end beyond the file: only a slot's own bytes count.
    if (run.error.load() != 0 || slot.offset + slot.length > run.missing_from.load()) {
      slot.ok = false;
      slot.timed_out = run.route == Route::kRemote && run.error.load() == ETIMEDOUT;
    } else {
      check_slot(plan, plan.sorted[k], false, 0);
    }
  }
}

// In the page that holds the new end of a truncated file the lost bytes read as zeros without a
// fault. A checksum would find out; where there is none, the file's size is asked for afterwards.
void Worker::check_tails(Plan& plan) const {
  uint32_t volume = UINT32_MAX;
  uint64_t end = 0;
  for (const Read& r : plan.gathers) {
    Slot& slot = plan.slots[r.user];
    if (!slot.ok || r.crc_done) continue;
    if (slot.volume != volume) {
      volume = slot.volume;
      struct stat status;
      const bool known = fstat(catalog_.volume(volume).fd(), &status) == 0;
      end = known && S_ISREG(status.st_mode) ? static_cast<uint64_t>(status.st_size) : UINT64_MAX;
    }
    if (slot.offset + slot.length > end) slot.ok = false;
  }
}

// Called by several threads at once, each for other slots.
void Worker::check_slot(Plan& plan, uint32_t number, bool crc_known, uint32_t crc) const {
  Slot& slot = plan.slots[number];
  if (!options_.verify || !slot.has_crc) return;
  if (!crc_known) crc = crc32c(0, plan.data + slot.dest, slot.length);
  slot.ok = crc == slot.crc;
}

// What a read costs on the simulated storage: 0 or the error that it meets there.
int Worker::slow_down(const Slot& slot) const {
  if (slot.route == Route::kPath) options_.slow->open_delay();
  return options_.slow->read_delay(slot.length);
}

// What went wrong is read once more, alone and in the plainest way, before it is called a failure.
void Worker::try_again(Plan& plan) const {
  const RemoteCall again{remote_engine_, plan.batch->buffer, options_.remote_deadline_s,
                         options_.engine_options.in_flight};
  for (uint32_t i = 0; i < plan.slots.size(); ++i) {
    Slot& slot = plan.slots[i];
    if (slot.ok) continue;
    const Segment& segment = catalog_.segments()[slot.segment];
    Extent extent;
    extent.volume = slot.volume - segment.volume_base;
    extent.offset = slot.offset;
    extent.length = slot.length;
    extent.crc = slot.crc;
    extent.mtime_ns = slot.mtime_ns;
    Failure failure = failure_at(slot);
    failure.system_errno = slot.timed_out ? ETIMEDOUT : options_.slow ? slow_down(slot) : 0;
    if (failure.system_errno == 0 &&
        catalog_.read_extent(segment, slot.sample, extent, 0, slot.length, plan.data + slot.dest,
                             &failure, &again)) {
      if (!options_.verify || !slot.has_crc) continue;
      failure.crc_found = crc32c(0, plan.data + slot.dest, slot.length);
      failure.kind = FailureKind::kChecksum;
      if (failure.crc_found == slot.crc) continue;
    }
    failure.slot = i;
    plan.batch->failures.push_back(failure);
  }
}

void Worker::finish(Plan& plan) const {
  Batch& batch = *plan.batch;
  batch.offsets.resize(plan.slots.size());
  batch.lengths.resize(plan.slots.size());
  for (size_t i = 0; i < plan.slots.size(); ++i) {
    batch.offsets[i] = static_cast<int64_t>(plan.slots[i].dest);
    batch.lengths[i] = static_cast<int64_t>(plan.slots[i].length);
    plan.sample_bytes += plan.slots[i].length;
    if (plan.slots[i].route == Route::kGather) plan.gathered_bytes += plan.slots[i].length;
  }
}

}  // namespace headrace::io
