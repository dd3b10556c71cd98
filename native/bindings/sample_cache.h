#pragma once

#include <nanobind/nanobind.h>

namespace headrace::bindings {

void register_sample_cache(nanobind::module_& m);

}  // namespace headrace::bindings
