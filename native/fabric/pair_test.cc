// Both sides' queue pairs joined in memory, under random splits, orders, deadlines and flipped
// bits.
#include <doctest/doctest.h>

#include <random>

#include "testing/fabric_pair.h"

using namespace headrace;
using namespace headrace::testing;

namespace {

FabricPair::Choose seeded(uint64_t seed) {
  auto random = std::make_shared<std::mt19937_64>(seed);
  return [random](uint32_t bound) { return static_cast<uint32_t>((*random)() % bound); };
}

}  // namespace

TEST_CASE("any splits and orders, with all digests, with and without flow control") {
  uint64_t reads = 0;
  uint64_t refused = 0;
  for (uint64_t seed = 0; seed < 64; ++seed) {
    CAPTURE(seed);
    const PairOptions options{.host_dgst = static_cast<uint8_t>(seed & 3),
                              .target_dgst = static_cast<uint8_t>(seed >> 2 & 3),
                              .sq_flow_control = (seed & 16) == 0,
                              .entries = static_cast<uint16_t>(seed & 32 ? 3 : 24)};
    FabricPair pair(options, seeded(seed));
    for (int i = 0; i < 800; ++i) pair.step();
    REQUIRE(pair.alive());
    pair.drain();
    CHECK(pair.host().options().dgst == (options.host_dgst & options.target_dgst));
    reads += pair.reads_right();
    refused += pair.refused();
  }
  CHECK(reads > 1000);
  CHECK(refused > 200);
}

TEST_CASE("a connection that ends at any moment ends every command once") {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    CAPTURE(seed);
    FabricPair pair({.host_dgst = 3, .target_dgst = 3}, seeded(seed));
    for (uint64_t i = 0; i < seed; ++i) pair.step();
    pair.end();
    pair.drain();
  }
}

TEST_CASE("with both digests every flipped bit is found, and no wrong byte is delivered") {
  uint64_t flipped = 0;
  uint64_t damaged = 0;
  uint64_t fatal = 0;
  for (uint64_t seed = 0; seed < 400; ++seed) {
    CAPTURE(seed);
    FabricPair pair({.host_dgst = 3, .target_dgst = 3, .flips = true}, seeded(seed));
    for (int i = 0; i < 600 && pair.alive(); ++i) pair.step();
    fatal += pair.alive() ? 0 : 1;
    pair.drain();
    flipped += pair.flipped();
    damaged += pair.damaged();
  }
  CHECK(flipped > 400);
  CHECK(damaged > 20);
  CHECK(fatal > 100);
}
