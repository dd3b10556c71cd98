#include "io/reader.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <numeric>
#include <system_error>
#include <unordered_set>

#include "core/crc32c.h"
#include "core/error.h"
#include "core/mapping.h"
#include "io/plan.h"
#include "io/sample_path.h"

namespace headrace::io {
namespace {

// Slots of one volume whose residency is asked one by one; larger groups are sampled.
constexpr size_t kProbeEachMax = 8;
constexpr size_t kProbeSample = 8;
// Directory rows are asked for this many samples ahead.
constexpr size_t kLookAhead = 16;
// Gathered slots start at cache lines: a copy to an unaligned place costs a fifth more.
constexpr uint64_t kGatherAlignment = 64;
// A window's samples are copied out in random order: the first lines of a later one are asked for.
constexpr uint64_t kGatherAhead = 4;

uint64_t align_down(uint64_t value, uint64_t alignment) { return value & ~(alignment - 1); }
uint64_t align_up(uint64_t value, uint64_t alignment) {
  return (value + alignment - 1) & ~(alignment - 1);
}

long major_faults() {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_majflt;
}

// Direct requests must stay aligned, and every request must make progress.
ReaderOptions sane(ReaderOptions options) {
  options.request_bytes_max =
      align_up(std::clamp<uint64_t>(options.request_bytes_max, 4096, 1 << 30), 4096);
  options.coalesce_gap_bytes = std::min<uint64_t>(options.coalesce_gap_bytes, 1 << 30);
  return options;
}

// A batch's size is a sum of numbers from a directory: it is refused before it could overflow.
void check_bytes(uint64_t bytes) {
  if (bytes <= kOffsetMax) return;
  throw Error(ErrorKind::kCorruptStore,
              "the samples of a batch are said to have more than " + std::to_string(kOffsetMax) +
                  " bytes. A sample directory is damaged; run `headrace verify` on the store.");
}

// A worker answers no signal but the ones that its own instructions raise.
void block_signals() {
  sigset_t all;
  sigfillset(&all);
  for (const int synchronous : {SIGBUS, SIGSEGV, SIGFPE, SIGILL, SIGTRAP}) {
    sigdelset(&all, synchronous);
  }
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

}  // namespace

// One thread and the engines that belong to it.
struct Reader::Worker {
  std::shared_ptr<Arena> arena;
  int listener = -1;
  std::unique_ptr<Engine> gather = make_mmap_engine();
  std::unique_ptr<Engine> async;
  std::unordered_set<uint64_t> known;

  explicit Worker(std::shared_ptr<Arena> a) : arena(std::move(a)), listener(arena->listen()) {}
  ~Worker() { arena->stop_listening(listener); }

  void forget_unmapped() {
    for (const uint64_t id : arena->take_unmapped(listener)) {
      if (known.erase(id) != 0) async->forget_buffer(id);
    }
  }
  void use(const Buffer& buffer) {
    forget_unmapped();
    if (known.insert(buffer.id).second) async->know_buffer(buffer.id, buffer.memory());
  }
};

std::shared_ptr<Reader> Reader::make(std::shared_ptr<const Catalog> catalog, ReaderOptions options,
                                     std::vector<int> parts) {
  return std::shared_ptr<Reader>(new Reader(std::move(catalog), options, std::move(parts)));
}

Reader::Reader(std::shared_ptr<const Catalog> catalog, ReaderOptions options,
               std::vector<int> parts)
    : catalog_(std::move(catalog)),
      options_(sane(options)),
      parts_(std::move(parts)),
      arena_(Arena::make(options.budget_bytes)),
      hints_(std::make_unique<VolumeHint[]>(catalog_->volumes())),
      owner_pid_(getpid()) {
  for (const Segment& segment : catalog_->segments()) {
    std::vector<int> slots;
    for (const int part : segment.part_map) {
      const auto it = std::find(parts_.begin(), parts_.end(), part);
      slots.push_back(it == parts_.end() ? -1 : static_cast<int>(it - parts_.begin()));
    }
    slots_of_part_.push_back(std::move(slots));
  }
}

bool Reader::foreign() const { return getpid() != owner_pid_; }

void Reader::refuse_foreign() const {
  if (!foreign()) return;
  throw Error(ErrorKind::kInvalidArgument,
              "this reader belongs to the process that made it, and its threads do not exist in a "
              "forked child. Open the store again after the fork.");
}

bool Reader::close(double seconds) {
  if (foreign()) return true;
  std::deque<std::shared_ptr<Job>> dropped;
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
    dropped.swap(queue_);
  }
  work_.notify_all();
  memory_.notify_all();
  for (const auto& job : dropped) {
    std::lock_guard lock(job->mutex_);
    job->error_ = std::make_exception_ptr(
        Error(ErrorKind::kInvalidArgument, "the reader was closed before this batch was read"));
    job->stage_ = Job::Stage::kDone;
    job->ready_.notify_all();
  }
  std::unique_lock lock(mutex_);
  return ended_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return alive_ == 0; });
}

