// Dispatch, and C functions; the schemas are in schemas.cpp. Fake kernels are in
// src/qfuse/kernels/*_ops.py: they must support symbolic sizes, and are needed for tracing, but not
// for running a compiled graph.
#include <dlfcn.h>
#include <torch/library.h>

#include "adapters.h"
#include "c_shim.h"
#include "isa/select.h"
#include "result_memory.h"

namespace {

// Every kernel: the name of its op, and its function.
#define QFUSE_KERNELS(KERNEL) \
  KERNEL(linear_w8a8, linear_w8a8) \
  KERNEL(linear_w8a8_quantized, linear_w8a8_quantized) \
  KERNEL(linear_w8a8_rows, linear_w8a8_rows) \
  KERNEL(convolution_w8a8, convolution_w8a8) \
  KERNEL(convolution_w8a8_quantized, convolution_w8a8_quantized) \
  KERNEL(convolution_w8a8_grouped, convolution_w8a8_grouped) \
  KERNEL(convolution_w8a8_grouped_quantized, convolution_w8a8_grouped_quantized) \
  KERNEL(convolution_depthwise_w8a8, convolution_depthwise_w8a8) \
  KERNEL(convolution_depthwise_w8a8_quantized, convolution_depthwise_w8a8_quantized) \
  KERNEL(linear_w4a8, linear_grouped<WeightBits::four>) \
  KERNEL(linear_w4a8_quantized, linear_grouped_quantized<WeightBits::four>) \
  KERNEL(linear_w4a8_rows, linear_grouped_rows<WeightBits::four>) \
  KERNEL(linear_w8a8_grouped, linear_grouped<WeightBits::eight>) \
  KERNEL(linear_w8a8_grouped_quantized, linear_grouped_quantized<WeightBits::eight>) \
  KERNEL(linear_w8a8_grouped_rows, linear_grouped_rows<WeightBits::eight>) \
  KERNEL(linear_w4a16, weight_only<&qfuse::linear_w4a16>) \
  KERNEL(linear_w8a16, weight_only<&qfuse::linear_w8a16>) \
  KERNEL(linear_w16a32, weight_only<&qfuse::linear_w16a32>) \
  KERNEL(convolution_w4a16, weight_only_convolution<&qfuse::convolution_w4a16>) \
  KERNEL(convolution_w8a16, weight_only_convolution<&qfuse::convolution_w8a16>) \
  KERNEL(attention, attention) \
  KERNEL(cat_channels, cat_channels) \
  KERNEL(matmul_a8a8, matmul_a8a8) \
  KERNEL(matmul_a8a8_quantized, matmul_a8a8_quantized) \
  KERNEL(rms_norm_quantized, rms_norm_quantized) \
  KERNEL(layer_norm_quantized, layer_norm_quantized) \
  KERNEL(activation_quantized, activation_quantized) \
  KERNEL(image_activation_quantized, image_activation_quantized)

// The file of this library.
std::string kernel_file() {
  static const char here = 0;
  Dl_info info;
  TORCH_CHECK(dladdr(&here, &info) != 0, "the file of the kernel library is not known");
  return info.dli_fname;
}

// Makes the C functions visible to libraries that are loaded from now on.
void publish_c_functions() {
  TORCH_CHECK(dlopen(kernel_file().c_str(), RTLD_NOW | RTLD_NOLOAD | RTLD_GLOBAL) != nullptr,
              "the kernel library cannot be made visible to others");
}

// Declarations of the C functions, by the name of the op.
c10::Dict<std::string, std::string> c_functions() {
  c10::Dict<std::string, std::string> all;
#define QFUSE_DECLARATION(name, ...)                                      \
  all.insert(#name, "AOTITorchError (*const aoti_torch_cpu_" #name ")(" + \
                        qfuse::CSignature<decltype(&__VA_ARGS__)>::text() + ")");
  QFUSE_KERNELS(QFUSE_DECLARATION)
#undef QFUSE_DECLARATION
  return all;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(qfuse, m) {
  m.def("kernel_file() -> str", &kernel_file);
  m.def("publish_c_functions() -> ()", &publish_c_functions);
  m.def("c_functions() -> Dict(str, str)", &c_functions);
  m.def("list_kernels() -> str[]", &qfuse::path_names);
  m.def("loaded_kernels() -> str[]", &qfuse::loaded_paths);
  m.def("missing_kernels(str name) -> str[]", &qfuse::missing_libraries);
  m.def("load_kernels(str library, str file) -> ()", &qfuse::load_path);
  m.def("chosen_kernels() -> str", &qfuse::chosen_path);
  m.def("choose_kernels(str name) -> ()", &qfuse::choose_path);
  m.def("result_memory() -> int", &qfuse::result_memory);
  m.def("release_result_memory() -> int", &qfuse::release_result_memory);
}

TORCH_LIBRARY_IMPL(qfuse, CPU, m) {
#define QFUSE_IMPL(name, ...) m.impl(#name, &__VA_ARGS__);
  QFUSE_KERNELS(QFUSE_IMPL)
#undef QFUSE_IMPL
}

// Pointers, since a missing variable is an error when a library that uses it is loaded; a missing
// function ends the process when it is called.
#define QFUSE_C_FUNCTION(name, ...)                                    \
  namespace {                                                          \
  constexpr char name##_op[] = "qfuse::" #name;                        \
  using name##_function = qfuse::CFunctionOf<&__VA_ARGS__>;            \
  }                                                                    \
  extern "C" {                                                         \
  __attribute__((visibility("default"))) extern const name##_function::Type \
      aoti_torch_cpu_##name;                                           \
  const name##_function::Type aoti_torch_cpu_##name =                  \
      &name##_function::call<name##_op>;                               \
  }
QFUSE_KERNELS(QFUSE_C_FUNCTION)
#undef QFUSE_C_FUNCTION
