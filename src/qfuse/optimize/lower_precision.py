"""Lower the remaining float matrix products to bfloat16, on request: this loses precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch.fx.node import map_arg

from qfuse.ir.graph.schema import is_call, overload_of
from qfuse.ir.graph.stage_graph import StageGraph, constant_of
from qfuse.ir.ops.product import as_fused_product
from qfuse.ir.ops.views import dtype_of, node_of, optional_node
from qfuse.rewrite.context import PassResult, RewriteContext
from qfuse.rewrite.graph_pass import Pass
from qfuse.rewrite.prelude import (
    Exactness,
    Miss,
    MissCode,
    Node,
    OpOverload,
    Rewriter,
    arguments,
    aten,
)
from qfuse.rewrite.repeat_view import repeat_view, viewed
from qfuse.rewrite.session import RewriteSession

_ATTENTION = aten.scaled_dot_product_attention.default
_PRODUCTS: tuple[OpOverload, ...] = (
    aten.linear.default,
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.matmul.default,
    aten.convolution.default,
    aten.conv1d.default,
    aten.conv2d.default,
    aten.conv3d.default,
    _ATTENTION,
)


class LowerPrecision(Pass):
    """Cast the operands of float32 products to bfloat16, and their results back.

    Softmax, norms and residual sums stay in float32, as under autocast, and so does an attention
    mask: its largest values are infinite in bfloat16, and a fully masked row would be NaN.
    Quantized ops are not changed: their precision is that of their quantized values. A fused
    product whose result is read by nothing but float products that are lowered, through views and
    copies, is cast itself, so that ``fuse-cast`` can let it write bfloat16.

    Refuses: a product in another dtype; constants that overflow in bfloat16; a summand that is
    computed at run time, which may be a mask.
    """

    name: ClassVar[str] = "narrow-floats"
    exactness = Exactness.LOSSY

    def run(self, program: StageGraph, context: RewriteContext) -> PassResult:
        """Lower every product, in one sweep."""
        result = PassResult()
        session = RewriteSession(program, context)
        narrow = _Narrowing()
        for node in list(program.graph.nodes):
            # Dead nodes are erased together with their casts, which other products may share.
            if not node.users or not _is_float32_product(node):
                continue
            miss = narrow.refusal(node)
            if miss is not None:
                result.miss(program, context, self.name, node, miss)
            elif self._lower(node, narrow, session):
                result.fired[self.name] += 1
        return result

    def _lower(self, node: Node, narrow: _Narrowing, session: RewriteSession) -> bool:
        known = len(narrow.casts)

        def edit(rw: Rewriter) -> None:
            rw.replace(node, narrow.product(node, rw))

        # A numeric check cannot pass a rewrite that loses precision on purpose.
        done = self.rewrite_at(node, edit, session, proof=None)
        # Casts of an edit that failed were undone with it.
        while not done and len(narrow.casts) > known:
            narrow.casts.popitem()
        return done


@dataclass(slots=True)
class _Narrowing:
    """The casts of one sweep; an operand of several products is cast once.

    Attributes:
        constants: Constants in bfloat16, by the identity of the constant; ``None`` where bfloat16
            overflows.
        casts: Casts of values computed at run time; each precedes all its later users.
        narrowed: Whether nothing but products that can be lowered reads a fused product.
    """

    constants: dict[int, torch.Tensor | None] = field(default_factory=dict)
    casts: dict[Node, Node] = field(default_factory=dict)
    narrowed: dict[Node, bool] = field(default_factory=dict)

    def refusal(self, node: Node) -> Miss | None:
        """Return why a product must stay in float32."""
        summand = _summand(node)
        for operand in _operands(node):
            value = constant_of(operand)
            if value is not None and self._narrow(value) is None:
                text = "{} has values that are infinite in bfloat16"
                return Miss(MissCode.RANGE, operand, text, operand.target)
            # A mask of -3.4e38 would become -inf, and a fully masked row NaN after softmax.
            if value is None and operand is summand:
                text = "the summand is computed at run time, and may be a mask"
                return Miss(MissCode.RANGE, operand, text)
        return None

    def product(self, node: Node, rw: Rewriter) -> Node:
        """Add the product in bfloat16, and the cast of its result."""
        casts = {operand: self._cast(operand, rw) for operand in _operands(node)}
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: casts.get(n, n))
        op = overload_of(node)
        assert op is not None, "a product is a call of an op"
        product = rw.call(op, *args, **kwargs)
        return rw.call(aten._to_copy.default, product, dtype=torch.float32)

    def _cast(self, operand: Node, rw: Rewriter) -> Node:
        value = constant_of(operand)
        if value is not None:
            narrowed = self._narrow(value)
            assert narrowed is not None, "refusal() has checked the constant"
            return rw.constant(narrowed, f"{operand.target}_bfloat16")
        fused = _fused_source(operand)
        if fused is not None and self._is_read_narrowed(fused):
            return self._narrow_view(operand, fused, rw)
        return self._once(operand, lambda: _to_bfloat16(operand, rw))

    def _narrow_view(self, node: Node, fused: Node, rw: Rewriter) -> Node:
        """Return a view of the fused product in bfloat16 instead of in float32."""
        if node is fused:
            return self._once(node, lambda: _to_bfloat16(node, rw))
        source = _source_of(node)
        assert source is not None, "it is a view of the fused product"
        narrow = self._narrow_view(source, fused, rw)
        return self._once(node, lambda: repeat_view(node, narrow, rw))

    def _once(self, node: Node, make: Callable[[], Node]) -> Node:
        if node not in self.casts:
            self.casts[node] = make()
        return self.casts[node]

    def _is_read_narrowed(self, fused: Node) -> bool:
        """Whether nothing but products that can be lowered reads a fused product."""
        if fused not in self.narrowed:
            self.narrowed[fused] = all(map(self._lowers, _readers_of(fused)))
        return self.narrowed[fused]

    def _lowers(self, reader: tuple[Node, Node]) -> bool:
        value, user = reader
        return _is_float32_product(user) and value in _operands(user) and self.refusal(user) is None

    def _narrow(self, value: torch.Tensor) -> torch.Tensor | None:
        if id(value) not in self.constants:
            # The largest bfloat16 is 3.39e38, so the largest float32 becomes infinite.
            narrowed = value.to(torch.bfloat16)
            overflows = not value.is_meta and bool((narrowed.isinf() & value.isfinite()).any())
            self.constants[id(value)] = None if overflows else narrowed
        return self.constants[id(value)]


def _to_bfloat16(node: Node, rw: Rewriter) -> Node:
    return rw.call(aten._to_copy.default, node, dtype=torch.bfloat16)


def _source_of(node: Node) -> Node | None:
    """Return what ``node`` is a view or a copy of."""
    if is_call(node, aten.clone.default):
        return node_of(arguments(node)["self"])
    return viewed(node)


def _readers_of(fused: Node) -> Iterator[tuple[Node, Node]]:
    """Yield the users of a value and of its views and copies, each with what it reads."""
    left = [fused]
    while left:
        value = left.pop()
        for user in value.users:
            if _source_of(user) is value:
                left.append(user)
            else:
                yield value, user


def _fused_source(node: Node) -> Node | None:
    """Return the fused product with a float32 result that ``node`` is a view of, or is."""
    while (source := _source_of(node)) is not None:
        node = source
    fused = as_fused_product(node)
    floats = fused is not None and fused.out_params is None
    return node if floats and dtype_of(node) is torch.float32 else None


def _is_float32_product(node: Node) -> bool:
    if not is_call(node, *_PRODUCTS):
        return False
    # Products that the source computes in float64 or float16 keep its choice.
    types = {n.meta["val"].dtype for n in node.all_input_nodes if _is_float_dtype(n)}
    return types == {torch.float32} and node.meta["val"].dtype is torch.float32


def _is_float_dtype(node: Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _operands(node: Node) -> list[Node]:
    """Return the operands to cast: the float ones, without the mask of an attention."""
    mask = _summand(node) if is_call(node, _ATTENTION) else None
    used = dict.fromkeys(n for n in node.all_input_nodes if _is_float_dtype(n))
    return [n for n in used if n is not mask]


def _summand(node: Node) -> Node | None:
    """Return the summand of a product: a bias or a mask."""
    a = arguments(node)
    if is_call(node, aten.addmm.default):
        return optional_node(a["self"])
    found = [a[name] for name in ("attn_mask", "bias") if name in a]
    return optional_node(found[0]) if found else None