void Reader::start_locked() {
  if (started_) return;
  const auto body = [](const std::shared_ptr<Reader>& self) {
    block_signals();
    {
      Worker worker(self->arena_);
      self->work(worker);
    }
    std::lock_guard lock(self->mutex_);
    --self->alive_;
    self->ended_.notify_all();
  };
  for (unsigned i = 0; i < std::max(1u, options_.workers); ++i) {
    std::thread thread;
    try {
      thread = std::thread(body, shared_from_this());
    } catch (const std::system_error& error) {
      if (alive_ != 0) break;  // fewer threads serve as well
      throw Error(ErrorKind::kVolume,
                  std::string("cannot start a thread that reads: ") + error.what() +
                      ". Raise the limit of processes (ulimit -u).",
                  {}, -1, error.code().value());
    }
    ++alive_;
    pthread_setname_np(thread.native_handle(), "headrace-read");
    thread.detach();
  }
  started_ = true;
}

std::shared_ptr<Job> Reader::submit(std::vector<int64_t> indices) {
  refuse_foreign();
  for (const int64_t index : indices) catalog_->check_index(index);
  auto job = std::make_shared<Job>();
  job->reader_ = shared_from_this();
  job->indices_ = std::move(indices);
  {
    std::lock_guard lock(mutex_);
    if (closing_) throw Error(ErrorKind::kInvalidArgument, "the reader is closed");
    start_locked();
    job->number_ = next_number_++;
    undelivered_.insert(job->number_);
    queue_.push_back(job);
  }
  work_.notify_one();
  return job;
}

void Reader::work(Worker& worker) {
  for (;;) {
    std::shared_ptr<Job> job;
    {
      std::unique_lock lock(mutex_);
      work_.wait(lock, [&] { return closing_ || !queue_.empty(); });
      if (queue_.empty()) return;
      job = std::move(queue_.front());
      queue_.pop_front();
    }
    std::exception_ptr error;
    try {
      run(worker, *job);
    } catch (...) {
      error = std::current_exception();
    }
    if (error) settle(*job);
    {
      std::lock_guard lock(job->mutex_);
      job->error_ = error;
      job->stage_ = Job::Stage::kDone;
    }
    job->ready_.notify_all();
  }
}

void Reader::run(Worker& worker, Job& job) {
  const auto enter = [&](Job::Stage stage, const Plan* plan) {
    std::lock_guard lock(job.mutex_);
    job.stage_ = stage;
    job.plan_ = plan;
  };
  enter(Job::Stage::kPlanning, nullptr);
  guard_mappings();
  worker.forget_unmapped();
  Plan plan;
  plan.batch = std::make_shared<Batch>();
  plan.batch->indices = std::move(job.indices_);
  locate(plan, plan.batch->indices);
  choose(plan);
  const uint64_t bytes = lay_out(plan);
  enter(Job::Stage::kMemory, nullptr);
  charge(job, bytes);
  plan.batch->bytes = bytes;
  plan.batch->buffer = arena_->acquire(bytes);
  plan.data = plan.batch->buffer->data;
  ask(plan);
  for (const Segment& segment : catalog_->segments()) segment.directory->assert_whole();
  enter(Job::Stage::kReading, &plan);
  const auto leave = [&](void*) { enter(Job::Stage::kPlanning, nullptr); };
  const std::unique_ptr<void, decltype(leave)> guard(&plan, leave);  // before `plan` goes
  read(worker, plan);
  try_again(plan);
  finish(plan);
  std::lock_guard lock(job.mutex_);
  job.batch_ = std::move(plan.batch);
}

