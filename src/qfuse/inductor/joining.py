"""Concatenate constants with as few calls as possible, which freezing folds to one constant.

Freezing folds ops on weights, except those that its own patterns match: a dequantize and the cast
of an int8 weight. The operands of these are concatenated, so that the patterns still match.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.node import map_arg

from qfuse.inductor._inductor_api import mark_frozen
from qfuse.inductor.constants import Constants
from qfuse.inductor.numbers import Numbers
from qfuse.inductor.products import call
from qfuse.ir.graph.schema import is_call, overload_of
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.normalize.importers.library.encoding import dense_values
from qfuse.rewrite.prelude import Miss, MissCode, Node, OpOverload, Rewriter, arguments, aten

_prims = torch.ops.prims
_CAST = _prims.convert_element_type.default
_MATRIX = 2
_CHANNELS = "dequantize_per_channel"
_TENSOR = "dequantize_per_tensor"


@dataclass(frozen=True, slots=True)
class JoinedProducts:
    """How to merge the same operand of several siblings.

    Attributes:
        parts: The nodes.
        axis: The concatenation axis; ``None`` if they are equal and one is used.
        below: What is concatenated instead, by argument name of the call that they share.
        values: The values of the parts, if the user needs a constant already, or if they are
            packed by oneDNN.
    """

    parts: tuple[Node, ...]
    axis: int | None
    below: Mapping[str, JoinedProducts] | None = None
    values: tuple[torch.Tensor, ...] = ()

    def build(self, rw: Rewriter, place: Callable[[Node], Node]) -> Node:
        """Emit the merged value."""
        first = self.parts[0]
        if self.axis is None:
            return place(first)
        if self.values and self.values[0].is_mkldnn:
            return _packed_again(self.values, first, rw)
        if self.values:
            made = rw.constant(torch.cat(self.values, self.axis), "joined")
            mark_frozen(attribute_value(made))
            return made
        if self.below is None:
            return _beside([place(part) for part in self.parts], self.axis, rw)
        given: dict[str, Any] = dict(arguments(first))
        given |= {name: join.build(rw, place) for name, join in self.below.items()}
        op = overload_of(first)
        assert op is not None, "only calls are joined below"
        return call(op, given, rw)


@dataclass(frozen=True, slots=True)
class ProductSpelling:
    """An op that freezing does not fold, without its tensors.

    Attributes:
        op: Its name.
        given: The other arguments, by name.
        below: The ops that compute its tensors, by argument name.
    """

    op: str
    given: tuple[tuple[str, Hashable], ...]
    below: tuple[tuple[str, Hashable], ...]


def spelling(part: Node, axis: int, known: Constants, numbers: Numbers) -> Hashable | Miss:
    """Return a key that is equal for constants that can be concatenated along ``axis``.

    Nodes that freezing folds always can be; of the ops that it keeps for its patterns, calls of one
    op that differ only in tensors.
    """
    if known.folded(part):
        return "computed"
    below = _below([part], axis, numbers)
    if below is None:
        text = "its parts would be concatenated in every call: freezing does not fold it"
        return Miss(MissCode.NOT_CONSTANT, part, text, progress=3)
    inner: list[tuple[str, Hashable]] = []
    for name, ((node,), at) in below.items():
        found = spelling(node, at, known, numbers)
        if isinstance(found, Miss):
            return found
        inner.append((name, found))
    return ProductSpelling(str(part.target), _without_data(part, numbers), tuple(inner))


def plan_join(
    parts: Sequence[Node], axis: int, known: Constants, numbers: Numbers, *, now: bool = False
) -> JoinedProducts | Miss:
    """Decide how to concatenate constants along ``axis`` without work at run time."""
    rank = len(shape_of(parts[0]))
    axis %= max(rank, 1)
    below = _below(parts, axis, numbers)
    if below is not None:
        # Freezing keeps a cast of int8 only if its operand is a constant. Of a `cat` node in its
        # place it would fold both, to a bfloat16 weight of twice the size.
        now = now or (is_call(parts[0], _CAST) and not all(map(known.folded, parts)))
        planned: dict[str, JoinedProducts] = {}
        for name, (inner, at) in below.items():
            made = plan_join(inner, at, known, numbers, now=now)
            if isinstance(made, Miss):
                return made
            planned[name] = made
        return JoinedProducts(tuple(parts), axis, planned)
    assert all(map(known.folded, parts)), "siblings are spelled alike"
    leaves = [known.values.get(part) for part in parts]
    values = tuple(value for value in leaves if value is not None)
    packed = [value is not None and value.is_mkldnn for value in leaves]
    # Packed weights are opaque: they can be unpacked and joined along their output features, but
    # neither with plain tensors nor along another axis.
    if any(packed) and not (all(packed) and axis == 1):
        # The report names one of the minority, which the others could merge without.
        fewer = 2 * sum(packed) <= len(packed)
        odd = next((p for p, own in zip(parts, packed, strict=True) if own is fewer), parts[0])
        text = "some of its siblings' weights are packed by oneDNN, and some are not"
        return Miss(MissCode.NOT_CONSTANT, odd, text, progress=3)
    now = now or any(packed)
    return JoinedProducts(
        tuple(parts), axis, None, values if now and len(values) == len(parts) else ()
    )


def _beside(parts: Sequence[Node], axis: int, rw: Rewriter) -> Node:
    """Concatenate parts, keeping their memory format."""
    values = [part.meta["val"] for part in parts]
    # `cat` of transposed weights would return row-major memory.
    turned = [v.dim() == _MATRIX and v.stride(0) == 1 and v.stride(1) != 1 for v in values]
    if axis != 1 or not all(turned):
        return rw.call(aten.cat.default, list(parts), axis)
    rows = [rw.call(aten.permute.default, part, [1, 0]) for part in parts]
    return rw.call(aten.permute.default, rw.call(aten.cat.default, rows), [1, 0])


def _packed_again(values: Sequence[torch.Tensor], like: Node, rw: Rewriter) -> Node:
    """Concatenate int8 weights that oneDNN packed: unpacking returns the exact values, [K, N]."""
    dense = torch.cat([dense_values(value) for value in values], 1)
    # Packed again in the graph: freezing folds that, and the constant is an ordinary tensor.
    weight = rw.constant(dense.t().contiguous(), "joined")
    mark_frozen(attribute_value(weight))
    old, pack = like.meta["val"], torch.ops.onednn.qlinear_prepack.default
    value = old.new_empty(tuple(dense.shape))
    return rw.replay(pack, (weight, None), {}, value)


def join_vectors(parts: Sequence[Node | int], rw: Rewriter, give: Callable[[Node], Node]) -> Node:
    """Concatenate vectors; a missing one, passed as its width, is filled with -0.0.

    Adding -0.0 does not change any value, not even 0.0 or -0.0.
    """
    like = next(part.meta["val"] for part in parts if isinstance(part, Node))
    joined: list[Node] = []
    for part in parts:
        if isinstance(part, Node):
            joined.append(give(part))
        else:
            zeros = torch.full((part,), -0.0, dtype=like.dtype, device=like.device)
            joined.append(rw.constant(zeros, "no_bias"))
    return rw.call(aten.cat.default, joined)


class Placer:
    """Provides constants before a node, by recomputing those that come after it.

    Args:
        known: The constants of the graph.
        order: The position of every node in the original graph.
    """

    def __init__(self, known: Constants, order: Mapping[Node, int]) -> None:
        self._known = known
        self._order = order

    def at(self, place: Node, rw: Rewriter) -> Callable[[Node], Node]:
        """Return a provider of constants before ``place``."""
        made: dict[Node, Node] = {}
        limit = self._order[place]

        def give(node: Node) -> Node:
            if self._order.get(node, -1) < limit:
                return node
            if node.op == "get_attr":
                return rw.constant(self._known.values[node], str(node.target))
            assert node in self._known, f"{node} is needed before it is computed"
            if node not in made:
                args, kwargs = map_arg((node.args, node.kwargs), give)
                made[node] = rw.replay(node.target, args, kwargs, node.meta["val"])
            return made[node]

        return give


Below = dict[str, tuple[list[Node], int]]


def attribute_value(node: Node) -> torch.Tensor:
    """Return the attribute that a ``get_attr`` node refers to."""
    module = node.graph.owning_module
    assert module is not None, "the graph is that of a module"
    return module.get_buffer(str(node.target))


def _below(parts: Sequence[Node], axis: int, numbers: Numbers) -> Below | None:
    """Return the operands to concatenate instead of the results of otherwise equal calls."""
    first, op = parts[0], overload_of(parts[0])
    if op is None or any(overload_of(part) is not op for part in parts):
        return None
    if len({_without_data(part, numbers) for part in parts}) != 1:
        return None
    named = [arguments(part) for part in parts]
    if is_call(first, aten.permute.default, aten.t.default):
        # `t` has no such argument.
        dims: Any = named[0].get("dims", (1, 0))
        return _inner(named, "self", int(dims[axis]) % len(dims))
    if is_call(first, _CAST):
        # `cat` would promote operands of different dtypes.
        same = len({dtype_of(n["a"]) for n in named if isinstance(n["a"], Node)}) == 1
        return _inner(named, "a", axis) if same else None
    return _stored(op, named, axis) if op.namespace == "quantized_decomposed" else None


def _stored(op: OpOverload, named: Sequence[Mapping[str, Any]], axis: int) -> Below | None:
    """Concatenate the quantized values of weights, and their scales."""
    name = op._schema.name.rpartition("::")[2]  # noqa: SLF001 - the way to ask
    if name == _CHANNELS:
        return _channels(named, axis)
    # Scales and zero points are Python numbers here, which are equal.
    numbers = name == _TENSOR and op._overloadname == "default"  # noqa: SLF001
    return _inner(named, "input", axis) if numbers else None


def _channels(named: Sequence[Mapping[str, Any]], axis: int) -> Below | None:
    """Concatenate weights with one scale per channel along the channel axis."""
    # Along another axis, all weights have one scale per input, and these would have to be equal.
    if named[0]["axis"] != axis:
        return None
    found = _inner(named, "input", axis)
    scales, zeros = _inner(named, "scales", 0), _inner(named, "zero_points", 0)
    if scales is None:
        return None
    # Only some of the weights have zero points as tensors.
    if zeros is None and any(n["zero_points"] is not None for n in named):
        return None
    return {**(found or {}), **scales, **(zeros or {})}


def _inner(named: Sequence[Mapping[str, Any]], name: str, axis: int) -> Below | None:
    nodes = [n[name] for n in named]
    return {name: (nodes, axis)} if all(isinstance(node, Node) for node in nodes) else None


def _without_data(node: Node, numbers: Numbers) -> tuple[tuple[str, Hashable], ...]:
    """Return the arguments that are not tensors."""
    plain = {k: v for k, v in arguments(node).items() if not isinstance(v, Node)}
    return tuple((k, numbers.frozen(v)) for k, v in sorted(plain.items()))
