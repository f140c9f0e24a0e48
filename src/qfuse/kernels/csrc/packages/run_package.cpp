// Runs AOTInductor packages for several threads at the same time.
//
// torch's own loader holds Python's lock (GIL) from the first to the last instruction of a call, so
// that other threads of Python stand still. An op of torch releases it.
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <string>
#include <unordered_map>
#include <vector>

#include "packages/entry.h"

namespace qfuse {
namespace {

class PackageRunner : public torch::CustomClassHolder, public Entry {
 public:
  PackageRunner(const std::string& package, const std::string& model, int64_t runners)
      : places_(runners),
        loader_(package, model, /*run_single_threaded=*/false, static_cast<size_t>(runners)) {}

  std::vector<std::string> constant_names() { return loader_.get_constant_fqns(); }

  // The constants are used where they are, and must outlive this object.
  void bind(const c10::Dict<std::string, at::Tensor>& constants) {
    std::unordered_map<std::string, at::Tensor> map;
    for (const auto& entry : constants) map.emplace(entry.key(), entry.value());
    loader_.load_constants(map, /*use_inactive=*/false, /*check_full_update=*/true,
                           /*user_managed=*/true);
  }

  std::vector<at::Tensor> run(at::TensorList inputs) override {
    // Not inside of the package: a thread that waits there is not woken if another one throws.
    const HeldPlace place(places_);
    return loader_.boxed_run(inputs.vec());
  }

 private:
  Places places_;
  torch::inductor::AOTIModelPackageLoader loader_;
};

std::vector<at::Tensor> run_package(int64_t number, at::TensorList inputs) {
  return Entry::of(number).run(inputs);
}

}  // namespace
}  // namespace qfuse

TORCH_LIBRARY_FRAGMENT(qfuse, m) {
  m.class_<qfuse::PackageRunner>("PackageRunner")
      .def(torch::init<const std::string&, const std::string&, int64_t>())
      .def("constant_names", &qfuse::PackageRunner::constant_names)
      .def("bind", &qfuse::PackageRunner::bind)
      .def("number", [](const c10::intrusive_ptr<qfuse::PackageRunner>& self) {
        return self->number();
      });
  m.def("run_package(int number, Tensor[] inputs) -> Tensor[]", &qfuse::run_package);
}
