#pragma once

#include <nanobind/nanobind.h>

namespace headrace::bindings {
void register_mapping(nanobind::module_& m);
}
