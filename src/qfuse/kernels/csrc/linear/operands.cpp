#include "linear/operands.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <charconv>

#include "quantized/stored.h"

namespace qfuse {
namespace {

struct Named {
  std::string_view name;
  StepKind kind;
  size_t args;
};

constexpr std::array<Named, 14> kActivations{{
    {"relu", StepKind::relu, 0},
    {"gelu", StepKind::gelu, 0},
    {"gelu_tanh", StepKind::gelu_tanh, 0},
    {"silu", StepKind::silu, 0},
    {"sigmoid", StepKind::sigmoid, 0},
    {"tanh", StepKind::tanh, 0},
    {"hardtanh", StepKind::hardtanh, 2},
    {"hardswish", StepKind::hardswish, 0},
    {"hardsigmoid", StepKind::hardsigmoid, 0},
    {"leaky_relu", StepKind::leaky_relu, 1},
    {"elu", StepKind::elu, 3},
    {"mish", StepKind::mish, 0},
    {"quick_gelu", StepKind::quick_gelu, 1},
    {"squared_relu", StepKind::squared_relu, 0},
}};

std::vector<std::string_view> split(std::string_view text, char mark) {
  std::vector<std::string_view> parts;
  while (true) {
    const size_t at = text.find(mark);
    parts.push_back(text.substr(0, at));
    if (at == std::string_view::npos) return parts;
    text.remove_prefix(at + 1);
  }
}

template <class Number>
Number parse(std::string_view text, std::string_view step) {
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  TORCH_CHECK(error == std::errc{} && end == text.data() + text.size(), "not a number: '", text,
              "' in epilogue step '", step, "'");
  return number;
}

at::ScalarType type_of(std::string_view name, std::string_view step) {
  if (name == "float32") return at::kFloat;
  if (name == "bfloat16") return at::kBFloat16;
  TORCH_CHECK(name == "float16", "cannot cast to '", name, "' in epilogue step '", step, "'");
  return at::kHalf;
}

struct Call {
  std::string_view text;
  std::string_view name;
  std::vector<std::string_view> args;
};

Call call_of(std::string_view text) {
  const size_t open = text.find('(');
  TORCH_CHECK(open != std::string_view::npos && text.back() == ')', "not an epilogue step: '", text,
              "'");
  return {text, text.substr(0, open), split(text.substr(open + 1, text.size() - open - 2), ',')};
}

void expect_args(const Call& call, size_t count) {
  TORCH_CHECK(call.args.size() == count, "epilogue step '", call.text, "' has ", call.args.size(),
              " arguments, expected ", count);
}

// The activation that the arguments name, except for the last `others` of them.
Step activation_of(const Call& call, size_t others = 0) {
  const auto* found = std::find_if(kActivations.begin(), kActivations.end(),
                                   [&](const Named& a) { return a.name == call.args[0]; });
  TORCH_CHECK(found != kActivations.end(), "unknown activation in epilogue step '", call.text, "'");
  expect_args(call, 1 + found->args + others);
  Step step{found->kind, 0, 0.0f, 0.0f, Real::f32};
  if (found->args > 0) step.a = static_cast<float>(parse<double>(call.args[1], call.text));
  if (found->args > 1) step.b = static_cast<float>(parse<double>(call.args[2], call.text));
  if (found->kind == StepKind::elu) {  // alpha, scale, input scale
    step.a *= step.b;
    step.scale = static_cast<float>(parse<double>(call.args[3], call.text));
  }
  return step;
}

// Quantizes and dequantizes.
Step round_of(const Call& call) {
  expect_args(call, 5);
  const auto number = [&](size_t i) {
    return static_cast<float>(parse<double>(call.args[i], call.text));
  };
  Step step{StepKind::round, 0, number(0), number(1), Real::f32};
  step.low = number(2);
  step.high = number(3);
  step.scale = number(4);
  return step;
}

// A quantized extra of a sum or product has two more arguments: its scale and zero point.
Step binary_of(const Call& call, const std::vector<at::Tensor>& extras) {
  const bool add = call.name == "add", prelu = call.name == "prelu";
  const size_t plain = add ? 2 : 1;
  const bool quantized = !prelu && call.args.size() > plain;
  expect_args(call, quantized ? plain + 2 : plain);
  const int32_t extra = parse<int32_t>(call.args[0], call.text);
  TORCH_CHECK(extra >= 0 && static_cast<size_t>(extra) < extras.size(), "epilogue step '",
              call.text, "' wants an extra that is not there: ", extras.size(), " given");
  const auto number = [&](size_t i) {
    return static_cast<float>(parse<double>(call.args[i], call.text));
  };
  const StepKind kind = add ? StepKind::add : prelu ? StepKind::prelu : StepKind::mul;
  Step step{kind, extra, add ? number(1) : 1.0f, 0.0f, Real::f32};
  const at::ScalarType type = extras[extra].scalar_type();
  TORCH_CHECK(quantized == (type == at::kChar || type == at::kByte), "epilogue step '", call.text,
              "' has an extra of type ", type, ", which is ", quantized ? "not " : "",
              "quantized");
  if (!quantized) return step;
  step.scale = number(plain);
  step.b = number(plain + 1);
  return step;
}

// Where ops use an extra, relative to the GLU split; an unused extra counts as after it.
struct Place {
  bool before;
  bool behind;
};

// The rows of an extra that the ops use, after broadcasting.
ElementRows extra_of(const at::Tensor& extra, const Place& place, at::IntArrayRef shape,
                  const Epilogue& epilogue, std::vector<at::Tensor>& kept) {
  TORCH_CHECK(extra.dim() >= 1, "an extra must have at least one axis");
  std::vector<int64_t> sizes = shape.vec();
  at::Tensor spread;
  if (epilogue.half > 0 && (place.behind || !place.before)) {
    sizes.back() = epilogue.half;
    spread = extra.expand(sizes);
  }
  // An extra used on both sides broadcasts to both, so it has one column; any width is valid.
  if (epilogue.half == 0 || place.before) spread = extra.expand(shape);
  const Rows rows = rows_of(spread);
  kept.push_back(rows.tensor);
  return {rows.tensor.const_data_ptr(), rows.ld,
          element_of(rows.tensor.scalar_type(), "an extra")};
}

}  // namespace

Rows rows_of(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.dim() >= 1, "expected a tensor with at least one axis");
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  const int64_t columns = sizes.back();
  Rows view{tensor, 1, columns, columns};
  bool fixed = columns <= 1 || strides.back() == 1;
  for (int64_t d = tensor.dim() - 2; d >= 0; --d) {
    if (sizes[d] == 1) continue;
    if (view.rows == 1) {
      view.ld = strides[d];
    } else {
      fixed = fixed && strides[d] == view.ld * view.rows;
    }
    view.rows *= sizes[d];
  }
  if (!fixed) {
    view.tensor = tensor.contiguous();
    view.ld = columns;
  }
  return view;
}

