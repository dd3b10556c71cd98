// The API as C sees it, over a store on disk: under the sanitizers, and with its threads.
#include <doctest/doctest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <new>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <vector>

#include "capi/failure.h"
#include "capi/headrace.h"
#include "capi/json.h"
#include "core/crc32c.h"
#include "core/error.h"
#include "core/sha.h"
#include "testing/child_process.h"
#include "testing/store_builder.h"

using namespace headrace;
using namespace headrace::testing;

namespace {

// A store over the test's volumes, as an index over files has it.
class DiskStore {
 public:
  explicit DiskStore(StoreSpec spec) : store(spec) {
    const auto image = build_directory(store.spec);
    const std::string bytes(reinterpret_cast<const char*>(image.bytes.data()), image.bytes.size());
    write_file(folder.path("segment-0000.hrd"), bytes);
    const auto directory = store.catalog()->segments()[0].directory;
    std::string volumes;
    for (size_t v = 0; v < store.paths.size(); ++v) {
      volumes += (v > 0 ? ",{" : "{") + std::string(R"("kind":"file","path":")") + store.paths[v] +
                 R"(","bytes":)" + std::to_string(store.volume_bytes(v)) + R"(,"mtime_ns":)" +
                 std::to_string(mtime_of(store.paths[v])) + "}";
    }
    const std::string uuid = hex_of(directory->uuid());
    const std::string samples = std::to_string(directory->samples());
    const std::string fingerprint = hex_of(sha256(directory->header())).substr(0, 32);
    std::string document = R"({"format":"headrace-store","version":1,"uuid":")" + uuid +
                           R"(","fingerprint":")" + fingerprint + R"(","samples":)" + samples +
                           R"(,"segments":[{"directory":"segment-0000.hrd","directory_bytes":)" +
                           std::to_string(bytes.size()) + R"(,"uuid":")" + uuid +
                           R"(","samples":)" + samples + R"(,"extents":)" +
                           std::to_string(directory->extents()) + R"(,"volumes":[)" + volumes +
                           "]}]";
    const std::string canonical = capi::Json::parse(document + "}", "test").canonical();
    char crc[16];
    std::snprintf(crc, sizeof crc, "%08x",
                  crc32c(std::as_bytes(std::span(canonical.data(), canonical.size()))));
    document += std::string(R"(,"crc32c":")") + crc + "\"}";
    write_file(folder.path("store.json"), document);
  }

  hr_mount_t* mount() {
    hr_mount_t* out = nullptr;
    const int code = hr_mount(folder.path(".").c_str(), nullptr, &out);
    INFO(hr_last_error());
    REQUIRE(code == HR_OK);
    return out;
  }

  TestStore store;
  Folder folder;
};

// Checks a batch against what its samples must be.
void check(const hr_batch& batch, const TestStore& store) {
  for (uint64_t i = 0; i < batch.samples; ++i) {
    const auto& parts = store.contents[static_cast<size_t>(batch.indices[i])];
    for (uint64_t p = 0; p < batch.parts; ++p) {
      const uint64_t slot = i * batch.parts + p;
      const std::string found(reinterpret_cast<const char*>(batch.buffer) + batch.offsets[slot],
                              static_cast<size_t>(batch.lengths[slot]));
      CHECK(found == parts[p].value_or(""));
    }
  }
}

TEST_CASE("an epoch brings each sample once, in parts") {
  DiskStore disk({.samples = 300, .parts = 3});
  hr_mount_t* mount = disk.mount();
  hr_sequence_t* sequence = nullptr;
  REQUIRE(hr_sequence(mount, 5, 0, 1, &sequence) == HR_OK);
  hr_unmount(mount);
  for (int epoch = 0; epoch < 2; ++epoch) {
    std::set<int64_t> seen;
    hr_batch batch = HR_BATCH_INIT;
    int code;
    while ((code = hr_batch_read(sequence, 17, &batch)) == HR_OK) {
      check(batch, disk.store);
      seen.insert(batch.indices, batch.indices + batch.samples);
      hr_batch_release(&batch);
    }
    CHECK(code == HR_END);
    CHECK(seen.size() == 300);
  }
  hr_sequence_close(sequence);
}

