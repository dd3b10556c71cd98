// Mappings whose files shrink: no crash, the damage is counted, and foreign faults go where they
// went before.
#include "core/mapping.h"

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <thread>
#include <vector>

#include "core/checked_file.h"
#include "core/error.h"
#include "testing/child_process.h"
#include "testing/directory_builder.h"

using namespace headrace;
using headrace::testing::in_child;

namespace {

const size_t kPage = static_cast<size_t>(sysconf(_SC_PAGESIZE));

// A memory file of `pages` pages of 0x5a.
struct File {
  int fd;
  explicit File(size_t pages)
      : fd(testing::memory_file(std::vector<std::byte>(pages * kPage, std::byte{0x5a}))) {}
  ~File() { close(fd); }
  void truncate(size_t pages) { REQUIRE(ftruncate(fd, static_cast<off_t>(pages * kPage)) == 0); }
};

uint8_t read_at(const std::byte* data, size_t at) {
  return static_cast<uint8_t>(*static_cast<const volatile std::byte*>(data + at));
}

// Touches a lost page that no Mapping knows of.
void fault_elsewhere() {
  const int fd = memfd_create("elsewhere", MFD_CLOEXEC);
  if (ftruncate(fd, static_cast<off_t>(kPage)) != 0) _exit(90);
  void* data = mmap(nullptr, kPage, PROT_READ, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED || ftruncate(fd, 0) != 0) _exit(91);
  read_at(static_cast<const std::byte*>(data), 5);
}

#if defined(__SANITIZE_THREAD__)
constexpr bool kThreadSanitizer = true;  // delivers raised signals in its own way
#else
constexpr bool kThreadSanitizer = false;
#endif

struct sigaction g_before;
std::atomic<int>* g_calls;  // shared with the parent

void exit_with_42(int) { _exit(42); }
void exit_with_address(int, siginfo_t* info, void*) { _exit(info->si_addr != nullptr ? 43 : 44); }

// What Python's faulthandler does: put the handler back that was there before, and raise again.
void restore_and_raise(int number) {
  g_calls->fetch_add(1);
  sigaction(number, &g_before, nullptr);
  raise(number);
}

void install(void (*handler)(int)) {
  struct sigaction action;
  std::memset(&action, 0, sizeof action);
  action.sa_handler = handler;
  action.sa_flags = SA_NODEFER;
  sigaction(SIGBUS, &action, &g_before);
}

}  // namespace

TEST_CASE("lost pages read as zeros, are counted once each, and the rest stays") {
  File file(8);
  const auto mapping = Mapping::of_file(file.fd, 8 * kPage, "file");
  CHECK(read_at(mapping->data(), 7 * kPage) == 0x5a);
  file.truncate(2);
  CHECK(mapping->damaged() == 0);
  errno = 77;
  CHECK(read_at(mapping->data(), 5 * kPage + 1) == 0);
  CHECK(errno == 77);
  CHECK(mapping->damaged() == 1);
  CHECK(read_at(mapping->data(), 5 * kPage + 2) == 0);
  CHECK(mapping->damaged() == 1);
  CHECK(read_at(mapping->data(), 7 * kPage) == 0);
  CHECK(mapping->damaged() == 2);
  CHECK(read_at(mapping->data(), kPage) == 0x5a);
}

TEST_CASE("only the damaged mapping counts, and its slot starts afresh when it is used again") {
  File a(2), b(2);
  auto damaged = Mapping::of_file(a.fd, 2 * kPage, "a");
  const auto whole = Mapping::of_file(b.fd, 2 * kPage, "b");
  a.truncate(0);
  CHECK(read_at(damaged->data(), 0) == 0);
  CHECK(damaged->damaged() == 1);
  CHECK(whole->damaged() == 0);
  damaged.reset();
  const auto next = Mapping::of_file(b.fd, 2 * kPage, "b");
  CHECK(next->damaged() == 0);
}

