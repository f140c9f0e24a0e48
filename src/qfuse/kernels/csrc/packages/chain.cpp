// Runs several AOTInductor libraries one after another, each of them any number of times.
//
// Blocks that a model repeats are compiled once. Each occurrence is a container of the same library
// with its own constants. The values between them are in one table, by number: first the inputs of
// the call, then everything else; a value is dropped after it was read last.
#include <torch/csrc/inductor/aoti_runner/model_container_runner_cpu.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "packages/entry.h"
#include "tensors.h"

namespace qfuse {
namespace {

using torch::inductor::AOTIModelContainerRunnerCpu;

// The strides of a dense tensor whose axes are stored in `order`, slowest first.
at::DimVector dense_strides(at::IntArrayRef sizes, const std::vector<int64_t>& order) {
  at::DimVector strides(sizes.size(), 1);
  int64_t step = 1;
  for (auto axis = order.rbegin(); axis != order.rend(); ++axis) {
    strides[*axis] = step;
    step *= std::max<int64_t>(sizes[*axis], 1);
  }
  return strides;
}

// `value` with the strides that its readers were compiled for; a copy if it has others.
at::Tensor placed(at::Tensor value, const std::vector<int64_t>& order) {
  const auto sizes = value.sizes();
  TORCH_CHECK(sizes.size() == order.size(), "a block returned ", sizes.size(), " axes, not ",
              order.size());
  const auto want = dense_strides(sizes, order);
  if (value.strides() == at::IntArrayRef(want)) return value;
  bool same = true;
  // Strides of axes of size one address nothing, but libraries may use them.
  for (size_t axis = 0; axis < want.size(); ++axis)
    same &= sizes[axis] == 1 || value.strides()[axis] == want[axis];
  const at::NoGradGuard no_grad;
  if (same || value.numel() == 0) return value.as_strided(sizes, want);
  return empty_strided_tensor(sizes, want, value.options()).copy_(value);
}

class PackageChain : public torch::CustomClassHolder, public Entry {
 public:
  // A chain of no libraries: `values` counts the places of the table, `inputs` those of the call.
  PackageChain(int64_t inputs, int64_t values, int64_t runners)
      : places_(runners),
        runners_(static_cast<size_t>(runners)),
        inputs_(checked(inputs, values)),
        table_(static_cast<size_t>(values)),
        orders_(static_cast<size_t>(values)),
        dropped_(static_cast<size_t>(values), true) {}

  // Appends a container of a library, which may be deleted afterwards; its outputs go to the places
  // `outputs`, those with a negative number nowhere.
  void add(const std::string& library, std::vector<int64_t> inputs, std::vector<int64_t> outputs) {
    for (const auto place : inputs) check_place(place);
    for (const auto place : outputs)
      if (place >= 0) check_place(place);
    auto runner = std::make_unique<AOTIModelContainerRunnerCpu>(library, runners_, false);
    steps_.push_back({std::move(runner), std::move(inputs), {}, std::move(outputs)});
  }

  std::vector<std::string> constant_names(int64_t step) {
    std::vector<std::string> names;
    for (const auto& [_, name] : steps_.at(step).runner->getConstantNamesToOriginalFQNs())
      names.push_back(name);
    return names;
  }

  // The constants are used where they are, and must outlive this object.
  void bind(int64_t step, const c10::Dict<std::string, at::Tensor>& constants) {
    auto& runner = *steps_.at(step).runner;
    std::unordered_map<std::string, at::Tensor> map;
    for (const auto& [own, name] : runner.getConstantNamesToOriginalFQNs())
      map.emplace(own, constants.at(name));
    runner.update_constant_buffer(map, /*use_inactive=*/false, /*validate_full_updates=*/true,
                                  /*user_managed=*/true);
  }

  // Puts a constant into the table.
  void hold(int64_t place, at::Tensor value) {
    check_place(place);
    table_[place] = std::move(value);
  }

