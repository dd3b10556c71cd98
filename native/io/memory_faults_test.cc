// Memory that runs out: each allocation of a batch fails once, in whatever thread it happens. The
// caller gets an error or the batch that it asked for, never another; the reader works afterwards.
#include <atomic>
#include <cstdlib>
#include <new>

#include "testing/reader_testing.h"

namespace {

// Allocations until the one that fails; negative: none does.
std::atomic<long> fails_after{-1};
std::atomic<int> failed{0};

bool fails() {
  if (fails_after.load(std::memory_order_relaxed) < 0) return false;
  if (fails_after.fetch_sub(1) != 0) return false;
  ++failed;
  return true;
}

void* allocate(size_t bytes, size_t alignment) {
  if (fails()) return nullptr;
  const size_t rounded = (bytes + alignment - 1) / alignment * alignment;
  return alignment > alignof(std::max_align_t)
             ? std::aligned_alloc(alignment, rounded == 0 ? alignment : rounded)
             : std::malloc(bytes == 0 ? 1 : bytes);
}
void* allocate_or_throw(size_t bytes, size_t alignment) {
  if (void* memory = allocate(bytes, alignment)) return memory;
  throw std::bad_alloc();
}

// Where only one of a pair is inlined, GCC takes the pair for a mismatch: neither is.
[[gnu::noinline]] void release(void* memory) { std::free(memory); }

}  // namespace

void* operator new(size_t bytes) { return allocate_or_throw(bytes, 1); }
void* operator new[](size_t bytes) { return allocate_or_throw(bytes, 1); }
void* operator new(size_t bytes, std::align_val_t alignment) {
  return allocate_or_throw(bytes, static_cast<size_t>(alignment));
}
void* operator new(size_t bytes, const std::nothrow_t&) noexcept { return allocate(bytes, 1); }
void* operator new[](size_t bytes, const std::nothrow_t&) noexcept { return allocate(bytes, 1); }
void operator delete(void* memory) noexcept { release(memory); }
void operator delete[](void* memory) noexcept { release(memory); }
void operator delete(void* memory, size_t) noexcept { release(memory); }
void operator delete[](void* memory, size_t) noexcept { release(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { release(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { release(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { release(memory); }
void operator delete[](void* memory, const std::nothrow_t&) noexcept { release(memory); }

using namespace headrace;
using namespace headrace::io::reader_testing;
using io::DirectReads;
using io::EngineChoice;

// A batch of a new reader whose n-th allocation fails. Returns whether one did.
bool read_with_failure(const TestStore& store, const std::shared_ptr<io::Catalog>& catalog,
                       const io::ReaderOptions& options, long n, int* refused) {
  const auto all = store.all();
  const Reading reading(catalog, options);
  std::shared_ptr<io::Batch> batch;
  std::exception_ptr error;
  failed = 0;
  fails_after = n;
  try {
    batch = reading->submit(all)->wait(kLong);
  } catch (...) {
    error = std::current_exception();
  }
  fails_after = -1;
  const bool happened = failed != 0;
  if (error) {
    ++*refused;
    REQUIRE(happened);
    try {
      std::rethrow_exception(error);
    } catch (const std::bad_alloc&) {
    } catch (const Error& typed) {
      CHECK(typed.kind == ErrorKind::kVolume);
    } catch (...) {
      FAIL("neither memory's error nor one of ours");
    }
  } else {
    REQUIRE(batch != nullptr);
    check_batch(store, *batch, all);
  }
  batch.reset();
  check_batch(store, *reading.read(all), all);  // nothing is stuck, nothing is counted twice
  CHECK(becomes([&] { return reading->stats().buffered_bytes == 0; }));
  CHECK(reading->stats().reads.in_flight == 0);
  return happened;
}

TEST_CASE("each allocation of a reader and its first batch fails once") {
  for (const bool tree : {false, true}) {
    TestStore store({.samples = 40, .volumes = 2, .tree = tree});
    const auto catalog = store.catalog();
    for (const EngineChoice engine : engines()) {
      for (const DirectReads direct : {DirectReads::kAlways, DirectReads::kNever}) {
        CAPTURE(tree);
        CAPTURE(static_cast<int>(engine));
        CAPTURE(static_cast<int>(direct));
        auto options = with(engine, direct);
        options.workers = 1;
        options.reads_in_flight = 8;
        long n = 0;
        int refused = 0;
        // What other threads allocate beside comes and goes: the end is where it is seen twice.
        for (int without = 0; without < 2; ++n) {
          CAPTURE(n);
          REQUIRE(n < 5000);
          if (!read_with_failure(store, catalog, options, n, &refused)) ++without;
        }
        MESSAGE(n << " allocations failed, " << refused
                  << " batches were refused, the others whole");
        CHECK(n > 20);
        CHECK(refused > 5);
      }
    }
  }
}
