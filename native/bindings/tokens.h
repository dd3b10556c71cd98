// Token bindings: pieces of documents become rows of equal length.
#pragma once

#include <nanobind/nanobind.h>

namespace headrace::bindings {

void register_tokens(nanobind::module_& m);

}  // namespace headrace::bindings
