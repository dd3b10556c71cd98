// What every engine must do, as one set of doctest cases.
//
// A test file lists its engines with HEADRACE_ENGINE_CONFORMANCE(name, factory), or with
// HEADRACE_VOLUME_CONFORMANCE where they know no files, and inherits all of it;
// `factory(EngineOptions)` returns a fresh engine. The reference is a plain pread of one read after
// the other (`expected`). Each check goes through `read_all`, which also counts that every read was
// reported exactly once.
#pragma once

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "io/engine.h"

namespace headrace::io::conformance {

using Factory = std::function<std::unique_ptr<Engine>(const EngineOptions&)>;

// A folder with one file of known bytes, removed at the end. /var/tmp, because /tmp may be a tmpfs
// that refuses O_DIRECT.
class Folder {
 public:
  Folder() {
    char name[] = "/var/tmp/headrace-engine-XXXXXX";
    REQUIRE(::mkdtemp(name) != nullptr);
    path_ = name;
    REQUIRE(::chmod(name, 0755) == 0);
    fd_ = ::open(name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    REQUIRE(fd_ >= 0);
  }
  ~Folder() {
    ::close(fd_);
    std::filesystem::remove_all(path_);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  int fd() const { return fd_; }
  std::string path(const std::string& name) const { return path_ + "/" + name; }

  // Writes `size` pseudo-random bytes and returns them.
  std::vector<std::byte> write(const std::string& name, size_t size, unsigned seed = 1) const {
    std::vector<std::byte> bytes(size);
    std::mt19937_64 random(seed);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
    const int file = ::open(path(name).c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    REQUIRE(file >= 0);
    REQUIRE(::pwrite(file, bytes.data(), size, 0) == static_cast<ssize_t>(size));
    REQUIRE(::fsync(file) == 0);  // O_DIRECT of a dirty page is slow, and not the subject
    ::close(file);
    return bytes;
  }

 private:
  std::string path_;
  int fd_ = -1;
};

class File {
 public:
  File(const std::string& path, int flags) : fd(::open(path.c_str(), flags | O_CLOEXEC)) {
    REQUIRE(fd >= 0);
  }
  ~File() { ::close(fd); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  const int fd;
};

// Page-aligned memory, filled with a byte that shows what was not written.
class Memory {
 public:
  static constexpr std::byte kUntouched{0xa5};

  explicit Memory(size_t size)
      : bytes_(static_cast<std::byte*>(std::aligned_alloc(4096, (size + 4095) / 4096 * 4096))),
        size_((size + 4095) / 4096 * 4096) {
    wipe();
  }
  ~Memory() { std::free(bytes_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  void wipe() { std::memset(bytes_, static_cast<int>(kUntouched), size_); }
  std::byte* at(size_t offset) { return bytes_ + offset; }
  std::span<std::byte> span() { return {bytes_, size_}; }

 private:
  std::byte* bytes_;
  size_t size_;
};

// Performs the reads and checks that each is reported once, with `user` and `dest` as they were.
inline void read_all(Engine& engine, std::vector<Read>& reads) {
  for (size_t i = 0; i < reads.size(); ++i) reads[i].user = static_cast<uint32_t>(i);
  const std::vector<Read> before = reads;
  std::vector<std::atomic<int>> reported(reads.size());
  engine.read(reads, [&](Read& read) { ++reported[read.user]; });
  size_t wrong = 0;
  for (size_t i = 0; i < reads.size(); ++i) {
    if (reported[i] != 1 || reads[i].dest != before[i].dest || reads[i].fd != before[i].fd) ++wrong;
  }
  REQUIRE(wrong == 0);
}

// The number of reads that differ from `file` (in status, length or bytes).
inline size_t count_wrong(const std::vector<Read>& reads, const std::vector<std::byte>& file) {
  size_t wrong = 0;
  for (const Read& read : reads) {
    const size_t from = std::min<size_t>(read.offset, file.size());
    const size_t expected = std::min(read.length, file.size() - from);
    if (read.error != 0 || read.done != expected ||
        (expected > 0 && std::memcmp(read.dest, file.data() + from, expected) != 0)) {
      ++wrong;
    }
  }
  return wrong;
}

// Extents at random below and around the end of a file, each with its own place in memory.
inline std::vector<Read> random_reads(int fd, size_t count, size_t file_size, size_t length_max,
                                      size_t alignment, Memory& memory, unsigned seed) {
  std::mt19937_64 random(seed);
  std::vector<Read> reads(count);
  size_t place = 0;
  for (Read& read : reads) {
    read.fd = fd;
    read.offset = random() % (file_size + length_max) / alignment * alignment;
    read.length = (random() % length_max / alignment + 1) * alignment;
    read.dest = memory.at(place);
    place += read.length;
  }
  REQUIRE(place <= memory.span().size());
  return reads;
}

inline Read path_read(int folder, const char* path, uint64_t size, std::byte* dest) {
  Read read;
  read.fd = folder;
  read.path = path;
  read.length = size;
  read.dest = dest;
  read.check.size_bytes = size;
  return read;
}

// The status of one read of `path`.
inline int path_error(Engine& engine, int folder, const char* path, FileCheck check) {
  Memory memory(4096);
  std::vector<Read> reads = {path_read(folder, path, 16, memory.at(0))};
  reads[0].check = check;
  read_all(engine, reads);
  return reads[0].error;
}

inline int64_t mtime_ns(const std::string& path) {
  struct stat status;
  REQUIRE(::stat(path.c_str(), &status) == 0);
  return int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec;
}

class FilesLimit {
 public:
  explicit FilesLimit(rlim_t files) {
    REQUIRE(::getrlimit(RLIMIT_NOFILE, &before_) == 0);
    const rlimit lower = {files, before_.rlim_max};
    REQUIRE(::setrlimit(RLIMIT_NOFILE, &lower) == 0);
  }
  ~FilesLimit() { ::setrlimit(RLIMIT_NOFILE, &before_); }
  FilesLimit(const FilesLimit&) = delete;
  FilesLimit& operator=(const FilesLimit&) = delete;

 private:
  rlimit before_;
};

// Root reads everything: be nobody for a while.
class AsNobody {
 public:
  AsNobody() { changed_ = ::geteuid() == 0 && ::seteuid(65534) == 0; }
  ~AsNobody() {
    if (changed_) static_cast<void>(!::seteuid(0));
  }
  AsNobody(const AsNobody&) = delete;
  AsNobody& operator=(const AsNobody&) = delete;

 private:
  bool changed_;
};

inline size_t open_descriptors() {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    ++count;
  }
  return count;
}

constexpr size_t kFileBytes = 1'000'003;  // ends off every boundary

inline void reads_random_extents(const Factory& make) {
  Folder folder;
  const auto bytes = folder.write("data", kFileBytes);
  const File file(folder.path("data"), O_RDONLY);
  const auto engine = make({.queue_depth = 16, .threads = 4});
  for (unsigned seed = 0; seed < 5; ++seed) {
    Memory memory(500 * 20'000);
    auto reads = random_reads(file.fd, 500, kFileBytes, 20'000, 1, memory, seed);
    read_all(*engine, reads);
    CHECK(count_wrong(reads, bytes) == 0);
  }
}

inline void reads_direct(const Factory& make) {
  Folder folder;
  const auto bytes = folder.write("data", kFileBytes);
  const File file(folder.path("data"), O_RDONLY | O_DIRECT);
  const auto engine = make({.queue_depth = 16, .threads = 4});
  for (const size_t alignment : {512, 4096}) {
    Memory memory(300 * 65536);
    auto reads = random_reads(file.fd, 300, kFileBytes, 65536, alignment, memory, 11);
    read_all(*engine, reads);
    CHECK(count_wrong(reads, bytes) == 0);
  }
}

inline void reads_more_than_its_queue(const Factory& make) {
  Folder folder;
  const auto bytes = folder.write("data", kFileBytes);
  const File file(folder.path("data"), O_RDONLY);
  for (const unsigned depth : {1u, 7u, 64u}) {
    const auto engine = make({.queue_depth = depth, .threads = 4});
    Memory memory(10'000 * 512);
    auto reads = random_reads(file.fd, 10'000, kFileBytes, 512, 1, memory, depth);
    read_all(*engine, reads);
    CHECK(count_wrong(reads, bytes) == 0);
  }
}

inline void reads_nothing(const Factory& make) {
  Folder folder;
  folder.write("data", 100);
  folder.write("empty", 0);
  const File file(folder.path("data"), O_RDONLY);
  const auto engine = make({});
  std::vector<Read> none;
  read_all(*engine, none);

  std::vector<Read> reads(200);
  for (Read& read : reads) read.fd = file.fd;
  reads.push_back(path_read(folder.fd(), "empty", 0, nullptr));
  reads.push_back(path_read(folder.fd(), "missing", 0, nullptr));
  read_all(*engine, reads);
  for (size_t i = 0; i + 1 < reads.size(); ++i) {
    CHECK(reads[i].error == 0);
    CHECK(reads[i].done == 0);
  }
  CHECK(reads.back().error == ENOENT);
}

inline void stops_at_the_end_of_file(const Factory& make) {
  Folder folder;
  const auto bytes = folder.write("data", 10'000);
  const auto engine = make({.queue_depth = 4, .threads = 2});
  for (const int flags : {O_RDONLY, O_RDONLY | O_DIRECT}) {
    const File file(folder.path("data"), flags);
    Memory memory(4 * 16384);
    std::vector<Read> reads(4);
    const uint64_t offsets[] = {8192, 0, 12288, 1 << 20};  // straddling twice, beyond twice
    for (size_t i = 0; i < reads.size(); ++i) {
      reads[i].fd = file.fd;
      reads[i].offset = offsets[i];
      reads[i].length = 16384;
      reads[i].dest = memory.at(i * 16384);
    }
    read_all(*engine, reads);
    CHECK(count_wrong(reads, bytes) == 0);
    CHECK(reads[0].done == 10'000 - 8192);
    CHECK(reads[1].done == 10'000);
    CHECK(reads[2].done == 0);
    CHECK(reads[3].done == 0);
  }
}

inline void reads_files_by_path(const Factory& make) {
  Folder folder;
  const auto engine = make({.queue_depth = 8, .threads = 4});
  std::vector<std::string> names;
  std::vector<std::vector<std::byte>> files;
  for (unsigned i = 0; i < 100; ++i) {
    names.push_back("file-" + std::to_string(i));
    files.push_back(folder.write(names.back(), i * 331, i));
  }
  Memory memory(100 * 40'000);
  std::vector<Read> reads;
  for (unsigned i = 0; i < 100; ++i) {
    reads.push_back(
        path_read(folder.fd(), names[i].c_str(), files[i].size(), memory.at(i * 40'000)));
    reads.back().check.mtime_ns = mtime_ns(folder.path(names[i]));
    if (i % 3 == 1) reads.back().offset = 100;     // a part, beyond the end for the shortest
    if (i % 3 == 2) reads.back().length = 40'000;  // more than there is
  }
  const size_t open_before = open_descriptors();
  for (int round = 0; round < 3; ++round) {
    memory.wipe();
    read_all(*engine, reads);
    size_t wrong = 0;
    for (unsigned i = 0; i < 100; ++i) wrong += count_wrong({reads[i]}, files[i]);
    CHECK(wrong == 0);
  }
  CHECK(open_descriptors() <= open_before + 1);  // nothing is left open (the listing itself is)
}

inline void reads_paths_and_descriptors_together(const Factory& make) {
  Folder folder;
  const auto bytes = folder.write("data", kFileBytes);
  const File file(folder.path("data"), O_RDONLY);
  const auto engine = make({.queue_depth = 8, .threads = 4});
  Memory memory(400 * 4096);
  auto reads = random_reads(file.fd, 400, kFileBytes, 4096, 1, memory, 3);
  for (size_t i = 0; i < reads.size(); i += 2) {
    reads[i].fd = folder.fd();
    reads[i].path = "data";
    reads[i].check.size_bytes = kFileBytes;
  }
  read_all(*engine, reads);
  CHECK(count_wrong(reads, bytes) == 0);
}

inline void names_what_is_wrong_with_a_path(const Factory& make) {
  Folder folder;
  folder.write("data", 100);
  const std::string data = folder.path("data");
  REQUIRE(::symlink("data", folder.path("link").c_str()) == 0);
  REQUIRE(::symlink("loop", folder.path("loop").c_str()) == 0);
  REQUIRE(::mkdir(folder.path("folder").c_str(), 0755) == 0);
  REQUIRE(::mkfifo(folder.path("fifo").c_str(), 0644) == 0);
  const auto engine = make({});
  const size_t open_before = open_descriptors();
  const auto error = [&](const char* path, FileCheck check = {.size_bytes = 100}) {
    return path_error(*engine, folder.fd(), path, check);
  };
  CHECK(error("data") == 0);
  CHECK(error("link") == 0);
  CHECK(error("missing") == ENOENT);
  CHECK(error("data/below") == ENOTDIR);
  CHECK(error("loop") == ELOOP);
  CHECK(error("folder") == EISDIR);
  CHECK(error("fifo") == EINVAL);
  CHECK(error("data", {.size_bytes = 101}) == ESTALE);
  CHECK(error("data", {.size_bytes = 100, .mtime_ns = mtime_ns(data)}) == 0);
  CHECK(error("data", {.size_bytes = 100, .mtime_ns = mtime_ns(data) + 1}) == ESTALE);
  CHECK(path_error(*engine, 987'654, "data", {.size_bytes = 100}) == EBADF);
  REQUIRE(::chmod(data.c_str(), 0) == 0);
  {
    const AsNobody nobody;
    CHECK(error("data") == EACCES);
  }
  CHECK(open_descriptors() <= open_before + 1);
}

inline void reports_each_failure_to_its_own_read(const Factory& make) {
  Folder folder;
  const auto bytes = folder.write("data", kFileBytes);
  const File file(folder.path("data"), O_RDONLY);
  const File write_only(folder.path("data"), O_WRONLY);
  const auto engine = make({.queue_depth = 8, .threads = 4});
  Memory memory(300 * 4096);
  auto reads = random_reads(file.fd, 300, kFileBytes, 4096, 1, memory, 5);
  for (size_t i = 0; i < reads.size(); ++i) {
    if (i % 5 == 1) reads[i].fd = 987'654;
    if (i % 5 == 2) reads[i].fd = write_only.fd;
    if (i % 5 == 3) reads[i].fd = -1;
    if (i % 5 == 4) reads[i].fd = folder.fd();
  }
  read_all(*engine, reads);
  const int expected[] = {0, EBADF, EBADF, EBADF, EISDIR};
  size_t wrong = 0;
  for (size_t i = 0; i < reads.size(); ++i) {
    if (reads[i].error != expected[i % 5]) ++wrong;
    if (i % 5 == 0) wrong += count_wrong({reads[i]}, bytes);
  }
  CHECK(wrong == 0);
}

inline void lives_with_few_descriptors(const Factory& make) {
  Folder folder;
  const auto bytes = folder.write("data", 5000);
  Memory memory(500 * 5000);
  std::vector<Read> reads;
  for (size_t i = 0; i < 500; ++i) {
    reads.push_back(path_read(folder.fd(), "data", 5000, memory.at(i * 5000)));
  }
  // Depth and threads beyond the limit; the program itself takes all but a few, then all but one.
  for (const size_t left : {40, 3, 1}) {
    const auto engine = make({.queue_depth = 128, .threads = 128});
    std::vector<Read> first = {reads[0]};
    read_all(*engine, first);  // rings and threads are made before descriptors run out
    memory.wipe();
    const FilesLimit limit(64);
    std::vector<int> dups;
    for (int fd; (fd = ::dup(folder.fd())) >= 0;) dups.push_back(fd);
    for (size_t i = 0; i < std::min(left, dups.size()); ++i) {
      ::close(dups.back());
      dups.pop_back();
    }
    read_all(*engine, reads);
    for (const int fd : dups) ::close(fd);
    CHECK(count_wrong(reads, bytes) == 0);
  }
}

inline void keeps_up_with_buffers_that_come_and_go(const Factory& make) {
  Folder folder;
  const auto bytes = folder.write("data", kFileBytes);
  const File direct(folder.path("data"), O_RDONLY | O_DIRECT);
  const File buffered(folder.path("data"), O_RDONLY);
  const auto engine = make({.queue_depth = 8, .threads = 4});
  const auto check = [&](Memory& memory, uint64_t id, unsigned seed) {
    memory.wipe();
    auto reads = random_reads(direct.fd, 100, kFileBytes, 8192, 512, memory, seed);
    for (size_t i = 0; i < reads.size(); ++i) {
      reads[i].buffer_id = id;
      if (i % 2 == 1) reads[i].fd = buffered.fd;
    }
    read_all(*engine, reads);
    CHECK(count_wrong(reads, bytes) == 0);
  };
  auto first = std::make_unique<Memory>(100 * 8192);
  Memory second(100 * 8192);
  check(*first, 1, 1);  // never made known
  engine->know_buffer(1, first->span());
  engine->know_buffer(2, second.span());
  check(*first, 1, 2);
  check(second, 2, 3);
  check(second, 1, 4);  // the wrong id: memory that the known buffer does not hold
  engine->forget_buffer(1);
  check(*first, 1, 5);
  first = std::make_unique<Memory>(100 * 8192);
  engine->know_buffer(1, first->span());
  check(*first, 1, 6);
  engine->know_buffer(1, second.span());  // moved without being forgotten
  check(second, 1, 7);
  engine->forget_buffer(77);
  for (uint64_t id = 100; id < 300; ++id) engine->know_buffer(id, second.span());  // too many
  check(second, 299, 8);
  for (uint64_t id = 100; id < 300; ++id) engine->forget_buffer(id);
  check(second, 299, 9);
}

inline void is_remade_and_destroyed_in_any_state(const Factory& make) {
  Folder folder;
  const auto bytes = folder.write("data", 4096);
  const File file(folder.path("data"), O_RDONLY);
  for (int i = 0; i < 20; ++i) {
    const auto engine = make({});
    if (i % 2 == 0) continue;  // never used
    Memory memory(4096);
    std::vector<Read> reads(1);
    reads[0].fd = file.fd;
    reads[0].length = 4096;
    reads[0].dest = memory.at(0);
    read_all(*engine, reads);
    CHECK(count_wrong(reads, bytes) == 0);
  }
}

}  // namespace headrace::io::conformance

#define HEADRACE_ENGINE_CASE(name, make, behaviour)                               \
  TEST_CASE(name ": " #behaviour) { headrace::io::conformance::behaviour(make); } \
  static_assert(true)

// For engines that read bytes at an offset, wherever these lie.
#define HEADRACE_VOLUME_CONFORMANCE(name, make)                             \
  HEADRACE_ENGINE_CASE(name, make, reads_random_extents);                   \
  HEADRACE_ENGINE_CASE(name, make, reads_direct);                           \
  HEADRACE_ENGINE_CASE(name, make, reads_more_than_its_queue);              \
  HEADRACE_ENGINE_CASE(name, make, stops_at_the_end_of_file);               \
  HEADRACE_ENGINE_CASE(name, make, keeps_up_with_buffers_that_come_and_go); \
  HEADRACE_ENGINE_CASE(name, make, is_remade_and_destroyed_in_any_state)

// For engines that know files, too.
#define HEADRACE_ENGINE_CONFORMANCE(name, make)                           \
  HEADRACE_VOLUME_CONFORMANCE(name, make);                                \
  HEADRACE_ENGINE_CASE(name, make, reads_nothing);                        \
  HEADRACE_ENGINE_CASE(name, make, reads_files_by_path);                  \
  HEADRACE_ENGINE_CASE(name, make, reads_paths_and_descriptors_together); \
  HEADRACE_ENGINE_CASE(name, make, names_what_is_wrong_with_a_path);      \
  HEADRACE_ENGINE_CASE(name, make, reports_each_failure_to_its_own_read); \
  HEADRACE_ENGINE_CASE(name, make, lives_with_few_descriptors)
