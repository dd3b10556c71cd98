// FileReader: what it reads, what it refuses, and that nothing it meets holds others up.
#include "io/file_reader.h"

#include <sys/syscall.h>
#include <sys/time.h>

#include <climits>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include "core/error.h"
#include "io/engine_conformance.h"
#include "testing/child_process.h"

namespace headrace::io {
namespace {

using namespace conformance;
using std::chrono::milliseconds;

// Files that were changed less than a clock tick ago are not trusted.
void let_the_clock_tick() { std::this_thread::sleep_for(milliseconds(25)); }

void drop_pages(const std::string& path) {
  const File file(path, O_RDONLY);
  REQUIRE(posix_fadvise(file.fd, 0, 0, POSIX_FADV_DONTNEED) == 0);
}

void fetch_pages(const std::string& path) {
  const File file(path, O_RDONLY);
  std::vector<char> bytes(2 << 20);
  REQUIRE(::read(file.fd, bytes.data(), bytes.size()) >= 0);
}

std::string text_of(const FileBytes& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::string text_of(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Closes the reader at the end: its threads hold it.
struct Reader {
  explicit Reader(const FileReaderOptions& options = {}) : reader(FileReader::make(options)) {}
  ~Reader() { reader->close(10); }
  FileReader* operator->() const { return reader.get(); }
  // Whether all memory was given back; the thread that read last may be a moment behind.
  bool drained() const {
    for (int i = 0; i < 5000 && reader->stats().buffered_bytes != 0; ++i) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    return reader->stats().buffered_bytes == 0;
  }
  std::shared_ptr<FileReader> reader;
};

// Takes a file once all of the job is read: no race with the threads.
std::string take(FileJob& job, size_t index, int* error) {
  REQUIRE(job.wait(10) != nullptr);
  const auto bytes = job.take(index, 10, error);
  CHECK(bytes.has_value() == (*error == 0));
  return bytes ? text_of(*bytes) : "";
}

std::string take(FileJob& job, size_t index) {
  int error = -1;
  std::string text = take(job, index, &error);
  CHECK(error == 0);
  return text;
}

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

// A gate at which reads of files of one size stop.
std::mutex g_gate;
std::condition_variable g_gate_moved;
bool g_gate_open = true;
int g_at_gate = 0;

ssize_t read_at_gate(int fd, const iovec* parts, int count, off_t offset) {
  struct stat status {};
  ::fstat(fd, &status);
  if (status.st_size == 7777) {
    std::unique_lock lock(g_gate);
    ++g_at_gate;
    g_gate_moved.notify_all();
    g_gate_moved.wait(lock, [] { return g_gate_open; });
  }
  return kSyscalls.preadv(fd, parts, count, offset);
}

struct Gate {
  Gate() {
    std::lock_guard lock(g_gate);
    g_gate_open = false;
    g_at_gate = 0;
  }
  ~Gate() { open(); }
  void open() {
    std::lock_guard lock(g_gate);
    g_gate_open = true;
    g_gate_moved.notify_all();
  }
  void wait_for(int count) {
    std::unique_lock lock(g_gate);
    REQUIRE(
        g_gate_moved.wait_for(lock, std::chrono::seconds(10), [&] { return g_at_gate >= count; }));
  }
  static FileReaderOptions options(unsigned reads_in_flight) {
    FileReaderOptions options{.reads_in_flight = reads_in_flight};
    options.calls.file.preadv = read_at_gate;
    return options;
  }
};

TEST_CASE("a read that never returns holds up neither other files nor its taker nor close") {
  Folder folder;
  folder.write("stuck", 7777);
  const std::string good = text_of(folder.write("good", 5000));
  let_the_clock_tick();
  Gate gate;
  auto reader = FileReader::make(Gate::options(2));
  auto job = reader->submit({folder.path("stuck"), folder.path("good"), folder.path("good")});
  gate.wait_for(1);
  int error = 0;
  for (const size_t index : {1, 2}) {
    std::optional<FileBytes> bytes;
    do {  // until its read has begun: one that has not would be given up
      std::this_thread::yield();
    } while (reader->stats().reads < 2);
    bytes = job->take(index, 10, &error);
    REQUIRE(bytes);
    CHECK(text_of(*bytes) == good);
  }
  CHECK(!job->done());
  CHECK(job->wait(0.01) == nullptr);
  CHECK(!job->take(0, 60, &error));  // patience is a multiple of what reads take
  CHECK(error == ETIMEDOUT);
  CHECK(reader->stats().gave_up == 1);
  CHECK(reader->stats().in_flight == 1);
  CHECK(!reader->close(0.05));
  job.reset();
  gate.open();
  CHECK(reader->close(10));
}

TEST_CASE("what has not begun is given up at once, and is not read") {
  Folder folder;
  folder.write("stuck", 7777);
  folder.write("good", 5000);
  let_the_clock_tick();
  Gate gate;
  Reader reader(Gate::options(1));
  const auto first = reader->submit({folder.path("stuck")});
  gate.wait_for(1);
  const auto second = reader->submit({folder.path("good"), folder.path("good")});
  int error = 0;
  CHECK(!second->take(0, 60, &error));
  CHECK(error == ECANCELED);
  second->forget(1);
  CHECK(second->done());
  auto third = reader->submit({folder.path("good")});
  third.reset();  // nobody wants it any more
  gate.open();
  REQUIRE(first->wait(10) != nullptr);
  CHECK(reader->stats().reads == 1);
}

TEST_CASE("a job of which all is refused keeps none that come after it from their turn") {
  Folder folder;
  constexpr uint64_t kBudget = 1 << 20;
  folder.write("stuck", 7777);
  folder.write("big", kBudget / 2 + 1);
  folder.write("good", 5000);
  let_the_clock_tick();
  Gate gate;
  auto options = Gate::options(1);  // nobody else would notice
  options.buffer_bytes = kBudget;
  Reader reader(options);
  const auto first = reader->submit({folder.path("stuck")});
  gate.wait_for(1);
  const auto refused = reader->submit({folder.path("big")});
  const auto last = reader->submit({folder.path("good")});
  gate.open();
  const auto batch = last->wait(10);
  REQUIRE(batch != nullptr);
  CHECK(batch->errors[0] == 0);
  REQUIRE(refused->wait(10) != nullptr);
  CHECK(refused->wait(0)->errors[0] == EFBIG);
}

TEST_CASE(
    "readers that are turned, starved, dropped and closed in any state end, and lose nothing") {
  Folder folder;
  constexpr unsigned kFiles = 24;
  std::vector<std::string> paths, texts;
  for (unsigned i = 0; i < kFiles; ++i) {
    const std::string name = std::to_string(i);
    texts.push_back(text_of(folder.write(name, 500 + 9000 * i, i)));
    paths.push_back(folder.path(name));
  }
  let_the_clock_tick();
  SlowFigures figures;
  figures.latency_median_s = 2e-4;
  figures.latency_sigma = 1;
  figures.open_median_s = 1e-4;
  figures.open_sigma = 1;
  char root[PATH_MAX];
  REQUIRE(realpath(folder.path("0").c_str(), root) != nullptr);
  const std::string above = std::string(root).substr(0, std::string(root).rfind('/'));
  const auto slow = std::make_shared<const SlowFiles>(std::make_shared<SlowModel>(figures),
                                                      std::vector<std::string>{above});
  std::mt19937 random(7);
  const auto below = [&](unsigned n) { return static_cast<unsigned>(random() % n); };
  uint64_t taken = 0, given_up = 0;
  for (int round = 0; round < 60; ++round) {
    Reader reader({.reads_in_flight = 1 + below(8),
                   .buffer_bytes = uint64_t{64 << 10} << below(5),
                   .slow = below(2) == 0 ? slow : nullptr});
    std::vector<std::shared_ptr<FileJob>> jobs;
    std::vector<std::vector<unsigned>> asked;
    for (unsigned j = 1 + below(6); j > 0; --j) {
      std::vector<std::string> some;
      asked.emplace_back();
      for (unsigned n = 1 + below(8); n > 0; --n) {
        asked.back().push_back(below(kFiles));
        some.push_back(paths[asked.back().back()]);
      }
      jobs.push_back(reader->submit(some));
    }
    if (below(3) == 0) reader->turn(1 + below(8), uint64_t{64 << 10} << below(5), {});
    const bool all = below(2) == 0;  // else it is closed with work left
    for (size_t j = 0; j < jobs.size() && (all || below(4) != 0); ++j) {
      if (all) REQUIRE(jobs[j]->wait(10) != nullptr);
      for (size_t i = 0; i < asked[j].size(); ++i) {
        int error = 0;
        if (const auto bytes = jobs[j]->take(i, 10, &error)) {
          CHECK(text_of(*bytes) == texts[asked[j][i]]);
          ++taken;
        } else {
          CHECK((error == ECANCELED || error == EFBIG || error == ENOBUFS || error == ETIMEDOUT));
          ++given_up;
        }
      }
      jobs[j].reset();
    }
    if (below(2) == 0) jobs.clear();
    CHECK(reader->close(10));
    jobs.clear();
    CHECK(reader.drained());
  }
  CHECK(taken > 100);
  CHECK(given_up > 100);
}

TEST_CASE("memory stays within the budget, and every job comes to its turn") {
  Folder folder;
  constexpr uint64_t kBudget = 1 << 20;
  std::vector<std::string> paths;
  for (int i = 0; i < 40; ++i) {
    folder.write(std::to_string(i), 50'000 + 1000 * i, static_cast<unsigned>(i));
    paths.push_back(folder.path(std::to_string(i)));
  }
  folder.write("big", kBudget / 2 + 1);
  let_the_clock_tick();
  Reader reader({.reads_in_flight = 4, .buffer_bytes = kBudget});
  std::vector<std::shared_ptr<FileJob>> jobs;
  for (size_t i = 0; i < paths.size(); i += 4) {
    jobs.push_back(reader->submit({paths.begin() + i, paths.begin() + i + 4}));
  }
  jobs.push_back(reader->submit({folder.path("big")}));
  jobs.push_back(reader->submit(paths));  // more than the budget at once
  uint64_t mapped_max = 0;
  size_t waited = 0;
  for (size_t j = 0; j < jobs.size(); ++j) {
    const auto batch = jobs[j]->wait(10);
    REQUIRE(batch != nullptr);
    const FileReaderStats stats = reader->stats();
    mapped_max = std::max(mapped_max, stats.mapped_bytes);
    CHECK(stats.buffered_bytes <= kBudget);
    // The last jobs cannot have memory while the first are held.
    if (j == 0) {
      std::this_thread::sleep_for(milliseconds(20));
      waited = static_cast<size_t>(
          std::count_if(jobs.begin(), jobs.end(), [](const auto& job) { return !job->done(); }));
    }
    for (const int error : batch->errors) {
      if (j < 10) CHECK(error == 0);
      if (j == 10) CHECK(error == EFBIG);
      if (j == 11) CHECK((error == 0 || error == ENOBUFS));
    }
    if (j == 11) CHECK(std::count(batch->errors.begin(), batch->errors.end(), 0) > 5);
    jobs[j].reset();
  }
  CHECK(waited > 2);
  CHECK(mapped_max <= kBudget);
  CHECK(reader.drained());
  CHECK(reader->stats().ready_bytes == 0);
  CHECK(reader->stats().wait_output_s > 0);
}

TEST_CASE("64 descriptors are enough, and the program keeps its share") {
  Folder folder;
  std::vector<std::string> paths;
  for (int i = 0; i < 200; ++i) {
    folder.write(std::to_string(i), 3000);
    paths.push_back(folder.path(std::to_string(i)));
  }
  let_the_clock_tick();
  const FilesLimit limit(64);
  Reader reader({.reads_in_flight = 256});
  const auto job = reader->submit(paths);
  const auto batch = job->wait(20);
  REQUIRE(batch != nullptr);
  CHECK(std::count(batch->errors.begin(), batch->errors.end(), 0) == 200);
  CHECK(reader->stats().threads <= 16);
}

TEST_CASE("descriptors that others hold make a file's error, and it recovers") {
  Folder folder;
  folder.write("data", 3000);
  let_the_clock_tick();
  const FilesLimit limit(64);
  Reader reader;
  std::vector<int> dups;
  for (int fd; (fd = ::dup(folder.fd())) >= 0;) dups.push_back(fd);
  const auto batch = reader->submit({folder.path("data")})->wait(10);
  for (const int fd : dups) ::close(fd);
  REQUIRE(batch != nullptr);
  CHECK(batch->errors[0] == EMFILE);
  CHECK(reader->submit({folder.path("data")})->wait(10)->errors[0] == 0);
}

TEST_CASE("concurrency is turned up and down while files are read") {
  Folder folder;
  folder.write("stuck", 7777);
  folder.write("good", 100);
  let_the_clock_tick();
  Gate gate;
  Reader reader(Gate::options(1));
  const auto stuck = reader->submit(std::vector<std::string>(8, folder.path("stuck")));
  gate.wait_for(1);
  CHECK(reader->stats().in_flight == 1);
  reader->turn(5, std::nullopt, std::nullopt);
  gate.wait_for(5);
  CHECK(reader->stats().in_flight == 5);
  reader->turn(2, 1 << 20, ColdReads::kFill);
  CHECK(reader->reads_in_flight() == 2);
  CHECK(reader->buffer_bytes() == 1 << 20);
  gate.open();
  REQUIRE(stuck->wait(10) != nullptr);
  while (reader->stats().threads > 2) std::this_thread::yield();
  CHECK(reader->submit({folder.path("good")})->wait(10)->errors[0] == 0);
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

TEST_CASE("many threads submit, take, forget and turn at once") {
  Folder folder;
  std::vector<std::string> paths, texts;
  for (int i = 0; i < 32; ++i) {
    texts.push_back(text_of(folder.write(std::to_string(i), 1000 + 997 * i, i)));
    paths.push_back(folder.path(std::to_string(i)));
  }
  let_the_clock_tick();
  Reader reader({.reads_in_flight = 4, .buffer_bytes = 256 << 10});
  std::atomic<size_t> wrong = 0, served = 0;
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 6; ++t) {
    threads.emplace_back([&, t] {
      for (unsigned round = 0; round < 20; ++round) {
        const auto job = reader->submit({paths.begin() + t, paths.begin() + t + 8});
        if (round % 4 == 0) job->forget(round % 8);
        if (round % 5 == 0) reader->turn(1 + round % 7, std::nullopt, std::nullopt);
        if (round % 2 == 0) job->wait(10);
        for (size_t i = 0; i < 8; ++i) {
          int error = 0;
          const auto bytes = job->take(i, 1, &error);
          if (!bytes) continue;
          ++served;
          if (text_of(*bytes) != texts[t + i]) ++wrong;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(served > 100);
  CHECK(reader.drained());
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

TEST_CASE("a forked child is refused, lets go without harm, and reads with its own") {
  Folder folder;
  folder.write("data", 5000);
  let_the_clock_tick();
  Reader reader;
  auto job = reader->submit({folder.path("data")});
  REQUIRE(job->wait(10) != nullptr);
  const auto end = testing::in_child([&] {
    int error = 0;
    if (job->take(0, 1, &error) || error != ECANCELED) return 1;
    if (job->done()) return 2;
    try {
      reader->submit({folder.path("data")});
      return 3;
    } catch (const Error&) {
    }
    job.reset();
    if (!reader->close(1)) return 4;
    Reader own;
    const auto batch = own->submit({folder.path("data")})->wait(5);
    return batch != nullptr && batch->errors[0] == 0 ? 0 : 5;
  });
  CHECK(end.exit_code == 0);
  int error = 0;
  CHECK(job->take(0, 1, &error));
}
#endif

TEST_CASE("closing ends what was submitted, and refuses more") {
  Folder folder;
  folder.write("data", 5000);
  auto reader = FileReader::make({});
  CHECK(reader->close(1));
  const auto job = reader->submit({folder.path("data")});
  const auto batch = job->wait(10);
  REQUIRE(batch != nullptr);
  CHECK(batch->errors[0] == ECANCELED);
  CHECK(reader->submit({})->done());
}

}  // namespace
}  // namespace headrace::io
