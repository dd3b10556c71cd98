#pragma once

#include <nanobind/nanobind.h>

namespace headrace::bindings {

void register_cache_view(nanobind::module_& m);

}  // namespace headrace::bindings
