// FileReader: memory and descriptors that it takes, and how many reads it makes at a time.
#include <algorithm>

#include "testing/file_reader_testing.h"

namespace headrace::io {
namespace {

using namespace conformance;
using namespace file_reader_testing;
using std::chrono::milliseconds;

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

TEST_CASE("jobs of one file each are looked at side by side, and a slow look holds up no others") {
  Folder folder;
  folder.write("slow", 7777);
  folder.write("good", 5000);
  let_the_clock_tick();
  Gate gate;
  FileReaderOptions options{.reads_in_flight = 16};
  options.calls.stat = look_at_gate;
  Reader reader(options);
  std::vector<std::shared_ptr<FileJob>> slow;
  for (int i = 0; i < 15; ++i) slow.push_back(reader->submit({folder.path("slow")}));
  gate.wait_for(15);
  const auto batch = reader->submit({folder.path("good")})->wait(10);
  REQUIRE(batch != nullptr);
  CHECK(batch->errors[0] == 0);
  gate.open();
  for (const auto& job : slow) CHECK(job->wait(10)->errors[0] == 0);
}

TEST_CASE("memory is kept for the largest file while it is looked at") {
  Folder folder;
  constexpr uint64_t kBudget = 1 << 20;  // of which 3/4 are for buffers in use
  folder.write("slow", kBudget / 2);
  for (int i = 0; i < 6; ++i) folder.write(std::to_string(i), 50'000);
  let_the_clock_tick();
  Gate gate;
  FileReaderOptions options{.reads_in_flight = 4, .buffer_bytes = kBudget};
  options.calls.stat = [](const char* path, struct stat* status) {
    const int result = ::stat(path, status);
    if (result == 0 && status->st_size == kBudget / 2) stop_at_gate(7777);
    return result;
  };
  Reader reader(options);
  auto slow = reader->submit({folder.path("slow")});
  std::vector<std::shared_ptr<FileJob>> jobs;
  for (int i = 0; i < 6; ++i) jobs.push_back(reader->submit({folder.path(std::to_string(i))}));
  const auto done = [&] {
    return std::count_if(jobs.begin(), jobs.end(), [](const auto& job) { return job->done(); });
  };
  for (int i = 0; i < 5000 && done() < 3; ++i) std::this_thread::sleep_for(milliseconds(1));
  std::this_thread::sleep_for(milliseconds(20));
  CHECK(done() == 3);  // whichever were looked at first
  CHECK(reader->stats().buffered_bytes <= kBudget * 3 / 16);
  gate.open();
  auto batch = slow->wait(10);  // though nothing was let go of
  REQUIRE(batch != nullptr);
  CHECK(batch->errors[0] == 0);
  slow.reset();
  batch.reset();
  for (const auto& job : jobs) REQUIRE(job->wait(10) != nullptr);
}

}  // namespace
}  // namespace headrace::io
