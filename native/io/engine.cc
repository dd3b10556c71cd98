#include "io/engine.h"

namespace headrace::io {}  // namespace headrace::io
