// The io_uring engine: many reads in flight from one thread, without a copy.
//
// Each read in flight has a slot, and each slot at most one request in the ring, so neither queue
// can overflow. A read of an open file is one READ (or READ_FIXED), repeated while it comes short.
// A read of a path is OPENAT, a check of the opened file, READ, close. `on_done` runs while the
// rest is in flight.
//
// Measured on two cores and a virtual disk that does 150,000 reads/s; O_DIRECT, random, cold:
//   - registered files gain 0 to 5% reads/s (the spread between runs) and 2 to 7% CPU in
//     limit_probe. Not used: the table would have to be told of every descriptor's life, since a
//     number that is closed and used again would silently read the other file.
//   - registered buffers halve the CPU at 110 kB (from 0.063 to 0.023-0.030 s/GB), and save a
//     fifth at 2.2 kB and depth 128.
//   - files by path, depth 64: OPENAT through the ring costs 24.4 us for a hot file of 110 kB,
//     openat in this thread 23.1. Cold, in 500 folders, the ring does 10,300 files/s and this
//     thread 6,800: opens of cold inodes wait for the disk, and the ring waits for many at once.
//     16 threads do 12,100 with a tenth more CPU, at 2 kB the same as the ring with two fifths
//     more, and a network's round trips favour the ring: paths stay here.
//
// Invariants:
//   - requests in the ring <= slots <= the ring's entries, and each busy slot holds a place in
//   flight
//   - a read is reported once, after the kernel has let go of its memory
//   - `read` returns or throws with nothing in flight, so between calls the ring is idle; or it
//   says
//     that reads are lost, and begins with a new ring
#include "io/uring.h"

#if HEADRACE_HAVE_URING
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "io/attempt.h"
#include "io/blocking.h"
#include "io/registered_buffers.h"
#include "io/residency.h"
#include "io/ring.h"

namespace headrace::io {
namespace {

constexpr unsigned kQueueDepthMax = 4096;

// io_uring_enter may be short of memory. So many refusals a millisecond apart, and it is broken.
constexpr unsigned kEnterRefusalsMax = 10'000;

struct Slot {
  Attempt attempt;
  InFlight::Time started;
  RingOp op = RingOp::kRead;
  bool owns_file = false;
  bool blocking = false;  // the last answer was EAGAIN: let a kernel thread wait in our stead
};

class UringEngine final : public Engine {
 public:
  UringEngine(unsigned depth, std::shared_ptr<InFlight> in_flight, const RingOptions& options,
              std::unique_ptr<Ring> ring)
      : options_(options), own_depth_(depth), in_flight_(std::move(in_flight)) {
    make_slots(depth);
    ring_ = std::move(ring);
  }

  ~UringEngine() override { leave_behind_parent(); }

  const char* name() const override { return "uring"; }
  void read(std::span<Read> reads, const OnDone& on_done) override;

  void know_buffer(uint64_t id, std::span<std::byte> memory) override {
    if (id == 0) return;
    buffers_.know(id, memory);
    if (is_at_home()) buffers_.apply(*ring_);
  }
  void forget_buffer(uint64_t id) override {
    buffers_.forget(id);
    if (is_at_home()) buffers_.apply(*ring_);  // else the next `read` unpins it
  }

  static std::unique_ptr<Ring> open_ring(unsigned depth, const RingOptions& options,
                                         bool single_issuer, std::string* reason) {
    return Ring::open({.entries = depth,
                       .single_issuer = single_issuer,
                       .registered_buffers = options.registered_buffers},
                      reason);
  }

 private:
  bool is_at_home() const { return ring_ && pid_ == ::getpid() && thread_ == ::gettid(); }
  void leave_behind_parent();
  void make_slots(unsigned depth);
  void free_all();
  void deepen();
  void come_home();

  void read_all(const OnDone& on_done);
  bool may_start(const Read& read) const;
  bool have_place();
  void start_more();
  void start(Read& read);
  void start_open(unsigned index);
  void queue(unsigned index, io_uring_sqe* sqe);
  void queue_open(unsigned index);
  void queue_read(unsigned index);

  bool enter(unsigned wait_for);
  void await_completion(int error);
  void end_in_flight();
  void forget_reads();
  void reap();
  void complete(unsigned index, int result);
  void opened(unsigned index, int result);
  void refused(unsigned index, int error);
  void finish(unsigned index);
  void finish_blocking();
  void report(const OnDone& on_done);
  void settle_places();

