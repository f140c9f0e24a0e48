"""Sizes and predicted times of products, quantizes and dequantizes, for the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from qfuse.cost import CostModel, hint_of
from qfuse.cost.work import ComputeKind, Work
from qfuse.ir.aten import aten
from qfuse.ir.dtypes import bit_width
from qfuse.ir.events import Estimated, Missed
from qfuse.ir.graph.schema import arguments, is_call, overload_of
from qfuse.ir.graph.stage_graph import StageGraph, place_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.convolution import as_convolution, as_fused_convolution
from qfuse.ir.ops.linear import as_fused_linear, as_linear
from qfuse.ir.ops.matmul import as_fused_matmul, as_matmul
from qfuse.ir.ops.views import node_of
from qfuse.ir.recurrent import RECURRENT

# Nodes upstream of a product that name the op its operand comes from; more do not explain it.
_MOST_UPSTREAM = 24
_INT8_BYTES = 1
_MATRIX = 2


def log_estimates(program: StageGraph, cost: CostModel, stage: str) -> None:
    """Log an estimate of every product, quantize and dequantize, and of what a rule declined."""
    declined = {miss.anchor.node for miss in program.log.of(Missed)}
    for node in program.graph.nodes:
        if is_call(node, ops.quantize, ops.dequantize, ops.requantize):
            seconds = cost.seconds(_pass_over(node))
            program.log.add(Estimated(stage, place_of(node), 0, seconds))
            continue
        size = _size_of(node)
        if size is not None:
            program.log.add(
                Estimated(
                    stage,
                    place_of(node),
                    size.multiply_adds,
                    cost.seconds(size.in_float()),
                    cost.seconds(size.in_int8()),
                    tuple(_upstream(node)),
                )
            )
        elif node.name in declined and _is_pass(node):
            seconds = cost.seconds(_pass_over(node))
            program.log.add(Estimated(stage, place_of(node), 0, seconds))


@dataclass(frozen=True, slots=True)
class _Size:
    """A product of a left operand of ``left`` elements with ``right`` elements.

    Attributes:
        multiply_adds: Products of two elements.
        rows: Rows of the result, as a matrix.
        left: Elements of the activation.
        right: Elements of the weight, or of the second activation.
        out: Elements of the result.
        constant: Whether the right operand is a weight.
        dtype: Float dtype.
    """

    multiply_adds: int
    rows: int
    left: int
    right: int
    out: int
    constant: bool
    dtype: torch.dtype

    def in_float(self) -> Work:
        """Return the work in the float dtype."""
        kind = ComputeKind.BF16 if self.dtype is torch.bfloat16 else ComputeKind.F32
        return self._work(kind, bit_width(self.dtype) // 8)

    def in_int8(self) -> list[Work]:
        """Return the work on 8-bit integers, after a pass that quantizes the activations."""
        width = bit_width(self.dtype) // 8
        moved = self.left if self.constant else self.left + self.right
        quantize = Work(reads=(float(moved * width),), writes=(float(moved),), kernel_calls=0)
        return [quantize, self._work(ComputeKind.INT8, _INT8_BYTES)]

    def _work(self, kind: ComputeKind, width: int) -> Work:
        right = float(self.right * width)
        return Work(
            flops=2.0 * self.multiply_adds,
            kind=kind,
            weight_bytes=right if self.constant else 0.0,
            reads=(float(self.left * width), *(() if self.constant else (right,))),
            writes=(float(self.out * bit_width(self.dtype) // 8),),
            one_row_flops=2.0 * self.multiply_adds / max(self.rows, 1),
        )


def _size_of(node: Node) -> _Size | None:
    """Return the size of a linear, convolution, matmul, attention or recurrent layer."""
    linear = as_fused_linear(node) or as_linear(node)
    if linear is not None:
        return _product(node, linear.x, linear.weight, constant=True)
    convolution = as_fused_convolution(node) or as_convolution(node)
    if convolution is not None:
        return _convolution(node, convolution.x, convolution.weight)
    matmul = as_fused_matmul(node) or as_matmul(node)
    if matmul is not None:
        constant = matmul.other.op == "get_attr"
        return _product(node, matmul.x, matmul.other, constant=constant)
    if is_call(node, aten.scaled_dot_product_attention.default):
        a = arguments(node)
        return _attention(node, node_of(a["query"]), node_of(a["key"]), node_of(a["value"]))
    return _recurrent(node, arguments(node)) if is_call(node, *RECURRENT) else None


def _product(node: Node, x: Node, other: Node, *, constant: bool) -> _Size:
    left, right, out = (_numel(n) for n in (x, other, node))
    depth = _last(x)
    columns = max(_last(node), 1)
    return _Size(out * depth, out // columns, left, right, out, constant, _float_dtype(node))


def _convolution(node: Node, x: Node, weight: Node) -> _Size:
    left, right, out = (_numel(n) for n in (x, weight, node))
    convolution = as_fused_convolution(node) or as_convolution(node)
    transposed = getattr(convolution, "transposed", False) is True
    # Every element of the input (transposed) or of the result is multiplied with one filter.
    filters = max(_shape(weight)[0], 1)
    products = (left if transposed else out) * (right // filters)
    return _Size(products, max(out // filters, 1), left, right, out, True, _float_dtype(node))


def _attention(node: Node, query: Node, key: Node, value: Node) -> _Size:
    elements = _numel(query)
    keys = _shape(key)[-2]
    # Scores, and the weighted sum of the values.
    products = elements * keys + _numel(node) * keys
    read = _numel(key) + _numel(value)
    rows = elements // max(_last(query), 1)
    out = _numel(node)
    return _Size(products, rows, elements, read, out, False, _float_dtype(node))


def _recurrent(node: Node, a: Mapping[str, Any]) -> _Size:
    x = node_of(a["input"] if "input" in a else a["data"])
    # Each step of each sequence is multiplied by every matrix once: the state's, and the input's.
    matrices = [node_of(w) for w in a["params"]] if "params" in a else [a["weight0"], a["weight1"]]
    right = sum(_numel(matrix) for matrix in matrices if len(_shape(matrix)) == _MATRIX)
    left = _numel(x)
    steps = left // max(_last(x), 1)
    # A state is multiplied only when the one before is known.
    state = a["hx_"] if "hx_" in a else a["hx"]
    rows = _shape(node_of(state[0] if isinstance(state, (list, tuple)) else state))[-2]
    return _Size(steps * right, rows, left, right, _numel(node), True, _float_dtype(node))


def _is_pass(node: Node) -> bool:
    """Whether an op reads a tensor and writes one."""
    op = overload_of(node)
    if op is None or op.is_view or _value(node) is None or not node.all_input_nodes:
        return False
    return _value(node.all_input_nodes[0]) is not None


def _pass_over(node: Node) -> Work:
    """Return the work of a loop that reads the operand and writes the result."""
    source = node.all_input_nodes[0]
    read, written = (_numel(n) * _bits(n) / 8 for n in (source, node))
    # A weight comes from memory on every call.
    if source.op == "get_attr":
        return Work(weight_bytes=read, writes=(written,))
    return Work(reads=(read,), writes=(written,))


def _upstream(node: Node) -> Iterator[str]:
    """Yield the names of the calls that the operands are computed from, nearest first."""
    queue = list(node.all_input_nodes)
    seen: set[Node] = set()
    while queue and len(seen) < _MOST_UPSTREAM:
        source = queue.pop(0)
        # Another product ends the computation of an operand.
        if source in seen or source.op != "call_function" or _is_product(source):
            continue
        seen.add(source)
        yield source.name
        queue += source.all_input_nodes


def _is_product(node: Node) -> bool:
    if is_call(node, *RECURRENT):
        return True
    views = (as_fused_linear, as_linear, as_fused_convolution, as_convolution, as_fused_matmul)
    return any(view(node) is not None for view in views) or as_matmul(node) is not None


def _value(node: Node) -> torch.Tensor | None:
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        value = next((one for one in value if isinstance(one, torch.Tensor)), None)
    return value if isinstance(value, torch.Tensor) else None


def _shape(node: Node) -> tuple[int, ...]:
    value = _value(node)
    return () if value is None else tuple(hint_of(size) for size in value.shape)


def _last(node: Node) -> int:
    return (1, *_shape(node))[-1]


def _numel(node: Node) -> int:
    total = 1
    for size in _shape(node):
        total *= size
    return total


def _bits(node: Node) -> int:
    value = _value(node)
    return 8 if value is None else bit_width(value.dtype)


def _float_dtype(node: Node) -> torch.dtype:
    value = _value(node)
    known = value is not None and value.dtype in {torch.bfloat16, torch.float16}
    return torch.bfloat16 if known else torch.float32
