// Volumes: what is checked when they are opened, direct descriptors, mappings and residency.
#include "io/volume.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <thread>

#include "core/error.h"
#include "testing/store_builder.h"

using namespace headrace;
using io::Volume;
using io::VolumeKind;

namespace {

Error open_error(VolumeKind kind, const std::string& path, uint64_t bytes, int64_t mtime_ns) {
  Volume volume(kind, path, bytes, mtime_ns);
  try {
    volume.fd();
  } catch (const Error& error) {
    CHECK(error.path == path);
    CHECK(std::string(error.what()).find(path) != std::string::npos);
    return error;
  }
  FAIL("the volume was opened");
  return Error(ErrorKind::kInvalidArgument, "");
}

}  // namespace

TEST_CASE("a file opens when its size and time are as recorded, and not otherwise") {
  testing::Folder folder;
  const std::string path = folder.path("file");
  testing::write_file(path, std::string(10000, 'x'));
  const int64_t mtime = testing::mtime_of(path);
  CHECK(Volume(VolumeKind::kFile, path, 10000, mtime).fd() >= 0);
  CHECK(Volume(VolumeKind::kFile, path, 10000, -1).fd() >= 0);
  CHECK(open_error(VolumeKind::kFile, path, 10001, -1).kind == ErrorKind::kCorruptStore);
  CHECK(open_error(VolumeKind::kFile, path, 9999, -1).offset_bytes == 9999);
  CHECK(open_error(VolumeKind::kFile, path, 10001, mtime).kind == ErrorKind::kSourceChanged);
  CHECK(open_error(VolumeKind::kFile, path, 10000, mtime + 1).kind == ErrorKind::kSourceChanged);
}

TEST_CASE("what is not there or not a file is an error, and a FIFO does not hang") {
  testing::Folder folder;
  const auto missing = open_error(VolumeKind::kFile, folder.path("missing"), 1, -1);
  CHECK(missing.kind == ErrorKind::kVolume);
  CHECK(missing.system_errno == ENOENT);
  CHECK(open_error(VolumeKind::kTree, folder.path("missing"), 0, -1).system_errno == ENOENT);
  const std::string fifo = folder.path("fifo");
  REQUIRE(mkfifo(fifo.c_str(), 0600) == 0);
  CHECK(open_error(VolumeKind::kFile, fifo, 0, -1).kind == ErrorKind::kCorruptStore);
  CHECK(open_error(VolumeKind::kTree, fifo, 0, -1).system_errno == ENOTDIR);
  CHECK(open_error(VolumeKind::kFile, folder.path(""), 0, -1).kind == ErrorKind::kCorruptStore);
}

TEST_CASE("an error of opening is met again at the next try, and mended files open then") {
  testing::Folder folder;
  Volume volume(VolumeKind::kFile, folder.path("late"), 5, -1);
  CHECK_THROWS_AS(volume.fd(), Error);
  CHECK_THROWS_AS(volume.fd(), Error);
  CHECK_THROWS_AS(volume.direct_fd(), Error);
  CHECK_THROWS_AS(volume.mapping(), Error);
  testing::write_file(folder.path("late"), "12345");
  CHECK(volume.fd() >= 0);
  CHECK(volume.mapping() != nullptr);
}

TEST_CASE("the direct descriptor is of the same file, and states its alignment") {
  testing::Folder folder;
  const std::string path = folder.path("file");
  testing::write_file(path, std::string(3 * 4096, 'x'));
  Volume volume(VolumeKind::kFile, path, 3 * 4096, -1);
  const int fd = volume.direct_fd();
  if (fd < 0) {
    MESSAGE("skipped: this file system has no direct reads");
    return;
  }
  CHECK((fcntl(fd, F_GETFL) & O_DIRECT) != 0);
  CHECK((volume.alignment() & (volume.alignment() - 1)) == 0);
  CHECK(volume.alignment() <= 4096);
  alignas(4096) static char block[4096];
  CHECK(pread(fd, block, volume.alignment(), volume.alignment()) ==
        static_cast<ssize_t>(volume.alignment()));
  CHECK(block[0] == 'x');
}