  // The axes of a value, from the slowest to the fastest, that its readers were compiled for.
  void set_order(int64_t place, std::vector<int64_t> order) {
    check_place(place);
    orders_[place] = std::make_unique<std::vector<int64_t>>(std::move(order));
  }

  // Sets the results of a call; nothing is added afterwards.
  void finish(std::vector<int64_t> outputs) {
    for (const auto place : outputs) {
      check_place(place);
      dropped_[place] = false;
    }
    outputs_ = std::move(outputs);
    std::vector<bool> read(table_.size(), false);
    for (auto step = steps_.rbegin(); step != steps_.rend(); ++step) {
      step->last.assign(step->inputs.size(), false);
      for (size_t i = step->inputs.size(); i-- > 0;) {
        const auto place = step->inputs[i];
        step->last[i] = dropped_[place] && !read[place];
        read[place] = true;
      }
    }
  }

  std::vector<at::Tensor> run(at::TensorList inputs) override {
    TORCH_CHECK(static_cast<int64_t>(inputs.size()) == inputs_, "the chain has ", inputs_,
                " inputs, not ", inputs.size());
    const HeldPlace place(places_);
    auto values = table_;
    std::copy(inputs.begin(), inputs.end(), values.begin());
    for (const auto& step : steps_) run_step(step, values);
    std::vector<at::Tensor> results;
    results.reserve(outputs_.size());
    for (const auto from : outputs_) results.push_back(values[from]);
    return results;
  }

 private:
  struct Step {
    std::unique_ptr<AOTIModelContainerRunnerCpu> runner;
    std::vector<int64_t> inputs;
    // Whether each input is read here for the last time.
    std::vector<bool> last;
    std::vector<int64_t> outputs;
  };

  void run_step(const Step& step, std::vector<at::Tensor>& values) const {
    std::vector<at::Tensor> given;
    given.reserve(step.inputs.size());
    for (size_t i = 0; i < step.inputs.size(); ++i) {
      auto& value = values[step.inputs[i]];
      if (step.last[i])
        given.push_back(std::move(value));
      else
        given.push_back(value);
    }
    auto made = step.runner->boxed_run(std::move(given));
    TORCH_CHECK(made.size() == step.outputs.size(), "a library returned ", made.size(),
                " values, not ", step.outputs.size());
    for (size_t i = 0; i < made.size(); ++i) {
      const auto to = step.outputs[i];
      if (to < 0) continue;
      values[to] = orders_[to] ? placed(std::move(made[i]), *orders_[to]) : std::move(made[i]);
    }
  }

  void check_place(int64_t place) const {
    TORCH_CHECK(place >= 0 && place < static_cast<int64_t>(table_.size()), "the table has ",
                table_.size(), " places, and none with the number ", place);
  }

  static int64_t checked(int64_t inputs, int64_t values) {
    TORCH_CHECK(inputs >= 0 && inputs <= values, "a table of ", values, " places cannot hold ",
                inputs, " inputs");
    return inputs;
  }

  Places places_;
  const size_t runners_;
  const int64_t inputs_;
  // What a call begins with: constants in their places.
  std::vector<at::Tensor> table_;
  std::vector<std::unique_ptr<std::vector<int64_t>>> orders_;
  // Whether a value may go after it was read last.
  std::vector<bool> dropped_;
  std::vector<Step> steps_;
  std::vector<int64_t> outputs_;
};

}  // namespace
}  // namespace qfuse

TORCH_LIBRARY_FRAGMENT(qfuse, m) {
  using qfuse::PackageChain;
  m.class_<PackageChain>("PackageChain")
      .def(torch::init<int64_t, int64_t, int64_t>())
      .def("add", &PackageChain::add)
      .def("constant_names", &PackageChain::constant_names)
      .def("bind", &PackageChain::bind)
      .def("hold", &PackageChain::hold)
      .def("set_order", &PackageChain::set_order)
      .def("finish", &PackageChain::finish)
      .def("number",
           [](const c10::intrusive_ptr<PackageChain>& self) { return self->number(); });
}
