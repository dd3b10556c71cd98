// Copies into batches that are not used at once.
#pragma once

#include <cstddef>

namespace headrace {

// As memcpy. Large pieces are streamed past the caches: the destination is a batch of megabytes
// that would evict itself before it is used, and ordinary stores read every line before they write
// it. Call `copies_done` before another thread reads what was copied.
void copy_for_later(std::byte* to, const std::byte* from, size_t size);
void copies_done();

}  // namespace headrace
