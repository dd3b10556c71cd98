// Which engine a reader's options ask for.
#pragma once

#include <memory>
#include <string>

#include "io/engine.h"
#include "io/reader_options.h"

namespace headrace::io {

// The engine for bytes that are not resident; `*reason` says why it is not io_uring, where that was
// wished for. Throws Error(kVolume) where `uring` was asked for and cannot run.
std::unique_ptr<Engine> make_engine(const ReaderOptions& options, std::string* reason);

}  // namespace headrace::io