void Reader::locate(Plan& plan, std::span<const int64_t> indices) const {
  const size_t parts = parts_.size();
  plan.slots.resize(indices.size() * parts);
  plan.batch->samples = indices.size();
  plan.batch->parts = parts;
  plan.batch->labels.resize(indices.size());
  const auto prefetch = [&](size_t i) {
    const Segment& segment = catalog_->segment_of(static_cast<uint64_t>(indices[i]));
    segment.directory->prefetch_sample(static_cast<uint64_t>(indices[i]) - segment.base);
  };
  for (size_t i = 0; i < std::min(kLookAhead, indices.size()); ++i) prefetch(i);
  for (size_t i = 0; i < indices.size(); ++i) {
    if (i + kLookAhead < indices.size()) prefetch(i + kLookAhead);
    const auto index = static_cast<uint64_t>(indices[i]);
    const Segment& segment = catalog_->segment_of(index);
    const auto number = static_cast<uint32_t>(&segment - catalog_->segments().data());
    const Directory& directory = *segment.directory;
    const uint64_t sample = index - segment.base;
    plan.batch->labels[i] = directory.label(sample);
    const auto [first, last] = directory.extents_of(sample);
    for (uint64_t e = first; e < last; ++e) {
      const uint32_t part = directory.part(e);
      const int position = part < slots_of_part_[number].size() ? slots_of_part_[number][part] : -1;
      if (position < 0) continue;
      const Extent extent = directory.extent(e);
      catalog_->check_extent(segment, sample, extent);
      Slot& slot = plan.slots[i * parts + static_cast<size_t>(position)];
      slot.offset = extent.offset;
      slot.length = extent.length;
      slot.mtime_ns = extent.mtime_ns;
      slot.sample = sample;
      slot.volume = segment.volume_base + extent.volume;
      slot.segment = number;
      slot.crc = extent.crc;
      slot.has_crc = directory.has_crc();
      slot.route = Route::kBuffered;  // decided by `choose`
    }
  }
}

// Decides each slot's route and sorts what is to be read in runs.
void Reader::choose(Plan& plan) {
  std::vector<uint32_t> order;
  order.reserve(plan.slots.size());
  bool one_volume = true;
  for (uint32_t i = 0; i < plan.slots.size(); ++i) {
    if (plan.slots[i].route == Route::kNone) continue;
    const Volume& volume = catalog_->volume(plan.slots[i].volume);
    // An empty file is still opened: it may have grown.
    if (plan.slots[i].length == 0 && volume.kind() != VolumeKind::kTree) {
      plan.slots[i].route = Route::kNone;
      if (plan.slots[i].has_crc && plan.slots[i].crc != 0) plan.slots[i].ok = false;
      continue;
    }
    one_volume &= order.empty() || plan.slots[i].volume == plan.slots[order[0]].volume;
    order.push_back(i);
  }
  if (!one_volume) {
    std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
      return plan.slots[a].volume < plan.slots[b].volume;
    });
  }
  for (size_t begin = 0; begin < order.size();) {
    size_t end = begin + 1;
    const uint32_t volume = plan.slots[order[begin]].volume;
    while (end < order.size() && plan.slots[order[end]].volume == volume) ++end;
    choose_volume(plan, std::span(order).subspan(begin, end - begin), volume);
    begin = end;
  }
  for (const uint32_t slot : order) {
    const Route route = plan.slots[slot].route;
    if (route == Route::kDirect || route == Route::kBuffered) plan.sorted.push_back(slot);
  }
  std::sort(plan.sorted.begin(), plan.sorted.end(), [&](uint32_t a, uint32_t b) {
    const Slot& x = plan.slots[a];
    const Slot& y = plan.slots[b];
    if (x.volume != y.volume) return x.volume < y.volume;
    if (x.route != y.route) return x.route < y.route;
    return x.offset < y.offset;
  });
}

