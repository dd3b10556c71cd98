// Picks the engine for this process: io_uring where it works, threads everywhere else.
#include "io/engine.h"

namespace headrace::io {

std::unique_ptr<Engine> make_best_engine(const EngineOptions& options, std::string* reason) {
  if (auto engine = make_uring_engine(options, reason)) {
    reason->clear();
    return engine;
  }
  return make_threads_engine(options);
}

}  // namespace headrace::io
