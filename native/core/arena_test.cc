// The arena: recycling, identities, limits, and life beyond it.
#include "core/arena.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>
#include <thread>

#include "core/error.h"
#include "testing/child_process.h"

using namespace headrace;

namespace {
constexpr size_t kMebi = size_t{1} << 20;

void write_all(const BufferPtr& buffer, int value) {
  std::memset(buffer->data, value, buffer->capacity);
}

// Others may map a shared buffer and see what is written, but never write or resize it.
bool only_readable(size_t bytes) {
  const auto arena = Arena::make(16 * kMebi, Memory::kShared);
  auto buffer = arena->acquire(bytes);
  REQUIRE(buffer->fd >= 0);
  write_all(buffer, 7);
  void* theirs = mmap(nullptr, buffer->capacity, PROT_READ, MAP_SHARED, buffer->fd, 0);
  REQUIRE(theirs != MAP_FAILED);
  const bool seen = static_cast<const std::byte*>(theirs)[bytes - 1] == std::byte{7};
  munmap(theirs, buffer->capacity);
  constexpr int kHole = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
  return seen &&
         mmap(nullptr, kMebi, PROT_READ | PROT_WRITE, MAP_SHARED, buffer->fd, 0) == MAP_FAILED &&
         pwrite(buffer->fd, "x", 1, 0) == -1 && ftruncate(buffer->fd, 1) == -1 &&
         fallocate(buffer->fd, kHole, 0, 4096) == -1;
}
}  // namespace

// First in this program: whether we may mount is asked once.
TEST_CASE("others never write to shared buffers, where no folder of huge pages is to be had") {
  const auto end = testing::in_child([] {
    if (getuid() == 0 && setresuid(65534, 65534, 65534) != 0) return 2;
    const auto large = Arena::make(0, Memory::kShared)->acquire(8 * kMebi);
    if ((fcntl(large->fd, F_GET_SEALS) & F_SEAL_SHRINK) == 0) return 3;
    return only_readable(kMebi) && only_readable(8 * kMebi) ? 0 : 1;
  });
  CHECK(end.exit_code == 0);
}

TEST_CASE("others never write to shared buffers, of small pages or huge") {
  CHECK(only_readable(kMebi));
  CHECK(only_readable(8 * kMebi));
  const auto slab = Arena::make(0, Memory::kSharedSmallPages)->acquire(8 * kMebi);
  CHECK((fcntl(slab->fd, F_GET_SEALS) & F_SEAL_SHRINK) != 0);
}

TEST_CASE("buffers are large enough, page-aligned and waste at most an eighth") {
  const auto arena = Arena::make(64 * kMebi);
  for (size_t bytes = 0; bytes < 40 * kMebi; bytes = bytes * 9 / 8 + 511) {
    CAPTURE(bytes);
    const auto buffer = arena->acquire(bytes);
    CHECK(buffer->capacity >= bytes);
    CHECK(reinterpret_cast<uintptr_t>(buffer->data) % 4096 == 0);
    CHECK(buffer->capacity % 4096 == 0);
    if (bytes >= 32768) CHECK(buffer->capacity <= bytes + bytes / 8);
    CHECK(buffer->memory().size() == buffer->capacity);
    buffer->data[0] = buffer->data[buffer->capacity - 1] = std::byte{1};
  }
}

TEST_CASE("a buffer that was let go is handed out again, with its identity") {
  const auto arena = Arena::make(64 * kMebi);
  auto buffer = arena->acquire(kMebi);
  const auto* data = buffer->data;
  const uint64_t id = buffer->id;
  CHECK(id != 0);
  buffer.reset();
  const size_t mapped = arena->mapped_bytes();
  buffer = arena->acquire(kMebi - 5000);
  CHECK(buffer->data == data);
  CHECK(buffer->id == id);
  CHECK(arena->mapped_bytes() == mapped);
}

TEST_CASE(
    "a far larger buffer is not wasted on a small request, and the smallest fitting is taken") {
  const auto arena = Arena::make(64 * kMebi);
  auto large = arena->acquire(8 * kMebi);
  auto middle = arena->acquire(kMebi + 300000);
  auto small = arena->acquire(kMebi);
  const uint64_t middle_id = middle->id, small_id = small->id, large_id = large->id;
  middle.reset();
  small.reset();
  large.reset();
  const auto tiny = arena->acquire(100);
  CHECK(std::set{middle_id, small_id, large_id}.count(tiny->id) == 0);
  CHECK(arena->acquire(kMebi)->id == small_id);
}

TEST_CASE("identities are never used for a second piece of memory") {
  const auto arena = Arena::make(kMebi);
  std::set<uint64_t> ids;
  for (int i = 0; i < 200; ++i) {
    const auto buffer = arena->acquire(2 * kMebi);  // over the cap: unmapped when let go
    CHECK(ids.insert(buffer->id).second);
  }
  CHECK(arena->mapped_bytes() == 0);
}

