// The board: what the daemon says of a file is what a reader finds, whole, while both are at it;
// and a reader that is handed nonsense says so instead of following it.
#include "preload/file_board.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <random>
#include <thread>

#include "core/error.h"
#include "testing/child_process.h"
#include "testing/store_builder.h"

using namespace headrace;
using namespace headrace::preload;

namespace {

struct Files {
  std::vector<std::string> paths;
  std::vector<std::string_view> views;
  std::vector<FileFigures> figures;

  explicit Files(int count, int64_t size = 10) {
    for (int i = 0; i < count; ++i) {
      paths.push_back("/data/set/" + std::to_string(i % 10) + "/" + std::to_string(i) + ".jpg");
      figures.push_back({7, 1000 + i, size, 5, 6, 7, 8, S_IFREG | 0644, 1, 2, 3, 4096, i == 3});
    }
    views.assign(paths.begin(), paths.end());
  }
};

FileBoard make_board(const Files& files, const BoardOptions& options = {}) {
  return FileBoard(files.views, files.figures, options);
}

int memory_file(const std::string& text) {
  const int fd = memfd_create("copy", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  REQUIRE(write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size()));
  return fd;
}

struct stat status_of(int fd) {
  struct stat status;
  REQUIRE(fstat(fd, &status) == 0);
  return status;
}

BoardView view_of(const FileBoard& board) {
  const auto nbytes = static_cast<uint64_t>(status_of(board.fd()).st_size);
  void* memory = mmap(nullptr, nbytes, PROT_READ, MAP_SHARED, board.fd(), 0);
  REQUIRE(memory != MAP_FAILED);
  BoardView view;
  REQUIRE(view.check(memory, nbytes));
  return view;
}

}  // namespace

TEST_CASE("each path is found, and nothing else is") {
  const Files files(5000);
  const FileBoard board = make_board(files);
  const BoardView view = view_of(board);
  for (int i = 0; i < 5000; ++i) {
    const std::string& path = files.paths[static_cast<size_t>(i)];
    CHECK(view.find(path.data(), path.size()) == i);
    CHECK(view.find(path.data(), path.size() - 1) == -1);
    CHECK(board.find(path + "x") == -1);
    CHECK(view.file(i).inode == 1000 + i);
    CHECK(view.place(i).copy == Copy::kNone);
  }
  CHECK(board.find("") == -1);
  CHECK(view.file(3).flags == kIsLink);
  CHECK(FileBoard({}, {}, {}).find("/data") == -1);
}

TEST_CASE("a copy is seen where it was placed until it is withdrawn") {
  const Files files(100);
  FileBoard board = make_board(files);
  const BoardView view = view_of(board);
  const int fd = memory_file("0123456789");
  const struct stat status = status_of(fd);
  CHECK(!view.has_device(status.st_dev));
  board.place(42, fd);
  const CopyPlace place = view.place(42);
  CHECK(place.copy == Copy::kMemory);
  CHECK(place.where == static_cast<uint32_t>(fd));
  CHECK(place.device == status.st_dev);
  CHECK(place.inode == status.st_ino);
  CHECK(view.has_device(status.st_dev));
  CHECK(view.find_copy(status.st_dev, status.st_ino) == 42);
  CHECK(view.find_copy(status.st_dev, status.st_ino + 1) == -1);
  CHECK(board.placed(42));
  CHECK(!board.placed(41));
  board.withdraw(42);
  board.withdraw(42);
  CHECK(!board.placed(42));
  CHECK(!view.still(42, place.generation));
  // Somebody may have it open still.
  CHECK(view.find_copy(status.st_dev, status.st_ino) == 42);
  close(fd);
}

