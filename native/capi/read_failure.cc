#include "capi/read_failure.h"

#include <cerrno>
#include <cstring>
#include <string>

#include "capi/failure.h"

namespace headrace::capi {
namespace {

std::string sample_text(const Mounted& mounted, int64_t index) {
  const io::Segment& segment = mounted.catalog->segment_of(static_cast<uint64_t>(index));
  std::string name;
  segment.directory->name(static_cast<uint64_t>(index) - segment.base, &name);
  return "sample " + std::to_string(index) + " ('" + name + "'): ";
}

std::string hex8(uint32_t value) {
  char text[12];
  std::snprintf(text, sizeof text, "%08x", value);
  return text;
}

[[noreturn]] void fail_system(const std::string& where, int error) {
  // What the initiator says when a place is gone, or was never staged.
  const bool fabric = error == EHOSTDOWN || error == ECONNRESET || error == ENODATA;
  const int code = error == ETIMEDOUT ? HR_ERR_TIMEOUT
                   : error == ENOMEM  ? HR_ERR_MEMORY
                   : fabric           ? HR_ERR_FABRIC
                                      : HR_ERR_IO;
  throw Failure(code,
                where + ": reading failed: " + strerror(error) +
                    (fabric ? ". Look at the target and the network."
                            : ". Check the disk and the file's permissions."),
                error);
}

}  // namespace

void fail_read(const Mounted& mounted, int64_t index, const io::Failure& failure) {
  const std::string where =
      sample_text(mounted, index) + mounted.catalog->volume(failure.volume).path();
  const std::string at = " (offset " + std::to_string(failure.offset) + ")";
  switch (failure.kind) {
    case io::FailureKind::kChecksum:
      throw Failure(HR_ERR_CORRUPT_SAMPLE,
                    where + ": checksum " + hex8(failure.crc_found) + ", expected " +
                        hex8(failure.crc_expected) + at +
                        ". headrace verify lists every bad sample, headrace repair repairs them.");
    case io::FailureKind::kShort:
      throw Failure(HR_ERR_CORRUPT_SAMPLE, where +
                                               ": the file ended before the sample did, expected " +
                                               std::to_string(failure.length) + " bytes" + at +
                                               ". headrace verify lists every bad sample.");
    case io::FailureKind::kChanged:
      throw Failure(HR_ERR_SOURCE_CHANGED,
                    where +
                        ": the file changed after it was indexed, or is gone. Index the source "
                        "again.",
                    failure.system_errno);
    case io::FailureKind::kSystem:
      break;
  }
  fail_system(where + at, failure.system_errno);
}

void fail_picture(const Mounted& mounted, int64_t index, const std::string& reason) {
  throw Failure(HR_ERR_PICTURE,
                sample_text(mounted, index) + "it is no picture that this library decodes: " +
                    reason + ". Take it out of the data, or have it marked (HR_ON_ERROR_MARK).");
}

}  // namespace headrace::capi
