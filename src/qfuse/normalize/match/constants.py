"""Constant expressions, and constants derived from them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod
from typing import Any

import torch
from torch.fx.node import map_arg

from qfuse.ir.graph.schema import is_call, overload_of
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.constants import constant_value, is_constant_expression, operands_first
from qfuse.ir.ops.views import bits_equal, has_values, result_of
from qfuse.ir.sizes import Size
from qfuse.rewrite.prelude import Node, OpOverload, Rewriter, aten

# Larger tensors are compared by identity.
_LIMIT = 1 << 22
# A weight that the graph quantizes. A dequantized weight would be larger than the stored one.
_QUANTIZING = (ops.quantize, ops.choose_qparams)
# Scales of large weights in small groups are not larger; weights are.
_PARAMETERS = 1 << 20


def evaluated(node: Node) -> torch.Tensor | None:
    """Compute a constant expression of any ATen ops and any size, or return ``None``.

    For values that would otherwise be computed in every call, such as weights that are unpacked, or
    that the graph quantizes.
    """
    if not is_constant_expression(node):
        return None
    known: dict[Node, Any] = {}
    for top in operands_first(node):
        value = _called(top, known)
        parts = value if isinstance(value, (tuple, list)) else [value]
        if any(not isinstance(part, torch.Tensor) or part.is_meta for part in parts):
            return None
        known[top] = value
    value = known[node]
    return value if isinstance(value, torch.Tensor) else None


def parameter_value(node: object) -> torch.Tensor | None:
    """Return the value of a scale or offset that depends only on constants, or ``None``.

    Unlike :func:`~qfuse.ir.ops.constants.constant_value`, through a dequantize: the scales of a
    weight may be quantized themselves.
    """
    known = constant_value(node)
    if known is not None or not isinstance(node, Node) or not is_constant_expression(node):
        return known
    values: dict[Node, Any] = {}
    for top in operands_first(node):
        fake = top.meta.get("val")
        if not isinstance(fake, torch.Tensor) or not _is_small(fake.shape):
            return None
        values[top] = _called(top, values, (ops.dequantize,))
        if not isinstance(values[top], torch.Tensor) or not has_values(values[top]):
            return None
    result: torch.Tensor = values[node]
    return result


def _is_small(shape: Sequence[Size]) -> bool:
    sizes = [size for size in shape if isinstance(size, int)]
    return len(sizes) == len(shape) and prod(sizes) <= _PARAMETERS


def _called(
    node: Node, known: dict[Node, Any], ours: Collection[OpOverload] = _QUANTIZING
) -> object:
    """Return the value of a constant, or of a deterministic call of known values."""
    if node.op == "get_attr":
        return constant_of(node)
    result = result_of(node)
    if result is not None:
        source, index = result
        return known[source][index]
    op = overload_of(node)
    # Another library's op may have effects, and a random one has other values in each call.
    if op is None or torch.Tag.nondeterministic_seeded in op.tags:
        return None
    if op.namespace != "aten" and op not in ours:
        return None
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: known[n])
    with torch.no_grad():
        made = op(*args, **kwargs)
    # Memory that a graph writes parts to may have any values where it does not; these are the same
    # in every compilation.
    return made.zero_() if op is aten.empty.memory_format else made


def is_unit(scale: Node) -> bool:
    """Whether a scale is 1 by construction, as a placeholder for a scale that is applied later."""
    if is_call(scale, aten.ones_like.default):
        return True
    value = constant_of(scale)
    return value is not None and not value.is_meta and value.numel() == 1 and value.item() == 1


def unit_scale(rw: Rewriter, q: Node, rank: int) -> Node:
    """Return the scale 1 of quantized values whose scale is applied later, or is 1."""
    return shared_constant(rw, q, torch.ones((1,) * rank), f"one_of_rank_{rank}")


def derived(rw: Rewriter, home: Node, value: torch.Tensor, what: str) -> Node:
    """Add a constant that is derived from ``home``, once.

    A value equal to ``home`` itself returns ``home``; one that was derived before under the same
    name returns that constant, so tied parameters stay tied.

    Args:
        rw: The rewriter.
        home: The constant that the value is derived from.
        value: The value.
        what: The suffix of the constant's name.
    """
    own = constant_of(home)
    if own is not None and _same(own, value):
        return rw.constant(own, str(home.target))
    owner = home.target if home.op == "get_attr" else home.name
    if not has_values(value):
        # The same derivation of one tensor is the same constant, although there are no bits to
        # compare.
        return _derived_without_values(rw, home, value, f"{owner}_{what}")
    return shared_constant(rw, home, value, f"{owner}_{what}")


def _derived_without_values(rw: Rewriter, home: Node, value: torch.Tensor, name: str) -> Node:
    parts = (name, str(value.dtype), *map(str, value.shape), *map(str, value.stride()))
    name = "".join(c if c.isalnum() else "_" for c in "_".join(parts).replace("torch.", ""))
    known = getattr(home.graph.owning_module, name, None)
    return rw.constant(known if isinstance(known, torch.Tensor) else value, name)


def shared_constant(rw: Rewriter, near: Node, value: torch.Tensor, name: str) -> Node:
    """Add a constant under ``name``, or return the equal one that has this name already.

    Args:
        rw: The rewriter.
        near: Any node of the graph.
        value: The value.
        name: The name.
    """
    name = "".join(c if c.isalnum() else "_" for c in name)
    known = getattr(near.graph.owning_module, name, None)
    # Equal values under one name are one parameter; other values get a fresh name.
    if isinstance(known, torch.Tensor) and _same(known, value):
        return rw.constant(known, name)
    return rw.constant(value, name)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device:
        return False
    if not has_values(a) or not has_values(b):
        # A meta tensor has no bits, so only the object itself is known to be equal.
        return a is b
    if a.data_ptr() == b.data_ptr() and a.stride() == b.stride():
        return True
    return a.numel() <= _LIMIT and bits_equal(a, b)
