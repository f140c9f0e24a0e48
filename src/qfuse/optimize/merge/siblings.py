"""Horizontal fusion of sibling ops of any kind: which may merge, and why others may not."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from qfuse.cost import Comparison, CostModel
from qfuse.ir.events import Fired
from qfuse.ir.graph.alias import leaves_graph
from qfuse.ir.graph.stage_graph import ASSUMED_META, StageGraph, constant_of, op_name, place_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.constants import is_constant_expression
from qfuse.ir.ops.qdq import Dequantize, as_dequantize
from qfuse.ir.ops.views import dtype_of, has_values, shape_of
from qfuse.ir.quant.spec import ZeroPointDomain, dtype_name
from qfuse.optimize.match.strides import restride, stride_sensitive_user
from qfuse.optimize.merge.concat_qparams import concat_params
from qfuse.rewrite.context import PassResult, RewriteContext
from qfuse.rewrite.graph_pass import Pass
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, Rewriter, aten
from qfuse.rewrite.session import Applied, RewriteSession

_MATRIX = 2

Facets = tuple[tuple[str, "Hashable"], ...]


class Weighted(Protocol):
    """An op with a weight whose first axis is its output features."""

    @property
    def node(self) -> Node:
        """The call."""

    @property
    def x(self) -> Node:
        """Its input."""

    @property
    def weight(self) -> Node:
        """Its weight: a constant, or the dequantize of one."""

    @property
    def bias(self) -> Node | None:
        """Its bias."""


@dataclass(frozen=True, slots=True)
class Sibling:
    """One op that may be merged.

    Attributes:
        op: The op.
        stored: The dequantize of its weight; ``None`` for a float weight.
        weight: The constant that is concatenated: the quantized values, or the float weight.
        shape: The weight's.
        alike: What else siblings must have in common, besides the input: values by their names.
    """

    op: Weighted
    stored: Dequantize | None
    weight: Node
    shape: tuple[int, ...]
    alike: Facets = ()

    @property
    def n(self) -> int:
        """Output features."""
        return self.shape[0]

    @property
    def parts(self) -> list[torch.Tensor]:
        """The constants of the op: weight, scale, zero point, bias."""
        nodes = [self.weight, self.op.bias]
        if self.stored is not None:
            nodes[1:1] = [self.stored.params.scale, self.stored.params.zero_point]
        found = [None if node is None else constant_of(node) for node in nodes]
        return [part for part in found if part is not None]

    @property
    def kind(self) -> Facets:
        """What siblings must have in common, besides the input: values by their names."""
        bias = None if self.op.bias is None else dtype_of(self.op.bias)
        if bias == dtype_of(self.op.weight):
            bias = None  # A missing bias is filled with that dtype.
        # Constants without values cannot be concatenated with constants that have values.
        held = tuple(has_values(part) for part in self.parts)
        held = (held[0],) if len(set(held)) == 1 else held
        # Dtypes are compared, not promoted: a bfloat16 weight next to a float32 one would compute
        # its rows in another precision.
        common = (
            *self.alike,
            ("float type", dtype_of(self.op.weight)),
            ("float type of the bias", bias),
            ("parts with values", held),
        )
        if self.stored is None:
            return *common, ("storage", None)
        spec = self.stored.params.spec
        return (
            *common,
            ("storage", spec.dtype),
            ("numbers in the storage", spec.element),
            ("format of the scale", spec.scale_format),
            ("second level of scales", spec.outer is not None),
            # The rest of the arithmetic, such as reciprocal or division, is that of quantizing, and
            # no weight is quantized again. Scales and blocks may differ, see `concat_params`.
            ("arithmetic", spec.arithmetic.compute),
            ("domain of the zero point", spec.domain),
            *self._range_of_offsets(),
        )

    def _range_of_offsets(self) -> Facets:
        """What siblings with float offsets have in common: an offset counts from the middle.

        A missing offset is not an offset of 0, with which the middle stands for 0.
        """
        assert self.stored is not None, "a float weight has no zero points"
        spec, zero = self.stored.params.spec, self.stored.params.zero_point
        if spec.domain is not ZeroPointDomain.FLOAT_OFFSET:
            return ()
        codes = spec.quant_min, spec.quant_max
        return ("range of float offsets", codes), ("float offsets", zero is not None)

    @property
    def is_assumed(self) -> bool:
        """Whether parameters without values had to be assumed equal, or small."""
        # The input is one node for all siblings only because equal parameters were assumed.
        if ASSUMED_META in self.op.x.meta:
            return True
        stored = as_dequantize(self.op.x)
        if stored is not None and ASSUMED_META in stored.q.meta:
            return True
        zero = None if self.stored is None else self.stored.params.zero_point
        value = None if zero is None else constant_of(zero)
        return value is not None and not has_values(value)


class MergeSiblings(Pass):
    """Merges the ops of one kind that share an input, in one sweep."""

    exactness = Exactness.EXACT

    @abstractmethod
    def input_of(self, node: Node) -> Node | None:
        """Return the input of ``node``, if it is an op of this kind."""

    @abstractmethod
    def sibling(self, node: Node) -> Sibling | Miss:
        """View an op of this kind as one that may merge, or return why it may not."""

    @abstractmethod
    def price(self, group: Sequence[Sibling], program: StageGraph, cost: CostModel) -> Comparison:
        """Compare the separate ops with the merged one."""

    @abstractmethod
    def merged(self, group: Sequence[Sibling], rw: Rewriter) -> Node:
        """Add the wide op and the split; replace every op by its part. Return the wide op."""

    def run(self, program: StageGraph, context: RewriteContext) -> PassResult:
        """Merge every group."""
        result = PassResult()
        session = RewriteSession(program, context)
        # Dead nodes would count as users of a weight, or as stride-sensitive users.
        session.editor.sweep()
        for users in self._by_input(program):
            # Viewed now: an earlier merge may have replaced their input by a part of its result.
            groups, misses = _groups(self._views(users))
            for group in groups:
                if len(group) > 1:
                    misses += self._merge(group, session, result)
            for node, miss in misses:
                result.miss(program, context, self.name, node, miss)
        return result

    def groups(self, program: StageGraph) -> list[list[Sibling]]:
        """Return the groups that may be merged, whether that pays or not."""
        every = [_groups(self._views(users))[0] for users in self._by_input(program)]
        return [group for groups in every for group in groups if len(group) > 1]

    def _views(self, nodes: Sequence[Node]) -> list[tuple[Node, Sibling | Miss]]:
        return [(node, self.sibling(node)) for node in nodes]

    def _by_input(self, program: StageGraph) -> list[list[Node]]:
        """Return the ops by input, where several share one, in the order of the graph."""
        by_input: dict[Node, list[Node]] = {}
        for node in program.graph.nodes:
            x = self.input_of(node)
            if x is not None:
                by_input.setdefault(x, []).append(node)
        return [nodes for nodes in by_input.values() if len(nodes) > 1]

    def _merge(
        self, group: Sequence[Sibling], session: RewriteSession, result: PassResult
    ) -> list[tuple[Node, Miss]]:
        first, context = group[0].op.node, session.context
        gain = None
        if context.cost is not None:
            priced = self.price(group, session.program, context.cost)
            gain = priced.gain
            # Under dynamic sizes, a merge that gains at the hint may lose at the smallest size.
            if not priced.loses_nowhere:
                return [(first, Miss(MissCode.PROFIT, first, "{}", str(priced), progress=9))]
        places = tuple(place_of(sibling.op.node) for sibling in group)

        def fired(key: str, rw: Rewriter, made: Node) -> Fired:
            del rw
            note = " + ".join(str(sibling.n) for sibling in group)
            assumed = any(sibling.is_assumed for sibling in group)
            exactness = Exactness.ASSUMED if assumed else self.exactness
            name = (made.name,)
            return Fired(context.stage, self.name, key, exactness, places, name, note, gain)

        # Libraries sum a wider product in another order, so comparing bits would prove nothing.
        edit, proof = partial(self.merged, group), Exactness.ROUNDING
        if isinstance(session.rewrite(self.name, first, edit, proof=proof, event=fired), Applied):
            result.fired[self.name] += 1
        return []


def refuse_parts(op: Weighted, stored: Dequantize | None, weight: Node) -> Miss | None:
    """Refuse computed constants, weights with other users, and stride-sensitive users."""
    parts = [weight, op.bias, *(() if stored is None else stored.params.tensors)]
    for part in parts:
        if part is not None and constant_of(part) is None:
            text = "its weight, bias or scale is computed at run time or given by the caller"
            if is_constant_expression(part):
                text = "its weight, bias or scale is computed from constants in every call"
            return Miss(MissCode.NOT_CONSTANT, part, text, progress=3)
    # The only user of a quantized weight may be its dequantize.
    users = {op.node} if stored is None else {stored.node}
    # A weight tied to an embedding stays for it, so the concatenation would be a second copy.
    if set(weight.users) != users or set(op.weight.users) != {op.node}:
        text = "its weight has other users, so it would be stored twice"
        return Miss(MissCode.SHARED, weight, text, progress=3)
    rigid = stride_sensitive_user(op.node)
    if rigid is not None:
        text = "{} depends on its strides, which change for a part of a wider result"
        return Miss(MissCode.ORDER, rigid, text, op_name(rigid), progress=3)
    # A bias that broadcasts would be concatenated to the wrong length.
    if op.bias is not None and tuple(shape_of(op.bias)) != (shape_of(weight)[0],):
        return Miss(MissCode.SHAPE, op.bias, "its bias is not a vector", progress=2)
    return None


def concat_weight(group: Sequence[Sibling], rw: Rewriter) -> Node:
    """Add the concatenated weights, and their dequantize if they are quantized."""
    name = "_".join(str(sibling.weight.target) for sibling in group)
    values = [constant_of(sibling.weight) for sibling in group]
    known = [value for value in values if value is not None]
    whole = rw.constant(_joined(known), name)
    # All or none: `Sibling.kind` has separated quantized weights from float ones.
    stored = [sibling.stored for sibling in group if sibling.stored is not None]
    if not stored:
        return whole
    shapes = [sibling.shape for sibling in group]
    parts = list(zip((d.params for d in stored), shapes, strict=True))
    return rw.call(ops.dequantize, *concat_params(parts, name, rw).call_args(whole))


def split_into(wide: Node, group: Sequence[Sibling], axis: int, rw: Rewriter) -> None:
    """Split the result of a wide op, and replace every op by its part.

    A part that leaves the graph, directly or as a view, is copied: the caller expects the captured
    strides, which cannot be restored where they depend on dynamic sizes.
    """
    split = rw.call(aten.split_with_sizes.default, wide, [s.n for s in group], axis)
    for index, sibling in enumerate(group):
        part = rw.item(split, index)
        if leaves_graph(sibling.op.node):
            part = rw.call(aten.clone.default, part)
        restride(sibling.op.node, part, rw)


def _joined(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate weights in the memory order that they have."""
    # `cat` returns row-major memory, so weights that are stored as [k, n] would become [n, k].
    if all(w.dim() == _MATRIX and not w.is_contiguous() and w.t().is_contiguous() for w in weights):
        return torch.cat([w.t() for w in weights], 1).t()
    return torch.cat(list(weights))


