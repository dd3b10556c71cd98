// Failover: reads volumes that lie in several places; a RemoteEngine over another one.
//
// A volume's places are URLs that the engine below knows, byte for byte alike, in the order in
// which they are asked. A read that a place does not serve (its target is gone, the block is not
// written yet, the medium failed) goes to the next one, and behind the last place to `last`, which
// reads by the volume's own path. It keeps no memory of what failed: the engine below knows which
// targets are gone and refuses at once, and asks them again when they are back.
//
// A good read costs one look-up and no thread more. Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "io/remote_engine.h"

namespace headrace::fabric {

struct FailoverFigures {
  uint64_t reads = 0;  // served by the first place
  uint64_t bytes = 0;
  uint64_t reads_elsewhere = 0;  // by a later one
  uint64_t bytes_elsewhere = 0;
  uint64_t reads_last = 0;  // by `last`
  uint64_t bytes_last = 0;
  uint64_t unwritten = 0;  // places that did not have the bytes yet
  uint64_t failed = 0;     // nobody served it
};

class Failover final : public io::RemoteEngine, public std::enable_shared_from_this<Failover> {
 public:
  // `last` may be null: then what no place serves fails with the last place's error.
  Failover(std::shared_ptr<io::RemoteEngine> engine, std::shared_ptr<io::RemoteEngine> last);
  ~Failover() override;

  void add_volume(const std::string& path, std::vector<std::string> places);
  FailoverFigures figures() const;
  // Ends the thread that asks `last`; later reads fail with ECANCELED.
  void close();

  void read(std::shared_ptr<io::RemoteRequests> requests) override;
  void turn(unsigned reads_in_flight) override;
  std::string name() const override { return "failover"; }

 private:
  class State;
  const std::shared_ptr<io::RemoteEngine> engine_;
  const std::shared_ptr<State> state_;
};

}  // namespace headrace::fabric
