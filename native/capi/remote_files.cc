#include "capi/remote_files.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "capi/failure.h"
#include "capi/segments.h"
#include "core/error.h"

namespace headrace::capi {
namespace {

constexpr uint64_t kPieceBytes = 8 << 20;

[[noreturn]] void fail_range(const std::string& name, uint64_t offset, int error) {
  throw Failure(error == ETIMEDOUT ? HR_ERR_TIMEOUT : HR_ERR_FABRIC,
                name + ": reading failed at byte " + std::to_string(offset) + ": " +
                    strerror(error) + ". Look at the target and the network.",
                error);
}

// A file in memory.
class MemoryFile {
 public:
  explicit MemoryFile(const std::string& name) : fd_(::memfd_create("headrace", MFD_CLOEXEC)) {
    if (fd_ < 0) fail(name);
  }
  ~MemoryFile() { ::close(fd_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  int fd() const { return fd_; }
  void append(std::span<const std::byte> bytes, const std::string& name) {
    while (!bytes.empty()) {
      const ssize_t done = ::write(fd_, bytes.data(), bytes.size());
      if (done < 0 && errno == EINTR) continue;
      if (done <= 0) fail(name);
      bytes = bytes.subspan(static_cast<size_t>(done));
    }
  }

 private:
  [[noreturn]] static void fail(const std::string& name) {
    throw Error(ErrorKind::kVolume, name + ": no memory for it: " + strerror(errno), name, -1,
                errno);
  }
  const int fd_;
};

}  // namespace

fabric::ConnectionsOptions connection_options(const MountOptions& options) {
  fabric::ConnectionsOptions out;
  out.host.identity = fabric::HostIdentity::of_machine();
  if (!options.host_nqn.empty()) {
    if (!fabric::is_nqn(options.host_nqn)) {
      refuse("host_nqn is '" + options.host_nqn + "', expected nqn.YYYY-MM.reversed.domain:name");
    }
    out.host.identity.nqn = options.host_nqn;
  }
  if (!options.digests) out.host.dgst = 0;
  out.host.timeout_s = std::min(10.0, options.timeout_s);
  out.queues = options.queues;
  out.command_timeout_s = std::min(10.0, options.timeout_s);
  out.give_up_s = options.give_up_s;
  out.read_deadline_s = options.give_up_s;
  return out;
}

void read_range(const std::shared_ptr<io::RemoteEngine>& engine, const std::string& name,
                uint64_t offset, std::span<std::byte> dest, double timeout_s) {
  // The requests keep memory of their own: an answer may come after we have given up.
  const auto memory = std::make_shared<std::vector<std::byte>>();
  for (uint64_t done = 0; done < dest.size();) {
    const uint64_t size = std::min(kPieceBytes, dest.size() - done);
    memory->resize(size);
    const io::RemoteCall call{engine, memory, timeout_s};
    const int64_t got = io::read_remote(call, 0, name, offset + done, size, memory->data());
    if (got < 0) fail_range(name, offset + done, static_cast<int>(-got));
    if (static_cast<uint64_t>(got) != size) {
      fail_corrupt(name, "bytes from " + std::to_string(offset + done), std::to_string(got),
                   std::to_string(size));
    }
    std::memcpy(dest.data() + done, memory->data(), size);
    done += size;
  }
}

std::shared_ptr<Directory> fetch_directory(const std::shared_ptr<io::RemoteEngine>& engine,
                                           const std::string& name, const SegmentEntry& entry,
                                           double timeout_s) {
  MemoryFile file(name);
  std::vector<std::byte> piece;
  for (uint64_t at = 0; at < entry.directory_bytes; at += piece.size()) {
    piece.resize(std::min(kPieceBytes, entry.directory_bytes - at));
    read_range(engine, name, at, piece, timeout_s);
    file.append(piece, name);
  }
  return open_directory(file.fd(), entry, name);
}

}  // namespace headrace::capi