def _groups(
    found: Sequence[tuple[Node, Sibling | Miss]],
) -> tuple[list[list[Sibling]], list[tuple[Node, Miss]]]:
    """Sort the ops with one input into groups that may merge; log why others may not."""
    groups: dict[Hashable, list[Sibling]] = {}
    misses: list[tuple[Node, Miss]] = []
    for node, sibling in found:
        if isinstance(sibling, Miss):
            misses.append((node, sibling))
        else:
            groups.setdefault(sibling.kind, []).append(sibling)
    misses += _lonely(list(groups.values()))
    return list(groups.values()), misses


def _lonely(groups: Sequence[Sequence[Sibling]]) -> list[tuple[Node, Miss]]:
    """Return why an op stays alone among siblings of other kinds."""
    if len(groups) == 1:
        return []
    alone = [group[0] for group in groups if len(group) == 1]
    return [(one.op.node, _difference(one, [g[0] for g in groups])) for one in alone]


def _difference(one: Sibling, others: Sequence[Sibling]) -> Miss:
    """Name the closest sibling of another kind, and the properties that differ."""
    differ = {id(o): _differing(one, o) for o in others if o is not one}
    near = min((o for o in others if o is not one), key=lambda o: len(differ[id(o)]))
    names = differ[id(near)]
    text = "the closest of its siblings, %{}, differs in {}"
    own, its = dict(one.kind), dict(near.kind)
    details = [
        f"{name} ({_word(its[name])}, not {_word(own[name])})"
        if name in own and name in its
        else name
        for name in names
    ]
    code = MissCode.SHAPE if one.alike != near.alike else MissCode.DTYPE
    told_names = near.op.node.name, ", ".join(details)
    return Miss(code, one.op.node, text, *told_names, progress=3)


def _differing(one: Sibling, other: Sibling) -> list[str]:
    """Return the names of the differences; a property that only one op has is left out."""
    own, its = dict(one.kind), dict(other.kind)
    both = [name for name in own if name in its and own[name] != its[name]]
    return both or sorted(set(own) ^ set(its))


def _word(value: Hashable) -> str:
    if value is None:
        return "none"
    return dtype_name(value) if isinstance(value, torch.dtype) else str(value)
