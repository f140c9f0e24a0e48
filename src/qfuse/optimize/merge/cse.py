"""CSE: combine equal quantizes, dequantizes, their parameters and the views between them."""

from __future__ import annotations

import operator
from collections.abc import Hashable
from functools import partial

from qfuse.ir.events import Fired
from qfuse.ir.graph.alias import leaves_graph
from qfuse.ir.graph.schema import overload_of
from qfuse.ir.graph.stage_graph import ASSUMED_META, StageGraph, constant_of, place_of
from qfuse.ir.movement.collective import WAITS
from qfuse.ir.movement.registry import MOVEMENT_OPS, SPLITS
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.views import bytes_of, has_values, tensor_of
from qfuse.ir.refusal import Refusal
from qfuse.optimize.commute.join import JOINS
from qfuse.rewrite.context import PassResult, RewriteContext
from qfuse.rewrite.graph_pass import Pass
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, Rewriter, arguments, aten
from qfuse.rewrite.session import RewriteSession

# A clone exists to be a separate tensor, and each wait of a collective must be kept.
_KEPT_APART = (aten.clone.default, aten.alias.default, *WAITS)

_COMBINABLE = frozenset(
    (
        *ops.CANONICAL,
        *ops.FUSED,
        aten.linear.default,
        *(op for op in MOVEMENT_OPS if op not in _KEPT_APART),
        *SPLITS,
        *JOINS,
        aten.constant_pad_nd.default,
        aten.clamp.default,
        aten.sym_size.int,
        aten._to_copy.default,
    )
)
# The arithmetic of scales and zero points that are computed without a choose_qparams op. Each
# returns a new tensor, and the same bits for the same operands.
_COMPUTING = frozenset(
    (
        aten.abs.default,
        aten.add.Tensor,
        aten.amax.default,
        aten.amin.default,
        aten.clamp.Tensor,
        aten.clamp_max.default,
        aten.clamp_max.Tensor,
        aten.clamp_min.default,
        aten.clamp_min.Tensor,
        aten.div.Tensor,
        aten.full_like.default,
        aten.max.dim,
        aten.maximum.default,
        aten.min.dim,
        aten.minimum.default,
        aten.mul.Tensor,
        aten.neg.default,
        aten.reciprocal.default,
        aten.round.default,
        aten.sub.Tensor,
        aten.zeros_like.default,
    )
)
# Ops with parameters as operands; only these have roles by which parameters can be alike.
_EDGES = frozenset((ops.quantize, ops.dequantize, ops.requantize))
_PARAMETERS = frozenset(("scale", "zero_point", "out_scale", "out_zero_point"))
# Comparing bits costs reading them; parameters are small, weights are compared by identity.
_BITS_LIMIT = 1 << 16


class Combine(Pass):
    """Value numbering over quantization ops, their parameters and the movement between them.

    Two nodes are equal when they call the same op with equal arguments: nodes by value number,
    numbers by type and value, constants by identity or, when they are small, by bits. A node that
    leaves the graph is not combined, so that outputs do not begin to alias.

    Arithmetic is combined where it computes a scale or a zero point, as in hand-written
    quantization; elsewhere it is left to the compiler.

    Parameters on the meta device have no values. Those with the same dtype, shape and role for the
    same data count as equal if ``RewriteContext.assume_equal`` is set; otherwise they are a miss.
    """

    name = "combine"
    exactness = Exactness.EXACT

    def run(self, program: StageGraph, context: RewriteContext) -> PassResult:
        """Combine in one sweep, in topological order."""
        result = PassResult()
        session = RewriteSession(program, context)
        known = _Known(_computing_parameters(program))
        for node in list(program.graph.nodes):
            first = known.equal(node)
            assumed = first is None
            if first is None:
                first = known.alike(node)
            # A pass on the graph of another tool must not edit outside of what it has normalized.
            if first is None or first is node or not context.covers(node):
                continue
            if assumed and not context.assume_equal:
                text = "its parameters have no values that could be compared with those of an equal"
                miss = Miss(MissCode.NO_VALUES, node, f"{text} one", progress=4)
                result.miss(program, context, self.name, node, miss)
                continue
            # Two outputs would be one tensor, and the caller may write to either.
            if leaves_graph(node) and leaves_graph(first):
                continue
            if node.op == "get_attr":
                # Which of two equal constants is used is not worth an event, or fuel.
                replace = partial(_replace, node, first)
                session.rewrite_always(self.name, node, replace, proof=self.exactness)
            elif self._combine(node, first, session, assumed=assumed):
                result.fired[self.name] += 1
        return result

    def _combine(self, node: Node, first: Node, session: RewriteSession, *, assumed: bool) -> bool:
        """Replace all uses of ``node`` by ``first``; return whether the rewrite was kept."""
        place = place_of(node)
        exactness = Exactness.ASSUMED if assumed else self.exactness

        def fired(key: str, rw: Rewriter, _: object) -> Fired:
            del rw
            stage, note = session.context.stage, f"the same as %{first.name}"
            return Fired(stage, self.name, key, exactness, (place,), (first.name,), note)

        edit = partial(_replace, node, first)
        done = session.rewrite(self.name, node, edit, proof=self.exactness, event=fired)
        if isinstance(done, Refusal):
            return False
        if assumed:
            # What is built on an assumption is an assumption too, such as a merge of its users.
            first.meta[ASSUMED_META] = True
        return True


