#include "io/rank_barrier.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <limits>
#include <new>
#include <string>

#include "core/error.h"

namespace headrace {
namespace {

constexpr uint64_t kMagic = 0x7265697272614252;  // "RBarrier"
constexpr uint32_t kRanksMax = 1 << 16;
constexpr int64_t kNever = std::numeric_limits<int64_t>::min();
constexpr int64_t kSecondNs = 1'000'000'000;

using Word = std::atomic<uint32_t>;
static_assert(sizeof(Word) == 4 && Word::is_always_lock_free);
static_assert(std::atomic<int64_t>::is_always_lock_free);

// Waits while the word has this value, until an absolute moment of CLOCK_MONOTONIC at the latest.
void sleep_on(const Word& word, uint32_t value, int64_t until_ns) {
  const timespec until{until_ns / kSecondNs, until_ns % kSecondNs};
  syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&word), FUTEX_WAIT_BITSET, value, &until,
          nullptr, FUTEX_BITSET_MATCH_ANY);
}

void wake_all(const Word& word) {
  syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr,
          nullptr, 0);
}

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * kSecondNs + now.tv_nsec;
}

// Whether the word has left this value; a signal ends the wait early.
bool has_changed(const Word& word, uint32_t value, int64_t until_ns) {
  while (word.load(std::memory_order_acquire) == value) {
    if (now_ns() >= until_ns) return false;
    errno = 0;
    sleep_on(word, value, until_ns);
    if (errno == EINTR) return word.load(std::memory_order_acquire) != value;
  }
  return true;
}

void raise_to(std::atomic<int64_t>& moment, int64_t ns) {
  int64_t seen = moment.load(std::memory_order_relaxed);
  while (seen < ns && !moment.compare_exchange_weak(seen, ns, std::memory_order_acq_rel)) {
  }
}

void* shared(int fd, size_t nbytes) {
  return mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
}

[[noreturn]] void no_memory(const char* why) {
  const int error = errno;
  throw Error(
      ErrorKind::kVolume,
      std::string("no shared memory for the ranks' barrier: ") + why + ": " + std::strerror(error),
      {}, -1, error);
}

}  // namespace

struct RankBarrier::Memory {
  uint64_t magic = 0;
  uint32_t ranks = 0;
  uint32_t led = 0;
  Word arrived = 0;
  Word full = 0;  // turns in which all of the host have arrived
  Word turn = 0;  // turns that are over
  struct Moments {
    std::atomic<int64_t> end = kNever, undelayed = kNever;
  } moments[2];  // of even and of odd turns
  // Behind it, for each process: turns in which it has arrived.
  Word* turns() { return reinterpret_cast<Word*>(this + 1); }
  static size_t nbytes(uint32_t ranks) { return sizeof(Memory) + ranks * sizeof(Word); }
};

RankBarrier::RankBarrier(Memory* memory, size_t nbytes, int fd, uint32_t index)
    : memory_(memory), nbytes_(nbytes), fd_(fd), index_(index) {}

std::unique_ptr<RankBarrier> RankBarrier::create(uint32_t ranks, bool led) {
  if (ranks < 1 || ranks > kRanksMax) {
    throw Error(ErrorKind::kInvalidArgument, "ranks is " + std::to_string(ranks) +
                                                 ", expected 1 to " + std::to_string(kRanksMax));
  }
  const size_t nbytes = Memory::nbytes(ranks);
  const int fd = memfd_create("headrace-barrier", MFD_CLOEXEC);
  if (fd < 0) no_memory("memfd_create");
  void* data = ftruncate(fd, static_cast<off_t>(nbytes)) == 0 ? shared(fd, nbytes) : MAP_FAILED;
  if (data == MAP_FAILED) {
    close(fd);
    no_memory("mmap");
  }
  Memory* memory = new (data) Memory;
  memory->magic = kMagic;
  memory->ranks = ranks;
  memory->led = led ? 1 : 0;
  return std::unique_ptr<RankBarrier>(new RankBarrier(memory, nbytes, fd, 0));
}

std::unique_ptr<RankBarrier> RankBarrier::attach(int fd, uint32_t index) {
  struct stat status;
  const bool sized = fstat(fd, &status) == 0 && status.st_size >= off_t{sizeof(Memory)} &&
                     status.st_size <= static_cast<off_t>(Memory::nbytes(kRanksMax));
  const size_t nbytes = sized ? static_cast<size_t>(status.st_size) : 0;
  void* data = sized ? shared(fd, nbytes) : MAP_FAILED;
  if (data != MAP_FAILED) {
    Memory* memory = static_cast<Memory*>(data);
    if (memory->magic == kMagic && index < memory->ranks &&
        nbytes == Memory::nbytes(memory->ranks)) {
      return std::unique_ptr<RankBarrier>(new RankBarrier(memory, nbytes, -1, index));
    }
    munmap(data, nbytes);
  }
  throw Error(ErrorKind::kInvalidArgument, "descriptor " + std::to_string(fd) +
                                               " is no memory of a barrier with a place " +
                                               std::to_string(index));
}

RankBarrier::~RankBarrier() {
  munmap(memory_, nbytes_);
  if (fd_ >= 0) close(fd_);
}

StepEnds RankBarrier::latest() const {
  const Memory::Moments& moments = memory_->moments[turn_ & 1];
  return {moments.end.load(std::memory_order_acquire),
          moments.undelayed.load(std::memory_order_acquire)};
}

void RankBarrier::raise(StepEnds ends) {
  Memory::Moments& moments = memory_->moments[turn_ & 1];
  raise_to(moments.end, ends.end_ns);
  raise_to(moments.undelayed, ends.undelayed_ns);
}

// Nobody reads the moments of the turn before: all have arrived in this one.
void RankBarrier::arrive(StepEnds ends) {
  raise(ends);
  memory_->turns()[index_].store(turn_ + 1, std::memory_order_relaxed);
  if (memory_->arrived.fetch_add(1, std::memory_order_acq_rel) + 1 < memory_->ranks) return;
  memory_->arrived.store(0, std::memory_order_relaxed);
  Memory::Moments& next = memory_->moments[(turn_ + 1) & 1];
  next.end.store(kNever, std::memory_order_relaxed);
  next.undelayed.store(kNever, std::memory_order_relaxed);
  if (memory_->led == 0) {
    go_on();
    return;
  }
  memory_->full.store(turn_ + 1, std::memory_order_release);
  wake_all(memory_->full);
}

void RankBarrier::go_on() {
  memory_->turn.store(turn_ + 1, std::memory_order_release);
  wake_all(memory_->turn);
}

bool RankBarrier::await(int64_t until_ns, StepEnds* latest_of_all) {
  if (!has_changed(memory_->turn, turn_, until_ns)) return false;
  *latest_of_all = latest();
  ++turn_;
  return true;
}

bool RankBarrier::await_host(int64_t until_ns, StepEnds* latest_of_host) {
  if (!has_changed(memory_->full, turn_, until_ns)) return false;
  *latest_of_host = latest();
  return true;
}

void RankBarrier::release(StepEnds latest_of_all) {
  raise(latest_of_all);
  go_on();
}

int64_t RankBarrier::missing() const {
  for (uint32_t index = 0; index < memory_->ranks; ++index) {
    if (memory_->turns()[index].load(std::memory_order_relaxed) == turn_) return index;
  }
  return -1;
}

}  // namespace headrace
