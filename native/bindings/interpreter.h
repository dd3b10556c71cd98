// The interpreter's lock, as somebody who wants it finds it.
#pragma once

#include <nanobind/nanobind.h>

namespace headrace::bindings {

void register_interpreter(nanobind::module_& m);

}  // namespace headrace::bindings
