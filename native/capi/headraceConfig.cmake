# find_package(headrace): the target headrace::headrace, from the wheel that this file is in.
#   cmake -Dheadrace_DIR="$(headrace config --cmake-dir)" ...
get_filename_component(_headrace_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
if(NOT TARGET headrace::headrace)
  add_library(headrace::headrace SHARED IMPORTED)
  set_target_properties(headrace::headrace PROPERTIES
    IMPORTED_LOCATION "${_headrace_prefix}/lib/libheadrace.so"
    INTERFACE_INCLUDE_DIRECTORIES "${_headrace_prefix}/include")
endif()
unset(_headrace_prefix)
