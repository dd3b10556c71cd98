// placeholder
#pragma once
#include "core/error.h"
namespace headrace::fabric {
class HostError : public Error {
 public:
  HostError(const std::string& message, int system_errno = 0, bool unsupported = false)
      : Error(ErrorKind::kVolume, message, {}, -1, system_errno), unsupported(unsupported) {}
  const bool unsupported;
};
}  // namespace headrace::fabric
