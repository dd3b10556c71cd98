// A cache that others look into: what they gather is always the samples that were asked for, while
// it is written, shrinks and grows, and whatever lies in its memory.
#include "io/cache_view.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <string>
#include <thread>

#include "core/error.h"
#include "core/shared_mapping.h"
#include "io/gatherer.h"
#include "io/sample_cache.h"
#include "testing/batch_content.h"

using namespace headrace;
using namespace headrace::io;
using headrace::testing::content;
using headrace::testing::make_batch;

namespace {

constexpr uint64_t kSamples = 400;

bool is_right(const Batch& batch, const std::vector<int64_t>& indices) {
  if (batch.indices != indices || batch.samples != indices.size()) return false;
  for (uint64_t k = 0; k < batch.samples; ++k) {
    if (batch.labels[k] != indices[k] % 10 - 1) return false;
    for (uint64_t p = 0; p < batch.parts; ++p) {
      const uint64_t slot = k * batch.parts + p;
      const std::string found(
          reinterpret_cast<const char*>(batch.buffer->data) + batch.offsets[slot],
          static_cast<size_t>(batch.lengths[slot]));
      if (found != content(indices[k], p)) return false;
    }
  }
  return true;
}

std::vector<int64_t> everything() {
  std::vector<int64_t> all(kSamples);
  for (size_t i = 0; i < kSamples; ++i) all[i] = static_cast<int64_t>(i);
  return all;
}

// A view of a cache of this process, kept up to date as a client is told to. With the cache's own
// addresses, so that ThreadSanitizer sees both sides.
class Client {
 public:
  explicit Client(std::shared_ptr<SampleCache> cache, uint64_t parts = 1)
      : cache_(std::move(cache)), parts_(parts) {
    update();
  }

  void update() {
    std::map<uint64_t, BufferPtr> now;
    for (const Slab& slab : cache_->slabs()) now[slab.number] = slab.buffer;
    if (now.empty() || index_ != now[0]) {
      view_ = nullptr;
      known_.clear();
    }
    if (now.empty()) return;
    if (view_ == nullptr) {
      index_ = now[0];
      view_ = std::make_shared<CacheView>(index_->memory(), index_, kSamples, parts_);
    }
    for (auto it = known_.begin(); it != known_.end();) {
      const bool gone = !now.contains(*it);
      if (gone) view_->drop_slab(*it);
      it = gone ? known_.erase(it) : std::next(it);
    }
    for (const auto& [number, buffer] : now) {
      const auto slab = static_cast<uint32_t>(number);
      if (number == 0 || !known_.insert(slab).second) continue;
      view_->add_slab(slab, buffer->memory(), buffer);
    }
  }

  // Null: nothing is held.
  std::shared_ptr<Hits> look_up(const std::vector<int64_t>& indices) const {
    return view_ == nullptr ? nullptr : view_->look_up(indices);
  }