  const RingOptions options_;
  const unsigned own_depth_;
  const std::shared_ptr<InFlight> in_flight_;
  std::unique_ptr<Ring> ring_;  // null: broken; the next `read` tries to make another
  pid_t pid_ = ::getpid();
  pid_t thread_ = ::gettid();
  unsigned moves_ = 0;  // how often another thread than the last one called
  RegisteredBuffers buffers_;

  std::vector<Slot> slots_;
  std::vector<unsigned> free_;
  std::vector<Read*> finished_;   // not yet reported
  unsigned places_ = 0;           // taken and not yet used; every busy slot uses one
  InFlight::Time now_;            // when the last requests were queued, or answers reaped
  std::vector<int64_t> took_ns_;  // of reads that finished and still count as in flight
  uint64_t took_bytes_ = 0;
  unsigned queued_ = 0;  // in our queue, not yet taken by the kernel
  unsigned in_kernel_ = 0;

  // One call of `read`.
  std::span<Read> reads_;
  size_t next_ = 0;
  std::vector<Read*> again_;  // refused for want of descriptors: opened again before `next_`
  unsigned files_open_ = 0;   // opened, or being opened
  unsigned files_max_ = 0;
  unsigned file_waits_ = 0;
};

// A forked child shares the parent's ring and may not touch it. Nor may it close the descriptor,
// whose number may be another file's by now: leak all.
void UringEngine::leave_behind_parent() {
  if (pid_ == ::getpid()) return;
  static_cast<void>(ring_.release());
  pid_ = ::getpid();
}

void UringEngine::make_slots(unsigned depth) {
  std::vector<Slot> slots(depth);
  std::vector<unsigned> free(depth);
  took_ns_.reserve(depth);
  slots_.swap(slots);
  free_.swap(free);
  free_all();
}

void UringEngine::free_all() {
  free_.resize(slots_.size());  // which it held before
  std::iota(free_.rbegin(), free_.rend(), 0u);
}

// More reads may be in flight than the ring holds: the next ring is larger. It never gets smaller;
// places bound what is used of it.
void UringEngine::deepen() {
  const unsigned wanted = std::min(in_flight_->depth(own_depth_), kQueueDepthMax);
  if (wanted <= slots_.size()) return;
  ring_.reset();  // `come_home` opens another
  make_slots(std::bit_ceil(wanted));
}

// The kernel binds a SINGLE_ISSUER ring to its thread. An engine that is made in one thread and
// used in another moves once; one that keeps moving gets a ring that doesn't mind.
void UringEngine::come_home() {
  leave_behind_parent();
  deepen();
  const bool moved = thread_ != ::gettid();
  thread_ = ::gettid();
  if (moved) ++moves_;
  if (!ring_ || (moved && ring_->is_single_issuer())) {
    std::string reason;
    ring_.reset();
    ring_ = open_ring(static_cast<unsigned>(slots_.size()), options_, moves_ < 2, &reason);
    buffers_.moved_to_new_ring();
  }
  if (ring_) buffers_.apply(*ring_);
}

void UringEngine::read(std::span<Read> reads, const OnDone& on_done) {
  if (reads.empty()) return;
  come_home();
  // While reads are in flight nothing is allocated: what runs out of memory, does so here.
  finished_.reserve(reads.size() + slots_.size());
  again_.reserve(reads.size());
  reads_ = reads;
  next_ = 0;
  files_max_ = 0;
  file_waits_ = 0;
  try {
    read_all(on_done);
  } catch (const ReadsLost&) {
    throw;
  } catch (...) {
    end_in_flight();
    throw;
  }
}

void UringEngine::read_all(const OnDone& on_done) {
  if (!ring_) finish_blocking();
  while (next_ < reads_.size() || !again_.empty() || free_.size() < slots_.size()) {
    start_more();
    if (free_.size() == slots_.size() && finished_.empty()) {  // others hold all places
      places_ = in_flight_->acquire(1);
      continue;
    }
    // With more answered than still in flight the disk would run dry during the callbacks: submit
    // before them. Otherwise one enter both submits and waits.
    if (!finished_.empty() && finished_.size() >= in_kernel_ && queued_ > 0) enter(0);
    report(on_done);
    const unsigned busy = static_cast<unsigned>(slots_.size() - free_.size());
    if (busy == 0) continue;
    if (!enter(std::max(1u, busy / std::max(1u, options_.wait_share)))) finish_blocking();
    reap();
  }
  report(on_done);
}

bool UringEngine::may_start(const Read& read) const {
  return read.path == nullptr || files_max_ == 0 || files_open_ < files_max_;
}

// Takes places for all that could start now, the first time that one is needed.
bool UringEngine::have_place() {
  if (places_ > 0) return true;
  if (free_.empty()) return false;
  const size_t left = again_.size() + reads_.size() - next_;
  places_ = in_flight_->try_acquire(static_cast<unsigned>(std::min(free_.size(), left)));
  return places_ > 0;
}

void UringEngine::start_more() {
  if (free_.empty() || (again_.empty() && next_ == reads_.size())) return;
  now_ = InFlight::Clock::now();
  while (!again_.empty() && may_start(*again_.back()) && have_place()) {
    Read& read = *again_.back();
    again_.pop_back();
    start(read);
  }
  while (again_.empty() && next_ < reads_.size() && may_start(reads_[next_]) && have_place()) {
    start(reads_[next_++]);
  }
  in_flight_->release(std::exchange(places_, 0));
}

void UringEngine::start(Read& read) {
  read.error = 0;
  read.done = 0;
  if (read.path == nullptr && read.length == 0) {
    finished_.push_back(&read);
    return;
  }
  const unsigned index = free_.back();
  free_.pop_back();
  --places_;
  const unsigned taken = in_flight_->taken();
  read.others =
      taken > places_ ? taken - places_ - 1 : 0;  // places that are kept for more are none
  slots_[index] = Slot{.attempt = {.read = &read, .fd = read.fd}, .started = now_};
  if (read.path != nullptr) {
    start_open(index);
  } else {
    queue_read(index);
  }
}

void UringEngine::start_open(unsigned index) {
  if (files_max_ == 0) files_max_ = open_files_max(static_cast<unsigned>(slots_.size()));
  ++files_open_;
  slots_[index].op = RingOp::kOpen;
  queue_open(index);
}

void UringEngine::queue(unsigned index, io_uring_sqe* sqe) {
  sqe->user_data = index;
  // A request that may not wait says EAGAIN (O_NONBLOCK on a file system without asynchronous
  // reads): a kernel thread may.
  if (slots_[index].blocking) sqe->flags |= IOSQE_ASYNC;
  ++queued_;
}

void UringEngine::queue_open(unsigned index) {
  io_uring_sqe* sqe = io_uring_get_sqe(ring_->get());
  const Read& read = *slots_[index].attempt.read;
  io_uring_prep_openat(sqe, read.fd, read.path, kOpenFlags, 0);
  queue(index, sqe);
}

void UringEngine::queue_read(unsigned index) {
  io_uring_sqe* sqe = io_uring_get_sqe(ring_->get());
  Slot& slot = slots_[index];
  const Attempt& attempt = slot.attempt;
  slot.op = RingOp::kRead;
  const unsigned bytes = static_cast<unsigned>(attempt.bytes());
  const int buffer = buffers_.slot_for(attempt.read->buffer_id, attempt.dest(), bytes);
  if (buffer != RegisteredBuffers::kNone) {
    io_uring_prep_read_fixed(sqe, attempt.fd, attempt.dest(), bytes, attempt.offset(), buffer);
  } else {
    io_uring_prep_read(sqe, attempt.fd, attempt.dest(), bytes, attempt.offset());
  }
  queue(index, sqe);
}

// Submits what is queued and waits for completions. False when the ring is broken and holds
// nothing of ours.
bool UringEngine::enter(unsigned wait_for) {
  for (unsigned refusals = 0;; ++refusals) {
    const int refused = options_.on_enter ? options_.on_enter() : 0;
    const int taken = refused != 0 ? refused : io_uring_submit_and_wait(ring_->get(), wait_for);
    if (taken >= 0) {
      queued_ -= static_cast<unsigned>(taken);
      in_kernel_ += static_cast<unsigned>(taken);
      return true;
    }
    if (io_uring_cq_ready(ring_->get()) > 0) return true;  // the loop comes back to what is left
    const bool may_pass = taken == -EAGAIN || taken == -EBUSY || taken == -ENOMEM;
    if (taken == -EINTR) continue;
    if (may_pass && refusals < kEnterRefusalsMax) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      continue;
    }
    // EOPNOTSUPP: the number is another file's.
    if (taken == -EBADF || taken == -EOPNOTSUPP) ring_->descriptor_is_gone();
    if (in_kernel_ == 0) return false;
    await_completion(-taken);
    return true;
  }
}

// The ring takes no calls any more, and the kernel still owns memory of the caller's. Most rings
// bring what is in flight all the same; returns when something has come. Throws ReadsLost when
// nothing does.
void UringEngine::await_completion(int error) {
  const auto until = InFlight::Clock::now() + options_.lost_after;
  while (io_uring_cq_ready(ring_->get()) == 0) {
    if (InFlight::Clock::now() >= until) {
      const unsigned reads = in_kernel_;
      ring_.reset();
      forget_reads();
      throw ReadsLost(error, reads);
    }
    io_uring_get_events(ring_->get());  // which may be refused, too
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// Something was thrown with reads in flight: waits for them, so that their memory may be used
// again. What was queued goes along, because it cannot be taken back.
void UringEngine::end_in_flight() {
  while (ring_ && in_kernel_ + queued_ > 0 && enter(1)) {
    unsigned head, count = 0;
    io_uring_cqe* cqe;
    io_uring_for_each_cqe(ring_->get(), head, cqe) {
      ++count;
      if (slots_[cqe->user_data].op == RingOp::kOpen && cqe->res >= 0) kSyscalls.close(cqe->res);
    }
    io_uring_cq_advance(ring_->get(), count);
    in_kernel_ -= count;
  }
  if (queued_ > 0) ring_.reset();  // it is broken, and what it would not take must not run later
  forget_reads();
}

// Begins anew: closes what the reads had opened, and gives their places back.
void UringEngine::forget_reads() {
  std::sort(free_.begin(), free_.end());
  for (unsigned index = 0, next = 0; index < slots_.size(); ++index) {
    if (next < free_.size() && free_[next] == index) {
      ++next;
    } else if (slots_[index].owns_file) {
      kSyscalls.close(slots_[index].attempt.fd);
    }
  }
  // Of reads that have finished, places are given back by `settle_places`.
  const auto busy = static_cast<unsigned>(slots_.size() - free_.size());
  in_flight_->release(busy + static_cast<unsigned>(took_ns_.size()) + std::exchange(places_, 0));
  took_ns_.clear();
  took_bytes_ = 0;
  free_all();
  again_.clear();
  finished_.clear();
  queued_ = in_kernel_ = files_open_ = 0;
}

void UringEngine::reap() {
  if (!ring_) return;
  io_uring* ring = ring_->get();
  struct Seen {  // even where completing one throws
    ~Seen() { io_uring_cq_advance(ring, count); }
    io_uring* ring;
    unsigned count = 0;
  };
  {
    Seen seen{ring};
    unsigned head;
    io_uring_cqe* cqe;
    now_ = InFlight::Clock::now();
    io_uring_for_each_cqe(ring, head, cqe) {
      ++seen.count;
      --in_kernel_;
      complete(static_cast<unsigned>(cqe->user_data), cqe->res);
    }
  }
  settle_places();
}

// Gives the places of finished reads back, all at once.
void UringEngine::settle_places() {
  in_flight_->finished(took_ns_, std::exchange(took_bytes_, 0));
  took_ns_.clear();
}

void UringEngine::complete(unsigned index, int result) {
  Slot& slot = slots_[index];
  if (options_.on_completion) result = options_.on_completion(slot.op, result);
  if (slot.op == RingOp::kOpen) {
    opened(index, result);
    return;
  }
  slot.blocking = result == -EAGAIN;
  if (slot.attempt.advance(result, kSyscalls) == Next::kAgain) {
    queue_read(index);
  } else {
    finish(index);
  }
}

void UringEngine::opened(unsigned index, int result) {
  Slot& slot = slots_[index];
  if (result < 0) {
    refused(index, -result);
    return;
  }
  file_waits_ = 0;
  slot.attempt.read->open_ns = (now_ - slot.started) / std::chrono::nanoseconds(1);
  slot.attempt.fd = result;
  slot.attempt.retries = 0;
  slot.owns_file = true;
  slot.blocking = false;
  // fstat here and not as a STATX request: the open has just brought the inode into memory, and
  // the ring hands every STATX to a kernel thread.
  Read& read = *slot.attempt.read;
  const int error = check_file(result, read.check, kSyscalls);
  read.resident = error == 0 && read.length > 0 && resident(result, read.offset, read.length);
  if (error != 0 || read.length == 0) {
    slot.attempt.fail(error);
    finish(index);
  } else {
    queue_read(index);
  }
}

void UringEngine::refused(unsigned index, int error) {
  Slot& slot = slots_[index];
  if (is_transient(error) && ++slot.attempt.retries <= kRetriesMax) {
    slot.blocking = error == EAGAIN;
    queue_open(index);
    return;
  }
  const bool ours_are_open = files_open_ > 1;
  if (is_out_of_files(error) && (ours_are_open || ++file_waits_ <= kFileWaitsMax)) {
    // Fewer at a time from now on, and this one again when the next of ours has closed.
    again_.push_back(slot.attempt.read);
    --files_open_;
    free_.push_back(index);
    in_flight_->release(1);
    files_max_ = std::max(1u, files_open_);
    if (!ours_are_open) std::this_thread::sleep_for(std::chrono::milliseconds(kFileWaitMs));
    return;
  }
  slot.attempt.fail(error);
  finish(index);
}

void UringEngine::finish(unsigned index) {
  Slot& slot = slots_[index];
  if (slot.owns_file) kSyscalls.close(slot.attempt.fd);
  if (slot.attempt.read->path != nullptr) --files_open_;
  slot.attempt.read->took_ns = (now_ - slot.started) / std::chrono::nanoseconds(1);
  took_ns_.push_back(slot.attempt.read->took_ns);
  took_bytes_ += slot.attempt.read->done;
  finished_.push_back(slot.attempt.read);
  free_.push_back(index);
}

// The ring is broken (somebody closed its descriptor) or could not be made again, and none of our
// requests is in the kernel: this thread performs what was queued and all that is left. The next
// call tries to make a new ring.
void UringEngine::finish_blocking() {
  queued_ = 0;
  ring_.reset();
  OpenFiles files;
  std::vector<bool> is_free(slots_.size());
  for (const unsigned index : free_) is_free[index] = true;
  for (unsigned index = 0; index < slots_.size(); ++index) {
    if (is_free[index]) continue;
    Slot& slot = slots_[index];
    if (slot.owns_file) kSyscalls.close(slot.attempt.fd);
    read_blocking(*slot.attempt.read, kSyscalls, files, 1);
    now_ = InFlight::Clock::now();
    slot.owns_file = false;
    finish(index);
  }
  settle_places();
  files_open_ = 0;
  while (next_ < reads_.size()) again_.push_back(&reads_[next_++]);
  for (Read* read : again_) {
    in_flight_->acquire(1);
    const auto started = InFlight::Clock::now();
    read_blocking(*read, kSyscalls, files, 1);
    took_ns_.push_back((InFlight::Clock::now() - started) / std::chrono::nanoseconds(1));
    took_bytes_ += read->done;
    settle_places();
    finished_.push_back(read);
  }
  again_.clear();
}

void UringEngine::report(const OnDone& on_done) {
  for (Read* read : finished_) on_done(*read);
  finished_.clear();
}

}  // namespace

std::unique_ptr<Engine> make_uring_engine(const EngineOptions& options, const RingOptions& ring,
                                          std::string* reason) {
  auto in_flight = options.in_flight ? options.in_flight : std::make_shared<InFlight>();
  const unsigned depth = std::clamp(in_flight->depth(options.queue_depth), 1u, kQueueDepthMax);
  auto opened = UringEngine::open_ring(depth, ring, true, reason);
  if (!opened) return nullptr;
  return std::make_unique<UringEngine>(depth, std::move(in_flight), ring, std::move(opened));
}

}  // namespace headrace::io

#else  // !HEADRACE_HAVE_URING

namespace headrace::io {

std::unique_ptr<Engine> make_uring_engine(const EngineOptions&, const RingOptions&,
                                          std::string* reason) {
  *reason = "this build has no io_uring: liburing was not found when it was compiled";
  return nullptr;
}

}  // namespace headrace::io

#endif

namespace headrace::io {

std::unique_ptr<Engine> make_uring_engine(const EngineOptions& options, std::string* reason) {
  return make_uring_engine(options, RingOptions{}, reason);
}

}  // namespace headrace::io
