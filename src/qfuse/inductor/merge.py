"""Merge matmuls of one input with constant matrices into one wide matmul and a split."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule

from qfuse.inductor.constants import Constants
from qfuse.inductor.epilogue import WideOp, plan_epilogue
from qfuse.inductor.joining import (
    JoinedProducts,
    Placer,
    ProductSpelling,
    join_vectors,
    plan_join,
    spelling,
)
from qfuse.inductor.numbers import Numbers
from qfuse.inductor.products import MatrixProduct, as_matrix_product, rebuild
from qfuse.ir.errors import RewriteError
from qfuse.ir.events import EventLog, Fired, Missed, Noted
from qfuse.ir.graph.alias import leaves_graph, memory_of
from qfuse.ir.graph.stage_graph import place_of
from qfuse.optimize.match.strides import restride, stride_sensitive_user
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, Rewriter, aten
from qfuse.rewrite.rewriter import GraphEditor

STAGE = "inductor"
NAME = "merge-linears"
# Bounds the walk along the ops that follow a product.
_CHAIN = 64


@dataclass(frozen=True, slots=True)
class _Plan:
    """The plan for merging one group.

    Attributes:
        products: The siblings, in the order of their parts.
        columns: How to concatenate their matrices, and other operands with one entry per feature.
        steps: The isomorphic ops on their results.
    """

    products: tuple[MatrixProduct, ...]
    columns: Mapping[str, JoinedProducts]
    steps: tuple[WideOp, ...]


def merge_products(module: GraphModule, known: Constants, reason: str, log: EventLog) -> int:
    """Merge every group of siblings; return the number of merged matmuls.

    Before::

        x -> mm(w1) -> cast -> mul(x_scale) -> mul(s1) -> view -> relu
        x -> mm(w2) -> cast -> mul(x_scale) -> mul(s2) -> view -> sigmoid

    After::

        x -> mm(cat(w1, w2)) -> cast -> mul(x_scale) -> mul(cat(s1, s2)) -> view -> split -> relu
                                                                                  -> sigmoid

    The siblings' inputs may be duplicate computations. Each element of the result is the same
    expression of the same values. A library's float matmul may round differently for a wider
    matrix; integer matmuls are exact.

    Args:
        module: The module; its graph is changed in place.
        known: The constants of the graph.
        reason: Why a weight is not a constant, for the report.
        log: Receives the events.
    """
    return _Merging(module, known, reason, log).run()


def combine_products(
    module: GraphModule, values: Mapping[Node, torch.Tensor], log: EventLog
) -> None:
    """Combine matmuls of the same input and weight.

    Two graph outputs are not combined, since each must own its memory.
    """
    editor = GraphEditor(module)
    numbers = Numbers(module.graph, values)
    first: dict[int, Node] = {}
    for node in [n for n in module.graph.nodes if as_matrix_product(n) is not None]:
        known = first.setdefault(numbers.of(node), node)
        if known is node or (leaves_graph(node) and leaves_graph(known)):
            continue
        place, key = place_of(node), f"{STAGE}/combine@{node.name}"
        rw = editor.rewriter("combine", node)
        rw.replace(node, known)
        rw.commit()
        note = f"the same as %{known.name}"
        log.add(Fired(STAGE, "combine", key, Exactness.EXACT, (place,), (known.name,), note))


class _Merging:
    """The sibling matmuls of one graph."""

    def __init__(self, module: GraphModule, known: Constants, reason: str, log: EventLog) -> None:
        self._module = module
        self._known = known
        self._reason = reason
        self._log = log
        self._numbers = Numbers(module.graph, known.values)
        self._order = {node: index for index, node in enumerate(module.graph.nodes)}
        self._placer = Placer(known, self._order)
        self._editor = GraphEditor(module)

    def run(self) -> int:
        # All plans before the first edit: value numbers
        # and positions are those of the original graph.
        plans = [plan for group in self._families() for plan in self._plans(group)]
        return sum(self._attempt(plan) for plan in plans)

    def _families(self) -> list[list[MatrixProduct]]:
        """Return the matmuls with the same input, for each input of several."""
        found: dict[int, list[MatrixProduct]] = {}
        for node in self._module.graph.nodes:
            product = as_matrix_product(node)
            if product is not None:
                found.setdefault(self._numbers.of(product.x), []).append(product)
        # Freezing folds a product of two constants.
        families = [[p for p in f if p.x not in self._known] for f in found.values()]
        return [family for family in families if len(family) > 1]

    def _plans(self, family: Sequence[MatrixProduct]) -> list[_Plan]:
        kinds: dict[Hashable, list[MatrixProduct]] = {}
        weights: dict[Hashable, MatrixProduct] = {}
        for product in family:
            miss = self._refuse(product, weights)
            if miss is not None:
                self._missed(product, miss)
            else:
                kinds.setdefault(self._kind(product), []).append(product)
        groups = list(kinds.values())
        plans = [plan for group in groups if len(group) > 1 for plan in self._planned(group)]
        for group in groups:
            if len(group) == 1 and len(groups) > 1:
                self._missed(group[0], self._difference(group[0], [g[0] for g in groups]))
        return plans

    def _kind(self, product: MatrixProduct) -> tuple[tuple[str, Hashable], ...]:
        """Return what siblings must have in common besides the input, by names for the report."""
        spelled = [
            entry
            for name in product.columns
            for entry in _by_name(name, self._spelling(product, name))
        ]
        return (*product.kind(self._numbers), *spelled)

    def _spelling(self, product: MatrixProduct, name: str) -> Hashable | Miss:
        node, axis = product.columns[name], product.spec.columns[name]
        return spelling(node, axis, self._known, self._numbers)

    def _refuse(
        self, product: MatrixProduct, weights: dict[Hashable, MatrixProduct]
    ) -> Miss | None:
        """Return why a matmul cannot be merged, whatever its siblings are."""
        if product.wrong:
            return Miss(MissCode.SHAPE, product.node, product.wrong, progress=2)
        for operand in product.operands:
            if operand not in self._known:
                # A view of a placeholder is no constant for the same reason as the placeholder.
                given = memory_of(operand).op == "placeholder" or not self._known.values
                text = self._reason if given else "its weight is computed at run time"
                return Miss(MissCode.NOT_CONSTANT, operand, text, progress=3)
        for name in product.columns:
            spelled = self._spelling(product, name)
            if isinstance(spelled, Miss):
                return spelled
        key = tuple(self._numbers.of(node) for node in product.columns.values())
        # The weight would be concatenated with itself. Equal products have been combined before.
        if weights.setdefault(key, product) is not product:
            text = "a sibling with the same weight is equal or has another bias"
            return Miss(MissCode.SHARED, product.node, text, progress=3)
        user = self._other_user(product)
        if user is not None:
            text = "%{} uses its weight too, which would be stored twice"
            return Miss(MissCode.SHARED, user, text, user.name, progress=3)
        return None

    def _other_user(self, product: MatrixProduct) -> Node | None:
        """Return a user of the weight outside the matmul."""
        # Ops directly after the product may use the same constants, for instance as its scales.
        own = {product.node}
        node = product.node
        for _ in range(_CHAIN):
            if len(node.users) != 1:
                break
            (node,) = node.users
            own.add(node)
        waiting = [n for c in product.columns.values() for n in _leaves(c, self._known)]
        seen = set(waiting)
        while waiting:
            for user in waiting.pop().users:
                if user in self._known:
                    if user not in seen:
                        seen.add(user)
                        waiting.append(user)
                elif user not in own:
                    return user
        return None

    def _planned(self, group: list[MatrixProduct]) -> list[_Plan]:
        """Merge the siblings that can be merged; the others do not prevent it."""
        group = sorted(group, key=lambda p: self._order[p.node])
        while len(group) > 1:
            columns = self._columns(group)
            if not isinstance(columns, Miss):
                nodes = [p.node for p in group]
                steps = plan_epilogue(nodes, self._known, self._numbers, self._order)
                return [_Plan(tuple(group), columns, tuple(steps))]
            # Of several siblings, the one whose operands
            # the miss names; without it the rest may merge.
            guilty = next((p for p in group if _reads(p, columns.at)), group[0])
            self._missed(guilty, columns)
            group.remove(guilty)
        return []

    def _columns(self, group: Sequence[MatrixProduct]) -> dict[str, JoinedProducts] | Miss:
        columns: dict[str, JoinedProducts] = {}
        for name in group[0].columns:
            axis = group[0].spec.columns[name]
            made = plan_join([p.columns[name] for p in group], axis, self._known, self._numbers)
            if isinstance(made, Miss):
                return made
            columns[name] = made
        return columns

    def _attempt(self, plan: _Plan) -> bool:
        """Merge one group; if an op rejects it, undo it and continue with the other groups."""
        first = plan.products[0]
        try:
            self._apply(plan)
        except RewriteError as error:
            miss = Miss(MissCode.BANNED, first.node, "it was rolled back here: {}", error.what)
            self._missed(first, miss)
            text = f"a bug of qfuse, please report it: {error.what}"
            self._log.add(Noted(STAGE, text, place_of(first.node), warn=True))
            return False
        return True

    def _apply(self, plan: _Plan) -> None:
        first = plan.products[0]
        places = tuple(place_of(product.node) for product in plan.products)
        key = f"{STAGE}/{NAME}@{first.node.name}"
        widths = " + ".join(str(product.n) for product in plan.products)
        rw = self._editor.rewriter(NAME, first.node)
        # The wide product takes the place of the first
        # sibling, before constants that later ones use.
        give = self._placer.at(first.node, rw)
        columns = {name: join.build(rw, give) for name, join in plan.columns.items()}
        wide = made = rebuild(first, first.x, columns, _bias(plan.products, rw, give), rw)
        last = [product.node for product in plan.products]
        for step in plan.steps:
            wide = step.build(wide, rw, self._placer, self._order)
            last = list(step.after)
        self._split(wide, last, [product.n for product in plan.products], rw)
        names = (made.name,)
        rw.commit()
        self._log.add(Fired(STAGE, NAME, key, Exactness.EXACT, places, names, f"({widths})"))

    def _split(self, wide: Node, last: Sequence[Node], widths: list[int], rw: Rewriter) -> None:
        place = min(last, key=self._order.__getitem__)
        with rw.before(place):
            split = rw.call(aten.split_with_sizes.default, wide, widths, -1)
            parts = [rw.item(split, index) for index in range(len(widths))]
            for old, part in zip(last, parts, strict=True):
                own = leaves_graph(old) or stride_sensitive_user(old) is not None
                if own:
                    # The result of a matmul is dense and owns its memory.
                    dense = torch.contiguous_format
                    rw.replace(old, rw.call(aten.clone.default, part, memory_format=dense))
                else:
                    restride(old, part, rw)

    def _missed(self, product: MatrixProduct, miss: Miss) -> None:
        places = place_of(product.node), place_of(miss.at)
        self._log.add(Missed(STAGE, NAME, miss.code, miss.reason, *places, miss.progress))

    def _difference(self, one: MatrixProduct, others: Sequence[MatrixProduct]) -> Miss:
        own = dict(self._kind(one))
        differing = []
        for other in others:
            if other is not one:
                its = dict(self._kind(other))
                names = [k for k in own if own[k] != its.get(k)]
                differing.append((len(names), other.node.name, names, its))
        _, name, names, _ = min(differing, key=lambda d: d[0])
        text = "its closest sibling %{} differs in {}"
        return Miss(MissCode.DTYPE, one.node, text, name, ", ".join(names), progress=3)


def _by_name(name: str, spelled: Hashable) -> Iterator[tuple[str, Hashable]]:
    """Split a key into named parts, so that a difference can be named."""
    if not isinstance(spelled, ProductSpelling):
        yield f"the computation of {name}", spelled
        return
    yield f"the computation of {name}", spelled.op
    yield from ((f"the {given} of {name}", value) for given, value in spelled.given)
    for inner, found in spelled.below:
        yield from _by_name(f"{inner} of {name}", found)


def _bias(
    products: Sequence[MatrixProduct], rw: Rewriter, give: Callable[[Node], Node]
) -> Node | None:
    """Concatenate the biases, if there are any."""
    if all(product.bias is None for product in products):
        return None
    return join_vectors([p.n if p.bias is None else p.bias for p in products], rw, give)


def _reads(product: MatrixProduct, node: Node) -> bool:
    """Whether a node is the matmul or is used to compute its columns."""
    waiting, seen = [product.node], {product.node, product.x}
    while waiting:
        one = waiting.pop()
        if one is node:
            return True
        new = [source for source in one.all_input_nodes if source not in seen]
        seen.update(new)
        waiting += new
    return False


def _leaves(node: Node, known: Constants) -> list[Node]:
    """Return the constants that a constant is computed from."""
    found: dict[Node, None] = {}
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if one in known.values:
            found[one] = None
        waiting += one.all_input_nodes
    return list(found)
