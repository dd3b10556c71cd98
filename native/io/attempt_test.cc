// Attempt: what each answer of the kernel means, without a kernel that gives it.
#include "io/attempt.h"

#include "io/engine_conformance.h"

namespace headrace::io {
namespace {

using namespace conformance;

struct Case {
  Read read;
  Attempt attempt;
  explicit Case(int fd, size_t length, uint64_t offset = 0) {
    read.length = length;
    read.offset = offset;
    attempt = {.read = &read, .fd = fd};
  }
  Next answer(int64_t result) { return attempt.advance(result, kSyscalls); }
};

TEST_CASE("a short buffered read goes on where it stopped, until zero") {
  Folder folder;
  folder.write("data", 10'000);
  const File file(folder.path("data"), O_RDONLY);
  Case c(file.fd, 20'000, 7);
  CHECK(c.answer(4'001) == Next::kAgain);
  CHECK(c.attempt.offset() == 4'008);
  CHECK(c.attempt.bytes() == 15'999);
  CHECK(c.answer(5'992) == Next::kAgain);
  CHECK(c.answer(0) == Next::kFinished);
  CHECK(c.read.error == 0);
  CHECK(c.read.done == 9'993);
}

TEST_CASE("a short direct read at the end of the file is final; elsewhere it restarts aligned") {
  Folder folder;
  folder.write("data", 10'000);
  const File file(folder.path("data"), O_RDONLY | O_DIRECT);
  Case at_end(file.fd, 16'384);
  CHECK(at_end.answer(10'000) == Next::kFinished);
  CHECK(at_end.read.done == 10'000);

  Case cut(file.fd, 16'384);
  CHECK(cut.answer(5'000) == Next::kAgain);
  CHECK(cut.attempt.offset() == 4'096);
  CHECK(cut.answer(904) == Next::kAgain);  // no further: cut again, and not the end
  CHECK(cut.answer(10'000 - 4'096) == Next::kFinished);
  CHECK(cut.read.done == 10'000);

  Case stuck(file.fd, 16'384);
  CHECK(stuck.answer(5'000) == Next::kAgain);
  for (unsigned i = 0; i < kRetriesMax; ++i) REQUIRE(stuck.answer(904) == Next::kAgain);
  CHECK(stuck.answer(904) == Next::kFinished);
  CHECK(stuck.read.error == EIO);
  CHECK(stuck.read.done == 5'000);
}

TEST_CASE("transient errors are tried again while there is progress in between") {
  Folder folder;
  folder.write("data", 10'000);
  const File file(folder.path("data"), O_RDONLY);
  Case c(file.fd, 8'000);
  for (unsigned round = 0; round < 3; ++round) {
    for (unsigned i = 0; i < kRetriesMax; ++i) REQUIRE(c.answer(-EINTR) == Next::kAgain);
    REQUIRE(c.answer(1'000) == Next::kAgain);
  }
  for (unsigned i = 0; i < kRetriesMax; ++i) REQUIRE(c.answer(-ECANCELED) == Next::kAgain);
  CHECK(c.answer(-ECANCELED) == Next::kFinished);
  CHECK(c.read.error == ECANCELED);
  CHECK(c.read.done == 3'000);
}

TEST_CASE("one call asks for at most a gibibyte, and a long read takes several") {
  Folder folder;
  folder.write("data", 1);
  const File file(folder.path("data"), O_RDONLY | O_DIRECT);
  Case c(file.fd, (size_t{5} << 30) + 512);
  size_t calls = 1;
  for (; c.attempt.bytes() == kCallBytesMax; ++calls) {
    REQUIRE(c.answer(static_cast<int64_t>(kCallBytesMax)) == Next::kAgain);
  }
  CHECK(calls == 6);
  CHECK(c.answer(512) == Next::kFinished);
  CHECK(c.read.done == c.read.length);
}

TEST_CASE("an engine leaves descriptors to the program") {
  {
    const FilesLimit limit(64);
    CHECK(open_files_max(1000) == 16);
    CHECK(open_files_max(8) == 8);
  }
  const FilesLimit limit(20);
  CHECK(open_files_max(1000) == 1);
}

}  // namespace
}  // namespace headrace::io
