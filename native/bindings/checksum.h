#pragma once

#include <nanobind/nanobind.h>

namespace headrace::bindings {
void register_checksum(nanobind::module_& m);
}