def _replace(node: Node, first: Node, rw: Rewriter) -> None:
    rw.replace(node, first)


class _Known:
    """The nodes seen so far, by the value that they compute.

    Args:
        computing: The arithmetic nodes that are to be combined.
    """

    def __init__(self, computing: frozenset[Node]) -> None:
        self._computing = computing
        self._numbers: dict[Hashable, Node] = {}
        self._constants: dict[Hashable, Node] = {}
        self._alike: dict[Hashable, Node] = {}

    def equal(self, node: Node) -> Node | None:
        """Return the first node equal to ``node``, or ``node`` itself if it is not to be combined.

        Returns ``None`` for a new value.
        """
        if node.op == "get_attr":
            return _find_constant(node, self._constants)
        if node.target is operator.getitem:
            # Its operand has been replaced by its first equal already, so the node is its number.
            return _first(self._numbers, (operator.getitem, node.args[0], node.args[1]), node)
        op = overload_of(node)
        # Any other op may be random or write to memory, or return its operand itself.
        if op not in _COMBINABLE and node not in self._computing:
            return node
        key = (op, tuple((k, _freeze(v)) for k, v in sorted(arguments(node).items())))
        first = _first(self._numbers, key, node)
        return None if first is node else first

    def alike(self, node: Node) -> Node | None:
        """Return the first node that differs from ``node`` only in parameters without values."""
        if overload_of(node) not in _EDGES:
            return None
        given = sorted(arguments(node).items())
        data = node.all_input_nodes[0]
        # Constant data are weights: scales of the same shape say nothing about weights being equal.
        if data.op == "get_attr" or not any(_valueless(v) for k, v in given if k in _PARAMETERS):
            return None
        frozen = (_freeze_role(k, v) for k, v in given)
        return _first(self._alike, (node.target, *frozen), node)


def _computing_parameters(program: StageGraph) -> frozenset[Node]:
    """Return the arithmetic that computes parameters of quantized ops, back to the data.

    The search passes through views, casts and tuple items; these are combined anyway.
    """
    passed = _COMPUTING | _COMBINABLE
    found: set[Node] = set()
    waiting: list[Node] = []
    for node in program.graph.nodes:
        if overload_of(node) in _EDGES:
            params = (v for k, v in arguments(node).items() if k in _PARAMETERS)
            waiting += (param for param in params if isinstance(param, Node))
    while waiting:
        node = waiting.pop()
        if node not in found and (overload_of(node) in passed or node.target is operator.getitem):
            found.add(node)
            waiting += node.all_input_nodes
    return frozenset(node for node in found if overload_of(node) in _COMPUTING)


def _find_constant(node: Node, constants: dict[Hashable, Node]) -> Node:
    value = constant_of(node)
    if value is None:
        return node
    # Equal bits of another shape or stride are another operand: a reader may depend on either.
    kind = (value.dtype, value.device, tuple(value.shape), value.stride())
    small = has_values(value) and value.numel() * value.element_size() <= _BITS_LIMIT
    # An id stays unique as long as the module holds the tensor.
    return _first(constants, (*kind, bytes_of(value) if small else id(value)), node)


def _first(known: dict[Hashable, Node], key: Hashable, node: Node) -> Node:
    """Return the first node with ``key`` that still has users; it may be ``node``."""
    first = known.get(key)
    if first is None or not first.users:
        # It was erased together with a node that was combined with another.
        known[key] = first = node
    return first


def _freeze(value: object) -> Hashable:
    """Make an argument hashable such that equal means equal: 1, 1.0 and True differ."""
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(v) for v in value)
    if isinstance(value, Node):
        return value
    return (type(value), repr(value))


def _freeze_role(name: str, value: object) -> Hashable:
    """Make an argument hashable such that parameters without values equal their counterparts."""
    if name in _PARAMETERS and _valueless(value):
        assert isinstance(value, Node), "only a node may have no values"
        fake = tensor_of(value)
        return name, fake.dtype, fake.device, tuple(fake.shape)
    return name, _freeze(value)


def _valueless(value: object) -> bool:
    constant = constant_of(value) if isinstance(value, Node) else None
    return constant is not None and not has_values(constant)
