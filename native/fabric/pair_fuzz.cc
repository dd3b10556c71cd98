// Fuzzes the model of testing/fabric_pair.h: the input makes all the choices.
#include "testing/fabric_pair.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace headrace::testing;
  size_t at = 0;
  const FabricPair::Choose choose = [&](uint32_t bound) {
    uint32_t value = 0;
    for (uint32_t range = bound - 1; range > 0 && at < size; range >>= 8) {
      value = value << 8 | data[at++];
    }
    return value % bound;
  };
  PairOptions options;
  options.host_dgst = static_cast<uint8_t>(choose(4));
  options.target_dgst = static_cast<uint8_t>(choose(4));
  options.sq_flow_control = choose(2) != 0;
  options.entries = static_cast<uint16_t>(2 + choose(12));
  options.data_pdu_max = 4 * (1 + choose(1024));
  // A flipped bit of a command without digests may make it another command.
  options.flips = (options.host_dgst & options.target_dgst) == 3 && choose(2) != 0;
  FabricPair pair(options, choose);
  for (int steps = 0; at < size && steps < 2000 && pair.alive(); ++steps) pair.step();
  pair.drain();  // with the input at its end every choice is 0
  return 0;
}
