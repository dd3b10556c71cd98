#include "io/string_kernel.h"

#include <dlfcn.h>

#include <atomic>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

namespace headrace::io {
namespace {

// Names and values of tensorflow/c/{kernels,ops,tf_tensor,tf_status,tf_datatype}.h.
struct TF_Status;
struct TF_Tensor;
struct TF_OpKernelContext;
struct TF_OpKernelConstruction;
struct TF_KernelBuilder;
struct TF_OpDefinitionBuilder;
struct TF_ShapeInferenceContext;
struct TF_ShapeHandle;
constexpr int kInt64 = 9;
constexpr int kString = 7;
constexpr int kUint8 = 4;
constexpr int kOk = 0;
constexpr int kInvalidArgument = 3;
constexpr int kResourceExhausted = 8;

// One function of the C API each, null until `load`.
struct Api {
  TF_Status* (*NewStatus)();
  void (*DeleteStatus)(TF_Status*);
  int (*GetCode)(const TF_Status*);
  const char* (*Message)(const TF_Status*);
  void (*SetStatus)(TF_Status*, int, const char*);
  TF_OpDefinitionBuilder* (*NewOpDefinitionBuilder)(const char*);
  void (*OpDefinitionBuilderAddInput)(TF_OpDefinitionBuilder*, const char*);
  void (*OpDefinitionBuilderAddOutput)(TF_OpDefinitionBuilder*, const char*);
  void (*OpDefinitionBuilderSetShapeInferenceFunction)(TF_OpDefinitionBuilder*,
                                                       void (*)(TF_ShapeInferenceContext*,
                                                                TF_Status*));
  void (*RegisterOpDefinition)(TF_OpDefinitionBuilder*, TF_Status*);
  TF_KernelBuilder* (*NewKernelBuilder)(const char*, const char*,
                                        void* (*)(TF_OpKernelConstruction*),
                                        void (*)(void*, TF_OpKernelContext*), void (*)(void*));
  void (*RegisterKernelBuilder)(const char*, TF_KernelBuilder*, TF_Status*);
  void (*ShapeInferenceContextSetUnknownShape)(TF_ShapeInferenceContext*, TF_Status*);
  void (*GetInput)(TF_OpKernelContext*, int, TF_Tensor**, TF_Status*);
  TF_Tensor* (*AllocateOutput)(TF_OpKernelContext*, int, int, const int64_t*, int, size_t,
                               TF_Status*);
  void (*OpKernelContext_Failure)(TF_OpKernelContext*, TF_Status*);
  void (*DeleteTensor)(TF_Tensor*);
  int (*TensorType)(const TF_Tensor*);
  int (*NumDims)(const TF_Tensor*);
  int64_t (*Dim)(const TF_Tensor*, int);
  size_t (*TensorByteSize)(const TF_Tensor*);
  void* (*TensorData)(const TF_Tensor*);
};

Api api;

// Fills `api`; returns the name of what is missing, or "".
std::string load(const std::string& library) {
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  if (handle == nullptr) return library + " is not loaded";
  std::string missing;
  const auto find = [&](auto& function, const char* name) {
    void* found = dlsym(handle, name);
    if (found == nullptr && missing.empty()) missing = std::string("TensorFlow has no ") + name;
    std::memcpy(&function, &found, sizeof found);
  };
#define HEADRACE_FIND(name) find(api.name, "TF_" #name)
  HEADRACE_FIND(NewStatus);
  HEADRACE_FIND(DeleteStatus);
  HEADRACE_FIND(GetCode);
  HEADRACE_FIND(Message);
  HEADRACE_FIND(SetStatus);
  HEADRACE_FIND(NewOpDefinitionBuilder);
  HEADRACE_FIND(OpDefinitionBuilderAddInput);
  HEADRACE_FIND(OpDefinitionBuilderAddOutput);
  HEADRACE_FIND(OpDefinitionBuilderSetShapeInferenceFunction);
  HEADRACE_FIND(RegisterOpDefinition);
  HEADRACE_FIND(NewKernelBuilder);
  HEADRACE_FIND(RegisterKernelBuilder);
  HEADRACE_FIND(ShapeInferenceContextSetUnknownShape);
  HEADRACE_FIND(GetInput);
  HEADRACE_FIND(AllocateOutput);
  HEADRACE_FIND(OpKernelContext_Failure);
  HEADRACE_FIND(DeleteTensor);
  HEADRACE_FIND(TensorType);
  HEADRACE_FIND(NumDims);
  HEADRACE_FIND(Dim);
  HEADRACE_FIND(TensorByteSize);
  HEADRACE_FIND(TensorData);
#undef HEADRACE_FIND
  return missing;
}

// TensorFlow's string as its C ABI has it (ctstring_internal.h): up to 22 bytes inside, more in
// memory of malloc's. The two lowest bits of the first byte say which.
struct String {
  uint64_t size;
  uint64_t capacity;
  char* data;
};
static_assert(sizeof(String) == 24 && std::endian::native == std::endian::little);

constexpr uint64_t kInsideMost = 22;
constexpr uint64_t kLarge = 1;
constexpr uint64_t kView = 3;

// Smaller ones are copied: a view of a page is no cheaper, and whoever keeps it keeps the batch.
constexpr uint64_t kViewLeast = 4096;

bool shares_memory = false;

// TensorFlow's TStringOwnerCApi: what the views of one batch hold. Ours keeps the buffer's tensor.
struct Owner {
  void (*ref)(Owner*);
  bool (*unref)(Owner*);
  void* object;
  TF_Tensor* buffer;
  std::atomic<int64_t> references;
};

void ref(Owner* owner) { owner->references.fetch_add(1, std::memory_order_relaxed); }

bool unref(Owner* owner) {
  if (owner->references.fetch_sub(1, std::memory_order_acq_rel) != 1) return false;
  api.DeleteTensor(owner->buffer);
  delete owner;
  return true;
}

// Makes an empty string a view, with a reference of its own.
void assign_view(String* string, const std::byte* data, uint64_t size, Owner* owner) {
  ref(owner);
  *string = {size << 2 | kView, reinterpret_cast<uintptr_t>(data), reinterpret_cast<char*>(owner)};
}

// Makes an empty string one of these bytes; false if there is no memory.
bool assign(String* string, const std::byte* data, uint64_t size) {
  if (size <= kInsideMost) {
    auto* inside = reinterpret_cast<char*>(string);
    inside[0] = static_cast<char>(size << 2);
    if (size > 0) std::memcpy(inside + 1, data, size);
    inside[1 + size] = '\0';
    return true;
  }
  const uint64_t room = (size + 1 + 15) / 16 * 16;
  auto* memory = static_cast<char*>(std::malloc(room));
  if (memory == nullptr) return false;
  std::memcpy(memory, data, size);
  memory[size] = '\0';
  *string = {size << 2 | kLarge, room - 1, memory};
  return true;
}

struct Tensors {
  TF_Status* status = api.NewStatus();
  std::vector<TF_Tensor*> held;
  Owner* owner = nullptr;

