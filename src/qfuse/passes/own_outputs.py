"""Parts of one tensor that leave the graph become tensors of their own, as they were."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from qfuse.ir.graph.alias import memory_of
from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import StageGraph
from qfuse.ir.movement.registry import SPLITS
from qfuse.rewrite.rewriter import RULE_META, GraphEditor

_NAME = "own-outputs"


def own_outputs(program: StageGraph) -> None:
    """Copy the parts of splits that rules made and the caller gets, or gets to see.

    A linear gives a dense tensor that nobody else has. A part of a wider one has other strides, and
    shares its memory with its siblings.
    """
    editor = GraphEditor(program.module)
    for leaf in program.graph.output_node().all_input_nodes:
        part = _part(leaf)
        if part is None:
            continue
        rw = editor.rewriter(_NAME, part)
        with rw.before(part.next):
            dense = torch.contiguous_format
            own = rw.call(torch.ops.aten.clone.default, part, memory_format=dense)
        rw.replace(part, own)
        rw.commit()


def _part(leaf: Node) -> Node | None:
    """Return the part of a split of ours that ``leaf`` shows."""
    node, root = leaf, memory_of(leaf)
    while node is not root:
        source = node.all_input_nodes[0]
        if node.target is operator.getitem and is_call(source, *SPLITS):
            return node if RULE_META in source.meta else None
        node = source
    return None
