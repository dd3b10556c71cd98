// What an NVMe/TCP URL names: nvme+tcp://host[:port]/nqn[?ns=1][#offset+length].
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace headrace::fabric {

struct Window {
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

struct FabricAddress {
  std::string host;
  uint16_t port = 4420;
  std::string subnqn;
  uint32_t nsid = 1;
  std::optional<Window> window;

  // Throws Error(kInvalidArgument).
  static FabricAddress parse(const std::string& url);
  // The target and subsystem, in one form however they were written.
  std::string target() const;
};

// Whether a name keeps to nqn.YYYY-MM.reversed.domain[:name].
bool is_nqn(const std::string& nqn);

}  // namespace headrace::fabric
