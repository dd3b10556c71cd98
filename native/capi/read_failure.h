// The one place that says what became of a sample that was not read.
#pragma once

#include <cstdint>
#include <string>

#include "capi/mounted.h"
#include "io/batch.h"

namespace headrace::capi {

// Throws what `failure` means for the sample with this index.
[[noreturn]] void fail_read(const Mounted& mounted, int64_t index, const io::Failure& failure);

// The same for one that is no picture.
[[noreturn]] void fail_picture(const Mounted& mounted, int64_t index, const std::string& reason);

}  // namespace headrace::capi
