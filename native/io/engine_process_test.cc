// Engines and the process around them: forks, seccomp filters, limits, descriptors that are closed.
//
// Each case runs in a forked child that ends with a status, because most can't be undone.
#include <doctest/doctest.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <cstddef>

#include "io/engine_conformance.h"

#if defined(__SANITIZE_THREAD__)
#define HEADRACE_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define HEADRACE_TSAN 1
#endif
#endif
#ifndef HEADRACE_TSAN
#define HEADRACE_TSAN 0
#endif

namespace headrace::io {
namespace {

using namespace conformance;

constexpr int kOk = 0;

// Runs `body` in a child; its return value, or -signal. A child that hangs is ended after 20 s.
template <typename Body>
int in_child(Body&& body) {
  const pid_t pid = ::fork();
  REQUIRE(pid >= 0);
  if (pid == 0) {
    ::alarm(20);
    ::_exit(body());
  }
  int status = 0;
  REQUIRE(::waitpid(pid, &status, 0) == pid);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

// Makes io_uring_setup answer `error`, as containers' default profiles do.
bool forbid_io_uring(int error) {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_io_uring_setup, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<unsigned>(error)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter = {sizeof program / sizeof program[0], program};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

bool reads_well(Engine& engine, int fd, const std::vector<std::byte>& bytes, uint64_t buffer = 0) {
  Memory memory(200 * 4096);
  if (buffer != 0) engine.know_buffer(buffer, memory.span());
  auto reads = random_reads(fd, 200, bytes.size(), 4096, 1, memory, 1);
  for (Read& read : reads) read.buffer_id = buffer;
  read_all(engine, reads);
  if (buffer != 0) engine.forget_buffer(buffer);
  return count_wrong(reads, bytes) == 0;
}

TEST_CASE("where a filter forbids io_uring, threads read, and the reason says so") {
  Folder folder;
  const auto bytes = folder.write("data", kFileBytes);
  const File file(folder.path("data"), O_RDONLY);
  struct Filter {
    int error;
    const char* words;
  };
  for (const Filter& filter : {Filter{EPERM, "seccomp"}, Filter{ENOSYS, "no io_uring"}}) {
    CHECK(in_child([&] {
            if (!forbid_io_uring(filter.error)) return 1;
            std::string reason;
            if (make_uring_engine({}, &reason) != nullptr) return 2;
            const bool built_in = reason.find("this build") == std::string::npos;
            if (built_in && reason.find("io_uring_setup") == std::string::npos) return 3;
            if (built_in && reason.find(filter.words) == std::string::npos) return 4;
            reason.clear();
            const auto engine = make_best_engine({.threads = 4}, &reason);
            if (reason.empty() || engine->name() != std::string("threads")) return 5;
            return reads_well(*engine, file.fd, bytes) ? kOk : 6;
          }) == kOk);
  }
}

TEST_CASE("the best engine is uring, without a reason, where uring works") {
  std::string why_not;
  const bool available = make_uring_engine({}, &why_not) != nullptr;
  std::string reason = "before";
  const auto engine = make_best_engine({}, &reason);
  CHECK(engine->name() == std::string(available ? "uring" : "threads"));
  CHECK(reason.empty() == available);
}

TEST_CASE("a forked child destroys its parent's engine, and may use it before") {
  Folder folder;
  const auto bytes = folder.write("data", kFileBytes);
  const File file(folder.path("data"), O_RDONLY);
  for (const bool uring : {true, false}) {
    for (const bool use : {false, true}) {
      // ThreadSanitizer ends a child that starts threads where the parent had some.
      if (HEADRACE_TSAN && !uring && use) continue;
      std::string reason;
      auto engine =
          uring ? make_best_engine({.threads = 4}, &reason) : make_threads_engine({.threads = 4});
      CHECK(reads_well(*engine, file.fd, bytes, 1));
      CHECK(in_child([&] {
              if (use && !reads_well(*engine, file.fd, bytes, 2)) return 1;
              engine.reset();
              return kOk;
            }) == kOk);
      CHECK(reads_well(*engine, file.fd, bytes, 3));  // the parent's still works
    }
  }
}

TEST_CASE("a low RLIMIT_MEMLOCK costs registered buffers and nothing else") {
  if (::geteuid() != 0) return;  // needs to give up CAP_IPC_LOCK
  Folder folder;
  const auto bytes = folder.write("data", kFileBytes);
  const File file(folder.path("data"), O_RDONLY);
  CHECK(in_child([&] {
          const rlimit none = {0, 0};
          if (::setrlimit(RLIMIT_MEMLOCK, &none) != 0 || ::setuid(65534) != 0) return 1;
          std::string reason;
          const auto engine = make_best_engine({.threads = 4}, &reason);
          return reads_well(*engine, file.fd, bytes, 1) ? kOk : 2;
        }) == kOk);
}

TEST_CASE("an engine survives a program that closes every descriptor it does not know") {
  Folder folder;
  const auto bytes = folder.write("data", kFileBytes);
  CHECK(in_child([&] {
          std::string reason;
          const auto engine = make_best_engine({.threads = 4}, &reason);
          for (int fd = 3; fd < 100; ++fd) ::close(fd);
          const int fd = ::open(folder.path("data").c_str(), O_RDONLY);
          for (int round = 0; round < 3; ++round) {
            if (!reads_well(*engine, fd, bytes, 1)) return 1;
          }
          return kOk;
        }) == kOk);
}

TEST_CASE("an engine that no descriptor is left for says so") {
  CHECK(in_child([] {
          const rlimit none = {0, 0};
          if (::setrlimit(RLIMIT_NOFILE, &none) != 0) return 1;
          std::string reason;
          if (make_uring_engine({}, &reason) != nullptr) return 2;
          return reason.empty() ? 3 : kOk;
        }) == kOk);
}

}  // namespace
}  // namespace headrace::io
