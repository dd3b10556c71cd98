// Turns headrace::Error into the Python class of the same kind (headrace/errors.py).
#pragma once

#include <nanobind/nanobind.h>

namespace headrace::bindings {
void register_errors(nanobind::module_& m);
}
