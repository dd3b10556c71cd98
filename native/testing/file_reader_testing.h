// What the tests of the file reader share: a reader that ends with the test, files whose pages are
// where a test wants them, and a gate at which reads stop.
#pragma once

#include <sys/stat.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "io/engine_conformance.h"
#include "io/file_reader.h"

namespace headrace::io::file_reader_testing {

using conformance::File;
using std::chrono::milliseconds;

// Files that were changed less than a clock tick ago are not trusted.
inline void let_the_clock_tick() { std::this_thread::sleep_for(milliseconds(25)); }

inline void drop_pages(const std::string& path) {
  const File file(path, O_RDONLY);
  REQUIRE(posix_fadvise(file.fd, 0, 0, POSIX_FADV_DONTNEED) == 0);
}

inline void fetch_pages(const std::string& path) {
  const File file(path, O_RDONLY);
  std::vector<char> bytes(2 << 20);
  REQUIRE(::read(file.fd, bytes.data(), bytes.size()) >= 0);
}

inline std::string text_of(const FileBytes& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

inline std::string text_of(const std::vector<std::byte>& bytes) {
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
inline std::string take(FileJob& job, size_t index, int* error) {
  REQUIRE(job.wait(10) != nullptr);
  const auto bytes = job.take(index, 10, error);
  CHECK(bytes.has_value() == (*error == 0));
  return bytes ? text_of(*bytes) : "";
}

inline std::string take(FileJob& job, size_t index) {
  int error = -1;
  std::string text = take(job, index, &error);
  CHECK(error == 0);
  return text;
}

// A gate at which reads of files of one size stop, or looks at them.
inline std::mutex g_gate;
inline std::condition_variable g_gate_moved;
inline bool g_gate_open = true;
inline int g_at_gate = 0;

inline void stop_at_gate(off_t size) {
  if (size != 7777) return;
  std::unique_lock lock(g_gate);
  ++g_at_gate;
  g_gate_moved.notify_all();
  g_gate_moved.wait(lock, [] { return g_gate_open; });
}

inline ssize_t read_at_gate(int fd, const iovec* parts, int count, off_t offset) {
  struct stat status {};
  ::fstat(fd, &status);
  stop_at_gate(status.st_size);
  return kSyscalls.preadv(fd, parts, count, offset);
}

inline int look_at_gate(const char* path, struct stat* status) {
  const int result = ::stat(path, status);
  if (result == 0) stop_at_gate(status->st_size);
  return result;
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

}  // namespace headrace::io::file_reader_testing
