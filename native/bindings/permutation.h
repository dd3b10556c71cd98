#pragma once

#include <nanobind/nanobind.h>

namespace headrace::bindings {
void register_permutation(nanobind::module_& m);
}
