// Choices cross the border as words.
#pragma once

#include <initializer_list>
#include <string>
#include <utility>

#include "core/error.h"

namespace headrace::bindings {

// What a word stands for. Throws Error(kInvalidArgument), which names the words that are known.
template <class T>
T choice(const std::string& value, std::initializer_list<std::pair<const char*, T>> values,
         const char* what) {
  std::string expected;
  for (const auto& [name, result] : values) {
    if (value == name) return result;
    expected += (expected.empty() ? "" : ", ") + std::string(name);
  }
  throw Error(ErrorKind::kInvalidArgument,
              std::string(what) + " is '" + value + "', expected one of " + expected);
}

}  // namespace headrace::bindings
