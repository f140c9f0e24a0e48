"""Sizes and predicted times of products, quantizes and dequantizes, for the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.fx import Node

from qfuse.cost import CostModel, hint_of, size_range
from qfuse.cost.sizes import SizeRange
from qfuse.cost.work import Work
from qfuse.ir.aten import aten
from qfuse.ir.dtypes import bit_width
from qfuse.ir.events import Estimated, Missed
from qfuse.ir.graph.schema import arguments, is_call, overload_of
from qfuse.ir.graph.stage_graph import StageGraph, SymbolRange, place_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.convolution import FusedConvolution, as_convolution, as_fused_convolution
from qfuse.ir.ops.linear import FusedLinear, as_fused_linear, as_linear
from qfuse.ir.ops.matmul import FusedMatmul, as_fused_matmul, as_matmul
from qfuse.ir.ops.views import node_of
from qfuse.ir.recurrent import RECURRENT
from qfuse.ir.sizes import product
from qfuse.lower.product_size import Form, Int8Kernels, ProductSize

# Nodes upstream of a product that name the op its operand comes from; more do not explain it.
_MOST_UPSTREAM = 24
_MATRIX = 2


def log_estimates(program: StageGraph, cost: CostModel, kernels: Int8Kernels, stage: str) -> None:
    """Log an estimate of every product, quantize and dequantize, and of what a rule declined."""
    declined = {miss.anchor.node for miss in program.log.of(Missed)}
    for node in program.graph.nodes:
        if is_call(node, ops.quantize, ops.dequantize, ops.requantize):
            seconds = cost.seconds(_pass_over(node))
            program.log.add(Estimated(stage, place_of(node), 0, seconds))
            continue
        size = _size_of(node, program.signature.symbols)
        if size is not None:
            program.log.add(
                Estimated(
                    stage,
                    place_of(node),
                    size.multiply_adds,
                    size.float_seconds(cost),
                    size.int8_seconds(cost, kernels),
                    tuple(_upstream(node)),
                )
            )
        elif node.name in declined and _is_pass(node):
            seconds = cost.seconds(_pass_over(node))
            program.log.add(Estimated(stage, place_of(node), 0, seconds))


def _size_of(node: Node, symbols: Mapping[str, SymbolRange]) -> ProductSize | None:
    """Return the size of a linear, convolution, matmul, attention or recurrent layer."""
    fused_linear, fused_convolution = as_fused_linear(node), as_fused_convolution(node)
    linear = fused_linear or as_linear(node)
    if linear is not None:
        quantized = fused_linear is not None and _is_quantized(fused_linear)
        return _linear(node, linear.x, linear.weight, symbols, quantized=quantized)
    convolution = fused_convolution or as_convolution(node)
    if convolution is not None:
        quantized = fused_convolution is not None and _is_quantized(fused_convolution)
        return _convolution(node, convolution.x, convolution.weight, quantized=quantized)
    fused_matmul = as_fused_matmul(node)
    matmul = fused_matmul or as_matmul(node)
    if matmul is not None:
        if fused_matmul is None and matmul.other.op == "get_attr":
            return _linear(node, matmul.x, matmul.other, symbols, quantized=False)
        quantized = fused_matmul is not None and _is_quantized(fused_matmul)
        return _matmul(node, matmul.x, matmul.other, quantized=quantized)
    if is_call(node, aten.scaled_dot_product_attention.default):
        a = arguments(node)
        return _attention(node, node_of(a["query"]), node_of(a["key"]), node_of(a["value"]))
    return _recurrent(node, arguments(node)) if is_call(node, *RECURRENT) else None


def _is_quantized(fused: FusedLinear | FusedConvolution | FusedMatmul) -> bool:
    other = fused.other_params if isinstance(fused, FusedMatmul) else fused.weight_params
    return fused.x_params is not None or other is not None


def _linear(
    node: Node, x: Node, weight: Node, symbols: Mapping[str, SymbolRange], *, quantized: bool
) -> ProductSize:
    left, right, out = (_numel(n) for n in (x, weight, node))
    k, n = _last(x), max(_last(node), 1)
    # A batch of weights is a batch of linears.
    count = max(right // max(k * n, 1), 1)
    rows = _fixed(out // n // count)
    value = _value(node)
    if count == 1 and value is not None:
        rows = size_range(product(value.shape[:-1]), symbols)
    dtype = _float_dtype(node)
    return ProductSize(
        *(Form.LINEAR, out * k, rows, left, right, out, dtype), k, n, count, quantized
    )


def _matmul(node: Node, x: Node, other: Node, *, quantized: bool) -> ProductSize:
    left, right, out = (_numel(n) for n in (x, other, node))
    rows, dtype = _fixed(out // max(_last(node), 1)), _float_dtype(node)
    return ProductSize(
        *(Form.MATMUL, out * _last(x), rows, left, right, out, dtype), quantized=quantized
    )


def _convolution(node: Node, x: Node, weight: Node, *, quantized: bool) -> ProductSize:
    left, right, out = (_numel(n) for n in (x, weight, node))
    convolution = as_fused_convolution(node) or as_convolution(node)
    transposed = getattr(convolution, "transposed", False) is True
    # Every element of the input (transposed) or of the result is multiplied with one filter.
    filters = max(_shape(weight)[0], 1)
    products = (left if transposed else out) * (right // filters)
    rows, dtype = _fixed(max(out // filters, 1)), _float_dtype(node)
    return ProductSize(
        *(Form.CONVOLUTION, products, rows, left, right, out, dtype), quantized=quantized
    )


def _attention(node: Node, query: Node, key: Node, value: Node) -> ProductSize:
    elements = _numel(query)
    keys = _shape(key)[-2]
    # Scores, and the weighted sum of the values.
    products = elements * keys + _numel(node) * keys
    read = _numel(key) + _numel(value)
    rows, dtype = _fixed(elements // max(_last(query), 1)), _float_dtype(node)
    return ProductSize(Form.MATMUL, products, rows, elements, read, _numel(node), dtype)


def _recurrent(node: Node, a: Mapping[str, Any]) -> ProductSize:
    x = node_of(a["input"] if "input" in a else a["data"])
    # Each step of each sequence is multiplied by every matrix once: the state's, and the input's.
    matrices = [node_of(w) for w in a["params"]] if "params" in a else [a["weight0"], a["weight1"]]
    right = sum(_numel(matrix) for matrix in matrices if len(_shape(matrix)) == _MATRIX)
    left = _numel(x)
    steps = left // max(_last(x), 1)
    # A state is multiplied only when the one before is known.
    state = a["hx_"] if "hx_" in a else a["hx"]
    rows = _shape(node_of(state[0] if isinstance(state, (list, tuple)) else state))[-2]
    sizes = (steps * right, _fixed(rows), left, right, _numel(node), _float_dtype(node))
    return ProductSize(Form.RECURRENT, *sizes)


def _fixed(size: int) -> SizeRange:
    return SizeRange(size, size, size)


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