TEST_CASE("a copy on a tier has its path, and is forgotten with it") {
  const testing::Folder folder;
  const Files files(10);
  const std::string tier = folder.path("tier");
  mkdir(tier.c_str(), 0700);
  FileBoard board = make_board(files, {.roots = {}, .tiers = {"/nowhere", tier + "/"}});
  const BoardView view = view_of(board);
  const std::string copy = tier + "/some.copy";
  const int fd = open(copy.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  CHECK_THROWS_AS(board.place_path(1, copy), Error);  // of another size
  REQUIRE(write(fd, "0123456789", 10) == 10);
  board.place_path(1, copy);
  const CopyPlace place = view.place(1);
  CHECK(place.copy == Copy::kTier);
  char path[256];
  REQUIRE(view.tier_path(1, place.where, path, sizeof path));
  CHECK(path == copy);
  CHECK(!view.tier_path(1, place.where, path, copy.size()));  // no room for the zero
  CHECK(!view.tier_path(1, 2, path, sizeof path));
  CHECK(!view.tier_path(2, 1, path, sizeof path));
  const struct stat status = status_of(fd);
  CHECK(view.find_copy(status.st_dev, status.st_ino) == 1);
  board.withdraw(1);
  CHECK(view.find_copy(status.st_dev, status.st_ino) == -1);
  CHECK_THROWS_AS(board.place_path(1, folder.path("other")), Error);
  CHECK_THROWS_AS(board.place_path(1, tier + "/missing"), Error);
  CHECK_THROWS_AS(board.place_path(1, tier + "/" + std::string(64, 'x')), Error);
  close(fd);
}

TEST_CASE("copies that come and go for ever are found, and those that are gone are not") {
  const testing::Folder folder;
  const Files files(64);
  FileBoard board = make_board(files, {.roots = {}, .tiers = {folder.path("")}});
  const BoardView view = view_of(board);
  std::mt19937 random(3);
  std::vector<struct stat> held(64);
  std::vector<int> fds(64, -1);
  for (int round = 0; round < 20000; ++round) {
    const size_t file = random() % 64;
    if (fds[file] >= 0 && random() % 2 == 0) {
      board.withdraw(static_cast<int64_t>(file));
      close(fds[file]);
      fds[file] = -1;
    } else if (fds[file] < 0) {
      fds[file] = memory_file("0123456789");
      held[file] = status_of(fds[file]);
      board.place(static_cast<int64_t>(file), fds[file]);
    }
    if (fds[file] >= 0) {
      REQUIRE(view.find_copy(held[file].st_dev, held[file].st_ino) == static_cast<int64_t>(file));
    }
  }
  for (const int fd : fds) close(fd);
}

TEST_CASE("readers see each placement whole, while others place and withdraw") {
  const Files files(4);
  FileBoard board = make_board(files);
  const BoardView view = view_of(board);
  const int fds[2] = {memory_file("0123456789"), memory_file("abcdefghij")};
  const uint64_t inodes[2] = {status_of(fds[0]).st_ino, status_of(fds[1]).st_ino};
  std::atomic<bool> over{false};
  std::vector<std::thread> writers;
  for (unsigned t = 0; t < 2; ++t) {
    writers.emplace_back([&, t] {
      std::mt19937 random(t);
      while (!over.load()) {
        const auto file = static_cast<int64_t>(random() % 4);
        if (random() % 3 == 0) {
          board.withdraw(file);
        } else {
          board.place(file, fds[random() % 2]);
        }
      }
    });
  }
  uint64_t seen = 0;
  for (uint64_t round = 0; round < 100'000 || (seen < 100 && round < 100'000'000); ++round) {
    const CopyPlace place = view.place(static_cast<int64_t>(round % 4));
    if (place.copy == Copy::kNone) continue;
    ++seen;
    const size_t which = place.where == static_cast<uint32_t>(fds[0]) ? 0 : 1;
    REQUIRE(place.where == static_cast<uint32_t>(fds[which]));
    REQUIRE(place.inode == inodes[which]);
  }
  over.store(true);
  for (std::thread& writer : writers) writer.join();
  CHECK(seen >= 100);
  for (const int fd : fds) close(fd);
}

TEST_CASE("roots are told by whole names") {
  const Files files(1);
  const FileBoard board = make_board(files, {.roots = {{"/data/set", "/mnt/set/"}}, .tiers = {}});
  const BoardView view = view_of(board);
  const auto root = [&](std::string_view path) { return view.root_of(path.data(), path.size()); };
  CHECK(root("/data/set") == 0);
  CHECK(root("/data/set/a") == 0);
  CHECK(root("/data/setting") == -1);
  CHECK(root("/data") == -1);
  uint32_t bytes;
  const char* stands = view.stands(0, &bytes);
  CHECK(std::string(stands, bytes) == "/mnt/set");
}

TEST_CASE("what makes no board is refused with the reason") {
  Files files(3);
  CHECK_THROWS_AS(FileBoard(files.views, {}, {}), Error);
  files.views[2] = files.views[1];
  CHECK_THROWS_AS(make_board(files), Error);
  for (const std::string& wrong : {std::string("relative"), std::string(),
                                   "/" + std::string(5000, 'x'), std::string("/a\0b", 4)}) {
    files.views[2] = wrong;
    CHECK_THROWS_AS(make_board(files), Error);
  }
  const Files sound(3);
  FileBoard board = make_board(sound);
  CHECK_THROWS_AS(board.place(3, 0), Error);
  CHECK_THROWS_AS(board.place(-1, 0), Error);
  CHECK_THROWS_AS(board.withdraw(3), Error);
  const int fd = memory_file("short");
  CHECK_THROWS_AS(board.place(0, fd), Error);
  close(fd);
  CHECK_THROWS_AS(board.place(0, fd), Error);
}

TEST_CASE("others can map the board for reading only, and it says when it has ended") {
  const Files files(3);
  BoardView view;
  {
    const FileBoard board = make_board(files);
    CHECK(mmap(nullptr, board.nbytes(), PROT_READ | PROT_WRITE, MAP_SHARED, board.fd(), 0) ==
          MAP_FAILED);
    CHECK(ftruncate(board.fd(), 0) != 0);
    CHECK((fcntl(board.fd(), F_GET_SEALS) & F_SEAL_SHRINK) != 0);
    view = view_of(board);
    CHECK(view.open());
  }
  CHECK(!view.open());
}

TEST_CASE("a reader follows nothing that lies outside, whatever bytes it is given") {
  const Files files(50);
  FileBoard board = make_board(files, {.roots = {{"/data", "/data"}}, .tiers = {"/tmp"}});
  const int fd = memory_file("0123456789");
  board.place(7, fd);
  std::string sound(board.nbytes(), '\0');
  REQUIRE(pread(board.fd(), sound.data(), sound.size(), 0) == static_cast<ssize_t>(sound.size()));
  std::mt19937_64 random(1);
  // At the very end of a mapping: what reads further is ended by SIGSEGV.
  const size_t mapped = (sound.size() + 4095) / 4096 * 4096;
  auto* memory = static_cast<char*>(
      mmap(nullptr, mapped + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  REQUIRE(memory != MAP_FAILED);
  REQUIRE(mprotect(memory + mapped, 4096, PROT_NONE) == 0);
  char* begin = memory + mapped - sound.size();
  int followed = 0;
  const auto end = testing::in_child([&] {
    for (int round = 0; round < 20000; ++round) {
      std::memcpy(begin, sound.data(), sound.size());
      size_t given = sound.size();
      const int kind = round % 4;
      if (kind == 0) {  // garbage all over
        for (int k = 0; k < 200; ++k) begin[random() % sound.size()] = static_cast<char>(random());
      } else if (kind == 1) {  // in the header
        for (int k = 0; k < 3; ++k) {
          const uint64_t word = random() % 3 == 0 ? random() : random() % (2 * sound.size());
          std::memcpy(begin + 16 + random() % 10 * 8, &word, 8);
        }
      } else if (kind == 2) {  // in the files
        const uint64_t word = random();
        std::memcpy(begin + sizeof(BoardHeader) / 8 * 8 + random() % 700 * 8, &word, 8);
      } else {  // cut off: the end of the mapping is the end of what is there
        given = random() % sound.size();
        std::memmove(memory + mapped - given, begin, given);
      }
      BoardView view;
      if (!view.check(memory + mapped - given, given)) continue;
      ++followed;
      for (const std::string& path : files.paths) {
        const int64_t number = view.find(path.data(), path.size());
        const int root = view.root_of(path.data(), path.size());
        uint32_t bytes = 0;
        if (root >= 0) (void)view.stands(root, &bytes);
        if (number < 0) continue;
        const CopyPlace place = view.place(number);
        char out[300];
        (void)view.tier_path(number, place.where, out, sizeof out);
      }
      (void)view.find_copy(random(), random());
      (void)view.has_device(random());
    }
    return followed > 1000 ? 0 : 1;
  });
  CHECK(end.signal == 0);
  CHECK(end.exit_code == 0);
  munmap(memory, mapped + 4096);
  close(fd);
}