Real real_of(at::ScalarType type, const char* what) {
  if (type == at::kFloat) return Real::f32;
  if (type == at::kBFloat16) return Real::bf16;
  TORCH_CHECK(type == at::kHalf, what, " must be float32, bfloat16 or float16, not ", type);
  return Real::f16;
}

at::Tensor vector_of(const at::Tensor& tensor, at::ScalarType type, int64_t size,
                     const char* what) {
  TORCH_CHECK(tensor.numel() == size || tensor.numel() == 1, what, " has ", tensor.numel(),
              " elements, expected 1 or ", size);
  const bool wants_float = at::isFloatingType(type);
  TORCH_CHECK(wants_float == at::isFloatingType(tensor.scalar_type()), what, " has type ",
              tensor.scalar_type(), ", expected ", wants_float ? "a float" : "an integer", " type");
  if (tensor.scalar_type() == type && tensor.numel() == size && tensor.is_contiguous()) {
    return tensor;  // the common case, without the cost of views
  }
  at::Tensor vector = tensor.to(type).reshape({-1});
  return (vector.numel() == size ? vector : vector.expand({size})).contiguous();
}

double number_of(const at::Tensor& tensor, const char* what) {
  TORCH_CHECK(tensor.numel() == 1, what, " has ", tensor.numel(), " elements, expected 1");
  switch (tensor.scalar_type()) {  // the common types, without the cost of `item`
    case at::kFloat:
      return *tensor.const_data_ptr<float>();
    case at::kDouble:
      return *tensor.const_data_ptr<double>();
    case at::kInt:
      return *tensor.const_data_ptr<int32_t>();
    default:
      return tensor.item<double>();
  }
}

namespace {

// Parses epilogue ops in order; see read_steps.
class Reader {
 public:
  Reader(const std::vector<at::Tensor>& extras, int64_t columns, at::ScalarType real,
         Epilogue& epilogue)
      : extras_(extras), columns_(columns), type_(real), up_(real), epilogue_(epilogue) {}

  at::ScalarType type() const { return type_; }
  const Place& place(size_t extra) const { return places_[extra]; }
  bool halved() const { return where_ != Where::both; }
  bool done() const { return where_ == Where::both || where_ == Where::product; }

  void read(const Call& call) {
    if (call.name == "glu") {
      read_halves(call, call.args.back());
      add(activation_of(call, 1));
      return read_product();
    }
    if (call.name == "halves") return read_halves(call, call.args[0]);
    if (call.name == "up") return read_up();
    if (call.name == "times") return read_product();
    if (call.name == "act") return add(activation_of(call));
    if (call.name == "round") return add(round_of(call));
    if (call.name == "add" || call.name == "mul" || call.name == "prelu") {
      const Step step = binary_of(call, extras_);
      const at::ScalarType type = extras_[step.extra].scalar_type();
      type_ = at::promoteTypes(type_, at::isFloatingType(type) ? type : at::kFloat);
      Place& place = places_[step.extra];
      (where_ == Where::both ? place.before : place.behind) = true;
      return add(step);
    }
    TORCH_CHECK(call.name == "cast", "unknown epilogue step '", call.text, "'");
    expect_args(call, 1);
    type_ = type_of(call.args[0], call.text);
    add({StepKind::cast, 0, 0.0f, 0.0f, Real::f32});
  }

