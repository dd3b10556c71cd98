#pragma once

#include <nanobind/nanobind.h>

namespace headrace::bindings {
void register_file_reader(nanobind::module_& m);
}
