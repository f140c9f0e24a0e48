// Runs AOTInductor packages for several threads at the same time.
//
// torch's own loader holds Python's lock (GIL) from the first to the last instruction of a call, so
// that other threads of Python stand still. An op of torch releases it.
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <condition_variable>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace qfuse {
namespace {

// A number of places, each of which one thread may hold.
class Places {
 public:
  explicit Places(int64_t count) : free_(count) {}

  void take() {
    std::unique_lock lock(mutex_);
    freed_.wait(lock, [&] { return free_ > 0; });
    --free_;
  }

  void give() {
    {
      const std::lock_guard lock(mutex_);
      ++free_;
    }
    freed_.notify_one();
  }

 private:
  std::mutex mutex_;
  std::condition_variable freed_;
  int64_t free_;
};

class PackageRunner : public torch::CustomClassHolder {
 public:
  PackageRunner(const std::string& package, const std::string& model, int64_t runners)
      : loader_(package, model, /*run_single_threaded=*/false, checked(runners)),
        places_(runners),
        number_(all().add(this)) {}
  ~PackageRunner() override { all().remove(number_); }

  // The object of a number; the caller keeps it alive.
  static PackageRunner& of(int64_t number) { return all().at(number); }

  std::vector<std::string> constant_names() { return loader_.get_constant_fqns(); }

  // The constants are used where they are, and must outlive this object.
  void bind(const c10::Dict<std::string, at::Tensor>& constants) {
    std::unordered_map<std::string, at::Tensor> map;
    for (const auto& entry : constants) map.emplace(entry.key(), entry.value());
    loader_.load_constants(map, /*use_inactive=*/false, /*check_full_update=*/true,
                           /*user_managed=*/true);
  }

  // Identifies this object in `run_package`: to pass a number takes 0.1 us, an object 10.
  int64_t number() const { return number_; }

  std::vector<at::Tensor> run(at::TensorList inputs) {
    // Not inside of the package: a thread that waits there is not woken if another one throws.
    places_.take();
    struct Leave {
      Places& places;
      ~Leave() { places.give(); }
    } const leave{places_};
    return loader_.boxed_run(inputs.vec());
  }

 private:
  // All objects that exist.
  class Registry {
   public:
    int64_t add(PackageRunner* runner) {
      const std::lock_guard lock(mutex_);
      runners_.emplace(++last_, runner);
      return last_;
    }

    void remove(int64_t number) {
      const std::lock_guard lock(mutex_);
      runners_.erase(number);
    }

    PackageRunner& at(int64_t number) {
      const std::lock_guard lock(mutex_);
      const auto found = runners_.find(number);
      TORCH_CHECK(found != runners_.end(), "there is no package with the number ", number);
      return *found->second;
    }

   private:
    std::mutex mutex_;
    std::unordered_map<int64_t, PackageRunner*> runners_;
    int64_t last_ = 0;
  };

  static Registry& all() {
    // Never destroyed: objects may outlive static variables.
    static auto* const registry = new Registry;
    return *registry;
  }

  static size_t checked(int64_t runners) {
    TORCH_CHECK(runners >= 1, "a package needs at least one runner, not ", runners);
    return static_cast<size_t>(runners);
  }

  torch::inductor::AOTIModelPackageLoader loader_;
  Places places_;
  const int64_t number_;
};

std::vector<at::Tensor> run_package(int64_t number, at::TensorList inputs) {
  return PackageRunner::of(number).run(inputs);
}

}  // namespace
}  // namespace qfuse

TORCH_LIBRARY_FRAGMENT(qfuse, m) {
  m.class_<qfuse::PackageRunner>("PackageRunner")
      .def(torch::init<const std::string&, const std::string&, int64_t>())
      .def("constant_names", &qfuse::PackageRunner::constant_names)
      .def("bind", &qfuse::PackageRunner::bind)
      .def("number", &qfuse::PackageRunner::number);
  m.def("run_package(int number, Tensor[] inputs) -> Tensor[]", &qfuse::run_package);
}
