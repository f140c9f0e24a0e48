"""Copy split results that are graph outputs, so that outputs own their memory as before."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from qfuse.ir.graph.alias import memory_of
from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import RULE_META, StageGraph
from qfuse.ir.movement.registry import SPLITS
from qfuse.rewrite.rewriter import GraphEditor

_NAME = "own-outputs"


def own_outputs(program: StageGraph) -> None:
    """Copy the results of splits that rules inserted if they, or views of them, are outputs.

    A linear returns a new dense tensor. A part of a wider one has other strides, and shares memory
    with its siblings.
    """
    editor = GraphEditor(program.module)
    for leaf in program.graph.output_node().all_input_nodes:
        part = _part(leaf)
        if part is None:
            continue
        rw = editor.rewriter(_NAME, part)
        # The copy reads the part, so it stands behind it.
        with rw.before(part.next):
            dense = torch.contiguous_format
            own = rw.call(torch.ops.aten.clone.default, part, memory_format=dense)
        rw.replace(part, own)
        rw.commit()


def _part(leaf: Node) -> Node | None:
    """Return the result of an inserted split that ``leaf`` is a view of."""
    node, root = leaf, memory_of(leaf)
    while node is not root:
        source = node.all_input_nodes[0]
        if node.target is operator.getitem and is_call(source, *SPLITS):
            # Results of a split that the caller wrote were views before the pass too.
            return node if RULE_META in source.meta else None
        node = source
    return None
