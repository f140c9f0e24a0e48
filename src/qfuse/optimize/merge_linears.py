"""Merge the linears that read one input into one wide linear and a split."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from qfuse.cost import Bits, ComputeKind, linear_work, pointwise_work, size_range
from qfuse.ir import ops
from qfuse.ir.alias import leaves_graph
from qfuse.ir.events import Exactness, Fired, MissCode, Missed
from qfuse.ir.program import ASSUMED_META, constant_of, op_name, place_of
from qfuse.ir.views import (
    Dequantize,
    Linear,
    as_dequantize,
    as_linear,
    dtype_of,
    has_values,
    shape_of,
)
from qfuse.optimize.concat import concat_bias, concat_params
from qfuse.optimize.restride import restride, rigid_reader
from qfuse.rewrite.driver import Context, PassResult
from qfuse.rewrite.rewriter import GraphEditor
from qfuse.rewrite.rule import Miss
from qfuse.rewrite.settle import settle
from qfuse.rewrite.whole import Pass

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from torch.fx import Node

    from qfuse.cost import Comparison, CostModel, Size
    from qfuse.ir.program import StageGraph
    from qfuse.rewrite.rewriter import Rewriter

__all__ = ["MergeLinears", "Sibling", "price", "sibling_groups"]

_aten = torch.ops.aten
_MATRIX = 2


@dataclass(frozen=True, slots=True)
class Sibling:
    """One linear that may be merged.

    Attributes:
        linear: The linear.
        stored: The dequantize of its weight; ``None`` for a float weight.
        weight: The constant that is concatenated: the stored numbers, or the float weight.
        n: Output features.
        k: Input features.
    """

    linear: Linear
    stored: Dequantize | None
    weight: Node
    n: int
    k: int

    @property
    def parts(self) -> list[torch.Tensor]:
        """The constants of the linear: weight, scale, zero point, bias."""
        nodes = [self.weight, self.linear.bias]
        if self.stored is not None:
            nodes[1:1] = [self.stored.params.scale, self.stored.params.zero_point]
        found = [None if node is None else constant_of(node) for node in nodes]
        return [part for part in found if part is not None]

    @property
    def kind(self) -> Hashable:
        """What siblings must have in common, besides the input."""
        bias = None if self.linear.bias is None else dtype_of(self.linear.bias)
        if bias == dtype_of(self.linear.weight):
            bias = None  # A missing bias is filled in that type.
        real = dtype_of(self.linear.weight)
        # What has no values is not concatenated with what has some.
        held = tuple(has_values(part) for part in self.parts)
        held = (held[0],) if len(set(held)) == 1 else held
        if self.stored is None:
            return real, bias, held
        spec = self.stored.params.spec
        stores = (spec.dtype, spec.element, spec.scale_format, spec.outer is None)
        return real, bias, held, *stores, spec.arithmetic.compute, spec.domain


class MergeLinears(Pass):
    """``linear(x, w1, b1)`` and ``linear(x, w2, b2)`` become parts of one ``linear(x, w, b)``.

    Before::

        x -> linear(dequantize(q1)) -> view
        x -> linear(dequantize(q2)) -> silu

    After::

        x -> linear(dequantize(q)) -> split -> view
                                            -> silu

    Every element of the result is the same expression of the same values, so this is exact; what a
    library makes of a wider product is its own rounding, so a check by values allows for that.
    Weights, scales, zero points and biases are concatenated now, never at run time. A missing bias
    among biased siblings is -0.0, which changes no sum, not even that of two zeros.

    Refuses: weights or biases that are computed at run time; weights that others read too, which
    would be held twice; a weight that a sibling has with another bias; a result of which somebody
    reads the memory, as ``as_strided`` does, or which is split; siblings that differ in storage,
    arithmetic or float type, which do not keep the others from merging; what the cost model finds
    slower at the least, the expected or the greatest size.
    """

    name: ClassVar[str] = "merge-linears"
    exactness = Exactness.EXACT

    def run(self, program: StageGraph, context: Context) -> PassResult:
        """Merge every group, in one sweep."""
        result = PassResult()
        editor = GraphEditor(program.module)
        for readers in _readers(program):
            groups, misses = _groups(readers)
            for group in groups:
                if len(group) > 1:
                    misses += self._merge(group, program, context, editor, result)
            for node, miss in misses:
                result.misses.append((self.name, miss))
                program.log.add(_missed(context.room, self.name, node, miss))
        return result

    def _merge(
        self,
        group: Sequence[Sibling],
        program: StageGraph,
        context: Context,
        editor: GraphEditor,
        result: PassResult,
    ) -> list[tuple[Node, Miss]]:
        first = group[0].linear.node
        gain = None
        if context.cost is not None:
            priced = price(group, program, context.cost)
            gain = priced.gain
            if not priced.loses_nowhere:
                return [(first, Miss(MissCode.PROFIT, first, "{}", str(priced), progress=9))]
        key = f"{context.room}/{self.name}@{first.name}"
        if not context.gate.allows(key):
            return []
        places = tuple(place_of(sibling.linear.node) for sibling in group)
        rw = editor.rewriter(self.name, first)
        made = _rewrite(group, rw)
        # A wider product is summed in another order by a library: bits would prove nothing.
        if not settle(rw, context, program.log, key, Exactness.ROUNDING, places[0]):
            return []
        note = " + ".join(str(sibling.n) for sibling in group)
        exactness = Exactness.ASSUMED if any(map(_is_assumed, group)) else self.exactness
        program.log.add(
            Fired(context.room, self.name, key, exactness, places, (made.name,), note, gain)
        )
        result.fired[self.name] += 1
        return []


def sibling_groups(program: StageGraph) -> list[list[Sibling]]:
    """Return the groups of linears that may be merged, whether that pays or not."""
    found = [group for readers in _readers(program) for group in _groups(readers)[0]]
    return [group for group in found if len(group) > 1]


def _readers(program: StageGraph) -> list[list[Node]]:
    """Return the linears by what they read, where there are several, in the order of the graph."""
    by_input: dict[Node, list[Node]] = {}
    for node in program.graph.nodes:
        linear = as_linear(node)
        if linear is not None:
            by_input.setdefault(linear.x, []).append(node)
    return [nodes for nodes in by_input.values() if len(nodes) > 1]


def _groups(nodes: Sequence[Node]) -> tuple[list[list[Sibling]], list[tuple[Node, Miss]]]:
    """Sort the readers of one input into groups that may merge; say why others may not."""
    groups: dict[Hashable, list[Sibling]] = {}
    misses: list[tuple[Node, Miss]] = []
    weights: set[Node] = set()
    for node in nodes:
        sibling = _sibling(node)
        if isinstance(sibling, Sibling) and sibling.weight in weights:
            text = "a sibling has the same weight with another bias"
            sibling = Miss(MissCode.SHARED, sibling.weight, text, progress=3)
        if isinstance(sibling, Miss):
            misses.append((node, sibling))
            continue
        weights.add(sibling.weight)
        groups.setdefault(sibling.kind, []).append(sibling)
    misses += _lonely(list(groups.values()))
    return list(groups.values()), misses


def _lonely(groups: Sequence[Sequence[Sibling]]) -> list[tuple[Node, Miss]]:
    """Say why a linear is left alone among siblings of other kinds."""
    if len(groups) == 1:
        return []
    text = "its siblings differ in storage, arithmetic, or float type"
    alone = [group[0].linear.node for group in groups if len(group) == 1]
    return [(node, Miss(MissCode.DTYPE, node, text, progress=3)) for node in alone]


def _sibling(node: Node) -> Sibling | Miss:
    linear = as_linear(node)
    assert linear is not None, "only linears are grouped"
    stored = as_dequantize(linear.weight)
    weight = linear.weight if stored is None else stored.q
    parts = [weight, linear.bias]
    if stored is not None:
        parts += stored.params.tensors
    for part in parts:
        if part is not None and constant_of(part) is None:
            text = "its weight, bias or scale is computed at run time or given by the caller"
            return Miss(MissCode.NOT_CONSTANT, part, text, progress=3)
    if len(shape_of(weight)) != _MATRIX or not shape_of(linear.x):
        return Miss(MissCode.SHAPE, weight, "its weight is not a matrix", progress=2)
    readers = {linear.node} if stored is None else {stored.node}
    if set(weight.users) != readers or set(linear.weight.users) != {linear.node}:
        text = "others read its weight too, which would be held twice"
        return Miss(MissCode.SHARED, weight, text, progress=3)
    rigid = rigid_reader(node)
    if rigid is not None:
        text = "{} depends on its strides, which a part of a wider result has not"
        return Miss(MissCode.ORDER, rigid, text, op_name(rigid), progress=3)
    n, k = (int(size) for size in shape_of(weight))
    if linear.bias is not None and tuple(shape_of(linear.bias)) != (n,):
        return Miss(MissCode.SHAPE, linear.bias, "its bias is not a vector", progress=2)
    return Sibling(linear, stored, weight, n, k)


def _rewrite(group: Sequence[Sibling], rw: Rewriter) -> Node:
    """Add the wide linear and the split; let every reader read its part."""
    weight = _weight(group, rw)
    bias = concat_bias([(s.linear.bias, s.n) for s in group], rw)
    wide = rw.call(_aten.linear.default, group[0].linear.x, weight, bias)
    axis = len(shape_of(wide)) - 1
    split = rw.call(_aten.split_with_sizes.default, wide, [s.n for s in group], axis)
    for index, sibling in enumerate(group):
        restride(sibling.linear.node, rw.item(split, index), rw)
    return wide


def _weight(group: Sequence[Sibling], rw: Rewriter) -> Node:
    name = "_".join(str(sibling.weight.target) for sibling in group)
    values = [constant_of(sibling.weight) for sibling in group]
    known = [value for value in values if value is not None]
    whole = rw.constant(_joined(known), name)
    stored = [sibling.stored for sibling in group if sibling.stored is not None]
    if not stored:
        return whole
    params = concat_params([(d.params, tuple(map(int, shape_of(d.q)))) for d in stored], name, rw)
    return rw.call(ops.dequantize, *params.call_args(whole))


def _joined(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Put weights below each other, in the order of memory that they have."""
    if all(w.t().is_contiguous() and not w.is_contiguous() for w in weights):
        return torch.cat([w.t() for w in weights], 1).t()
    return torch.cat(list(weights))


