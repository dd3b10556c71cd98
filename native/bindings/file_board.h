#pragma once

#include <nanobind/nanobind.h>

namespace headrace::bindings {
void register_file_board(nanobind::module_& m);
}
