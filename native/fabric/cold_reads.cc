#include "fabric/cold_reads.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

namespace headrace::fabric {

Buffer make_buffer(size_t bytes) {
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(kBufferAlignment, bytes));
  if (memory == nullptr) throw std::bad_alloc();
  return Buffer(memory);
}

int read_range(const Export& source, uint64_t offset, std::span<std::byte> dest, int flags) {
  size_t done = 0;
  while (done < dest.size()) {
    const iovec part{dest.data() + done, dest.size() - done};
    const ssize_t count = ::preadv2(source.fd, &part, 1, static_cast<off_t>(offset + done), flags);
    if (count < 0) {
      if (errno == EINTR) continue;
      return errno;
    }
    if (count == 0) {
      // Zeros belong into the last block alone; a file that shrank has lost its data.
      if (offset + done < source.bytes) return flags != 0 ? EAGAIN : EIO;
      std::memset(dest.data() + done, 0, dest.size() - done);
      return 0;
    }
    done += static_cast<size_t>(count);
  }
  return 0;
}

// Bytes that are read once are not worth their way through the page cache: its fresh pages cost
// several times the copy. A device that wants larger blocks than ours refuses, with EINVAL.
int read_cold(const Export& source, uint64_t offset, std::span<std::byte> dest, bool direct) {
  if (direct && source.direct_fd >= 0 && offset + dest.size() <= source.bytes) {
    ssize_t count;
    do {
      count = ::pread(source.direct_fd, dest.data(), dest.size(), static_cast<off_t>(offset));
    } while (count < 0 && errno == EINTR);
    if (count == static_cast<ssize_t>(dest.size())) return 0;
  }
  return read_range(source, offset, dest, 0);
}

ColdReads::ColdReads(unsigned threads_max) : threads_max_(std::max(1u, threads_max)) {}

ColdReads::~ColdReads() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  arrived_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ColdReads::put(ColdRead read, Done done) {
  const std::lock_guard lock(mutex_);
  work_.push_back({std::move(read), std::move(done)});
  if (idle_ < work_.size() && threads_.size() < threads_max_) {
    threads_.emplace_back([this] { run(); });
  }
  arrived_.notify_one();
}

void ColdReads::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    ++idle_;
    arrived_.wait(lock, [this] { return stopping_ || !work_.empty(); });
    --idle_;
    if (stopping_) return;
    auto [read, done] = std::move(work_.front());
    work_.pop_front();
    lock.unlock();
    const Judgement& range = read.range;
    read.error =
        read_cold(*range.source, range.offset, {read.buffer.get(), range.bytes}, read.direct);
    done(std::move(read));
    lock.lock();
  }
}

}  // namespace headrace::fabric
