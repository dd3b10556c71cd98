// Slices share an epoch out without loss: each position once, the same steps for every rank.
#include "capi/slices.h"

#include <doctest/doctest.h>

#include <vector>

using namespace headrace::capi;

TEST_CASE("each position is taken once, and all ranks take the same number of steps") {
  for (const Tail tail : {Tail::kExact, Tail::kPad, Tail::kDrop}) {
    for (const uint64_t length : {1, 5, 36, 100}) {
      for (const uint32_t world : {1, 3, 7}) {
        for (const uint64_t n : {1, 4, 50}) {
          std::vector<int> taken(length);
          std::vector<size_t> steps;
          for (uint32_t rank = 0; rank < world; ++rank) {
            const Slices slices{length, rank, world, tail};
            size_t count = 0;
            for (uint64_t at = 0;; ++count) {
              const Span span = slices.next(at, n);
              if (span.end) break;
              for (uint64_t p = span.start; p < span.stop; ++p) ++taken[p % length];
              at = span.after;
            }
            steps.push_back(count);
          }
          for (const size_t count : steps) CHECK(count == steps[0]);
          const uint64_t whole = length / (n * world) * (n * world);
          for (uint64_t p = 0; p < length; ++p) {
            if (tail == Tail::kExact) CHECK(taken[p] == 1);
            if (tail == Tail::kDrop) CHECK(taken[p] == (p < whole ? 1 : 0));
            if (tail == Tail::kPad) CHECK(taken[p] >= 1);
          }
        }
      }
    }
  }
}
