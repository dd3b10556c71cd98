// Failure: what a call of the C API failed with, and the border that no exception crosses.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

#include "capi/headrace.h"

namespace headrace::capi {

class Failure : public std::runtime_error {
 public:
  Failure(int code, const std::string& message, int system_errno = 0)
      : std::runtime_error(message), code(code), system_errno(system_errno) {}

  const int code;
  const int system_errno;
};

[[noreturn]] inline void refuse(const std::string& message) {
  throw Failure(HR_ERR_ARGUMENT, message);
}

// Keeps the exception that is being handled as this thread's last error; returns its code.
int keep_failure() noexcept;
const char* last_error() noexcept;
int last_errno() noexcept;

// What `body` returns, or the code of what it threw.
template <class Body>
auto guarded(Body&& body) noexcept -> decltype(body()) {
  try {
    return body();
  } catch (...) {
    return keep_failure();
  }
}

}  // namespace headrace::capi
