#pragma once

#include <nanobind/nanobind.h>

namespace headrace::bindings {
void register_generation(nanobind::module_& m);
}
