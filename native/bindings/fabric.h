#pragma once

#include <nanobind/nanobind.h>

namespace headrace::bindings {

void register_fabric(nanobind::module_& m);

}  // namespace headrace::bindings