TEST_CASE("a sequence that is closed in the middle leaves nothing") {
  DiskStore disk({.samples = 300});
  hr_mount_t* mount = disk.mount();
  hr_sequence_t* sequence = nullptr;
  REQUIRE(hr_sequence(mount, 5, 2, 4, &sequence) == HR_OK);
  hr_batch batch = HR_BATCH_INIT;
  REQUIRE(hr_batch_read(sequence, 3, &batch) == HR_OK);
  hr_sequence_close(sequence);
  hr_unmount(mount);
  check(batch, disk.store);  // it outlives both
  hr_batch_release(&batch);
  CHECK(batch.owner == nullptr);
  CHECK(hr_batch_release(&batch) == HR_OK);
}

// What one thread got of a sequence in `epochs` loops, each until HR_END.
struct Taken {
  std::vector<std::vector<int64_t>> indices;  // by epoch
  int wrong = 0;  // a batch or an end that was not of the loop's epoch, or no end
};
Taken take(hr_sequence_t* sequence, uint64_t epochs, uint64_t n, const TestStore& store) {
  Taken taken;
  for (uint64_t epoch = 0; epoch < epochs; ++epoch) {
    auto& indices = taken.indices.emplace_back();
    hr_batch batch = HR_BATCH_INIT;
    int code;
    while ((code = hr_batch_read(sequence, n, &batch)) == HR_OK) {
      taken.wrong += batch.epoch != epoch;
      for (uint64_t i = 0; i < batch.samples; ++i) {
        const auto& content = store.contents[static_cast<size_t>(batch.indices[i])][0];
        const auto* bytes = reinterpret_cast<const char*>(batch.buffer) + batch.offsets[i];
        const std::string_view got(bytes, static_cast<size_t>(batch.lengths[i]));
        taken.wrong += got != content.value_or("");
      }
      indices.insert(indices.end(), batch.indices, batch.indices + batch.samples);
      hr_batch_release(&batch);
    }
    taken.wrong += code != HR_END || batch.epoch != epoch;
  }
  return taken;
}

