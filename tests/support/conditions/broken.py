"""Problems in which one condition of a kernel does not hold, by the name of the condition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from qfuse.ir.ops.epilogue import Epilogue
from qfuse.ir.ops.output import ExtraOutput
from qfuse.ir.ops.views import QuantParams
from qfuse.ir.quant.choose import Formula
from qfuse.ir.quant.element import ScaleFormat
from qfuse.ir.quant.spec import QuantSpec, ZeroPointDomain
from qfuse.lower.problems.linear_rowwise import LinearRowwiseProblem

Break = Callable[[Any], Any]

F64, BF16, F16 = torch.float64, torch.bfloat16, torch.float16
WIDE = torch.int16


def put(whole: Any, path: str, value: object) -> Any:
    """Return a copy of nested dataclasses with the field at ``path`` replaced."""
    head, _, rest = path.partition(".")
    return replace(whole, **{head: put(getattr(whole, head), rest, value) if rest else value})


def read(whole: Any, path: str) -> Any:
    """Return the field at ``path``."""
    for name in path.split("."):
        whole = getattr(whole, name)
    return whole


def const(problem: Any, value: torch.Tensor) -> Node:
    """Return a constant in the graph of ``problem``."""
    graph = problem.place.graph
    module = graph.owning_module
    name = f"broken_{len(list(module.named_buffers()))}"
    module.register_buffer(name, value)
    node: Node = graph.get_attr(name)
    node.meta["val"] = value
    return node


def run_time(problem: Any, value: object) -> Node:
    """Return an input whose values are not known, with the metadata of ``value``."""
    node: Node = problem.place.graph.placeholder("broken")
    node.meta["val"] = value
    return node


def field(path: str, value: object) -> Break:
    """Put a value."""
    return lambda problem: put(problem, path, value)


def node(path: str, dtype: torch.dtype, *shape: int) -> Break:
    """Put an input of a dtype, and of another shape if there is one."""

    def change(problem: Any) -> Any:
        sizes = shape or read(problem, path).meta["val"].shape
        return put(problem, path, run_time(problem, torch.empty(sizes, dtype=dtype)))

    return change


def constant(path: str, value: float, dtype: torch.dtype, like: str = "") -> Break:
    """Put a constant of one value, in the shape of another operand."""

    def change(problem: Any) -> Any:
        shape = read(problem, like or path).meta["val"].shape
        return put(
            problem, path, const(problem, torch.full([int(s) for s in shape], value, dtype=dtype))
        )

    return change


def block(path: str, last: int | None, axis: int = -1, rest: int | None = 1) -> Break:
    """Put blocks of ``last`` along one axis, and of ``rest`` along the others."""

    def change(problem: Any) -> Any:
        sizes = [rest] * len(read(problem, f"{path}.block"))
        sizes[axis] = last
        return put(problem, f"{path}.block", tuple(sizes))

    return change


def both(*changes: Break) -> Break:
    """Make several changes."""

    def change(problem: Any) -> Any:
        for one in changes:
            problem = one(problem)
        return problem

    return change


def stored(path: str, dtype: torch.dtype) -> Break:
    """Put another storage dtype, with a range that every one has."""
    return lambda problem: put(
        problem, path, replace(read(problem, path), dtype=dtype, quant_min=0, quant_max=7)
    )


def chosen(**changes: Any) -> Break:
    """Change how the parameters of a result are chosen."""

    def change(problem: Any) -> Any:
        spec, choose = problem.op.output.chosen
        return put(problem, "op.output.chosen", (spec, replace(choose, **changes)))

    return change


def _quantized(path: str, of: str) -> Break:
    """Put parameters of int8 values with one scale."""

    def change(problem: Any) -> Any:
        rank = len(read(problem, of).meta["val"].shape)
        spec = QuantSpec(torch.int8, -128, 127, (None,) * rank)
        return put(problem, path, QuantParams(spec, const(problem, torch.ones([1] * rank)), None))

    return change


def _epilogue(text: str) -> Break:
    return both(field("op.epilogue", Epilogue.parse(text)), field("op.extras", ()))


def _four_bits(problem: Any) -> Any:
    shape = [int(size) for size in problem.fused.weight.meta["val"].shape]
    stored = torch.arange(torch.Size(shape).numel()).reshape(shape) % 100
    return put(problem, "fused.weight", const(problem, stored.to(torch.int8)))


def _other_floats(problem: Any) -> Any:
    """Put floats that the kernel does not know: each knows those of one width at most."""
    known = read(problem, W).spec.dtype
    return stored(f"{W}.spec", torch.float8_e4m3fn if known is F16 else F16)(problem)


def _results(value: Callable[[torch.Tensor], torch.Tensor]) -> Break:
    """Put results with other strides."""

    def change(problem: Any) -> Any:
        made = [value(torch.empty(x.shape, dtype=x.dtype)) for x in problem.op.node.meta["val"]]
        return put(problem, "op.node", run_time(problem, made))

    return change


def _turned(x: torch.Tensor) -> torch.Tensor:
    return x.mT.contiguous().mT


def _turn_matmul(problem: Any) -> Any:
    value = problem.fused.node.meta["val"]
    made = _turned(torch.empty(value.shape, dtype=value.dtype))
    return put(problem, "fused.node", run_time(problem, made))


def _as_depthwise(problem: Any) -> Any:
    """Put two groups of one input channel."""
    n, _, *kernel = problem.fused.weight.meta["val"].shape
    weight = const(problem, torch.ones(n, 1, *kernel, dtype=torch.int8))
    return put(put(problem, "fused.weight", weight), "fused.groups", 2)


_ROUND = QuantSpec(torch.uint8, 0, 255, (None,) * 3)

X, W, OTHER = "fused.x_params", "fused.weight_params", "fused.other_params"
PARAMS = {
    "activation": X,
    "weight": W,
    "left operand": X,
    "right operand": OTHER,
    "input": "op.x_params",
    "residual": "op.residual_params",
    "output": "op.output.params",
}


def _of_params(who: str, path: str) -> dict[str, Break]:
    """Return what the conditions of the parameters of one operand have in common."""
    scale, zero = f"{path}.scale", f"{path}.zero_point"
    return {
        f"the {who} is quantized": field(path, None),
        f"the {who} has 8 bits": stored(f"{path}.spec", WIDE),
        f"kernels know the {who}'s scales": field(f"{path}.spec.arithmetic.compute", F64),
        f"the {who}'s zero point is an integer": constant(zero, 0, torch.float32, scale),
        f"the {who}'s zero point is in the range of its dtype": constant(
            zero, 1000, torch.int32, scale
        ),
        f"the {who} is stored as int8": stored(f"{path}.spec", torch.uint8),
        f"the {who} has no zero point": constant(zero, 1, torch.int32, scale),
        f"the {who} has one scale, or one per row": block(f"{path}.spec", 2),
        f"kernels know the {who}'s dtypes": constant(scale, 1, torch.int32),
    }


BREAKS: dict[str, Break] = {
    **{name: one for who, path in PARAMS.items() for name, one in _of_params(who, path).items()},
    # Products.
    "the product is computed in a float dtype of at most 32 bits": field("float_dtype", F64),
    "kernels compute in the dtype of the product": field("float_dtype", F64),
    "the linear computes in a float dtype of at most 32 bits": field("float_dtype", F64),
    "the activation is not quantized": _quantized(X, "fused.x"),
    "the weight and its parameters are constants": node("fused.weight", torch.int8),
    "no sum of products can overflow": field("k", 1 << 20),
    "the bias has one element per output feature": node("fused.bias", torch.float32, 3),
    "the operands of the epilogue are floats of at most 32 bits": lambda problem: put(
        problem, "fused.extras", (run_time(problem, torch.empty(1, dtype=F64)),)
    ),
    "the weight has 8 bits": both(stored(f"{W}.spec", WIDE), constant("fused.weight", 1, WIDE)),
    # Linears.
    "the weight has one scale, or one per output feature": block(f"{W}.spec", 16),
    "the weight has scales of groups of input features that kernels know": block(f"{W}.spec", 5),
    "the weight has scales of groups of input features": block(f"{W}.spec", None),
    "the weight is stored as integers": stored(f"{W}.spec", torch.float8_e4m3fn),
    "no sum of a group can overflow": both(block(f"{W}.spec", 1 << 20), field("k", 1 << 21)),
    "the values of the weight fit four bits": _four_bits,
    "the zero points of the codes fit 8 bits": constant(
        f"{W}.zero_point", 127, torch.int32, f"{W}.scale"
    ),
    "the zero points of the codes fit four bits": constant(
        f"{W}.zero_point", 100, torch.int32, f"{W}.scale"
    ),
    "no size can be 1": field("n", 1),
    "the weight's scale is a constant": node(f"{W}.scale", torch.float32),
    "the linear has several input features": field("k", 1),
    "it reads no features beyond the end of a row": both(
        field("float_dtype", BF16), field("k", 33)
    ),
    "the scales are exact in the dtype of the activation": field("float_dtype", BF16),
    # Products of float activations.
    "kernels know how the weight is stored": _other_floats,
    "the weight is not rounded to bfloat16 before a float32 product": both(
        field(f"{W}.spec.arithmetic.compute", BF16), field("float_dtype", torch.float32)
    ),
    "the weight stays in the range of float16": both(
        field(f"{W}.spec.arithmetic.compute", F16),
        field("float_dtype", F16),
        constant(f"{W}.scale", 60000.0, torch.float32),
        constant("fused.weight", 7, torch.int8),
    ),
    "the middle of the weight's range is an integer": field(f"{W}.spec.quant_max", 254),
    "the input features fill the lanes of float offsets": both(
        block(f"{W}.spec", None), field("k", 33)
    ),
    "the weight is stored in float16": constant("fused.weight", 1, torch.float32),
    "the linear computes in float32": field("float_dtype", BF16),
    # Convolutions.
    "the activation has one scale": block(f"{X}.spec", 1, axis=1, rest=None),
    "the weight has one scale, or one per output channel": block(f"{W}.spec", 2),
    "kernels know the granularity of the weight": block(f"{W}.spec", 2),
    "the weight has scales of groups of input channels": block(f"{W}.spec", 1, axis=0, rest=None),
    "the weight has no zero points": constant(f"{W}.zero_point", 1, torch.int32, f"{W}.scale"),
    "the zero points of the codes fit them": constant(
        f"{W}.zero_point", 100, torch.int32, f"{W}.scale"
    ),
    "a group has several input channels": _as_depthwise,
    "every group has one input channel": field("fused.groups", 1),
    # Products of two activations.
    "the result is contiguous": _turn_matmul,
    "no scale of the left operand differs within a sum": block(f"{X}.spec", 1, rest=None),
    "no scale of the right operand differs within a sum": block(
        f"{OTHER}.spec", 1, axis=-2, rest=None
    ),
    "the scales of the left operand broadcast": block(f"{X}.spec", 2, axis=-2, rest=None),
    "the scales of the right operand broadcast": block(f"{OTHER}.spec", 2, rest=None),
    # The results of norms and activations.
    "its results are row-major": _results(_turned),
    "its result has 8 bits": stored("spec", WIDE),
    "the zero point of its result is an integer": field(
        "spec.domain", ZeroPointDomain.FLOAT_OFFSET
    ),
    "the scale of its result is a plain one": both(
        field("spec.domain", ZeroPointDomain.NONE), field("spec.scale_format", ScaleFormat.E8M0)
    ),
    "it is quantized in a float dtype of at most 32 bits": field("spec.float_dtype", F64),
    "its scale is computed per row": chosen(block=(None,) * 3),
    "kernels know the formula of its scale": chosen(formula=Formula.AO_FLOAT8),
    "its scale is computed for the range of its result": chosen(quant_min=-127),
    "kernels write the dtypes of its scale and zero point": chosen(scale_dtype=torch.float8_e5m2),
    "its result has one scale": block("op.output.params.spec", 1),
    "kernels read the dtype of the scale": constant("op.output.params.scale", 1, torch.int32),
    "the zero point fits 32 bits": node("op.output.params.zero_point", torch.int64, 1),
    # Their operands.
    "the input is a float": node("op.x", torch.int32),
    "the residual is a float": node("op.residual", torch.int32),
    "the input has 8 bits": node("op.x", WIDE),
    "the residual has 8 bits": node("op.residual", WIDE),
    "the residual has the shape of the input": lambda problem: node(
        "op.residual", problem.op.residual.meta["val"].dtype, 1, 1, 70
    )(problem),
    "it is over the last axis": field("op.norm.axes", 2),
    "it computes in float32": field("op.norm.compute", F64),
    "its weight has one float per column": node("op.weight", torch.float32, 3),
    "it rounds once, to the dtype of its result": field("op.norm.rounded", F64),
    "it computes in float32 and rounds once": field("op.norm.rounded", BF16),
    "its weight and bias have one float per column": node("op.bias", torch.float32, 3),
    "it multiplies no quantized halves": both(
        _quantized("op.x_params", "op.x"), _epilogue("glu(silu,gate-first)")
    ),
    "kernels know its epilogue ops": both(
        field("op.epilogue", Epilogue.parse(f"round(0,-,{_ROUND})")), field("op.extras", ())
    ),
    "kernels of images know its epilogue ops": _epilogue(
        "glu(silu,gate-first)|glu(silu,gate-first)"
    ),
    "it has few epilogue ops": _epilogue("|".join(["act(relu)"] * 20)),
    "its operands are floats of the shape of its input": lambda problem: put(
        problem, "op.extras", (run_time(problem, torch.empty(1)),)
    ),
    # Images.
    "its result has the shape of its input": node("op.x", torch.float32, 2, 1, 30, 30),
    "its result is a channels-last image": _results(lambda x: x.contiguous()),
    "its input is channels-last": node("op.x", torch.float32),
    "its input is float32": lambda problem: put(
        problem, "op.x", run_time(problem, problem.op.x.meta["val"].to(BF16))
    ),
    "its input has 8 bits and is dequantized to float32": field(
        "op.x_params.spec.float_dtype", BF16
    ),
    "its input has one scale, or one per channel": block("op.x_params.spec", 1),
    "kernels read its operands": lambda problem: put(
        problem, "op.extras", (run_time(problem, torch.empty(64, 1, 1, dtype=F64)),) * 2
    ),
    "its parameters are static": field("op.output.params", None),
    "only its quantized result is used": field("op.output.keep", frozenset({ExtraOutput.FLOAT})),
    "it is quantized from float32 to 8 bits": field("spec.float_dtype", BF16),
    "its scale is a constant": node("op.output.params.scale", torch.float32),
}
"""What breaks a condition, and none before it."""


def broken(problem: Any, name: str) -> Any:
    """Return ``problem`` with the condition ``name`` broken, of the linear or of the rows."""
    if not isinstance(problem, LinearRowwiseProblem):
        return BREAKS[name](problem)
    try:
        return replace(problem, problem=BREAKS[name](problem.problem))
    except AttributeError:
        # It is a field of the op behind the linear.
        return replace(problem, rows=BREAKS[name](problem.rows))
