"""Typed views of nodes. Rules read nodes through these and never index ``node.args``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node
from torch.fx.node import Argument

from qfuse.ir.graph.schema import arguments, is_call
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.epilogue import Epilogue
from qfuse.ir.quant.choose import ChooseSpec
from qfuse.ir.quant.spec import QuantSpec


@dataclass(frozen=True, slots=True)
class QuantParams:
    """Quantization of one edge of a graph: the spec, and the nodes of scale and zero point.

    Attributes:
        spec: Storage, range, block, arithmetic.
        scale: Node of the scale, in the rank of the tensor.
        zero_point: Node of the zero point, of the same shape, or ``None``.
        outer_scale: Node of the second level of scales, one per block ``spec.outer``, or ``None``.
    """

    spec: QuantSpec
    scale: Node
    zero_point: Node | None
    outer_scale: Node | None = None

    @property
    def tensors(self) -> tuple[Node, ...]:
        """Return the nodes of all that there is: scale, zero point, second level of scales."""
        found = (self.scale, self.zero_point, self.outer_scale)
        return tuple(node for node in found if node is not None)

    def call_args(self, value: Node) -> tuple[Argument, ...]:
        """Return the positional arguments of a quantize or dequantize of ``value``."""
        return (value, *_edge_args(self), *_outer_args(self))

    def same_as(self, other: QuantParams) -> bool:
        """Structural equality: equal specs, and tensors equal by node or by bits.

        A float64 literal and a float32 tensor are never equal here, whatever their values.
        """
        return (
            self.spec == other.spec
            and _same_tensor(self.scale, other.scale)
            and _same_tensor(self.zero_point, other.zero_point)
            and _same_tensor(self.outer_scale, other.outer_scale)
        )


@dataclass(frozen=True, slots=True)
class Quantize:
    """A ``qfuse::quantize`` call."""

    node: Node
    x: Node
    params: QuantParams


@dataclass(frozen=True, slots=True)
class Dequantize:
    """A ``qfuse::dequantize`` call."""

    node: Node
    q: Node
    params: QuantParams


@dataclass(frozen=True, slots=True)
class Requantize:
    """A ``qfuse::requantize`` call."""

    node: Node
    q: Node
    params: QuantParams
    out_params: QuantParams

    def call_args(self) -> tuple[Argument, ...]:
        """Return the positional arguments of a ``qfuse::requantize`` call with these values."""
        return (
            self.q,
            *_edge_args(self.params),
            *_edge_args(self.out_params),
            *_outer_args(self.params, self.out_params),
        )


@dataclass(frozen=True, slots=True)
class Choose:
    """A ``qfuse::choose_qparams`` call; its results are the ``getitem`` users 0 and 1.

    ``outer_scale`` is what the chosen scale is relative to, or ``None``.
    """

    node: Node
    x: Node
    spec: ChooseSpec
    outer_scale: Node | None = None


@dataclass(frozen=True, slots=True)
class Linear:
    """An ``aten.linear`` call: ``x @ weight.T + bias``."""

    node: Node
    x: Node
    weight: Node
    bias: Node | None


@dataclass(frozen=True, slots=True)
class FusedLinear:
    """A ``qfuse::linear`` call. ``None`` params are float edges."""

    node: Node
    x: Node
    x_params: QuantParams | None
    weight: Node
    weight_params: QuantParams | None
    bias: Node | None
    out_params: QuantParams | None
    epilogue: Epilogue
    extras: tuple[Node, ...]

    @property
    def real(self) -> torch.dtype:
        """Float type that it computes in and gives to its epilogue."""
        return dtype_of(self.x) if self.x_params is None else self.x_params.spec.real

    def call_args(self) -> tuple[Argument, ...]:
        """Return the positional arguments of a ``qfuse::linear`` call with these values."""
        return (
            self.x,
            *_edge_args(self.x_params),
            self.weight,
            *_edge_args(self.weight_params),
            self.bias,
            *_edge_args(self.out_params),
            str(self.epilogue),
            list(self.extras),
            *_outer_args(self.x_params, self.weight_params, self.out_params),
        )


def as_quantize(value: object) -> Quantize | None:
    """View ``value`` as a quantize, or ``None``."""
    if not isinstance(value, Node) or not is_call(value, ops.quantize):
        return None
    a = arguments(value)
    params = params_of(a["spec"], a["scale"], a["zero_point"], a["outer_scale"])
    assert params is not None, f"a quantize needs a spec: {value.format_node()}"
    return Quantize(value, node_of(a["x"]), params)


def as_dequantize(value: object) -> Dequantize | None:
    """View ``value`` as a dequantize, or ``None``."""
    if not isinstance(value, Node) or not is_call(value, ops.dequantize):
        return None
    a = arguments(value)
    params = params_of(a["spec"], a["scale"], a["zero_point"], a["outer_scale"])
    assert params is not None, f"a dequantize needs a spec: {value.format_node()}"
    return Dequantize(value, node_of(a["q"]), params)


def as_requantize(value: object) -> Requantize | None:
    """View ``value`` as a requantize, or ``None``."""
    if not isinstance(value, Node) or not is_call(value, ops.requantize):
        return None
    a = arguments(value)
    params = params_of(a["spec"], a["scale"], a["zero_point"], a["outer_scale"])
    out = params_of(a["out_spec"], a["out_scale"], a["out_zero_point"], a["out_outer_scale"])
    assert params is not None, f"a requantize needs a spec: {value.format_node()}"
    assert out is not None, f"a requantize needs a spec of its result: {value.format_node()}"
    return Requantize(value, node_of(a["q"]), params, out)


def as_choose(value: object) -> Choose | None:
    """View ``value`` as a choose_qparams, or ``None``."""
    if not isinstance(value, Node) or not is_call(value, ops.choose_qparams):
        return None
    a = arguments(value)
    spec, outer = ChooseSpec.parse(str(a["choose"])), optional_node(a["outer_scale"])
    return Choose(value, node_of(a["x"]), spec, outer)


def as_linear(value: object) -> Linear | None:
    """View ``value`` as an ``aten.linear``, or ``None``."""
    if not isinstance(value, Node) or not is_call(value, torch.ops.aten.linear.default):
        return None
    a = arguments(value)
    return Linear(value, node_of(a["input"]), node_of(a["weight"]), optional_node(a["bias"]))


def as_fused_linear(value: object) -> FusedLinear | None:
    """View ``value`` as a ``qfuse::linear``, or ``None``."""
    if not isinstance(value, Node) or not is_call(value, ops.linear):
        return None
    a = arguments(value)
    extras = a["extras"]
    assert isinstance(extras, (list, tuple)), f"extras is not a list: {extras!r}"
    return FusedLinear(
        value,
        node_of(a["x"]),
        params_of(a["x_spec"], a["x_scale"], a["x_zero_point"], a["x_outer_scale"]),
        node_of(a["weight"]),
        params_of(
            a["weight_spec"], a["weight_scale"], a["weight_zero_point"], a["weight_outer_scale"]
        ),
        optional_node(a["bias"]),
        params_of(a["out_spec"], a["out_scale"], a["out_zero_point"], a["out_outer_scale"]),
        Epilogue.parse(str(a["epilogue"])),
        tuple(node_of(e) for e in extras),
    )


def node_of(value: Argument) -> Node:
    """Return ``value``, which must be a node."""
    assert isinstance(value, Node), f"not a node: {value!r}"
    return value


def optional_node(value: Argument) -> Node | None:
    """Return ``value``, which must be a node or ``None``."""
    return None if value is None else node_of(value)


def tensor_of(node: Node) -> torch.Tensor:
    """Return the fake tensor that stands for ``node``'s value."""
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor), f"{node} is not a tensor: {value!r}"
    return value


