#include "io/ring.h"

#if HEADRACE_HAVE_URING
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

namespace headrace::io {
namespace {

// Numbers of the kernel's interface that older headers lack.
constexpr unsigned kSubmitAll = 1U << 7;      // 5.18
constexpr unsigned kCoopTaskrun = 1U << 8;    // 5.19
constexpr unsigned kSingleIssuer = 1U << 12;  // 6.0
constexpr unsigned kDeferTaskrun = 1U << 13;  // 6.1

// NO_SQARRAY (6.6) changes where liburing finds its indices: only a liburing that knows the flag
// may be given it. With an older one the kernel's default layout costs nothing that we measured.
#ifdef IORING_SETUP_NO_SQARRAY
constexpr unsigned kNoSqarray = IORING_SETUP_NO_SQARRAY;
#else
constexpr unsigned kNoSqarray = 0;
#endif

// The kernel pins at most 1 GiB in one registered buffer.
constexpr size_t kBufferBytesMax = size_t{1} << 30;

// A ring is often mapped where another thread's was unmapped. The kernel puts these in order, and
// liburing's own system calls hide that from ThreadSanitizer.
#if defined(__SANITIZE_THREAD__)
extern "C" void __tsan_acquire(void*);
extern "C" void __tsan_release(void*);
char g_mappings;
void will_unmap() { __tsan_release(&g_mappings); }
void mapped() { __tsan_acquire(&g_mappings); }
#else
void will_unmap() {}
void mapped() {}
#endif

long read_sysctl(const char* path) {
  long value = -1;
  if (FILE* file = std::fopen(path, "re")) {
    if (std::fscanf(file, "%ld", &value) != 1) value = -1;
    std::fclose(file);
  }
  return value;
}

std::string explain_set_up(int error) {
  const std::string call = "io_uring_setup: " + std::string(std::strerror(error));
  switch (error) {
    case ENOSYS:
      return call + ": the kernel has no io_uring (it came with 5.1), or a seccomp filter hides it";
    case EPERM:
    case EACCES: {
      const long disabled = read_sysctl("/proc/sys/kernel/io_uring_disabled");
      if (disabled == 2) return call + ": the sysctl kernel.io_uring_disabled is 2";
      if (disabled == 1) {
        return call +
               ": the sysctl kernel.io_uring_disabled is 1 and this process is not in "
               "kernel.io_uring_group";
      }
      return call + ": a seccomp filter or security module (a container's default) forbids it";
    }
    case ENOMEM:
      return call + ": no memory, or RLIMIT_MEMLOCK (`ulimit -l`) is too low for this kernel";
    case EMFILE:
    case ENFILE:
      return call + ": no file descriptors are left (`ulimit -n`)";
    default:
      return call;
  }
}

}  // namespace

std::unique_ptr<Ring> Ring::open(const Options& options, std::string* reason) {
  std::unique_ptr<Ring> ring(new Ring);
  if (const int error = ring->set_up(options)) {
    *reason = explain_set_up(error);
    return nullptr;
  }
  if (const int error = ring->prove()) {
    *reason =
        "io_uring can be set up, but a read through it fails: " + std::string(std::strerror(error));
    return nullptr;
  }
  if (options.registered_buffers) {
    ring->has_table_ = io_uring_register_buffers_sparse(&ring->ring_, kBuffersMax) == 0;
  }
  return ring;
}

// 0 or an errno value. EINVAL means a flag that this kernel lacks: try with fewer.
int Ring::set_up(const Options& options) {
  const unsigned shared[] = {kSubmitAll | kCoopTaskrun, kSubmitAll, 0};
  const unsigned single[] = {kSubmitAll | kSingleIssuer | kDeferTaskrun | kNoSqarray,
                             kSubmitAll | kSingleIssuer | kDeferTaskrun,
                             kSubmitAll | kSingleIssuer | kCoopTaskrun};
  const auto attempt = [&](unsigned flags) {
    const int result = io_uring_queue_init(options.entries, &ring_, flags);
    mapped();
    is_set_up_ = result == 0;
    return -result;
  };
  int error = EINVAL;
  if (options.single_issuer) {
    for (const unsigned flags : single) {
      error = attempt(flags);
      if (error != EINVAL) return error;
    }
  }
  for (const unsigned flags : shared) {
    error = attempt(flags);
    if (error != EINVAL) return error;
  }
  return error;
}

// Reads eight bytes that are known. 0 or an errno value.
int Ring::prove() {
  const char expected[8] = {'h', 'e', 'a', 'd', 'r', 'a', 'c', 'e'};
  char found[8] = {};
  const int fd = static_cast<int>(memfd_create("headrace-probe", MFD_CLOEXEC));
  if (fd < 0) return errno;
  int error = ::pwrite(fd, expected, sizeof expected, 0) == sizeof expected ? 0 : EIO;
  if (error == 0) {
    io_uring_prep_read(io_uring_get_sqe(&ring_), fd, found, sizeof found, 0);
    int submitted;
    do {
      submitted = io_uring_submit_and_wait(&ring_, 1);
    } while (submitted == -EINTR);
    io_uring_cqe* cqe = nullptr;
    while (submitted >= 0) {
      const int waited = io_uring_wait_cqe(&ring_, &cqe);
      if (waited == 0) break;
      if (waited != -EINTR) submitted = waited;
    }
    if (submitted < 0) {
      error = -submitted;
    } else {
      error = cqe->res < 0 ? -cqe->res : 0;
      io_uring_cqe_seen(&ring_, cqe);
      if (error == 0 && std::memcmp(expected, found, sizeof found) != 0) error = EIO;
    }
  }
  ::close(fd);
  return error;
}

Ring::~Ring() {
  if (!is_set_up_) return;
  will_unmap();
  io_uring_queue_exit(&ring_);  // liburing closes -1 as well, which the kernel refuses
}

bool Ring::is_single_issuer() const { return (ring_.flags & kSingleIssuer) != 0; }

bool Ring::set_buffer(unsigned slot, std::span<std::byte> memory) {
  if (!has_table_ || memory.empty() || memory.size() > kBufferBytesMax) return false;
  const iovec part = {memory.data(), memory.size()};
  const __u64 tag = 0;
  return io_uring_register_buffers_update_tag(&ring_, slot, &part, &tag, 1) == 1;
}

void Ring::clear_buffer(unsigned slot) {
  if (!has_table_) return;
  const iovec nothing = {nullptr, 0};
  const __u64 tag = 0;
  io_uring_register_buffers_update_tag(&ring_, slot, &nothing, &tag, 1);
}

}  // namespace headrace::io
#endif
