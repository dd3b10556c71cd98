#include "core/token_types.h"

#include <cstring>
#include <limits>
#include <utility>

namespace headrace {
namespace {

// Without a branch: the compiler makes vector instructions of it.
template <class From, class To>
bool convert(const uint8_t* from, To* to, size_t count) {
  bool changed = false;
  for (size_t i = 0; i < count; ++i) {
    From token;
    std::memcpy(&token, from + i * sizeof(From), sizeof(From));
    to[i] = static_cast<To>(token);
    if constexpr (!std::in_range<To>(std::numeric_limits<From>::max())) {
      changed |= !std::in_range<To>(token);
    }
  }
  return !changed;
}

}  // namespace

unsigned bytes_of(TokenType type) {
  switch (type) {
    case TokenType::kUint8:
    case TokenType::kInt8:
      return 1;
    case TokenType::kUint16:
    case TokenType::kInt16:
      return 2;
    case TokenType::kUint32:
    case TokenType::kInt32:
      return 4;
    case TokenType::kInt64:
      break;
  }
  return 8;
}

template <class To>
bool convert_tokens(TokenType type, const uint8_t* from, To* to, size_t count) {
  switch (type) {
    case TokenType::kUint8:
      return convert<uint8_t>(from, to, count);
    case TokenType::kInt8:
      return convert<int8_t>(from, to, count);
    case TokenType::kUint16:
      return convert<uint16_t>(from, to, count);
    case TokenType::kInt16:
      return convert<int16_t>(from, to, count);
    case TokenType::kUint32:
      return convert<uint32_t>(from, to, count);
    case TokenType::kInt32:
      return convert<int32_t>(from, to, count);
    case TokenType::kInt64:
      break;
  }
  return convert<int64_t>(from, to, count);
}

template bool convert_tokens(TokenType, const uint8_t*, int32_t*, size_t);
template bool convert_tokens(TokenType, const uint8_t*, int64_t*, size_t);

}  // namespace headrace