void Reader::choose_volume(Plan& plan, std::span<uint32_t> slots, uint32_t number) {
  const auto set_all = [&](Route route) {
    for (const uint32_t slot : slots) plan.slots[slot].route = route;
  };
  Volume& volume = catalog_->volume(number);
  if (volume.kind() == VolumeKind::kTree || catalog_->open_per_read()) {
    return set_all(Route::kPath);
  }
  const bool may_gather =
      options_.engine == EngineChoice::kAuto || options_.engine == EngineChoice::kMmap;
  const bool may_direct = options_.direct != DirectReads::kNever;
  if (options_.engine == EngineChoice::kMmap && volume.mapping() != nullptr) {
    return set_all(Route::kGather);
  }
  if (options_.direct == DirectReads::kAlways) {
    return set_all(volume.direct_fd() >= 0 ? Route::kDirect : Route::kBuffered);
  }
  const auto resident = [&](uint32_t slot) {
    return volume.resident(plan.slots[slot].offset, plan.slots[slot].length);
  };
  const Route cold = may_direct && volume.direct_fd() >= 0 ? Route::kDirect : Route::kBuffered;
  const Route warm = may_gather && volume.mapping() != nullptr ? Route::kGather : Route::kBuffered;
  VolumeHint& hint = hints_[number];
  if (slots.size() > kProbeEachMax && !hint.doubtful.load(std::memory_order_relaxed)) {
    size_t found = 0;
    for (size_t i = 0; i < kProbeSample; ++i) {
      found += resident(slots[i * slots.size() / kProbeSample]);
    }
    if (found == kProbeSample) return set_all(warm);
    if (found == 0) return set_all(cold);
  }
  size_t found = 0;
  for (const uint32_t slot : slots) {
    const bool here = resident(slot);
    found += here;
    plan.slots[slot].route = here ? warm : cold;
  }
  if (found == slots.size() && slots.size() > kProbeEachMax) {
    hint.doubtful.store(false, std::memory_order_relaxed);
  }
}

// Gives every slot its place in the buffer; returns the bytes needed.
uint64_t Reader::lay_out(Plan& plan) const {
  uint64_t bytes = 0;
  for (Slot& slot : plan.slots) {
    if (slot.route != Route::kGather && slot.route != Route::kPath) continue;
    slot.dest = bytes;
    bytes = align_up(bytes + slot.length, kGatherAlignment);
    check_bytes(bytes);
  }
  lay_out_runs(plan, &bytes);
  return bytes;
}

void Reader::lay_out_runs(Plan& plan, uint64_t* bytes) const {
  for (uint32_t i = 0; i < plan.sorted.size(); ++i) {
    Slot& slot = plan.slots[plan.sorted[i]];
    const uint64_t alignment =
        slot.route == Route::kDirect ? catalog_->volume(slot.volume).alignment() : 1;
    const uint64_t begin = align_down(slot.offset, alignment);
    const uint64_t end = align_up(slot.offset + slot.length, alignment);
    Run* run = plan.runs.empty() ? nullptr : &plan.runs.back();
    if (run == nullptr || run->volume != slot.volume || run->route != slot.route ||
        begin > run->end + options_.coalesce_gap_bytes) {
      run = &plan.runs.emplace_back();
      run->volume = slot.volume;
      run->route = slot.route;
      run->begin = begin;
      run->end = begin;
      run->dest = align_up(*bytes, 4096);
      run->first = i;
    }
    run->end = std::max(run->end, end);
    run->last = i + 1;
    slot.dest = run->dest + (slot.offset - run->begin);
    *bytes = run->dest + (run->end - run->begin);
    check_bytes(*bytes);
  }
}