TEST_CASE("threads that meet the same lost pages all survive and all see the damage") {
  File file(64);
  const auto mapping = Mapping::of_file(file.fd, 64 * kPage, "file");
  file.truncate(0);
  std::atomic<int> unseen{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (size_t page = 0; page < 64; ++page) {
        if (read_at(mapping->data(), page * kPage) != 0) continue;
        if (mapping->damaged() == 0) ++unseen;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(mapping->damaged() >= 64);
  CHECK(unseen == 0);
}

TEST_CASE("an empty file maps to nothing, and a descriptor that cannot be mapped is an error") {
  File file(1);
  CHECK(Mapping::of_file(file.fd, 0, "empty")->size() == 0);
  CHECK(Mapping::of_file(file.fd, 0, "empty")->damaged() == 0);
  try {
    Mapping::of_file(-1, kPage, "bad");
    FAIL("a bad descriptor was mapped");
  } catch (const Error& error) {
    CHECK(error.kind == ErrorKind::kVolume);
    CHECK(error.system_errno == EBADF);
    CHECK(error.path == "bad");
  }
}

TEST_CASE("more mappings than slots are refused, and slots come back") {
  File file(1);
  for (int round = 0; round < 2; ++round) {
    std::vector<std::unique_ptr<Mapping>> mappings;
    int error_number = 0;
    try {
      for (int i = 0; i < 5000; ++i) mappings.push_back(Mapping::of_file(file.fd, kPage, "file"));
    } catch (const Error& error) {
      error_number = error.system_errno;
    }
    CHECK(error_number == EMFILE);
    CHECK(mappings.size() == 4096);
  }
}

TEST_CASE("a checked file that was truncated while open throws instead of handing out zeros") {
  const auto image = testing::build_directory(testing::plain_spec(20000));
  const int fd = testing::memory_file(image.bytes);
  CheckedFile file(Mapping::of_file(fd, image.bytes.size(), "some.hrd"), "some.hrd");
  file.set_checksums(image.payload(), 4096, 65536);
  CHECK(*file.at(image.payload(), 1) == image.bytes[image.payload()]);
  CHECK_NOTHROW(file.assert_whole());
  REQUIRE(ftruncate(fd, static_cast<off_t>(image.payload() + 65536)) == 0);
  const uint64_t behind = image.payload() + 2 * 65536;
  REQUIRE(behind < image.bytes.size());
  for (int i = 0; i < 2; ++i) {
    try {
      file.at(behind, 1);
      FAIL("a lost page was handed out");
    } catch (const Error& error) {
      CHECK(error.kind == ErrorKind::kCorruptStore);
      CHECK(std::string(error.what()).find("vanished") != std::string::npos);
    }
  }
  CHECK_THROWS_AS(file.assert_whole(), Error);
  close(fd);
}

TEST_CASE("pages that were checked before they were lost are found by assert_whole") {
  const auto image = testing::build_directory(testing::plain_spec(3000));
  const int fd = testing::memory_file(image.bytes);
  const auto directory = Directory::open(fd, "some.hrd");
  for (uint64_t i = 0; i < 3000; ++i) directory->extent(i);
  REQUIRE(ftruncate(fd, 0) == 0);
  CHECK(directory->extent(2999).length == 0);  // zeros: this is why assert_whole must be asked
  CHECK_THROWS_AS(directory->assert_whole(), Error);
  close(fd);
}

TEST_CASE("a fault outside our mappings reaches the handler that was there before") {
  for (const bool with_information : {false, true}) {
    const auto end = in_child([&] {
      if (with_information) {
        struct sigaction action;
        std::memset(&action, 0, sizeof action);
        action.sa_sigaction = exit_with_address;
        action.sa_flags = SA_SIGINFO;
        sigaction(SIGBUS, &action, nullptr);
      } else {
        install(exit_with_42);
      }
      guard_mappings();
      fault_elsewhere();
      return 1;
    });
    CHECK(end.exit_code == (with_information ? 43 : 42));
  }
}

TEST_CASE("a fault outside our mappings ends the process where no handler was there before") {
  const auto end = in_child([] {
    signal(SIGBUS, SIG_DFL);
    guard_mappings();
    fault_elsewhere();
    return 1;
  });
  CHECK(end.signal == SIGBUS);
}

TEST_CASE("a SIGBUS that was sent ends the process, is handled or is ignored as before") {
  const auto sent = [](void (*handler)(int)) {
    return in_child([=] {
      install(handler);
      guard_mappings();
      raise(SIGBUS);
      return 7;
    });
  };
  CHECK(sent(SIG_DFL).signal == SIGBUS);
  CHECK(sent(SIG_IGN).exit_code == 7);
  CHECK(sent(exit_with_42).exit_code == 42);
}

TEST_CASE("a handler in front of ours that hands the signal back does not loop for ever" *
          doctest::skip(kThreadSanitizer)) {
  g_calls = static_cast<std::atomic<int>*>(
      mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  const auto end = in_child([] {
    signal(SIGBUS, SIG_DFL);
    guard_mappings();
    install(restore_and_raise);  // its previous handler is ours
    guard_mappings();            // ours is outermost again; its previous handler is theirs
    fault_elsewhere();
    return 1;
  });
  CHECK(end.signal == SIGBUS);
  CHECK(g_calls->load() == 1);
  munmap(g_calls, kPage);
}

TEST_CASE("our pages are still served after another handler was put in front and we came back") {
  const auto end = in_child([] {
    File file(2);
    const auto mapping = Mapping::of_file(file.fd, 2 * kPage, "file");
    install(exit_with_42);
    guard_mappings();
    if (ftruncate(file.fd, 0) != 0) return 1;
    return read_at(mapping->data(), 0) == 0 && mapping->damaged() == 1 ? 0 : 2;
  });
  CHECK(end.exit_code == 0);
}
