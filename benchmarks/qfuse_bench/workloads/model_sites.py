"""The merge sites of a model, each extracted with the users of its results.

The gain of a site includes the users of its linears: a user of a part of a wider result may be
slower, and may no longer be fused with the linear. So the elementwise ops after the linears are
included, across movements, as far as a kernel would fuse them; their other operands are inputs.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from qfuse.capture import capture
from qfuse.cost import Comparison, CostModel
from qfuse.ir.aten import aten
from qfuse.ir.errors import OptionsError
from qfuse.ir.graph.schema import is_call, overload_of
from qfuse.ir.graph.stage_graph import NormalGraph, constant_of, place_of
from qfuse.ir.graph.text import to_text
from qfuse.ir.movement.registry import SPLITS, movement_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.qdq import as_dequantize, as_quantize
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.quant.spec import dtype_name
from qfuse.normalize import normalize
from qfuse.optimize.merge.cse import Combine
from qfuse.optimize.merge.merge_linears import MergeLinears, price
from qfuse.optimize.merge.siblings import Sibling
from qfuse.optimize.schedule import move
from qfuse.rewrite.context import RewriteContext
from qfuse.testing.build import GraphBuilder

# Limit of included elementwise ops in a row; a kernel fuses that many in any case.
_DEPTH = 4


@dataclass(frozen=True, slots=True)
class ModelSite:
    """One merge site of a model, or several that are alike.

    Attributes:
        name: The modules that its linears are in.
        kind: How they are quantized.
        m: Rows of the input.
        k: Input features.
        widths: Output features of each.
        predicted: What the cost model says of it where it is.
        program: The site alone.
        scales: The inputs of that which are scales.
        count: How many are alike.
    """

    name: str
    kind: str
    m: int
    k: int
    widths: tuple[int, ...]
    predicted: Comparison
    program: NormalGraph
    scales: frozenset[str]
    count: int = 1

    def inputs(self) -> list[torch.Tensor]:
        """Return random inputs for it."""
        return [
            _random(spec.dtype, tuple(map(int, spec.shape)), scale=spec.name in self.scales)
            for spec in self.program.signature.inputs
            if spec.dtype is not None
        ]


def sites_of(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], cost: CostModel
) -> list[ModelSite]:
    """Return the merge sites of a model; those that are alike once.

    Raises:
        OptionsError: Its sizes vary.
        CaptureError: It cannot be exported.
    """
    captured = capture(model, args, dict(kwargs))
    if captured.signature.symbols:
        raise OptionsError(
            "the sizes of the model vary, and sites are measured at fixed ones",
            fix="give the module, or a program that was exported with fixed sizes",
        )
    normal = normalize(captured, RewriteContext("normalize", cost))
    context = RewriteContext("optimize", cost)
    # As they are when merging gets them.
    Combine().run(normal, context)
    move(normal, context)
    found: dict[str, ModelSite] = {}
    for group in MergeLinears().groups(normal):
        site = _site(group, normal, cost)
        text = f"{site.kind} {to_text(site.program.graph)}"
        known = found.get(text)
        found[text] = site if known is None else replace(known, count=known.count + 1)
    return list(found.values())


def _site(group: Sequence[Sibling], program: NormalGraph, cost: CostModel) -> ModelSite:
    first = group[0]
    m = 1
    for size in shape_of(first.op.x)[:-1]:
        m *= int(size)
    widths = tuple(sibling.n for sibling in group)
    priced = price(group, program, cost)
    alone, scales = cut(group, program)
    return ModelSite(_name(group), _kind(first), m, first.shape[1], widths, priced, alone, scales)


def _name(group: Sequence[Sibling]) -> str:
    places = [place_of(sibling.op.node) for sibling in group]
    paths = [(place.module or place.node).split(".") for place in places]
    return " + ".join([".".join(paths[0]), *(path[-1] for path in paths[1:])])


def _kind(sibling: Sibling) -> str:
    real = dtype_name(dtype_of(sibling.op.node))
    if sibling.stored is None:
        return f"float {real}"
    stored = sibling.stored.params.spec
    weight = f"{dtype_name(stored.dtype)}, {real}"
    x = as_dequantize(sibling.op.x)
    if x is None:
        return f"weight-only {weight}"
    return f"{'dynamic' if constant_of(x.params.scale) is None else 'static'} {weight}"


def cut(group: Sequence[Sibling], program: NormalGraph) -> tuple[NormalGraph, frozenset[str]]:
    """Return a graph of the linears of a group and what is fused behind them.

    Returns:
        The graph, whose constants are shared, and the names of inputs that are scales.
    """
    cutter = _Cutter(program, {sibling.op.node: 0 for sibling in group})
    return cutter.run()


@dataclass
class _Cutter:
    program: NormalGraph
    depth: dict[Node, int]
    b: GraphBuilder = field(default_factory=GraphBuilder)
    made: dict[Node, Node] = field(default_factory=dict)
    scales: set[str] = field(default_factory=set)
    names: int = 0

    def run(self) -> tuple[NormalGraph, frozenset[str]]:
        for node in self.program.graph.nodes:
            depth = self.depth.get(node, self._depth_behind(node))
            if depth is not None and _is_static(node):
                self.depth[node] = depth
        # Inputs come first in a graph.
        for node in self.depth:
            for source in node.all_input_nodes:
                self._declare(source)
                self._note_scale(source)
            self._note_scale(node)
        for node in self.depth:
            self._copy(node)
        outs = [out for node in self.depth for out in self._outputs(node)]
        return self.b.done(*outs), frozenset(self.scales)

    def _depth_behind(self, node: Node) -> int | None:
        """Return how many elementwise ops lie between the linears and the end of ``node``."""
        known = [self.depth[source] for source in node.all_input_nodes if source in self.depth]
        if not known:
            return None
        if node.target is operator.getitem or is_call(node, *SPLITS):
            return max(known)
        if movement_of(node) is not None:
            return max(known)
        deeper = max(known) + 1
        return deeper if deeper <= _DEPTH and _is_elementwise(node) else None

    def _declare(self, node: Node) -> None:
        """Add the inputs that ``node`` stands for or is made of."""
        if node in self.made or node in self.depth or _is_held(node):
            return
        dequantize = as_dequantize(node)
        if dequantize is None:
            self._input(node)
            return
        self._declare(dequantize.q)
        params = dequantize.params
        for part in (params.scale, params.zero_point):
            if part is not None:
                self._declare(part)

    def _note_scale(self, node: Node) -> None:
        """Remember the input that is the scale of ``node``, if there is one."""
        view = as_quantize(node) or as_dequantize(node)
        scale = None if view is None else self.made.get(view.params.scale)
        if scale is not None and scale.op == "placeholder":
            self.scales.add(str(scale.target))

    def _input(self, node: Node) -> None:
        value = node.meta["val"]
        name = self._name("x")
        self.made[node] = self.b.arg(name, value.dtype, *map(int, value.shape))

    def _name(self, hint: str) -> str:
        self.names += 1
        return f"{hint}{self.names}"

    def _copy(self, node: Node) -> Node:
        """Add ``node``, and what it reads of constants; inputs are there already."""
        known = self.made.get(node)
        if known is not None:
            return known
        value = constant_of(node)
        if value is not None:
            made = self.b.const(self._name("c"), value)
        elif node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, Node), "an item is of a node"
            made = self.b.item(self._copy(source), int(str(index)))
        else:
            op = overload_of(node)
            assert op is not None, f"{node} is a call"
            args, kwargs = map_arg((node.args, node.kwargs), self._copy)
            made = self.b.call(op, *args, **kwargs)
        self.made[node] = made
        return made

    def _outputs(self, node: Node) -> list[Node]:
        """Return the output of the site at ``node``: itself, or a part if it has other users."""
        if isinstance(node.meta["val"], (tuple, list)):
            return []
        outside = [user for user in node.users if user not in self.depth]
        made = self.made[node]
        if not outside and node.users:
            return []
        if any(user.op == "output" for user in outside) or self.depth[node] > 0:
            return [made]
        # Its user supports any strides, and only needs one row.
        sizes = list(made.meta["val"].shape)
        if sizes:
            made = self.b.call(aten.slice.Tensor, made, sizes.index(max(sizes[:-1] or sizes)), 0, 1)
        return [self.b.call(aten.neg.default, made)]


def _is_elementwise(node: Node) -> bool:
    op = overload_of(node)
    if op is None or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    return torch.Tag.pointwise in op.tags or is_call(node, ops.quantize, aten.cat.default)


def _is_held(node: Node) -> bool:
    """Whether ``node`` is a constant, or a weight made of constants alone."""
    if constant_of(node) is not None:
        return True
    dequantize = as_dequantize(node)
    return dequantize is not None and all(map(_is_held, node.all_input_nodes))


def _is_static(node: Node) -> bool:
    """Whether nothing that ``node`` reads is a size."""
    return all(
        isinstance(source.meta["val"], (torch.Tensor, tuple, list))
        for source in node.all_input_nodes
    )


def _random(dtype: torch.dtype, shape: tuple[int, ...], *, scale: bool) -> torch.Tensor:
    if dtype.is_floating_point:
        made = torch.rand(shape) * 0.02 + 1e-2 if scale else torch.randn(shape)
        return made.to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 100, shape).to(dtype)
