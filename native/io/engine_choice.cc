#include "io/engine_choice.h"

#include <cerrno>

#include "core/error.h"

namespace headrace::io {

std::unique_ptr<Engine> make_engine(const ReaderOptions& options, std::string* reason) {
  if (options.engine == EngineChoice::kThreads) return make_threads_engine(options.engine_options);
  if (options.engine != EngineChoice::kUring) {
    return make_best_engine(options.engine_options, reason);
  }
  auto engine = make_uring_engine(options.engine_options, reason);
  if (engine != nullptr) return engine;
  throw Error(ErrorKind::kVolume,
              "engine 'uring' was asked for and cannot run: " + *reason +
                  " Use engine='auto' to fall back to threads.",
              {}, -1, ENOSYS);
}

}  // namespace headrace::io
