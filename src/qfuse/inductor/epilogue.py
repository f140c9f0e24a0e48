"""Apply the isomorphic ops after sibling matmuls once, to the merged result.

Inductor's patterns match scales, casts and biases after a matmul together with it, so the split
must come after them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qfuse.inductor.constants import Constants, is_pure
from qfuse.inductor.joining import JoinedProducts, Placer, join_vectors, plan_join
from qfuse.inductor.numbers import Numbers
from qfuse.inductor.products import call
from qfuse.ir.graph.schema import is_call, overload_of
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.sizes import same_shape
from qfuse.rewrite.prelude import Miss, Node, OpOverload, Rewriter, arguments, aten

_RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_CAST = torch.ops.prims.convert_element_type.default
_ADD = aten.add.Tensor
# Bounds the walk along the ops that follow the products.
_MOST_STEPS = 64


@dataclass(frozen=True, slots=True)
class WideOp:
    """One op that is applied to the merged result.

    Attributes:
        before: The operand of each sibling.
        after: The result of each sibling; for one without a bias, its operand.
        op: The op.
        given: Arguments of the first sibling; its node of ``before`` is ``data``.
        data: Name of the argument that is the merged result.
        joins: Arguments that are concatenated, by name.
    """

    before: tuple[Node, ...]
    after: tuple[Node, ...]
    op: OpOverload
    given: Mapping[str, Any]
    data: str
    joins: Mapping[str, JoinedProducts | _Bias]

    def build(self, wide: Node, rw: Rewriter, placer: Placer, order: Mapping[Node, int]) -> Node:
        """Emit the op on the merged result, after all its operands."""
        # The first result may have users before the other siblings are computed.
        place = min(self.after, key=order.__getitem__)
        with rw.before(place):
            give = placer.at(place, rw)
            given = {**self.given, self.data: wide}
            given |= {name: join.build(rw, give) for name, join in self.joins.items()}
            if self.op in _RESHAPES:
                name = "shape" if "shape" in given else "size"
                given[name] = [*list(given[name])[:-1], shape_of(wide)[-1]]
            return call(self.op, given, rw)


@dataclass(frozen=True, slots=True)
class _Bias:
    """A bias with missing parts: these are -0.0, which does not change any sum.

    Attributes:
        parts: The bias of each sibling, or its width if it has none.
    """

    parts: tuple[Node | int, ...]

    def build(self, rw: Rewriter, give: Any) -> Node:
        """Emit the concatenated bias."""
        return join_vectors(self.parts, rw, give)


@dataclass(frozen=True, slots=True)
class _Lanes:
    """The current node of each sibling."""

    nodes: tuple[Node, ...]
    known: Constants
    numbers: Numbers
    order: Mapping[Node, int]

    def next(self) -> WideOp | None:
        """Return the next isomorphic op, ``None`` if the siblings differ."""
        users = [_only_user(node) for node in self.nodes]
        biased = [user is not None and self._adds(user, node) for user, node in self._with(users)]
        # A sibling without a bias keeps its node, and gets -0.0 as its part.
        if any(biased):
            return self._bias(users, biased)
        calls = [user for user in users if user is not None]
        # One sibling has several users, or another op: here the chain ends and the split begins.
        if len(calls) != len(self.nodes) or len({overload_of(c) for c in calls}) != 1:
            return None
        op = overload_of(calls[0])
        if op in _RESHAPES:
            return self._reshape(calls)
        return self._elementwise(calls) if _is_elementwise(calls[0]) else None

    def _with(self, users: Sequence[Node | None]) -> list[tuple[Node | None, Node]]:
        return list(zip(users, self.nodes, strict=True))

    def _adds(self, user: Node, data: Node) -> bool:
        """Whether a constant vector is added, which some siblings may lack."""
        # The merged `add` is built without alpha.
        if not is_call(user, _ADD) or arguments(user).get("alpha", 1) != 1:
            return False
        other = _other(user, data)
        # Integers have no -0.0; and parts that freezing
        # does not fold are concatenated in every call.
        if other is None or not self.known.folded(other) or not dtype_of(data).is_floating_point:
            return False
        # A float32 bias promotes a bfloat16 product, and a sibling without it would stay bfloat16.
        kept = dtype_of(user) == dtype_of(data) == dtype_of(other)
        return kept and tuple(shape_of(other)) == (shape_of(data)[-1],)

    def _bias(self, users: Sequence[Node | None], biased: Sequence[bool]) -> WideOp | None:
        parts: list[Node | int] = []
        after: list[Node] = []
        for user, data, adds in zip(users, self.nodes, biased, strict=True):
            other = _other(user, data) if adds and user is not None else None
            width = shape_of(data)[-1]
            assert isinstance(width, int), "the features of a product are known"
            parts.append(width if other is None else other)
            after.append(data if other is None or user is None else user)
        if len({dtype_of(node) for node in self.nodes}) != 1:
            return None
        return WideOp(self.nodes, tuple(after), _ADD, {}, "self", {"other": _Bias(tuple(parts))})

    def _reshape(self, calls: Sequence[Node]) -> WideOp | None:
        shapes = [tuple(shape_of(node)) for node in calls]
        widths = [shape_of(node)[-1] for node in self.nodes]
        kept = all(
            s and isinstance(s[-1], int) and s[-1] == w for s, w in zip(shapes, widths, strict=True)
        )
        if not kept or not all(same_shape(s[:-1], shapes[0][:-1]) for s in shapes):
            return None
        first = min(calls, key=self.order.__getitem__)
        given = dict(arguments(first))
        op = overload_of(first)
        assert op is not None, "it is a call of a reshape"
        # A part of a wider result may not be viewable with every shape, and would be copied.
        return WideOp(self.nodes, tuple(calls), op, given, "self", {})

    def _elementwise(self, calls: Sequence[Node]) -> WideOp | None:
        if len({str(dtype_of(c)) for c in calls}) != 1:
            return None
        for new, old in zip(calls, self.nodes, strict=True):
            if not same_shape(shape_of(new), shape_of(old)):
                return None
        named = [arguments(c) for c in calls]
        first = min(range(len(calls)), key=lambda i: self.order[calls[i]])
        data = next(k for k, v in named[first].items() if v is self.nodes[first])
        joins: dict[str, JoinedProducts | _Bias] = {}
        for name in named[0]:
            if name == data:
                # `x - a` and `a - x` are the same op, with the data in different places.
                if any(n[name] is not node for n, node in zip(named, self.nodes, strict=True)):
                    return None
                continue
            join = self._operand([n[name] for n in named])
            if join is None:
                return None
            if join.axis is not None:
                joins[name] = join
        op = overload_of(calls[first])
        assert op is not None, "it is a call of an op"
        return WideOp(self.nodes, tuple(calls), op, named[first], data, joins)

    def _operand(self, values: Sequence[Any]) -> JoinedProducts | None:
        """Decide how to merge an operand other than the data."""
        equal = len({self.numbers.frozen(v) for v in values}) == 1
        if not all(isinstance(v, Node) for v in values):
            plain = not any(isinstance(v, Node) or _holds_node(v) for v in values)
            return JoinedProducts((), None) if equal and plain else None
        shapes = [tuple(shape_of(v)) for v in values]
        # The same numbers for every column, such as the scale of a token: one of them is enough.
        if equal and (not shapes[0] or shapes[0][-1] == 1):
            return JoinedProducts(tuple(values), None)
        widths = [shape_of(node)[-1] for node in self.nodes]
        # Different values of one column each, such as two
        # scales per token, would have to be repeated.
        if any(not s or s[-1] != w for s, w in zip(shapes, widths, strict=True)):
            return None
        alike = all(same_shape(s[:-1], shapes[0][:-1]) for s in shapes)
        if not alike or len({dtype_of(v) for v in values}) != 1:
            return None
        made = plan_join(values, -1, self.known, self.numbers)
        return None if isinstance(made, Miss) else made


def plan_epilogue(
    nodes: Sequence[Node], known: Constants, numbers: Numbers, order: Mapping[Node, int]
) -> list[WideOp]:
    """Return the isomorphic ops of the siblings, in order."""
    steps: list[WideOp] = []
    while len(steps) < _MOST_STEPS:
        step = _Lanes(tuple(nodes), known, numbers, order).next()
        if step is None:
            break
        steps.append(step)
        nodes = step.after
    return steps


def _only_user(node: Node) -> Node | None:
    if len(node.users) != 1:
        return None
    (user,) = node.users
    # In `x * x` both operands are the data, and `WideOp` has one place for it.
    reads = sum(source is node for source in _operands(user))
    return user if user.op == "call_function" and reads == 1 else None


def _operands(node: Node) -> list[Node]:
    if overload_of(node) is None:
        return []
    return [v for v in arguments(node).values() if isinstance(v, Node)]


def _other(user: Node, data: Node) -> Node | None:
    """Return the operand that is added to ``data``."""
    named = arguments(user)
    pair = [named["self"], named["other"]]
    others = [v for v in pair if v is not data]
    return others[0] if len(others) == 1 and isinstance(others[0], Node) else None


def _is_elementwise(node: Node) -> bool:
    op = overload_of(node)
    if op is None or not is_pure(node):
        return False
    return op is _CAST or torch.Tag.pointwise in op.tags


def _holds_node(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return any(isinstance(v, Node) or _holds_node(v) for v in value)
    return False
