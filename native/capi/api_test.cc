// The API as C sees it, over a store on disk: under the sanitizers, and with its threads.
#include <doctest/doctest.h>

#include <atomic>
#include <cerrno>
#include <new>
#include <set>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "capi/failure.h"
#include "capi/headrace.h"
#include "capi/json.h"
#include "core/crc32c.h"
#include "core/error.h"
#include "core/sha.h"
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

TEST_CASE("threads share a mount, a sample and a sequence") {
  DiskStore disk({.samples = 200});
  hr_mount_t* mount = disk.mount();
  hr_sequence_t* sequence = nullptr;
  hr_sample_t* shared = nullptr;
  REQUIRE(hr_sequence(mount, 1, 0, 1, &sequence) == HR_OK);
  REQUIRE(hr_open_index(mount, 3, &shared) == HR_OK);
  std::vector<std::thread> threads;
  std::atomic<uint64_t> delivered{0};
  std::atomic<int> wrong{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      hr_batch batch = HR_BATCH_INIT;
      while (hr_batch_read(sequence, 5, &batch) == HR_OK) {
        delivered += batch.samples;
        hr_batch_release(&batch);
        std::string bytes(10'000, '\0');
        const int64_t got = hr_read(shared, 0, bytes.data(), bytes.size());
        if (got < 0 || bytes.substr(0, static_cast<size_t>(got)) != disk.store.contents[3][0]) {
          ++wrong;
        }
        if (delivered >= 200) break;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(delivered >= 200);
  CHECK(wrong == 0);
  hr_close(shared);
  hr_sequence_close(sequence);
  hr_unmount(mount);
}

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
