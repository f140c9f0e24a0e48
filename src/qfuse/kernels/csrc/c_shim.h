// C functions of ops, which code that AOTInductor generates calls without a dispatcher.
//
// The function's type and the text that declares it there follow from the type of the op's C++
// function. Arguments are passed as AOTInductor's code generator writes them: handles of tensors,
// pointers for optional values, a pointer and a length for lists, int32 for dtypes and bools, and
// pointers to the results at the end.
#pragma once

#include <ATen/record_function.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>

#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace qfuse {

// How an argument of type T is passed: the C types, their text, and the value for T, made of those.
template <typename T>
struct CArgument;

// A tensor as the dispatcher would pass it on: not a lazily negated view.
inline c10::MaybeOwned<at::Tensor> materialized(AtenTensorHandle handle) {
  const at::Tensor& tensor = *torch::aot_inductor::tensor_handle_to_tensor_pointer(handle);
  if (tensor.is_neg() || tensor.is_conj()) {
    return c10::MaybeOwned<at::Tensor>::owned(tensor.clone());
  }
  return c10::MaybeOwned<at::Tensor>::borrowed(tensor);
}

template <>
struct CArgument<const at::Tensor&> {
  using Types = std::tuple<AtenTensorHandle>;
  static constexpr std::string_view text = "AtenTensorHandle";
  c10::MaybeOwned<at::Tensor> tensor;
  explicit CArgument(AtenTensorHandle handle) : tensor(materialized(handle)) {}
  operator const at::Tensor&() const { return *tensor; }
};

template <>
struct CArgument<const std::optional<at::Tensor>&> {
  using Types = std::tuple<AtenTensorHandle*>;
  static constexpr std::string_view text = "AtenTensorHandle*";
  std::optional<at::Tensor> tensor;
  explicit CArgument(AtenTensorHandle* handle) {
    if (handle != nullptr) {
      tensor = *materialized(*handle);
    }
  }
  operator const std::optional<at::Tensor>&() const { return tensor; }
};

template <>
struct CArgument<std::optional<std::vector<at::Tensor>>> {
  // A pointer to the pointer to the handles; for an empty list, to something else.
  using Types = std::tuple<const void*, int64_t>;
  static constexpr std::string_view text = "const void*, int64_t";
  std::vector<at::Tensor> tensors;
  CArgument(const void* handles, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      tensors.push_back(*materialized((*static_cast<const AtenTensorHandle* const*>(handles))[i]));
    }
  }
  operator std::optional<std::vector<at::Tensor>>() { return std::move(tensors); }
};

template <>
struct CArgument<at::IntArrayRef> {
  using Types = std::tuple<const int64_t*, int64_t>;
  static constexpr std::string_view text = "const int64_t*, int64_t";
  at::IntArrayRef numbers;
  CArgument(const int64_t* data, int64_t count) : numbers(data, static_cast<size_t>(count)) {}
  operator at::IntArrayRef() const { return numbers; }
};

template <typename T, typename C>
struct CScalar {
  using Types = std::tuple<C>;
  C value;
  explicit CScalar(C given) : value(given) {}
  operator T() const { return static_cast<T>(value); }
};

template <>
struct CArgument<std::string_view> : CScalar<std::string_view, const char*> {
  using CScalar::CScalar;
  static constexpr std::string_view text = "const char*";
};

template <>
struct CArgument<int64_t> : CScalar<int64_t, int64_t> {
  using CScalar::CScalar;
  static constexpr std::string_view text = "int64_t";
};

template <>
struct CArgument<double> : CScalar<double, double> {
  using CScalar::CScalar;
  static constexpr std::string_view text = "double";
};

template <>
struct CArgument<bool> : CScalar<bool, int32_t> {
  using CScalar::CScalar;
  static constexpr std::string_view text = "int32_t";
};

template <>
struct CArgument<at::ScalarType> : CScalar<at::ScalarType, int32_t> {
  using CScalar::CScalar;
  static constexpr std::string_view text = "int32_t";
};

inline std::tuple<at::Tensor> as_tuple(at::Tensor result) {
  return {std::move(result)};
}
template <typename... T>
std::tuple<T...> as_tuple(std::tuple<T...> results) {
  return results;
}

template <typename R>
constexpr size_t kResults = std::tuple_size_v<decltype(as_tuple(std::declval<R>()))>;

template <typename Signature>
struct CSignature;

template <typename R, typename... Args>
struct CSignature<R (*)(Args...)> {
  using CTypes = decltype(std::tuple_cat(std::declval<typename CArgument<Args>::Types>()...));
  using Arguments = std::tuple<CArgument<Args>...>;
  using Results = std::make_index_sequence<kResults<R>>;

  // Where the C arguments of argument `index` begin.
  static constexpr size_t start(size_t index) {
    constexpr size_t counts[] = {std::tuple_size_v<typename CArgument<Args>::Types>...};
    size_t total = 0;
    for (size_t i = 0; i < index; ++i) {
      total += counts[i];
    }
    return total;
  }

  static std::string text() {
    std::string all;
    ((all += std::string(CArgument<Args>::text) + ", "), ...);
    for (size_t i = 0; i < kResults<R>; ++i) {
      all += i == 0 ? "AtenTensorHandle*" : ", AtenTensorHandle*";
    }
    return all;
  }
};

// The C function of an op: `CTypes` are the types of its arguments, `Out` counts its results.
template <auto Op, typename CTypes, typename Out>
struct CFunction;

template <auto Op, typename... C, size_t... Out>
struct CFunction<Op, std::tuple<C...>, std::index_sequence<Out...>> {
  using Signature = CSignature<decltype(Op)>;
  using All = std::tuple<C...>;
  template <size_t>
  using Result = AtenTensorHandle*;
  using Type = AOTITorchError (*)(C..., Result<Out>...);

  template <const char* Name>
  static AOTITorchError call(C... given, Result<Out>... results) {
    AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
      // For profilers, as the dispatcher does.
      RECORD_FUNCTION(Name, c10::ArrayRef<const c10::IValue>());
      constexpr size_t count = std::tuple_size_v<typename Signature::Arguments>;
      auto values = as_tuple(run(All(given...), std::make_index_sequence<count>()));
      ((*results = torch::aot_inductor::new_tensor_handle(std::move(std::get<Out>(values)))), ...);
    })
  }

 private:
  template <size_t... I>
  static auto run(const All& all, std::index_sequence<I...>) {
    return Op(argument<I>(all)...);
  }

  template <size_t I>
  static auto argument(const All& all) {
    using Argument = std::tuple_element_t<I, typename Signature::Arguments>;
    constexpr auto count = std::make_index_sequence<std::tuple_size_v<typename Argument::Types>>();
    return [&]<size_t... J>(std::index_sequence<J...>) {
      return Argument(std::get<Signature::start(I) + J>(all)...);
    }(count);
  }
};

template <auto Op>
using CFunctionOf = CFunction<Op, typename CSignature<decltype(Op)>::CTypes,
                              typename CSignature<decltype(Op)>::Results>;

}  // namespace qfuse