TEST_CASE("pictures are decoded ahead for all threads, and what is none is marked") {
  DiskStore disk({.samples = 200, .parts = 1});  // of random bytes: not one is a picture
  hr_mount_t* mount = disk.mount();
  hr_sequence_t* sequence = nullptr;
  REQUIRE(hr_sequence(mount, 5, 0, 1, &sequence) == HR_OK);
  hr_images images = HR_IMAGES_INIT;
  images.height = images.width = 8;
  REQUIRE(hr_sequence_images(sequence, &images) == HR_OK);
  hr_batch first = HR_BATCH_INIT;
  for (int again = 0; again < 2; ++again) {
    CHECK(hr_batch_read(sequence, 7, &first) == HR_ERR_PICTURE);
    CHECK(first.owner == nullptr);
  }
  REQUIRE(hr_sequence_set(sequence, HR_SET_ON_ERROR, HR_ON_ERROR_MARK) == HR_OK);
  std::atomic<uint64_t> marked{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      hr_batch batch = HR_BATCH_INIT;
      while (hr_batch_read(sequence, 7, &batch) == HR_OK) {
        const auto* pixels = static_cast<const uint8_t*>(batch.pixels);
        CHECK(batch.pixel_bytes == 3 * 8 * 8);
        CHECK(std::count(pixels, pixels + batch.samples * batch.pixel_bytes, 0) ==
              static_cast<int64_t>(batch.samples * batch.pixel_bytes));
        marked += batch.failed;
        hr_batch_release(&batch);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(marked == 200);
  hr_sequence_close(sequence);
  hr_unmount(mount);
}

TEST_CASE("threads that share a sequence read each epoch exactly once, however many they are") {
  constexpr uint64_t kEpochs = 3;
  DiskStore disk({.samples = 409});
  hr_mount_t* mount = disk.mount();
  std::vector<int64_t> all(409);
  std::iota(all.begin(), all.end(), 0);
  for (const size_t count : {1, 2, 4, 8}) {
    CAPTURE(count);
    hr_sequence_t* sequence = nullptr;
    REQUIRE(hr_sequence(mount, 1, 0, 1, &sequence) == HR_OK);
    std::vector<Taken> taken(count + 1);
    std::vector<std::thread> threads;
    for (size_t t = 0; t < count; ++t) {
      threads.emplace_back([&, t] { taken[t] = take(sequence, kEpochs, 5, disk.store); });
    }
    for (std::thread& thread : threads) thread.join();
    // One that begins when all is over hears of each end, and reads nothing.
    std::thread([&] { taken[count] = take(sequence, kEpochs, 5, disk.store); }).join();
    CHECK(std::all_of(taken[count].indices.begin(), taken[count].indices.end(),
                      [](const auto& indices) { return indices.empty(); }));
    for (uint64_t epoch = 0; epoch < kEpochs; ++epoch) {
      CAPTURE(epoch);
      std::vector<int64_t> indices;
      for (const Taken& one : taken) {
        indices.insert(indices.end(), one.indices[epoch].begin(), one.indices[epoch].end());
      }
      CHECK(indices.size() == 409);
      std::sort(indices.begin(), indices.end());
      CHECK(indices == all);
    }
    for (const Taken& one : taken) CHECK(one.wrong == 0);
    uint64_t epoch = 0, position = 0;
    CHECK(hr_sequence_get(sequence, HR_SET_EPOCH, &epoch) == HR_OK);
    CHECK(hr_sequence_get(sequence, HR_SET_POSITION, &position) == HR_OK);
    CHECK(epoch == kEpochs);
    CHECK(position == 0);
    hr_sequence_close(sequence);
  }
  hr_unmount(mount);
}

TEST_CASE("windows of a blocked order are cut up for all threads, however little memory there is") {
  DiskStore disk({.samples = 409});
  hr_mount_t* mount = disk.mount();
  for (const uint64_t window_blocks : {1, 7, 1000}) {
    CAPTURE(window_blocks);
    hr_sequence_t* sequence = nullptr;
    REQUIRE(hr_sequence(mount, 1, 0, 1, &sequence) == HR_OK);
    hr_order order = HR_ORDER_INIT;
    order.kind = HR_ORDER_BLOCKED;
    order.block_samples = 3;
    order.window_blocks = window_blocks;
    REQUIRE(hr_sequence_order(sequence, &order) == HR_OK);
    REQUIRE(hr_sequence_set(sequence, HR_SET_BUFFER_BYTES, 1) == HR_OK);
    std::vector<Taken> taken(4);
    std::vector<std::thread> threads;
    for (Taken& one : taken) threads.emplace_back([&] { one = take(sequence, 2, 5, disk.store); });
    for (std::thread& thread : threads) thread.join();
    for (size_t epoch = 0; epoch < 2; ++epoch) {
      std::multiset<int64_t> seen;
      for (const Taken& one : taken) {
        CHECK(one.wrong == 0);
        seen.insert(one.indices[epoch].begin(), one.indices[epoch].end());
      }
      CHECK(seen.size() == 409);
      CHECK(std::set<int64_t>(seen.begin(), seen.end()).size() == 409);
    }
    CHECK(hr_sequence_order(sequence, &order) == HR_ERR_ARGUMENT);
    hr_sequence_close(sequence);
  }
  hr_unmount(mount);
}

TEST_CASE("an epoch that is set begins for all threads, and its ends are counted anew") {
  DiskStore disk({.samples = 40});
  hr_mount_t* mount = disk.mount();
  hr_sequence_t* sequence = nullptr;
  REQUIRE(hr_sequence(mount, 1, 0, 1, &sequence) == HR_OK);
  hr_batch batch = HR_BATCH_INIT;
  const auto read = [&] {
    const int code = hr_batch_read(sequence, 40, &batch);
    const std::pair<int, uint64_t> answer{code, batch.epoch};
    hr_batch_release(&batch);
    return answer;
  };
  using Answer = std::pair<int, uint64_t>;
  // New threads for each epoch: told to begin it, none is owed an end.
  for (const uint64_t epoch : {0, 1, 2}) {
    REQUIRE(hr_sequence_set(sequence, HR_SET_EPOCH, epoch) == HR_OK);
    std::thread([&] {
      CHECK(read() == Answer{HR_OK, epoch});
      CHECK(read() == Answer{HR_END, epoch});
    }).join();
  }
  // A thread that was not there hears of the epoch that is over, then goes on.
  CHECK(read() == Answer{HR_END, 2});
  CHECK(read() == Answer{HR_OK, 3});
  // After the end of the last epoch of all comes epoch 0, and ends are right across it.
  REQUIRE(hr_sequence_set(sequence, HR_SET_EPOCH, 0xFFFFFFFF) == HR_OK);
  CHECK(read() == Answer{HR_OK, 0xFFFFFFFF});
  CHECK(read() == Answer{HR_END, 0xFFFFFFFF});
  CHECK(read() == Answer{HR_OK, 0});
  std::thread([&] { CHECK(read() == Answer{HR_END, 0xFFFFFFFF}); }).join();
  // What a position is set in is the epoch that `get` tells.
  CHECK(read() == Answer{HR_END, 0});
  REQUIRE(hr_sequence_set(sequence, HR_SET_POSITION, 20) == HR_OK);
  CHECK(read() == Answer{HR_OK, 1});
  CHECK(read() == Answer{HR_END, 1});
  hr_sequence_close(sequence);
  hr_unmount(mount);
}

TEST_CASE("threads share a mount and a sample") {
  DiskStore disk({.samples = 20});
  hr_mount_t* mount = disk.mount();
  hr_sample_t* shared = nullptr;
  REQUIRE(hr_open_index(mount, 3, &shared) == HR_OK);
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int round = 0; round < 20; ++round) {
        std::string bytes(10'000, '\0');
        const int64_t got = hr_read(shared, 0, bytes.data(), bytes.size());
        wrong += got < 0 || bytes.substr(0, static_cast<size_t>(got)) != disk.store.contents[3][0];
        uint64_t index = 0;
        wrong += hr_find(mount, disk.store.spec.names[7].c_str(), &index) != HR_OK || index != 7;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  hr_close(shared);
  hr_unmount(mount);
}

// Sanitizers make system calls of their own.
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)

// From now on this process may do nothing but end: any other system call ends it with SIGSYS.
bool forbid_system_calls() {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_exit_group, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
  };
  const sock_fprog filter = {sizeof program / sizeof program[0], program};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

TEST_CASE("looking a name up makes no system call") {
  DiskStore disk({.samples = 200});
  hr_mount_t* mount = disk.mount();
  const auto look_up = [&](uint64_t sample) {
    uint64_t index = 0;
    const int code = hr_find(mount, disk.store.spec.names[sample].c_str(), &index);
    return code == HR_OK && index == sample;
  };
  const ChildEnd end = in_child([&] {
    if (!look_up(0)) return 2;
    if (!forbid_system_calls()) return 3;
    for (uint64_t sample = 0; sample < 200; ++sample) {
      if (!look_up(sample)) return 4;
    }
    return 0;
  });
  CHECK(end.signal == 0);
  CHECK(end.exit_code == 0);
  // The filter does what it is there for.
  CHECK(in_child([] {
          if (!forbid_system_calls()) return 3;
          ::getppid();
          return 0;
        }).signal == SIGSYS);
  hr_unmount(mount);
}

#endif

TEST_CASE("whatever is thrown inside, a code comes out") {
  const auto code = [](auto&& body) {
    return capi::guarded([&]() -> int {
      body();
      return 0;
    });
  };
  CHECK(code([] { throw 7; }) == HR_ERR_INTERNAL);
  CHECK(code([] { throw std::logic_error("ours"); }) == HR_ERR_INTERNAL);
  CHECK(std::string(hr_last_error()) == "ours");
  CHECK(code([] { throw std::bad_alloc(); }) == HR_ERR_MEMORY);
  CHECK(code([] { throw std::system_error(EMFILE, std::generic_category()); }) == HR_ERR_IO);
  CHECK(hr_last_errno() == EMFILE);
  CHECK(code([] { throw Error(ErrorKind::kVolumeTimeout, "late"); }) == HR_ERR_TIMEOUT);
  const std::string endless(10'000, 'x');
  CHECK(code([&] { throw std::runtime_error(endless); }) == HR_ERR_INTERNAL);
  CHECK(std::string(hr_last_error()).size() == 4095);
}

TEST_CASE("each thread has its own last error") {
  CHECK(hr_unmount(nullptr) == HR_ERR_ARGUMENT);
  std::thread([] { CHECK(std::string(hr_last_error()).empty()); }).join();
  CHECK(std::string(hr_last_error()) == "mount is null");
}

}  // namespace