TEST_CASE("free memory stays under the cap, the oldest goes first, and listeners hear of it") {
  const auto arena = Arena::make(4 * kMebi);
  const int early = arena->listen();
  std::vector<BufferPtr> buffers;
  std::vector<uint64_t> ids;
  for (int i = 0; i < 6; ++i) {
    buffers.push_back(arena->acquire(kMebi));
    ids.push_back(buffers.back()->id);
  }
  CHECK(arena->mapped_bytes() == 6 * kMebi);
  for (auto& buffer : buffers) buffer.reset();  // in the order of their ids
  CHECK(arena->mapped_bytes() == 4 * kMebi);
  CHECK(arena->take_unmapped(early) == std::vector<uint64_t>{ids[0], ids[1]});
  CHECK(arena->take_unmapped(early).empty());
  const int late = arena->listen();
  CHECK(late != early);
  CHECK(arena->take_unmapped(late).empty());
  arena->acquire(6 * kMebi).reset();
  CHECK(arena->take_unmapped(late).size() >= 1);
  arena->stop_listening(early);
  arena->stop_listening(late);
  arena->acquire(6 * kMebi).reset();
}

TEST_CASE("an arena that retains all unmaps nothing, however batches grow") {
  const auto arena = Arena::make(kRetainAll);
  const int listener = arena->listen();
  for (size_t bytes = kMebi; bytes < 4 * kMebi; bytes += kMebi / 4) arena->acquire(bytes);
  CHECK(arena->take_unmapped(listener).empty());
  const size_t mapped = arena->mapped_bytes();
  CHECK(arena->acquire(kMebi) != nullptr);
  CHECK(arena->mapped_bytes() == mapped);
}

TEST_CASE("a buffer outlives the user's reference to the arena") {
  auto arena = Arena::make(kMebi);
  const std::weak_ptr<Arena> watch = arena;
  auto buffer = arena->acquire(kMebi / 2);
  arena.reset();
  write_all(buffer, 3);
  CHECK(!watch.expired());
  buffer.reset();
  CHECK(watch.expired());
}

TEST_CASE("memory that the system refuses is an error, and is not counted") {
  const auto arena = Arena::make(kMebi);
  for (const size_t bytes : {size_t{1} << 60, SIZE_MAX - 5, (SIZE_MAX >> 1) + 100}) {
    CAPTURE(bytes);
    try {
      arena->acquire(bytes);
      FAIL("the system gave an absurd amount of memory");
    } catch (const Error& error) {
      CHECK(error.kind == ErrorKind::kVolume);
      CHECK(error.system_errno == ENOMEM);
    }
  }
  CHECK(arena->mapped_bytes() == 0);
}

TEST_CASE("threads that take and give back at once never share a buffer") {
  const auto arena = Arena::make(2 * kMebi);
  const int listener = arena->listen();
  std::atomic<int> shared{0};
  std::vector<std::thread> threads;
  for (int t = 1; t <= 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 300; ++i) {
        const auto buffer = arena->acquire(4096u << (i % 7));
        write_all(buffer, t);
        const auto other = arena->acquire(100000);
        std::memset(other->data, -t, 100);
        for (const size_t at : {size_t{0}, buffer->capacity / 2, buffer->capacity - 1}) {
          if (buffer->data[at] != static_cast<std::byte>(t)) ++shared;
        }
        if (i % 50 == 0) arena->take_unmapped(listener);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(shared == 0);
  CHECK(arena->mapped_bytes() <= 2 * kMebi);
}

TEST_CASE("a forked child takes and gives back memory whatever the parent's threads were doing") {
  const auto arena = Arena::make(8 * kMebi);
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop) arena->acquire(4096);
  });
  const auto kept = arena->acquire(kMebi);
  write_all(kept, 5);
  int clean = 0;
  for (int i = 0; i < 20; ++i) {
    const auto end = testing::in_child([&] {
      auto buffer = arena->acquire(kMebi);
      if (buffer->id != 0 || kept->data[100] != std::byte{5}) return 1;
      write_all(buffer, 6);
      buffer.reset();
      return 0;
    });
    clean += end.exit_code == 0;
  }
  stop = true;
  busy.join();
  CHECK(clean == 20);
  CHECK(kept->data[100] == std::byte{5});
}

TEST_CASE("an abandoned buffer is unmapped, never handed out again, and reported once") {
  const auto arena = Arena::make(8 * kMebi, Memory::kShared);
  Arena::take_retired_shared();
  auto buffer = arena->acquire(kMebi);
  auto other = arena->acquire(kMebi);
  const uint64_t id = buffer->id, other_id = other->id;
  buffer->abandoned = true;
  buffer.reset();
  other.reset();
  CHECK(Arena::take_retired_shared() == std::vector<uint64_t>{id});
  CHECK(Arena::take_retired_shared().empty());
  CHECK(arena->acquire(kMebi)->id == other_id);
  CHECK(arena->acquire(kMebi)->id != id);
}

TEST_CASE("shared memory that cannot be had is an error, not a signal") {
  const auto end = testing::in_child([] {
    const auto arena = Arena::make(0, Memory::kShared);
    try {
      arena->acquire(size_t{1} << 55);
    } catch (const Error& e) {
      return arena->mapped_bytes() == 0 ? 0 : 2;
    }
    return 1;
  });
  CHECK(end.exit_code == 0);
}
