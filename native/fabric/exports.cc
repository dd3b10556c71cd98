#include "fabric/exports.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "core/error.h"

namespace headrace::fabric {

namespace {

int open_direct(int fd) {
  return ::open(("/proc/self/fd/" + std::to_string(fd)).c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
}

}  // namespace

Export::~Export() {
  ::close(fd);
  if (direct_fd >= 0) ::close(direct_fd);
}

void Exports::add(uint32_t nsid, int fd, uint64_t bytes, uint32_t block_bytes) {
  if (nsid == 0 || nsid >= 0xFFFFFFFE || bytes == 0 || block_bytes < 512 ||
      (block_bytes & (block_bytes - 1)) != 0) {
    throw Error(ErrorKind::kInvalidArgument,
                "namespace " + std::to_string(nsid) + " of " + std::to_string(bytes) +
                    " bytes in blocks of " + std::to_string(block_bytes) + " cannot be exported");
  }
  const int own = ::fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (own < 0) {
    throw Error(ErrorKind::kVolume, std::string("cannot export: ") + std::strerror(errno), {}, -1,
                errno);
  }
  auto added = std::make_shared<const Export>(own, open_direct(own), bytes, block_bytes);
  const std::lock_guard lock(mutex_);
  if (!exports_.emplace(nsid, std::move(added)).second) {
    throw Error(ErrorKind::kInvalidArgument,
                "namespace " + std::to_string(nsid) + " is exported already");
  }
  bytes_ += bytes;
}

void Exports::remove(uint32_t nsid) {
  const std::lock_guard lock(mutex_);
  const auto it = exports_.find(nsid);
  if (it == exports_.end()) return;
  bytes_ -= it->second->bytes;
  exports_.erase(it);
}

void Exports::set_written(uint32_t nsid, uint64_t bytes) {
  const auto found = find(nsid);
  if (found == nullptr) {
    throw Error(ErrorKind::kInvalidArgument,
                "namespace " + std::to_string(nsid) + " is not exported");
  }
  // Released after the bytes were written, by whoever wrote them; the page cache is the rest.
  found->written.store(bytes, std::memory_order_release);
}

std::shared_ptr<const Export> Exports::find(uint32_t nsid) const {
  const std::lock_guard lock(mutex_);
  const auto it = exports_.find(nsid);
  return it == exports_.end() ? nullptr : it->second;
}

namespace {

Judgement refuse(uint16_t status) {
  return {static_cast<uint16_t>(status | kDoNotRetry), nullptr, 0, 0};
}

Judgement judge_read(const Sqe& sqe, std::shared_ptr<const Export> source, uint32_t transfer_max) {
  const uint64_t blocks = blocks_of(sqe);
  const uint64_t slba = slba_of(sqe);
  const uint64_t bytes = blocks * source->block_bytes;
  const uint64_t capacity = (source->bytes + source->block_bytes - 1) / source->block_bytes;
  if (blocks > capacity || slba > capacity - blocks) return refuse(kLbaOutOfRange);
  if (bytes > transfer_max) return refuse(kInvalidField);
  if (sqe.sgl_type != kSglTransport) return refuse(kSglTypeInvalid);
  if (sqe.sgl_length != bytes) return refuse(kSglLengthInvalid);
  const uint64_t offset = slba * source->block_bytes;
  const uint64_t end = std::min(offset + bytes, source->bytes);
  if (end > source->written.load(std::memory_order_acquire)) return refuse(kUnwrittenBlock);
  return {kSuccess, std::move(source), offset, static_cast<uint32_t>(bytes)};
}

}  // namespace

Judgement judge_command(const Sqe& sqe, const Exports& exports, uint32_t transfer_max) {
  const auto opcode = static_cast<Opcode>(sqe.opcode);
  auto source = exports.find(sqe.nsid);
  switch (opcode) {
    case Opcode::kFlush:
      // Nothing is ever dirty; FFFFFFFFh means all namespaces.
      if (source == nullptr && sqe.nsid != 0xFFFFFFFF) return refuse(kInvalidNamespace);
      return {};
    case Opcode::kRead:
      if (source == nullptr) return refuse(kInvalidNamespace);
      return judge_read(sqe, std::move(source), transfer_max);
    case Opcode::kWrite:
    case Opcode::kWriteUncorrectable:
    case Opcode::kWriteZeroes:
    case Opcode::kDatasetManagement:
      if (source == nullptr) return refuse(kInvalidNamespace);
      return refuse(kNamespaceWriteProtected);
    default:
      return refuse(kInvalidOpcode);
  }
}

}  // namespace headrace::fabric
