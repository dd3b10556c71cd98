#pragma once

#include <nanobind/nanobind.h>

namespace headrace::bindings {
void register_pixels(nanobind::module_& m);
}