 private:
  enum class Where { both, gate, up, product };

  void add(Step step) {
    TORCH_CHECK(epilogue_.steps < kMaxSteps, "at most ", kMaxSteps, " epilogue steps");
    step.type = real_of(type_, "an epilogue step");
    epilogue_.step[epilogue_.steps++] = step;
  }

  void read_halves(const Call& call, std::string_view side) {
    TORCH_CHECK(where_ == Where::both, "halves of halves in an epilogue");
    TORCH_CHECK(columns_ % 2 == 0, "epilogue step '", call.text, "' halves ", columns_,
                " features");
    TORCH_CHECK(side == "gate-first" || side == "up-first", "epilogue step '", call.text,
                "' does not say which half is the gate");
    epilogue_.up_first = side == "up-first";
    epilogue_.half = columns_ / 2;
    epilogue_.front = epilogue_.steps;
    up_ = type_;
    where_ = Where::gate;
  }

  void read_up() {
    TORCH_CHECK(where_ == Where::gate, "an epilogue without a gate in front of its other half");
    epilogue_.gate = epilogue_.steps;
    std::swap(type_, up_);
    where_ = Where::up;
  }

  void read_product() {
    if (where_ == Where::gate) read_up();
    TORCH_CHECK(where_ == Where::up, "an epilogue without halves to multiply");
    epilogue_.up = epilogue_.steps;
    type_ = at::promoteTypes(type_, up_);
    epilogue_.product = real_of(type_, "a product of halves");
    where_ = Where::product;
  }

  const std::vector<at::Tensor>& extras_;
  int64_t columns_;
  at::ScalarType type_;  // after the last op
  at::ScalarType up_;    // of the half that ops do not apply to
  Epilogue& epilogue_;
  std::array<Place, kMaxExtras> places_{};
  Where where_ = Where::both;
};

Reader read_text(std::string_view text, const std::vector<at::Tensor>& extras, int64_t columns,
                 at::ScalarType real, Epilogue& epilogue, bool takes_halves) {
  TORCH_CHECK(extras.size() <= kMaxExtras, "at most ", kMaxExtras, " extras, not ", extras.size());
  epilogue.steps = 0;
  epilogue.half = 0;
  Reader reader(extras, columns, real, epilogue);
  if (!text.empty()) {
    for (const std::string_view part : split(text, '|')) reader.read(call_of(part));
  }
  TORCH_CHECK(reader.done(), "an epilogue whose halves are not multiplied: '", text, "'");
  TORCH_CHECK(takes_halves || !reader.halved(), "this kernel does not support GLU: '", text, "'");
  return reader;
}

}  // namespace

at::ScalarType parse_steps(std::string_view text, const std::vector<at::Tensor>& extras,
                           at::ScalarType real, Epilogue& epilogue) {
  return read_text(text, extras, /*columns=*/0, real, epilogue, /*takes_halves=*/false).type();
}

at::ScalarType read_steps(std::string_view text, const std::vector<at::Tensor>& extras,
                          at::IntArrayRef shape, at::ScalarType real, Epilogue& epilogue,
                          std::vector<at::Tensor>& kept, bool takes_halves) {
  const Reader reader = read_text(text, extras, shape.back(), real, epilogue, takes_halves);
  for (size_t i = 0; i < extras.size(); ++i) {
    epilogue.extra[i] = extra_of(extras[i], reader.place(i), shape, epilogue, kept);
  }
  return reader.type();
}

void set_product(Epilogue& e, at::ScalarType product_dtype) {
  e.real = real_of(product_dtype, "product_dtype");
  const bool casts = e.steps > 0 && e.step[0].kind == StepKind::cast;
  if (!casts || e.half > 0 || e.real != Real::f32) return;
  e.real = e.step[0].type;
  std::copy(e.step + 1, e.step + e.steps, e.step);
  --e.steps;
}

void prefetch_result(const Epilogue& e, int64_t row, int64_t rows, int64_t column,
                     int64_t columns) {
  const int64_t size = bytes_of(e.out_type);
  const auto* to = static_cast<const char*>(e.out) + ((row - e.out_row) * e.out_ld + column) * size;
  for (int64_t i = 0; i < rows; ++i, to += e.out_ld * size) {
    for (int64_t j = 0; j < columns * size; j += kLine) __builtin_prefetch(to + j, 1);
  }
}

}  // namespace qfuse
