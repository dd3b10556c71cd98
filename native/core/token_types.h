// Tokens as they are stored become tokens as a model takes them: one copy that widens, or narrows.
#pragma once

#include <cstddef>
#include <cstdint>

namespace headrace {

// Little-endian.
enum class TokenType { kUint8, kInt8, kUint16, kInt16, kUint32, kInt32, kInt64 };

unsigned bytes_of(TokenType type);

// Copies `count` tokens from any address. Returns whether every token is what it was; what does not
// fit is cut off. `To` is int32_t or int64_t.
template <class To>
bool convert_tokens(TokenType type, const uint8_t* from, To* to, size_t count);

}  // namespace headrace
