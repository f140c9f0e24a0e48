"""Hand-made lowered graphs for the tests of the backends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from qfuse.ir.graph.stage_graph import LoweredGraph, Mutation, OutputSpec
from qfuse.testing.build import GraphBuilder

aten = torch.ops.aten


@torch.library.custom_op("qfuse_backend_tests::twist", mutates_args=())
def _twist(x: torch.Tensor, by: torch.Tensor, scale: float) -> torch.Tensor:
    return x.flip(-1) * by * scale


@_twist.register_fake
def _fake_twist(x: torch.Tensor, by: torch.Tensor, scale: float) -> torch.Tensor:
    del by, scale
    return torch.empty_like(x)


TWIST = torch.ops.qfuse_backend_tests.twist.default
"""A custom op: ``x.flip(-1) * by * scale``."""


def finish(
    builder: GraphBuilder,
    outputs: Sequence[Node],
    writes: Sequence[tuple[str, Node]] = (),
    returned: Mapping[int, str] | None = None,
) -> LoweredGraph:
    """Finish a graph.

    Args:
        builder: Holds its nodes.
        outputs: The user outputs.
        writes: Values, each with the name of the input or constant that it is written to.
        returned: Outputs that are an input, by position.
    """
    made = builder.done(*(value for _, value in writes), *outputs, stage=LoweredGraph)
    names = [spec.name for spec in made.signature.inputs]
    mutations = tuple(
        Mutation(i, input_index=names.index(name)) if name in names else Mutation(i, buffer=name)
        for i, (name, _) in enumerate(writes)
    )
    is_input = {i: names.index(name) for i, name in (returned or {}).items()}
    leaves = tuple(OutputSpec(i, input_index=is_input.get(i)) for i in range(len(outputs)))
    tree = pytree.tree_structure(tuple(range(len(outputs))))
    signature = replace(made.signature, mutations=mutations, outputs=leaves, out_spec=tree)
    return replace(made, signature=signature)


def projection_graph(scale: float = 0.37) -> LoweredGraph:
    """A linear over any number of rows, a reduction, a custom op, and constants of every size.

    Outputs: ``y`` of shape ``[n, 2, 4]``; ``twist(y)``; the sum of ``x`` over rows; a view of
    ``x``; a constant; and ``y`` transposed in memory.
    """
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "n", 16)
    ids = b.arg("ids", torch.int64, "n")
    weight = b.const("weight", torch.randn(8, 16))
    table = b.const("table", torch.randn(10, 8))
    factor = b.const("factor", torch.tensor(scale))
    four = b.const("four", torch.tensor([1.0, 2.0, 3.0, 4.0]))
    y = b.call(aten.linear.default, x, weight)
    y = b.call(aten.mul.Tensor, y, factor)
    y = b.call(aten.add.Tensor, y, b.call(aten.embedding.default, table, ids))
    heads = b.call(aten.mul.Tensor, b.call(aten.view.default, y, [-1, 2, 4]), four)
    twisted = b.call(TWIST, y, factor, 2.0)
    total = b.call(aten.sum.dim_IntList, x, [0])
    view = b.call(aten.slice.Tensor, x, 1, 0, 4)
    turned = b.call(aten.neg.default, b.call(aten.t.default, y))
    return finish(b, [heads, twisted, total, view, four, turned])


def decode_constants() -> dict[str, torch.Tensor]:
    """Fresh constants and buffers for :func:`decode_graph`."""
    base = torch.arange(6.0)
    return {
        "keys": torch.randn(1, 2, 16, 8),
        "steps": torch.tensor(0),
        "left": torch.randn(3),
        "right": torch.randn(3),
        "base": base,
        "tail": base[3:],
        "gain": torch.tensor(0.5),
    }


def decode_graph(constants: Mapping[str, torch.Tensor]) -> LoweredGraph:
    """A decode step that writes to buffers and to one input, in every way that is easy to get wrong.

    Source, in plain torch::

        old = self.keys[:, :, :2].clone()       # what it was before the writes
        self.keys[:, :, pos] = q
        values[:, :, pos] = q * self.gain       # an input
        self.steps += 1
        self.left, self.right = swapped in place
        self.base = self.base + 1               # in place; `tail` is a view of it
        return q @ keys^T, old, values (the input itself), tail before the write * 2, steps
    """
    b = GraphBuilder()
    q = b.arg("q", torch.float32, 1, 2, 1, 8)
    pos = b.arg("pos", torch.int64, 1)
    values = b.arg("values", torch.float32, 1, 2, 16, 8)
    const = {name: b.const(name, value) for name, value in constants.items()}
    keys = b.call(aten.index_copy.default, const["keys"], 2, pos, q)
    scaled = b.call(aten.mul.Tensor, q, const["gain"])
    new_values = b.call(aten.index_put.default, values, [None, None, pos], scaled)
    steps = b.call(aten.add.Tensor, const["steps"], 1)
    base = b.call(aten.add.Tensor, const["base"], 1.0)
    scores = b.call(aten.matmul.default, q, b.call(aten.transpose.int, keys, 2, 3))
    old = b.call(aten.slice.Tensor, const["keys"], 2, 0, 2)
    tail = b.call(aten.mul.Tensor, const["tail"], 2.0)
    return finish(
        b,
        [scores, old, new_values, tail, steps],
        writes=[
            ("keys", keys),
            ("values", new_values),
            ("steps", steps),
            ("left", const["right"]),
            ("right", const["left"]),
            ("base", base),
        ],
        returned={2: "values"},
    )