def price(
    group: Sequence[Sibling], program: StageGraph, cost: CostModel, m: Size | None = None
) -> Comparison:
    """Compare the linears apart and as one; parts that leave are copied to their own strides.

    Args:
        group: The linears.
        program: Where they are.
        cost: Prices work.
        m: Rows of their input, instead of those that the graph declares.
    """
    if m is None:
        rows = math.prod(shape_of(group[0].linear.x)[:-1], start=1)
        m = size_range(rows, program.signature.symbols)
    k = group[0].k
    bits, kind = _arithmetic(group[0])
    before = [linear_work(m, k, sibling.n, bits, kind) for sibling in group]
    after = [linear_work(m, k, sum(sibling.n for sibling in group), bits, kind)]
    after += [
        pointwise_work(m * sibling.n, [bits.out], [bits.out])
        for sibling in group
        if leaves_graph(sibling.linear.node)
    ]
    return cost.compare(before, after)


def _arithmetic(sibling: Sibling) -> tuple[Bits, ComputeKind]:
    real = dtype_of(sibling.linear.node)
    wide = real.itemsize * 8
    plain = ComputeKind.BF16 if real is torch.bfloat16 else ComputeKind.F32
    stored = sibling.stored
    if stored is None:
        return Bits(wide, wide, wide), plain
    spec = stored.params.spec
    activation = as_dequantize(sibling.linear.x)
    if activation is None:
        return Bits(wide, spec.bits, wide), plain
    dtype = activation.params.spec.dtype
    whole = not dtype.is_floating_point and not spec.dtype.is_floating_point
    kind = ComputeKind.INT8 if whole else plain
    return Bits(dtype.itemsize * 8, spec.bits, wide), kind


def _is_assumed(sibling: Sibling) -> bool:
    """Whether parameters without values had to be taken as equal to others, or as small."""
    if ASSUMED_META in sibling.linear.x.meta:
        return True
    stored = as_dequantize(sibling.linear.x)
    if stored is not None and ASSUMED_META in stored.q.meta:
        return True
    zero = None if sibling.stored is None else sibling.stored.params.zero_point
    value = None if zero is None else constant_of(zero)
    return value is not None and not has_values(value)


def _missed(room: str, rule: str, node: Node, miss: Miss) -> Missed:
    places = place_of(node), place_of(miss.at)
    return Missed(room, rule, miss.code, miss.reason, *places, miss.progress)
