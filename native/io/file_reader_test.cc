// FileReader: what it reads, and what it refuses.
#include "io/file_reader.h"

#include <climits>
#include <cstdlib>
#include <cstring>

#include "core/error.h"
#include "io/engine_conformance.h"
#include "testing/file_reader_testing.h"

namespace headrace::io {
namespace {

using namespace conformance;
using namespace file_reader_testing;
using std::chrono::milliseconds;

TEST_CASE("files of every size arrive whole, from the page cache and from the disk") {
  Folder folder;
  std::vector<std::string> paths, texts;
  for (const size_t size : {0, 1, 511, 4095, 4096, 4097, 100'000, 1 << 20, (1 << 20) + 13}) {
    const std::string name = std::to_string(size);
    texts.push_back(text_of(folder.write(name, size, static_cast<unsigned>(size))));
    paths.push_back(folder.path(name));
  }
  let_the_clock_tick();
  for (const ColdReads cold : {ColdReads::kDirect, ColdReads::kFill}) {
    for (const bool cached : {true, false}) {
      for (const std::string& path : paths) cached ? fetch_pages(path) : drop_pages(path);
      Reader reader({.cold = cold});
      const auto job = reader->submit(paths);
      const auto batch = job->wait(10);
      REQUIRE(batch != nullptr);
      for (size_t i = 0; i < paths.size(); ++i) {
        CHECK(batch->errors[i] == 0);
        CHECK(batch->lengths[i] == static_cast<int64_t>(texts[i].size()));
        CHECK(batch->identities[i].size == texts[i].size());
        CHECK(take(*job, i) == texts[i]);
      }
      const FileReaderStats stats = reader->stats();
      CHECK(stats.reads == paths.size());
      CHECK(stats.failures == 0);
      CHECK(stats.page_cache_bytes + stats.source_bytes == stats.bytes);
      if (cached) CHECK(stats.source_bytes == 0);
      if (!cached) CHECK(stats.page_cache_bytes == 0);
      uint64_t counted = 0;
      for (const uint64_t count : stats.latency_us) counted += count;
      CHECK(counted == stats.reads);
    }
  }
}

TEST_CASE("what is no readable regular file is that path's error, promptly") {
  Folder folder;
  folder.write("good", 5000);
  folder.write("secret", 10);
  REQUIRE(::chmod(folder.path("secret").c_str(), 0) == 0);
  REQUIRE(::mkfifo(folder.path("fifo").c_str(), 0644) == 0);
  REQUIRE(::mkdir(folder.path("folder").c_str(), 0755) == 0);
  REQUIRE(::symlink(folder.path("good").c_str(), folder.path("link").c_str()) == 0);
  REQUIRE(::symlink("loop", folder.path("loop").c_str()) == 0);
  let_the_clock_tick();
  const std::vector<std::pair<std::string, int>> cases = {
      {folder.path("good"), 0},
      {folder.path("link"), 0},
      {folder.path("fifo"), EINVAL},
      {folder.path("folder"), EISDIR},
      {folder.path("missing"), ENOENT},
      {folder.path("good") + "/below", ENOTDIR},
      {folder.path("loop"), ELOOP},
      {"", ENOENT},
      {folder.path("good") + std::string("\0tail", 5), EINVAL},
      {folder.path(std::string(300, 'x')), ENAMETOOLONG},
      {folder.path(std::string(5000, 'x')), ENAMETOOLONG},
      {"/dev/zero", EINVAL},
      {"/proc/self/status", ESTALE},  // says that it is empty, and is not
      {folder.path("secret"), EACCES},
  };
  const AsNobody nobody;
  Reader reader;
  std::vector<std::string> paths;
  for (const auto& [path, error] : cases) paths.push_back(path);
  const auto job = reader->submit(paths);
  REQUIRE(job->wait(10) != nullptr);
  for (size_t i = 0; i < cases.size(); ++i) {
    CAPTURE(cases[i].first);
    int error = -1;
    take(*job, i, &error);
    CHECK(error == cases[i].second);
  }
}

TEST_CASE("a file that changes between the read and its use is not given") {
  Folder folder;
  const std::string path = folder.path("data");
  struct stat before {};
  const auto change = [&](int kind) {
    const timespec times[2] = {before.st_atim, before.st_mtim};
    if (kind == 0) REQUIRE(::unlink(path.c_str()) == 0);
    if (kind == 1) REQUIRE(::truncate(path.c_str(), 4000) == 0);
    if (kind == 2) REQUIRE(::truncate(path.c_str(), 9000) == 0);
    if (kind == 3) {  // same size and mtime, another inode
      folder.write("other", 5000, 2);
      REQUIRE(::utimensat(AT_FDCWD, folder.path("other").c_str(), times, 0) == 0);
      REQUIRE(::rename(folder.path("other").c_str(), path.c_str()) == 0);
    }
    if (kind == 4) {  // same size, mtime and inode
      const int fd = ::open(path.c_str(), O_WRONLY);
      REQUIRE(::pwrite(fd, "x", 1, 0) == 1);
      ::close(fd);
      REQUIRE(::utimensat(AT_FDCWD, path.c_str(), times, 0) == 0);
    }
  };
  for (int kind = 0; kind < 5; ++kind) {
    CAPTURE(kind);
    folder.write("data", 5000);
    let_the_clock_tick();
    Reader reader;
    const auto job = reader->submit({path});
    REQUIRE(job->wait(10) != nullptr);
    REQUIRE(::stat(path.c_str(), &before) == 0);
    change(kind);
    struct stat after {};
    if (::stat(path.c_str(), &after) == 0 && kind >= 3) {
      CHECK(after.st_size == before.st_size);
      CHECK(after.st_mtim.tv_nsec == before.st_mtim.tv_nsec);
    }
    int error = 0;
    CHECK(!job->take(0, 1, &error));
    CHECK(error == (kind == 0 ? ENOENT : ESTALE));
  }
}

// Calls that change the file, fail, or wait: plain functions, so their state is global.
std::string g_path;
std::atomic<int> g_struck;

ssize_t grow_then_read(int fd, const iovec* parts, int count, off_t offset) {
  const ssize_t result = kSyscalls.preadv(fd, parts, count, offset);
  if (::truncate(g_path.c_str(), 6000) == 0) ++g_struck;
  return result;
}
ssize_t truncate_then_read(int fd, const iovec* parts, int count, off_t offset) {
  if (::truncate(g_path.c_str(), 100) == 0) ++g_struck;
  return kSyscalls.preadv(fd, parts, count, offset);
}
ssize_t fail_to_read(int, const iovec*, int, off_t) {
  ++g_struck;
  errno = EIO;
  return -1;
}
int replace_then_open(int directory, const char* path, int flags) {
  if (::rename((g_path + ".other").c_str(), g_path.c_str()) == 0) ++g_struck;
  return kSyscalls.openat(directory, path, flags);
}
int out_of_files(int, const char*, int) {
  ++g_struck;
  errno = EMFILE;
  return -1;
}

TEST_CASE("a file that changes or fails while it is read is that file's error") {
  Folder folder;
  g_path = folder.path("data");
  const auto run = [&](auto arm) {
    folder.write("data", 5000);
    folder.write("data.other", 5000, 2);
    folder.write("good", 5000);
    let_the_clock_tick();
    g_struck = 0;
    FileReaderOptions options{.reads_in_flight = 1};
    arm(options.calls.file);
    Reader reader(options);
    const auto job = reader->submit({g_path});
    const auto batch = job->wait(10);
    REQUIRE(batch != nullptr);
    CHECK(g_struck > 0);
    return batch->errors[0];
  };
  CHECK(run([](Syscalls& sys) { sys.preadv = grow_then_read; }) == ESTALE);
  CHECK(run([](Syscalls& sys) { sys.preadv = truncate_then_read; }) == ESTALE);
  CHECK(run([](Syscalls& sys) { sys.preadv = fail_to_read; }) == EIO);
  CHECK(run([](Syscalls& sys) { sys.openat = replace_then_open; }) == ESTALE);
  CHECK(run([](Syscalls& sys) { sys.openat = out_of_files; }) == EMFILE);
}

TEST_CASE("a file that was written a moment ago is not trusted: its next change may go unseen") {
  Folder folder;
  Reader reader;
  // Whether the read comes within the tick is up to the machine: some of many do.
  size_t young = 0;
  for (int i = 0; i < 50 && young == 0; ++i) {
    folder.write("data", 100, static_cast<unsigned>(i));
    const auto batch = reader->submit({folder.path("data")})->wait(10);
    REQUIRE(batch != nullptr);
    CHECK((batch->errors[0] == 0 || batch->errors[0] == ESTALE));
    young += batch->errors[0] == ESTALE ? 1 : 0;
  }
  CHECK(young > 0);
}

int whole_seconds(int result, struct stat* status) {
  status->st_mtim.tv_nsec = status->st_ctim.tv_nsec = 0;
  return result;
}

TEST_CASE("where times are whole seconds, a moment ago is within the second") {
  Folder folder;
  FileReaderOptions options;
  options.calls.stat = [](const char* path, struct stat* status) {
    return whole_seconds(::stat(path, status), status);
  };
  options.calls.file.fstat = [](int fd, struct stat* status) {
    return whole_seconds(::fstat(fd, status), status);
  };
  Reader reader(options);
  // Written at the very end of a second, it may be read in the next one: not five times in a row.
  size_t young = 0;
  for (unsigned i = 0; i < 5 && young == 0; ++i) {
    folder.write("data", 100, i);
    let_the_clock_tick();
    const auto batch = reader->submit({folder.path("data")})->wait(10);
    REQUIRE(batch != nullptr);
    young += batch->errors[0] == ESTALE ? 1 : 0;
  }
  CHECK(young > 0);
}

int no_look(const char*, struct stat*) {
  errno = EIO;
  return -1;
}

TEST_CASE("files that are known are read without a look, if they still are what they were") {
  Folder folder;
  const std::string text = text_of(folder.write("same", 5000));
  folder.write("changed", 5000);
  let_the_clock_tick();
  std::vector<FileIdentity> known(3);
  REQUIRE(identify(folder.path("same").c_str(), {}, &known[0]) == 0);
  REQUIRE(identify(folder.path("changed").c_str(), {}, &known[1]) == 0);
  folder.write("changed", 6000);
  let_the_clock_tick();
  known[2].size = UINT64_MAX;  // nothing is made of that size
  const std::vector<std::string> paths = {folder.path("same"), folder.path("changed"),
                                          folder.path("same")};
  FileReaderOptions options;
  options.calls.stat = no_look;
  Reader reader(options);
  const auto batch = reader->submit(paths, known)->wait(10);
  REQUIRE(batch != nullptr);
  CHECK(batch->errors == std::vector<int32_t>{0, ESTALE, EFBIG});
  const FileBytes bytes{batch, 0};
  CHECK(text_of(bytes) == text);
  CHECK(reader->stats().reads == 2);
  CHECK_THROWS_AS(reader->submit(paths, {known[0]}), Error);
}

TEST_CASE("bytes outlive the job and the reader") {
  Folder folder;
  const std::string text = text_of(folder.write("data", 5000));
  let_the_clock_tick();
  std::optional<FileBytes> bytes;
  {
    Reader reader;
    auto job = reader->submit({folder.path("data")});
    REQUIRE(job->wait(10) != nullptr);
    int error = 0;
    bytes = job->take(0, 1, &error);
  }
  REQUIRE(bytes);
  CHECK(text_of(*bytes) == text);
  const File same(folder.path("data"), O_RDONLY);
  CHECK(bytes->same_as(same.fd));
  folder.write("data", 5000, 3);
  const File other(folder.path("data"), O_RDONLY);
  CHECK(!bytes->same_as(other.fd));
}

#if !defined(__SANITIZE_THREAD__)
TEST_CASE("a batch says when its last file was there, not when somebody looked") {
  const Folder folder;
  folder.write("a", 100);
  folder.write("b", 100);
  let_the_clock_tick();
  const auto began = SlowModel::now_ns();
  const Reader real;
  const auto job = real->submit({folder.path("a"), folder.path("b")});
  while (!job->done()) std::this_thread::yield();
  const auto done = SlowModel::now_ns();
  std::this_thread::sleep_for(milliseconds(5));
  const auto batch = job->wait(10);
  REQUIRE(batch != nullptr);
  CHECK(batch->ready_ns > began);
  CHECK(batch->ready_ns <= done);
  // On a simulated storage: when its answer was due, whenever a thread was woken.
  SlowFigures figures;
  figures.parallelism = 1;
  figures.latency_median_s = 0.002;
  const auto model = std::make_shared<SlowModel>(figures);
  char root[PATH_MAX];
  REQUIRE(realpath(folder.path("").c_str(), root) != nullptr);
  const Reader slow(FileReaderOptions{
      .reads_in_flight = 2,
      .slow = std::make_shared<const SlowFiles>(model, std::vector<std::string>{root})});
  const auto batch_slow = slow->submit({folder.path("a"), folder.path("b")})->wait(10);
  REQUIRE(batch_slow != nullptr);
  CHECK(model->admit(0, 0, false).due_ns == batch_slow->ready_ns + 2'000'000);
  CHECK(slow->submit({folder.path("none")})->wait(10)->ready_ns == 0);
}
#endif

}  // namespace
}  // namespace headrace::io
