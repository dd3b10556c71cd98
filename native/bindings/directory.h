#pragma once

#include <nanobind/nanobind.h>

namespace headrace::bindings {
void register_directory(nanobind::module_& m);
}