TEST_CASE("a path that names another file by now gets no direct descriptor") {
  testing::Folder folder;
  const std::string path = folder.path("file");
  testing::write_file(path, std::string(4096, 'x'));
  Volume volume(VolumeKind::kFile, path, 4096, -1);
  REQUIRE(volume.fd() >= 0);
  testing::write_file(folder.path("other"), std::string(4096, 'y'));
  std::filesystem::rename(folder.path("other"), path);
  CHECK(volume.direct_fd() == -1);
  char byte;
  CHECK(pread(volume.fd(), &byte, 1, 0) == 1);
  CHECK(byte == 'x');
}

TEST_CASE("a path that became a FIFO does not hang the direct opening") {
  testing::Folder folder;
  const std::string path = folder.path("file");
  testing::write_file(path, std::string(4096, 'x'));
  Volume volume(VolumeKind::kFile, path, 4096, -1);
  REQUIRE(volume.fd() >= 0);
  std::filesystem::remove(path);
  REQUIRE(mkfifo(path.c_str(), 0600) == 0);
  CHECK(volume.direct_fd() == -1);
}

TEST_CASE("bytes are resident after they were read and not after they were dropped") {
  testing::Folder folder;
  const std::string path = folder.path("file");
  const uint64_t size = 64 * 4096;
  testing::write_file(path, std::string(size, 'x'));
  Volume volume(VolumeKind::kFile, path, size, -1);
  testing::warm_file(path);
  CHECK(volume.resident(0, size));
  CHECK(volume.resident(4095, 2));
  CHECK(volume.resident(size - 1, 1));
  testing::evict_file(path);
  CHECK(!volume.resident(0, size));
  CHECK(!volume.resident(4095, 2));
  CHECK(volume.resident(100, 0));  // nothing is always there
  posix_fadvise(volume.fd(), 0, 0, POSIX_FADV_RANDOM);
  char byte;
  REQUIRE(pread(volume.fd(), &byte, 1, 10 * 4096) == 1);
  CHECK(volume.resident(10 * 4096, 4096));
  CHECK(!volume.resident(10 * 4096, 4097));
  CHECK(!volume.resident(10 * 4096 - 1, 2));
}

TEST_CASE("a tree has no mapping, no direct descriptor and nothing resident") {
  testing::Folder folder;
  Volume volume(VolumeKind::kTree, folder.path(""), 0, -1);
  CHECK(volume.fd() >= 0);
  CHECK(volume.direct_fd() == -1);
  CHECK(volume.mapping() == nullptr);
  CHECK(!volume.resident(0, 1));
}

TEST_CASE("an empty file has no mapping, and a mapping that lost pages is not given out again") {
  testing::Folder folder;
  testing::write_file(folder.path("empty"), "");
  CHECK(Volume(VolumeKind::kFile, folder.path("empty"), 0, -1).mapping() == nullptr);
  const std::string path = folder.path("file");
  testing::write_file(path, std::string(8 * 4096, 'x'));
  Volume volume(VolumeKind::kFile, path, 8 * 4096, -1);
  const Mapping* mapping = volume.mapping();
  REQUIRE(mapping != nullptr);
  CHECK(volume.mapping() == mapping);
  std::filesystem::resize_file(path, 4096);
  CHECK(static_cast<int>(*static_cast<const volatile std::byte*>(mapping->data() + 5 * 4096)) == 0);
  CHECK(mapping->damaged() == 1);
  CHECK(volume.mapping() == nullptr);
}

TEST_CASE("threads that need a volume first at the same time get the same descriptors") {
  testing::Folder folder;
  testing::write_file(folder.path("file"), std::string(8192, 'x'));
  for (int round = 0; round < 20; ++round) {
    Volume volume(VolumeKind::kFile, folder.path("file"), 8192, -1);
    int fds[4], direct[4];
    const Mapping* mappings[4];
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        direct[t] = volume.direct_fd();
        mappings[t] = volume.mapping();
        fds[t] = volume.fd();
      });
    }
    for (auto& thread : threads) thread.join();
    for (int t = 1; t < 4; ++t) {
      CHECK(fds[t] == fds[0]);
      CHECK(direct[t] == direct[0]);
      CHECK(mappings[t] == mappings[0]);
    }
  }
}
