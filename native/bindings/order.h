#pragma once

#include <nanobind/nanobind.h>

namespace headrace::bindings {
void register_order(nanobind::module_& m);
}
