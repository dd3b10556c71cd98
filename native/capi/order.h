// Orders of a sequence, as a program in C describes them.
#pragma once

#include <cstdint>
#include <memory>

#include "capi/headrace.h"
#include "capi/mounted.h"
#include "core/order.h"

namespace headrace::capi {

// An order over all samples, an epoch of which has a position for each. Throws
// Failure(HR_ERR_ARGUMENT), or Error(kInvalidArgument) for a number that is out of bounds.
std::unique_ptr<Order> make_order(const Mounted& mounted, uint64_t seed, const hr_order& described);

}  // namespace headrace::capi
