#include "capi/failure.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <system_error>

#include "core/error.h"
#include "fabric/host.h"

namespace headrace::capi {
namespace {

// Not a string: keeping an error must not need memory that there is none of.
constexpr size_t kMessageBytesMax = 4096;
thread_local char message[kMessageBytesMax] = "";
thread_local int system_error = 0;

int keep(int code, const char* text, int error) noexcept {
  const size_t size = std::min(std::strlen(text), kMessageBytesMax - 1);
  std::memcpy(message, text, size);
  message[size] = '\0';
  system_error = error;
  return code;
}

int code_of(const Error& error) {
  switch (error.kind) {
    case ErrorKind::kInvalidArgument:
      return HR_ERR_ARGUMENT;
    case ErrorKind::kSampleNotFound:
      return HR_ERR_NO_SAMPLE;
    case ErrorKind::kCorruptStore:
      return HR_ERR_CORRUPT_STORE;
    case ErrorKind::kCorruptSample:
      return HR_ERR_CORRUPT_SAMPLE;
    case ErrorKind::kSourceChanged:
      return HR_ERR_SOURCE_CHANGED;
    case ErrorKind::kVolumeTimeout:
      return HR_ERR_TIMEOUT;
    case ErrorKind::kVolume:
      break;
  }
  if (error.system_errno == ENOMEM) return HR_ERR_MEMORY;
  return error.system_errno == ETIMEDOUT ? HR_ERR_TIMEOUT : HR_ERR_IO;
}

}  // namespace

int keep_failure() noexcept {
  try {
    throw;
  } catch (const Failure& e) {
    return keep(e.code, e.what(), e.system_errno);
  } catch (const fabric::HostError& e) {
    return keep(e.unsupported ? HR_ERR_UNSUPPORTED : HR_ERR_FABRIC, e.what(), e.system_errno);
  } catch (const Error& e) {
    return keep(code_of(e), e.what(), e.system_errno);
  } catch (const std::bad_alloc&) {
    return keep(HR_ERR_MEMORY, "out of memory", ENOMEM);
  } catch (const std::system_error& e) {
    return keep(HR_ERR_IO, e.what(), e.code().value());
  } catch (const std::exception& e) {
    return keep(HR_ERR_INTERNAL, e.what(), 0);
  } catch (...) {
    return keep(HR_ERR_INTERNAL, "an exception that is none of the library's", 0);
  }
}

const char* last_error() noexcept { return message; }
int last_errno() noexcept { return system_error; }

}  // namespace headrace::capi