  ~Tensors() {
    if (owner != nullptr) unref(owner);
    for (TF_Tensor* tensor : held) api.DeleteTensor(tensor);
    api.DeleteStatus(status);
  }
  bool ok() const { return api.GetCode(status) == kOk; }
};

void cut(TF_OpKernelContext* context, Tensors& t) {
  for (int i = 0; i < 3; ++i) {
    TF_Tensor* input = nullptr;
    api.GetInput(context, i, &input, t.status);
    if (!t.ok()) return;
    t.held.push_back(input);
  }
  const size_t bytes = api.TensorByteSize(t.held[0]);
  const size_t count = api.TensorByteSize(t.held[1]) / sizeof(int64_t);
  if (api.TensorType(t.held[0]) != kUint8 || api.TensorType(t.held[1]) != kInt64 ||
      api.TensorType(t.held[2]) != kInt64 ||
      api.TensorByteSize(t.held[2]) != count * sizeof(int64_t)) {
    api.SetStatus(t.status, kInvalidArgument, "expected uint8, int64 and as many int64");
    return;
  }
  std::vector<int64_t> shape;
  for (int i = 0; i < api.NumDims(t.held[1]); ++i) shape.push_back(api.Dim(t.held[1], i));
  TF_Tensor* output =
      api.AllocateOutput(context, 0, kString, shape.data(), static_cast<int>(shape.size()),
                         count * sizeof(String), t.status);
  if (!t.ok()) return;
  t.held.push_back(output);
  const auto* data = static_cast<const std::byte*>(api.TensorData(t.held[0]));
  const auto* offsets = static_cast<const int64_t*>(api.TensorData(t.held[1]));
  const auto* lengths = static_cast<const int64_t*>(api.TensorData(t.held[2]));
  auto* strings = static_cast<String*>(api.TensorData(output));
  if (shares_memory) {
    TF_Tensor* buffer = nullptr;  // another reference than the one in `held`
    api.GetInput(context, 0, &buffer, t.status);
    if (!t.ok()) return;
    t.owner = new Owner{&ref, &unref, nullptr, buffer, 1};
    t.owner->object = t.owner;
  }
  for (size_t i = 0; i < count; ++i) {
    const auto offset = static_cast<uint64_t>(offsets[i]);
    const auto length = static_cast<uint64_t>(lengths[i]);
    if (length > 0 && (offset > bytes || length > bytes - offset)) {
      api.SetStatus(t.status, kInvalidArgument, "a sample lies outside of the buffer");
      return;
    }
    if (t.owner != nullptr && length >= kViewLeast) {
      assign_view(&strings[i], data + offset, length, t.owner);
    } else if (!assign(&strings[i], data + offset, length)) {
      api.SetStatus(t.status, kResourceExhausted, "no memory for a sample");
      return;
    }
  }
}

void compute(void*, TF_OpKernelContext* context) {
  Tensors t;
  cut(context, t);
  if (!t.ok()) api.OpKernelContext_Failure(context, t.status);
}

void infer_shape(TF_ShapeInferenceContext* context, TF_Status* status) {
  api.ShapeInferenceContextSetUnknownShape(context, status);  // whoever uses it sets the shape
}

std::string register_once(const std::string& library) {
  if (std::string missing = load(library); !missing.empty()) return missing;
  Tensors t;
  TF_OpDefinitionBuilder* operation = api.NewOpDefinitionBuilder(kStringOperation);
  for (const char* input : {"data: uint8", "offsets: int64", "lengths: int64"}) {
    api.OpDefinitionBuilderAddInput(operation, input);
  }
  api.OpDefinitionBuilderAddOutput(operation, "strings: string");
  api.OpDefinitionBuilderSetShapeInferenceFunction(operation, &infer_shape);
  api.RegisterOpDefinition(operation, t.status);
  if (!t.ok()) return api.Message(t.status);
  TF_KernelBuilder* kernel =
      api.NewKernelBuilder(kStringOperation, "CPU", nullptr, &compute, nullptr);
  api.RegisterKernelBuilder(kStringOperation, kernel, t.status);
  return t.ok() ? "" : api.Message(t.status);
}

}  // namespace

std::string register_string_kernel(const std::string& framework_library, bool shares) {
  static std::once_flag once;
  static std::string why;
  std::call_once(once, [&] {
    shares_memory = shares;
    why = register_once(framework_library);
  });
  return why;
}

}  // namespace headrace::io
