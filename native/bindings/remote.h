// How an engine written in Python reads remote volumes.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "io/remote_engine.h"

namespace headrace::bindings {

// The engine behind `object` (headrace.io's RemoteEngine protocol), or null for None.
std::shared_ptr<io::RemoteEngine> remote_engine_of(nanobind::object object);

void register_remote(nanobind::module_& m);

}  // namespace headrace::bindings
