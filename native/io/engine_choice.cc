#include "io/engine_choice.h"

#include <cerrno>

#include "core/error.h"
#include "io/slow_engine.h"

namespace headrace::io {

namespace {

std::unique_ptr<Engine> make_real_engine(EngineChoice choice, const EngineOptions& options,
                                         std::string* reason) {
  if (choice == EngineChoice::kThreads) return make_threads_engine(options);
  if (choice != EngineChoice::kUring) return make_best_engine(options, reason);
  auto engine = make_uring_engine(options, reason);
  if (engine != nullptr) return engine;
  throw Error(ErrorKind::kVolume,
              "engine 'uring' was asked for and cannot run: " + *reason +
                  " Use engine='auto' to fall back to threads.",
              {}, -1, ENOSYS);
}

}  // namespace

std::unique_ptr<Engine> make_engine(const ReaderOptions& options, std::string* reason) {
  EngineOptions engine = options.engine_options;
  if (options.make_engine) return options.make_engine(engine);
  if (options.slow == nullptr) return make_real_engine(options.engine, engine, reason);
  engine.in_flight = nullptr;  // the places are for reads of the simulated storage
  return make_slow_engine(make_real_engine(options.engine, engine, reason), options.slow,
                          options.engine_options);
}

}  // namespace headrace::io