 private:
  std::shared_ptr<SampleCache> cache_;
  uint64_t parts_;
  BufferPtr index_;
  std::shared_ptr<CacheView> view_;
  std::set<uint32_t> known_;
};

// What the owner would be asked for.
std::shared_ptr<Batch> read_missing(const Hits& hits) {
  std::vector<int64_t> indices;
  for (const int64_t at : hits.missing) indices.push_back(hits.indices[static_cast<size_t>(at)]);
  return make_batch(indices, hits.parts);
}

std::vector<int64_t> some(std::mt19937& random, size_t count) {
  std::vector<int64_t> indices(count);
  for (int64_t& index : indices) index = static_cast<int64_t>(random() % kSamples);
  return indices;
}

// A sealed memfd with these bytes.
int sealed(const std::vector<std::byte>& bytes, int seals = F_SEAL_SHRINK | F_SEAL_FUTURE_WRITE) {
  const int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  REQUIRE(write(fd, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
  REQUIRE(fcntl(fd, F_ADD_SEALS, seals) == 0);
  return fd;
}

std::vector<std::byte> page() { return std::vector<std::byte>(4096); }

}  // namespace

TEST_CASE("a view of mapped descriptors finds what the cache holds") {
  for (const uint64_t parts : {1, 3}) {
    const auto cache = SampleCache::make(kSamples, parts, 8 << 20, Memory::kShared);
    CHECK(cache->slabs().empty());
    std::vector<int64_t> even;
    for (int64_t i = 0; i < static_cast<int64_t>(kSamples); i += 2) even.push_back(i);
    CHECK(cache->insert(*make_batch(even, parts)) == even.size());
    const auto slabs = cache->slabs();
    REQUIRE(slabs.size() >= 2);
    REQUIRE(slabs[0].number == 0);
    const auto view =
        CacheView::of(slabs[0].buffer->fd, slabs[0].buffer->capacity, kSamples, parts);
    CHECK(view->look_up(even)->missing.size() == even.size());  // it has no slabs yet
    for (size_t k = 1; k < slabs.size(); ++k) {
      view->add_slab(static_cast<uint32_t>(slabs[k].number), slabs[k].buffer->fd,
                     slabs[k].buffer->capacity);
    }
    const auto gatherer = Gatherer::make(1 << 20, 2);
    CHECK(is_right(*gatherer->submit(view->look_up(even))->take(), even));
    const auto all = everything();
    const auto hits = view->look_up(all);
    CHECK(hits->missing.size() == kSamples / 2);
    CHECK(is_right(*gatherer->gather(*hits, read_missing(*hits).get()), all));
    CHECK_THROWS_AS(view->look_up(std::vector<int64_t>{kSamples}), Error);
    CHECK_THROWS_AS(view->look_up(std::vector<int64_t>{-1}), Error);
    CHECK_THROWS_AS(view->add_slab(1, slabs[1].buffer->fd, slabs[1].buffer->capacity), Error);
    gatherer->close();
  }
}

TEST_CASE("what was looked up stays valid when the slabs are given back") {
  const auto cache = SampleCache::make(kSamples, 1, 8 << 20, Memory::kShared);
  cache->insert(*make_batch(everything()));
  Client client(cache);
  const auto hits = client.look_up(everything());
  const uint64_t version = cache->version();
  cache->set_quota(0);
  CHECK(cache->version() != version);
  CHECK(cache->slabs().empty());
  CHECK(client.look_up(everything())->missing.size() == kSamples);  // the index says so
  client.update();
  CHECK(client.look_up(everything()) == nullptr);
  const auto gatherer = Gatherer::make(1 << 20, 1);
  CHECK(is_right(*gatherer->submit(hits)->take(), everything()));
  gatherer->close();
}

TEST_CASE("clients gather what is right while the cache is filled, shrinks and grows") {
  const auto cache = SampleCache::make(kSamples, 1, 400'000, Memory::kShared);
  std::atomic<int> wrong{0};
  std::atomic<bool> done{false};
  std::thread writer([&] {
    std::mt19937 random(99);
    for (uint64_t k = 0; !done; ++k) {
      cache->set_quota(k % 4 * 150'000);
      cache->insert(*make_batch(some(random, 30)));
    }
  });
  std::vector<std::thread> readers;
  for (unsigned t = 0; t < 3; ++t) {
    readers.emplace_back([&, t] {
      std::mt19937 random(t);
      Client client(cache);
      const auto gatherer = Gatherer::make(1 << 20, 1);
      uint64_t found = 0;
      for (int round = 0; round < 300 || found < 500; ++round) {
        if (random() % 3 == 0) client.update();  // it hears of changes late
        const auto indices = some(random, 1 + random() % 20);
        const auto hits = client.look_up(indices);
        if (hits == nullptr) continue;
        found += hits->held.size();
        const auto batch = hits->missing.empty()
                               ? gatherer->submit(hits)->take()
                               : gatherer->gather(*hits, read_missing(*hits).get());
        if (!is_right(*batch, indices)) ++wrong;
      }
      gatherer->close();
    });
  }
  for (std::thread& reader : readers) reader.join();
  done = true;
  writer.join();
  CHECK(wrong == 0);
}

TEST_CASE("garbage in index and slabs is an error, or held by nobody, and never a crash") {
  std::mt19937_64 random(5);
  int errors = 0;
  int batches = 0;
  for (int round = 0; round < 2000; ++round) {
    std::vector<uint64_t> words(kSamples);
    std::vector<std::byte> slab(4096 + random() % 4096);
    for (std::byte& b : slab) b = static_cast<std::byte>(random());
    for (uint64_t i = 0; i < kSamples; ++i) {
      const uint64_t number = random() % 4;
      const uint64_t offset = round % 2 == 0 ? random() % 100 : random() & UINT32_MAX;
      words[i] = number << 32 | offset;
      // Heads that are nearly right, with lengths that are not.
      const uint64_t at = offset * kEntryAlignment;
      if (at + 24 > slab.size()) continue;
      const int64_t lengths[] = {INT64_MAX, INT64_MIN, -1, 0, 100, 4000, 1 << 20};
      const int64_t head[3] = {static_cast<int64_t>(i), 7, lengths[random() % 7]};
      std::memcpy(slab.data() + at, head, sizeof head);
    }
    CacheView view(std::as_bytes(std::span(words)), nullptr, kSamples, 1);
    view.add_slab(1, slab, nullptr);
    view.add_slab(2, std::span(slab).first(10), nullptr);
    const auto hits = view.look_up({{static_cast<int64_t>(random() % kSamples)}});
    const auto gatherer = Gatherer::make(1 << 20, 1);
    try {
      if (hits->missing.empty()) {
        const auto batch = gatherer->submit(hits)->take();
        CHECK(batch->bytes <= slab.size() + kEntryAlignment);
        ++batches;
      }
    } catch (const Error& e) {
      CHECK(e.kind == ErrorKind::kCorruptStore);
      ++errors;
    }
    gatherer->close();
  }
  CHECK(errors > 100);
  CHECK(batches > 10);
}

TEST_CASE("memory that could vanish under a reader is refused") {
  const auto refused = [](int fd, size_t size) {
    try {
      SharedMapping::of(fd, size);
    } catch (const Error& e) {
      close(fd);
      return e.kind == ErrorKind::kInvalidArgument;
    }
    close(fd);
    return false;
  };
  CHECK(SharedMapping::of(sealed(page()), 4096)->bytes().size() == 4096);
  CHECK(refused(sealed(page()), 4097));  // smaller than was said
  CHECK(refused(sealed(page()), 0));
  CHECK(refused(sealed(page(), F_SEAL_SHRINK), 4096));  // a hole may be punched
  CHECK(refused(sealed(page(), F_SEAL_GROW), 4096));
  CHECK(refused(open("/proc/self/exe", O_RDONLY | O_CLOEXEC), 4096));
  CHECK(refused(-1, 4096));
  int pipes[2];
  REQUIRE(pipe(pipes) == 0);
  close(pipes[1]);
  CHECK(refused(pipes[0], 4096));
  const int sparse = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  REQUIRE(ftruncate(sparse, 1 << 20) == 0);
  REQUIRE(fcntl(sparse, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_FUTURE_WRITE) == 0);
  CHECK(refused(sparse, 1 << 20));  // its pages may not be there when they are touched
  CHECK_THROWS_AS(CacheView::of(-1, 4096, 10, 1), Error);
  CHECK_THROWS_AS(CacheView(page(), nullptr, 513, 1), Error);
  CHECK_THROWS_AS(CacheView(page(), nullptr, 512, 0), Error);
}

TEST_CASE("a forked child does not inherit the pages, and lets go of what it has without harm") {
  auto mapping = SharedMapping::of(sealed(page()), 4096);
  const auto gatherer = Gatherer::make(1 << 20, 1);
  auto words = page();
  CacheView view(words, nullptr, 10, 1);
  auto job = gatherer->submit(view.look_up({}));
  const std::byte* address = mapping->bytes().data();
  const pid_t child = fork();
  if (child == 0) {
    // The address is free there, and may be somebody else's soon.
    void* other = mmap(const_cast<std::byte*>(address), 4096, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (other == MAP_FAILED) _exit(1);
    *static_cast<char*>(other) = 42;
    mapping.reset();
    if (*static_cast<volatile char*>(other) != 42) _exit(2);
    bool threw = false;
    try {
      job->take();
    } catch (const Error&) {
      threw = true;
    }
    job.reset();
    _exit(threw ? 0 : 3);
  }
  int status = -1;
  waitpid(child, &status, 0);
  CHECK(status == 0);
  CHECK(job->take()->samples == 0);
  gatherer->close();
}

TEST_CASE("jobs are taken in any order, dropped, and after the end") {
  const auto cache = SampleCache::make(kSamples, 1, 8 << 20);
  cache->insert(*make_batch(everything()));
  for (const uint64_t budget : {uint64_t{1}, uint64_t{100'000}, uint64_t{64} << 20}) {
    std::mt19937 random(3);
    const auto gatherer = Gatherer::make(budget, 2);
    std::vector<std::pair<std::vector<int64_t>, std::shared_ptr<GatherJob>>> jobs;
    for (int k = 0; k < 60; ++k) {
      const auto indices = some(random, 50);
      jobs.emplace_back(indices, gatherer->submit(cache->look_up(indices)));
    }
    while (jobs.size() > 10) {
      const size_t k = random() % jobs.size();
      if (random() % 3 != 0) {
        CHECK(is_right(*jobs[k].second->take(), jobs[k].first));
        CHECK_THROWS_AS(jobs[k].second->take(), Error);
      }
      jobs.erase(jobs.begin() + static_cast<std::ptrdiff_t>(k));
    }
    gatherer->close();
    for (const auto& [indices, job] : jobs) CHECK(is_right(*job->take(), indices));
    const auto late = some(random, 5);
    CHECK(is_right(*gatherer->submit(cache->look_up(late))->take(), late));
    CHECK_THROWS_AS(gatherer->submit(SampleCache::make(9, 1, 0)->look_up({{1}})), Error);
  }
}
