#pragma once

#include <nanobind/nanobind.h>

namespace headrace::bindings {
void register_slow(nanobind::module_& m);
}
