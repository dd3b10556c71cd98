#pragma once

#include <nanobind/nanobind.h>

namespace headrace::bindings {
void register_rank_barrier(nanobind::module_& m);
}
