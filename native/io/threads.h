// The threads engine with its system calls in the caller's hand: for tests.
#pragma once

#include <memory>

#include "io/engine.h"
#include "io/syscalls.h"

namespace headrace::io {

std::unique_ptr<Engine> make_threads_engine(const EngineOptions& options, const Syscalls& sys);

}  // namespace headrace::io
