"""Typed accessors for nodes and quantization parameters, so that rules never index ``args``."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch.fx import Node
from torch.fx.node import Argument

from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.quant.spec import QuantSpec


@dataclass(frozen=True, slots=True)
class QuantParams:
    """Quantization parameters of one value: the spec, and the nodes of scale and zero point.

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
        """Return the nodes that are present: scale, zero point, second level of scales."""
        found = (self.scale, self.zero_point, self.outer_scale)
        return tuple(node for node in found if node is not None)

    @property
    def args(self) -> tuple[Argument, ...]:
        """Return scale, zero point and spec as arguments."""
        return (self.scale, self.zero_point, str(self.spec))

    @property
    def reference_args(self) -> tuple[Any, ...]:
        """Return the arguments after the tensor for the reference of quantize or dequantize."""
        return (self.scale, self.zero_point, self.spec, self.outer_scale)

    def call_args(self, value: Node) -> tuple[Argument, ...]:
        """Return the positional arguments of a quantize or dequantize of ``value``."""
        outer = () if self.outer_scale is None else (self.outer_scale,)
        return (value, *self.args, *outer)

    def widened(self) -> Self:
        """Return the parameters that compute in float64."""
        return replace(self, spec=self.spec.widened())

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


def node_of(value: Argument) -> Node:
    """Return ``value``, which must be a node."""
    assert isinstance(value, Node), f"not a node: {value!r}"
    return value


def optional_node(value: Argument) -> Node | None:
    """Return ``value``, which must be a node or ``None``."""
    return None if value is None else node_of(value)


def result_of(value: object) -> tuple[Node, int] | None:
    """Return the op that ``value`` is a ``getitem`` of, and the index; otherwise ``None``."""
    if not isinstance(value, Node) or value.target is not operator.getitem:
        return None
    source, index = value.args
    assert isinstance(source, Node), f"not the result of an op: {value.format_node()}"
    return (source, index) if isinstance(index, int) else None


def results_of(node: Node) -> dict[int, Node]:
    """Return the ``getitem`` users of a node with several results, by index."""
    return dict(all_results_of(node))


def all_results_of(node: Node) -> list[tuple[int, Node]]:
    """Return the index of each ``getitem`` user and the user: an index may come more than once."""
    return [
        (int(u.args[1]), u)  # type: ignore[arg-type]
        for u in node.users
        if u.target is operator.getitem
    ]


def tensor_of(node: Node) -> torch.Tensor:
    """Return the fake tensor of ``node``."""
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor), f"{node} is not a tensor: {value!r}"
    return value


def shape_of(node: Node) -> Sequence[int | torch.SymInt]:
    """Return the (possibly symbolic) shape of ``node``'s value."""
    return tuple(tensor_of(node).shape)


def dtype_of(node: Node) -> torch.dtype:
    """Return the dtype of ``node``'s value."""
    return tensor_of(node).dtype


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
    """Whether a constant has data that can be read; on the meta device or packed it does not."""
    return not constant.is_meta and constant.layout is torch.strided


def bits_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of equal dtype and shape hold the same bits (so -0.0 is not 0.0).

    A tensor without data is only equal to itself.
    """
    if a is b:
        return True
    return has_values(a) and has_values(b) and torch.equal(_bytes(a), _bytes(b))


def bytes_of(value: torch.Tensor) -> bytes:
    """Return the bits that :func:`bits_equal` compares, as a hashable key."""
    return bytes(_bytes(value).cpu().numpy())


def _bytes(value: torch.Tensor) -> torch.Tensor:
    flat = value.detach().contiguous().reshape(-1)
    # A single element is contiguous for any stride, but only unit strides can be viewed as bytes.
    flat = flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)
