// The slow engine: another engine behind a simulated storage.
//
// Reads the real bytes by the engine it is given, and reports each read when the model says that
// the storage would have answered. Thousands of reads are in flight on the caller's thread alone: a
// heap of their times is all they cost. How many is decided by the places in flight.
//
// While the reader closes nothing is delayed any more.
#pragma once

#include <memory>

#include "io/engine.h"
#include "io/slow_model.h"

namespace headrace::io {

// `inner` must have been made without `options.in_flight`: the places are taken here.
std::unique_ptr<Engine> make_slow_engine(std::unique_ptr<Engine> inner,
                                         std::shared_ptr<SlowModel> model,
                                         const EngineOptions& options);

}  // namespace headrace::io