def shape_of(node: Node) -> Sequence[int | torch.SymInt]:
    """Return the (possibly symbolic) shape of ``node``'s value."""
    return tuple(tensor_of(node).shape)


def dtype_of(node: Node) -> torch.dtype:
    """Return the dtype of ``node``'s value."""
    return tensor_of(node).dtype


def scalar_of(node: Node) -> int | float | None:
    """Return the value of a constant of one element, or ``None``."""
    value = constant_of(node)
    if value is None or value.numel() != 1 or not has_values(value):
        return None
    item: int | float = value.item()
    return item


def params_of(
    spec: Argument, scale: Argument, zero_point: Argument, outer: Argument = None
) -> QuantParams | None:
    """Return the parameters of an edge, which is float if the spec is empty."""
    if not spec:
        return None
    found = QuantSpec.parse(str(spec))
    return QuantParams(found, node_of(scale), optional_node(zero_point), optional_node(outer))


def edge_args(params: QuantParams | None) -> tuple[Argument, ...]:
    """Return scale, zero point and spec as arguments; those of a float edge for ``None``.

    For ops whose edges have no second level of scales.
    """
    assert params is None or params.outer_scale is None, f"one level of scales: {params}"
    return _edge_args(params)


def _edge_args(params: QuantParams | None) -> tuple[Argument, ...]:
    if params is None:
        return (None, None, "")
    return (params.scale, params.zero_point, str(params.spec))


def _outer_args(*edges: QuantParams | None) -> tuple[Argument, ...]:
    """Return the second levels of scales of all edges; nothing if there are none at the end."""
    found: list[Argument] = [None if edge is None else edge.outer_scale for edge in edges]
    while found and found[-1] is None:
        found.pop()
    return tuple(found)


def _same_tensor(a: Node | None, b: Node | None) -> bool:
    if a is b:
        return True
    if a is None or b is None:
        return False
    left, right = constant_of(a), constant_of(b)
    return (
        left is not None
        and right is not None
        and left.dtype == right.dtype
        and left.shape == right.shape
        and left.device == right.device
        and bits_equal(left, right)
    )


def has_values(constant: torch.Tensor) -> bool:
    """Whether a constant can be read: on the meta device there is nothing but a shape."""
    return not constant.is_meta


def bits_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of equal dtype and shape hold the same bits (so -0.0 is not 0.0).

    What has no values is equal to itself alone.
    """
    if a is b:
        return True
    return has_values(a) and has_values(b) and torch.equal(_bytes(a), _bytes(b))


def bits_of(value: torch.Tensor) -> bytes:
    """Return the bits that :func:`bits_equal` compares, to be looked up."""
    return bytes(_bytes(value).cpu().numpy())


def _bytes(value: torch.Tensor) -> torch.Tensor:
    flat = value.detach().contiguous().reshape(-1)
    # A single element is contiguous whatever its stride says, but is not viewed as bytes then.
    flat = flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)