// Writes down what is to be read. After this the plan's lists stay as they are, so that
// `Job::waiting_for` may look at them while the reads run.
void Reader::ask(Plan& plan) const {
  BatchStats& stats = plan.batch->stats;
  const auto request = [&](int fd, uint64_t offset, uint64_t length, uint64_t dest) -> Read& {
    Read& r = plan.requests.emplace_back();
    r.fd = fd;
    r.offset = offset;
    r.length = length;
    r.dest = plan.data + dest;
    r.buffer_id = plan.batch->buffer->id;
    stats.bytes_read += length;
    return r;
  };
  plan.gathers.reserve(plan.slots.size());
  for (uint32_t i = 0; i < plan.slots.size(); ++i) {
    Slot& slot = plan.slots[i];
    if (slot.route != Route::kGather && slot.route != Route::kPath) continue;
    Volume& volume = catalog_->volume(slot.volume);
    if (slot.route == Route::kGather) {
      Read& r = plan.gathers.emplace_back();
      r.mapping = volume.mapping();
      r.offset = slot.offset;
      r.length = slot.length;
      r.dest = plan.data + slot.dest;
      r.want_crc = options_.verify && slot.has_crc;
      r.user = i;
    } else {
      const bool tree = volume.kind() == VolumeKind::kTree;
      std::string& path = plan.paths.emplace_back();
      if (tree) {
        catalog_->segments()[slot.segment].directory->name(slot.sample, &path);
        if (!stays_below(path)) {
          slot.ok = false;
          continue;
        }
      } else {
        path = volume.path();
      }
      Read& r =
          request(tree ? volume.fd() : AT_FDCWD, tree ? 0 : slot.offset, slot.length, slot.dest);
      r.path = path.c_str();
      r.check = tree ? FileCheck{slot.length, slot.mtime_ns}
                     : FileCheck{volume.bytes(), volume.mtime_ns()};
      r.user = i;
      ++stats.opened_files;
    }
  }
  for (uint32_t i = 0; i < plan.runs.size(); ++i) {
    Run& run = plan.runs[i];
    Volume& volume = catalog_->volume(run.volume);
    const bool direct = run.route == Route::kDirect;
    uint32_t requests = 0;
    for (uint64_t at = run.begin; at < run.end;) {
      const uint64_t length = std::min(options_.request_bytes_max, run.end - at);
      request(direct ? volume.direct_fd() : volume.fd(), at, length, run.dest + (at - run.begin))
          .user = i;
      at += length;
      ++requests;
    }
    run.requests_left.store(requests, std::memory_order_relaxed);
    (direct ? stats.direct_reads : stats.buffered_reads) += requests;
  }
  stats.cached_reads = plan.gathers.size();
}

