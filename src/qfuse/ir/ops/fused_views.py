"""Typed views of the fused ops that share one output block (see ``ir/ops/fused_reference.py``)."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import Node
from torch.fx.node import Argument

from qfuse.ir.graph.schema import arguments, is_call
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.epilogue import Epilogue
from qfuse.ir.ops.fused_reference import Keep, keep_text, parse_keep
from qfuse.ir.ops.norm_spec import NormSpec
from qfuse.ir.ops.views import (
    QuantParams,
    as_fused_linear,
    as_quantize,
    as_requantize,
    dtype_of,
    edge_args,
    node_of,
    optional_node,
    params_of,
)
from qfuse.ir.quant.choose import ChooseSpec
from qfuse.ir.quant.spec import QuantSpec


@dataclass(frozen=True, slots=True)
class Output:
    """How a fused op gives its result.

    Attributes:
        params: Given parameters, if it is quantized with them.
        chosen: What it is quantized as with parameters that are chosen for it, and how they are.
        keep: What it gives besides.
    """

    params: QuantParams | None = None
    chosen: tuple[QuantSpec, ChooseSpec] | None = None
    keep: frozenset[Keep] = frozenset()

    def __post_init__(self) -> None:
        assert self.params is None or self.chosen is None, "its parameters are given or chosen"
        is_float = self.params is None and self.chosen is None
        assert self.chosen is None or not self.chosen[1].outer, "one level of scales is chosen"
        assert not (is_float and Keep.FLOAT in self.keep), "a float result is not kept besides"

    @property
    def spec(self) -> QuantSpec | None:
        """What the result is quantized as; ``None`` if it is float."""
        if self.chosen is not None:
            return self.chosen[0]
        return None if self.params is None else self.params.spec

    @property
    def choose(self) -> ChooseSpec | None:
        """How parameters are chosen, if they are."""
        return None if self.chosen is None else self.chosen[1]

    @property
    def count(self) -> int:
        """How many results the op has."""
        return self.place(None)

    def place(self, what: Keep | None) -> int:
        """Return the index of a kept value; of ``None``, what follows the last one."""
        first = 1 if self.chosen is None else 3
        order = [k for k in Keep if k in self.keep]
        return first + (len(order) if what is None else order.index(what))

    def call_args(self) -> tuple[Argument, ...]:
        """Return the arguments of the block."""
        keep = keep_text(self.keep)
        if self.chosen is not None:
            spec, choose = self.chosen
            return (None, None, str(spec), str(choose), keep)
        return (*edge_args(self.params), "", keep)


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """A ``qfuse::rms_norm`` call; its results are its ``getitem`` users."""

    node: Node
    x: Node
    residual: Node | None
    weight: Node | None
    norm: NormSpec
    output: Output

    def call_args(self) -> tuple[Argument, ...]:
        """Return the positional arguments of a ``qfuse::rms_norm`` call with these values."""
        operands = (self.x, self.residual, self.weight)
        return (*operands, str(self.norm), *self.output.call_args())


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """A ``qfuse::layer_norm`` call; its results are its ``getitem`` users."""

    node: Node
    x: Node
    residual: Node | None
    weight: Node | None
    bias: Node | None
    norm: NormSpec
    output: Output

    def call_args(self) -> tuple[Argument, ...]:
        """Return the positional arguments of a ``qfuse::layer_norm`` call with these values."""
        operands = (self.x, self.residual, self.weight, self.bias)
        return (*operands, str(self.norm), *self.output.call_args())


FusedNorm = RmsNorm | LayerNorm


@dataclass(frozen=True, slots=True)
class Activation:
    """A ``qfuse::activation`` call; ``None`` params are a float edge."""

    node: Node
    x: Node
    x_params: QuantParams | None
    epilogue: Epilogue
    extras: tuple[Node, ...]
    output: Output

    @property
    def real(self) -> torch.dtype:
        """Float type that its steps begin with."""
        return dtype_of(self.x) if self.x_params is None else self.x_params.spec.real

    def call_args(self) -> tuple[Argument, ...]:
        """Return the positional arguments of a ``qfuse::activation`` call with these values."""
        operands = (self.x, *edge_args(self.x_params), str(self.epilogue), list(self.extras))
        return (*operands, *self.output.call_args())


def as_rms_norm(value: object) -> RmsNorm | None:
    """View ``value`` as a ``qfuse::rms_norm``, or ``None``."""
    if not isinstance(value, Node) or not is_call(value, ops.rms_norm):
        return None
    a = arguments(value)
    return RmsNorm(
        value,
        node_of(a["x"]),
        optional_node(a["residual"]),
        optional_node(a["weight"]),
        NormSpec.parse(str(a["norm"])),
        _output(a),
    )


def as_layer_norm(value: object) -> LayerNorm | None:
    """View ``value`` as a ``qfuse::layer_norm``, or ``None``."""
    if not isinstance(value, Node) or not is_call(value, ops.layer_norm):
        return None
    a = arguments(value)
    return LayerNorm(
        value,
        node_of(a["x"]),
        optional_node(a["residual"]),
        optional_node(a["weight"]),
        optional_node(a["bias"]),
        NormSpec.parse(str(a["norm"])),
        _output(a),
    )


def as_fused_norm(value: object) -> FusedNorm | None:
    """View ``value`` as a fused norm of either kind, or ``None``."""
    return as_rms_norm(value) or as_layer_norm(value)


def as_activation(value: object) -> Activation | None:
    """View ``value`` as a ``qfuse::activation``, or ``None``."""
    if not isinstance(value, Node) or not is_call(value, ops.activation):
        return None
    a = arguments(value)
    extras = a["extras"]
    assert isinstance(extras, (list, tuple)), f"extras is not a list: {extras!r}"
    return Activation(
        value,
        node_of(a["x"]),
        params_of(a["x_spec"], a["x_scale"], a["x_zero_point"]),
        Epilogue.parse(str(a["epilogue"])),
        tuple(node_of(e) for e in extras),
        _output(a),
    )


def output_of(node: Node) -> Output | None:
    """Return how a fused op of several results gives them; ``None`` for any other node."""
    if not is_call(node, ops.rms_norm, ops.layer_norm, ops.activation):
        return None
    return _output(arguments(node))


def result_of(value: object) -> tuple[Node, int] | None:
    """Return the op that ``value`` is a result of, and which one; ``None`` if it is none."""
    if not isinstance(value, Node) or value.target is not operator.getitem:
        return None
    source, index = value.args
    assert isinstance(source, Node), f"not the result of an op: {value.format_node()}"
    return (source, index) if isinstance(index, int) else None


def stored_spec(node: Node) -> QuantSpec | None:
    """Return what the op that made ``node`` quantized it as; ``None`` if it did not."""
    if (quantize := as_quantize(node)) is not None:
        return quantize.params.spec
    if (requantize := as_requantize(node)) is not None:
        return requantize.out_params.spec
    if (linear := as_fused_linear(node)) is not None:
        return None if linear.out_params is None else linear.out_params.spec
    result = result_of(node)
    output = None if result is None or result[1] != 0 else output_of(result[0])
    return None if output is None else output.spec


def _output(a: dict[str, Argument]) -> Output:
    keep = parse_keep(str(a["keep"]))
    if a["choose"]:
        chosen = QuantSpec.parse(str(a["out_spec"])), ChooseSpec.parse(str(a["choose"]))
        return Output(None, chosen, keep)
    params = params_of(a["out_spec"], a["out_scale"], a["out_zero_point"])
    return Output(params, None, keep)
