#include "bindings/errors.h"

#include "core/error.h"

namespace nb = nanobind;

namespace headrace::bindings {
namespace {

const char* python_class(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kInvalidArgument:
      return "ValueError";
    case ErrorKind::kSampleNotFound:
      return "SampleNotFound";
    case ErrorKind::kCorruptStore:
      return "CorruptStore";
    case ErrorKind::kCorruptSample:
      return "CorruptSample";
    case ErrorKind::kSourceChanged:
      return "SourceChanged";
    case ErrorKind::kVolume:
      return "VolumeError";
    case ErrorKind::kVolumeTimeout:
      return "VolumeTimeout";
  }
  return "HeadraceError";
}

// Raises the Python error. The module is looked up when an error happens, not at import: errors are
// rare, and `_native` stays importable alone.
void raise(const Error& error) {
  if (error.kind == ErrorKind::kInvalidArgument) {
    PyErr_SetString(PyExc_ValueError, error.what());
    return;
  }
  nb::object cls = nb::module_::import_("headrace.errors").attr(python_class(error.kind));
  nb::dict fields;
  if (!error.path.empty()) {
    fields["path"] = nb::steal(PyUnicode_DecodeFSDefault(error.path.c_str()));
  }
  if (error.offset_bytes >= 0) fields["offset_bytes"] = error.offset_bytes;
  if (error.system_errno != 0) fields["errno"] = error.system_errno;
  nb::str message = nb::steal<nb::str>(PyUnicode_DecodeFSDefault(error.what()));
  nb::object value = cls(message, **fields);
  PyErr_SetObject(cls.ptr(), value.ptr());
}

}  // namespace

void register_errors(nb::module_&) {
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const Error& error) {
      try {
        raise(error);
      } catch (nb::python_error& e) {
        e.restore();
      }
    }
  });
}

}  // namespace headrace::bindings