void Reader::read(Worker& worker, Plan& plan) {
  if (!plan.gathers.empty()) {
    const long faults = major_faults();
    worker.gather->read(plan.gathers, [&](Read& r) {
      if (r.error != 0 || r.done != r.length) {
        plan.slots[r.user].ok = false;
      } else {
        check_slot(plan, r.user, r.crc_done, r.crc);
      }
    });
    if (major_faults() != faults) {
      for (const Read& r : plan.gathers) {
        hints_[plan.slots[r.user].volume].doubtful.store(true, std::memory_order_relaxed);
      }
    }
    check_tails(plan);
  }
  if (plan.requests.empty()) return;
  if (worker.async == nullptr) {
    std::string reason;
    if (options_.engine == EngineChoice::kUring) {
      worker.async = make_uring_engine(options_.engine_options, &reason);
      if (worker.async == nullptr) {
        throw Error(ErrorKind::kVolume,
                    "engine 'uring' was asked for and cannot run: " + reason +
                        " Use engine='auto' to fall back to threads.",
                    {}, -1, ENOSYS);
      }
    } else if (options_.engine == EngineChoice::kThreads) {
      worker.async = make_threads_engine(options_.engine_options);
    } else {
      worker.async = make_best_engine(options_.engine_options, &reason);
    }
    std::lock_guard lock(mutex_);
    engine_name_ = worker.async->name();
    engine_reason_ = reason;
  }
  worker.use(*plan.batch->buffer);
  worker.async->read(plan.requests, [&](Read& r) {
    plan.requests_done.fetch_add(1, std::memory_order_relaxed);
    if (r.path != nullptr) {
      Slot& slot = plan.slots[r.user];
      if (r.error != 0 || r.done != r.length) {
        slot.ok = false;
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
    if (run.requests_left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    for (uint32_t k = run.first; k < run.last; ++k) {
      Slot& slot = plan.slots[plan.sorted[k]];
      // The last direct request may end beyond the file: only a slot's own bytes count.
      if (run.error.load() != 0 || slot.offset + slot.length > run.missing_from.load()) {
        slot.ok = false;
      } else {
        check_slot(plan, plan.sorted[k], false, 0);
      }
    }
  });
}

// In the page that holds the new end of a truncated file the lost bytes read as zeros without a
// fault. A checksum would find out; where there is none, the file's size is asked for afterwards.
void Reader::check_tails(Plan& plan) const {
  uint32_t volume = UINT32_MAX;
  uint64_t end = 0;
  for (const Read& r : plan.gathers) {
    Slot& slot = plan.slots[r.user];
    if (!slot.ok || r.crc_done) continue;
    if (slot.volume != volume) {
      volume = slot.volume;
      struct stat status;
      const bool known = fstat(catalog_->volume(volume).fd(), &status) == 0;
      end = known && S_ISREG(status.st_mode) ? static_cast<uint64_t>(status.st_size) : UINT64_MAX;
    }
    if (slot.offset + slot.length > end) slot.ok = false;
  }
}

// Called by several threads at once, each for other slots.
void Reader::check_slot(Plan& plan, uint32_t number, bool crc_known, uint32_t crc) const {
  Slot& slot = plan.slots[number];
  if (!options_.verify || !slot.has_crc) return;
  if (!crc_known) crc = crc32c(0, plan.data + slot.dest, slot.length);
  slot.ok = crc == slot.crc;
}

// What went wrong is read once more, alone and in the plainest way, before it is called a failure.
void Reader::try_again(Plan& plan) const {
  for (uint32_t i = 0; i < plan.slots.size(); ++i) {
    Slot& slot = plan.slots[i];
    if (slot.ok) continue;
    const Segment& segment = catalog_->segments()[slot.segment];
    Extent extent;
    extent.volume = slot.volume - segment.volume_base;
    extent.offset = slot.offset;
    extent.length = slot.length;
    extent.crc = slot.crc;
    extent.mtime_ns = slot.mtime_ns;
    Failure failure;
    if (catalog_->read_extent(segment, slot.sample, extent, 0, slot.length, plan.data + slot.dest,
                              &failure)) {
      if (!options_.verify || !slot.has_crc) continue;
      failure.crc_found = crc32c(0, plan.data + slot.dest, slot.length);
      failure.kind = FailureKind::kChecksum;
      if (failure.crc_found == slot.crc) continue;
    }
    failure.slot = i;
    plan.batch->failures.push_back(failure);
  }
}

void Reader::finish(Plan& plan) const {
  Batch& batch = *plan.batch;
  batch.offsets.resize(plan.slots.size());
  batch.lengths.resize(plan.slots.size());
  for (size_t i = 0; i < plan.slots.size(); ++i) {
    batch.offsets[i] = static_cast<int64_t>(plan.slots[i].dest);
    batch.lengths[i] = static_cast<int64_t>(plan.slots[i].length);
  }
}

// Waits until the batch's memory fits. The oldest undelivered batch never waits: it is the one that
// the consumer takes next. Nor do a batch that somebody waits for and those before it, which stand
// in its way.
void Reader::charge(Job& job, uint64_t bytes) {
  std::unique_lock lock(mutex_);
  memory_.wait(lock, [&] {
    return closing_ || outstanding_bytes_ + bytes <= options_.budget_bytes ||
           *undelivered_.begin() == job.number_ || job.number_ < wanted_end_;
  });
  if (closing_) throw Error(ErrorKind::kInvalidArgument, "the reader was closed");
  outstanding_bytes_ += bytes;
  job.charged_bytes_ = bytes;
}

void Reader::want(const Job& job) {
  {
    std::lock_guard lock(mutex_);
    if (job.number_ < wanted_end_) return;
    wanted_end_ = job.number_ + 1;
  }
  memory_.notify_all();
}

// The job was delivered, failed or was forgotten: its memory is no longer ours to count.
void Reader::settle(Job& job) {
  if (foreign()) return;
  {
    std::lock_guard lock(mutex_);
    outstanding_bytes_ -= std::exchange(job.charged_bytes_, 0);
    undelivered_.erase(job.number_);
  }
  memory_.notify_all();
}

std::string Reader::engine_name() const {
  if (foreign()) return {};
  std::lock_guard lock(mutex_);
  return engine_name_;
}

std::string Reader::engine_reason() const {
  if (foreign()) return {};
  std::lock_guard lock(mutex_);
  return engine_reason_;
}

std::shared_ptr<Batch> Reader::gather(std::span<const Piece> pieces) {
  auto batch = std::make_shared<Batch>();
  batch->parts = parts_.size();
  uint64_t bytes = 0;
  for (const Piece& piece : pieces) {
    if (piece.batch == nullptr) throw Error(ErrorKind::kInvalidArgument, "a piece has no batch");
    const Batch& from = *piece.batch;
    if (piece.start > piece.stop || piece.stop > from.samples || from.parts != batch->parts) {
      throw Error(ErrorKind::kInvalidArgument, "a piece lies outside its batch");
    }
    for (uint64_t s = piece.start * batch->parts; s < piece.stop * batch->parts; ++s) {
      batch->offsets.push_back(static_cast<int64_t>(bytes));
      batch->lengths.push_back(from.lengths[s]);
      bytes = align_up(bytes + static_cast<uint64_t>(from.lengths[s]), kGatherAlignment);
    }
  }
  batch->bytes = bytes;
  batch->buffer = arena_->acquire(bytes);
  std::byte* to = batch->buffer->data;
  uint64_t slot = 0;
  for (const Piece& piece : pieces) {
    const Batch& from = *piece.batch;
    const uint64_t first = piece.start * batch->parts;
    const uint64_t last = piece.stop * batch->parts;
    for (uint64_t s = first; s < last; ++s, ++slot) {
      if (s + kGatherAhead < last) {
        const std::byte* next = from.buffer->data + from.offsets[s + kGatherAhead];
        for (int line = 0; line < 16; ++line) __builtin_prefetch(next + 64 * line);
      }
      std::memcpy(to + batch->offsets[slot], from.buffer->data + from.offsets[s],
                  static_cast<size_t>(from.lengths[s]));
    }
    batch->indices.insert(batch->indices.end(), from.indices.begin() + piece.start,
                          from.indices.begin() + piece.stop);
    batch->labels.insert(batch->labels.end(), from.labels.begin() + piece.start,
                         from.labels.begin() + piece.stop);
    for (Failure failure : from.failures) {
      if (failure.slot < first || failure.slot >= last) continue;
      failure.slot = failure.slot - first + slot - (last - first);
      batch->failures.push_back(failure);
    }
  }
  batch->samples = batch->indices.size();
  return batch;
}

Job::~Job() {
  if (reader_ != nullptr) reader_->settle(*this);
}

bool Job::done() const {
  if (reader_->foreign()) return false;
  std::lock_guard lock(mutex_);
  return stage_ == Stage::kDone;
}

std::shared_ptr<Batch> Job::wait(double seconds) {
  reader_->refuse_foreign();
  if (!done()) reader_->want(*this);
  std::shared_ptr<Batch> batch;
  {
    std::unique_lock lock(mutex_);
    // Bounded: the clock counts nanoseconds in 64 bits.
    const auto patience = std::chrono::duration<double>(seconds > 0 ? std::min(seconds, 1e9) : 0.0);
    if (!ready_.wait_for(lock, patience, [&] { return stage_ == Stage::kDone; })) return nullptr;
    if (error_) std::rethrow_exception(error_);
    if (delivered_) throw Error(ErrorKind::kInvalidArgument, "this batch was delivered before");
    delivered_ = true;
    batch = std::move(batch_);
  }
  reader_->settle(*this);
  return batch;
}

std::string Job::waiting_for() const {
  if (reader_->foreign()) return "a reader of another process";
  std::lock_guard lock(mutex_);
  switch (stage_) {
    case Stage::kQueued:
      return "a free worker";
    case Stage::kPlanning:
      return "the sample directory";
    case Stage::kMemory:
      return "memory within the budget";
    case Stage::kDone:
      return "nothing";
    case Stage::kReading:
      break;
  }
  const uint64_t done = plan_->requests_done.load();
  std::string text = std::to_string(plan_->requests.size() - done) + " of " +
                     std::to_string(plan_->requests.size()) + " reads";
  for (const Run& run : plan_->runs) {
    if (run.requests_left.load() == 0) continue;
    return text + ", one of them in volume " + reader_->catalog_->volume(run.volume).path() +
           " at offset " + std::to_string(run.begin);
  }
  return plan_->paths.empty() ? text : text + ", files such as " + plan_->paths.front();
}

}  // namespace headrace::io
