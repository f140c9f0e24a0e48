"""Random graphs of convolutions as modules, some of whose calls write to their operand."""

from __future__ import annotations

import copy
import operator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st
from tests.support.captured_case import CapturedCase
from tests.support.strategies.convolutions.cases import conv_cases
from torch._ops import OpOverload
from torch.export import Dim
from torch.fx import GraphModule, Node

from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.ir.ops.views import dtype_of, shape_of

aten = torch.ops.aten

# The sizes of images that `conv_cases` draws.
_DRAWN = (9, 10, 11)

_IN_PLACE: dict[OpOverload, OpOverload] = {
    aten.relu.default: aten.relu_.default,
    aten.add.Tensor: aten.add_.Tensor,
    aten.sub.Tensor: aten.sub_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.clamp.default: aten.clamp_.default,
    aten.hardtanh.default: aten.hardtanh_.default,
    aten.hardswish.default: aten.hardswish_.default,
    aten.silu.default: aten.silu_.default,
    aten.sigmoid.default: aten.sigmoid_.default,
    aten.leaky_relu.default: aten.leaky_relu_.default,
    aten.elu.default: aten.elu_.default,
    aten.mish.default: aten.mish_.default,
    aten.clamp_max.default: aten.clamp_max_.default,
    aten.neg.default: aten.neg_.default,
}


@st.composite
def writing_modules(draw: st.DrawFn, *, exact: bool) -> tuple[CapturedCase, GraphModule]:
    """A random graph and a module that computes much the same, but writes to what it computed.

    The values of the module differ where a tensor that is written to is read again; what the module
    itself gives is the truth.
    """
    case = draw(conv_cases(exact=exact))
    assume(not _may_be_one(case.program))
    # An example with one image would not have a dynamic batch.
    first = {**case.sizes[0], "n": max(2, case.sizes[0]["n"])}
    case = replace(case, sizes=(first, case.sizes[1]))
    graph = copy.deepcopy(case.program.graph)
    for node in graph.nodes:
        if _may_write(node) and draw(st.booleans()):
            node.target = _IN_PLACE[node.target]
    module = GraphModule(case.program.module, graph)
    module.graph.lint()
    return case, module.eval()


def _may_write(node: Node) -> bool:
    """Whether a call has a form that writes to its first operand, which is not an input's or a constant's."""
    if node.target not in _IN_PLACE or not isinstance(node.args[0], Node):
        return False
    x = node.args[0]
    source = x
    while source.op == "call_function" and _is_view(source):
        source = source.all_input_nodes[0]
    same = map(str, shape_of(x)), map(str, shape_of(node))
    return source.op == "call_function" and tuple(same[0]) == tuple(same[1]) and _same_type(x, node)


def _is_view(node: Node) -> bool:
    """Whether a value may be in the memory of its operand."""
    if node.target in {operator.getitem, aten.reshape.default, aten.contiguous.default}:
        return True
    return isinstance(node.target, OpOverload) and node.target.is_view


def _same_type(x: Node, y: Node) -> bool:
    return dtype_of(x) == dtype_of(y)


def _may_be_one(program: CapturedGraph) -> bool:
    """Whether a size of an image is one for some of the drawn sizes, and more for others.

    torch.export makes a guard for it, which excludes either.
    """
    images = {
        size.node.expr: name
        for node, spec in zip(_inputs(program), program.signature.inputs, strict=True)
        for size, name in zip(shape_of(node), spec.shape, strict=True)
        if isinstance(size, torch.SymInt) and name in {"h", "w"}
    }
    drawn = [dict(zip(images, sizes, strict=True)) for sizes in product(_DRAWN, repeat=len(images))]
    for node in program.graph.nodes:
        value = node.meta.get("val")
        sizes: tuple[Any, ...] = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
        for size in sizes:
            if isinstance(size, torch.SymInt) and set(images) & size.node.expr.free_symbols:
                found = {int(size.node.expr.subs(each)) for each in drawn}
                if 1 in found and len(found) > 1:
                    return True
    return False


def _inputs(program: CapturedGraph) -> list[Node]:
    return list(program.graph.find_nodes(op="placeholder"))


def dynamic_shapes(case: CapturedCase) -> dict[str, dict[int, Any]] | None:
    """What torch.export is told about the symbolic sizes."""
    # No other images than those that are drawn: a strided window may give one pixel of all of them,
    # and torch.export makes a guard for that.
    most = max(_DRAWN)
    dims = {name: Dim(name, min=min(_DRAWN), max=most) for name in ("h", "w")}
    dims["n"] = Dim("n", min=1, max=64)
    inputs = case.program.signature.inputs
    shapes = {
        spec.name: {
            axis: dims[size] for axis, size in enumerate(spec.shape) if isinstance(size, str)
        }
        for spec in inputs
    }
    return shapes if any(shapes.values()) else None
