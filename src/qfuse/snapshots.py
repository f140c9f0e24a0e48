"""Snapshots of a graph between stages: names and texts only, for reports and pages.

Nodes of different stages correspond if they implement a common node of the captured graph. One node
may correspond to several, in both directions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from qfuse.ir.graph.stage_graph import (
    MODULE_META,
    RULE_META,
    SITE_META,
    SOURCE_META,
    StageGraph,
)
from qfuse.ir.graph.text import op_text, type_text
from qfuse.rewrite.rewriter import origins

STAGES = ("captured", "normalized", "optimized", "lowered")
"""The names of the four stages, in order."""

_NAMES = {"normal": "normalized"}


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """One node of a stage.

    Attributes:
        name: Its name in the graph.
        op: Its op, such as ``aten.linear``; ``placeholder``, ``get_attr`` or ``output`` else.
        inputs: Names of its operands.
        type: Dtype and shape of its value, such as ``float32[4, s0]``.
        bytes: Size of its value at the traced sizes; ``None`` if it is not a tensor.
        source: The user's line, or "".
        module: Path of the module, or "".
        rule: The rule that made it, or "".
        origins: Names of the captured nodes that it implements.
        site: Name of the optimized node that it implements, for nodes made by lowering, or "".
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    type: str
    bytes: int | None
    source: str
    module: str
    rule: str
    origins: tuple[str, ...]
    site: str


@dataclass(frozen=True, slots=True)
class StageSnapshot:
    """The graph of one stage.

    Attributes:
        stage: One of :data:`STAGES`.
        nodes: In topological order.
    """

    stage: str
    nodes: tuple[NodeSnapshot, ...]

    @classmethod
    def of(cls, program: StageGraph) -> StageSnapshot:
        """Take a snapshot of ``program``."""
        nodes = tuple(map(_snapshot, program.graph.nodes))
        return cls(_NAMES.get(program.stage, program.stage), nodes)


@dataclass(slots=True)
class StageRecorder:
    """Keeps the snapshots of the latest rewrite of a captured graph."""

    stages: list[StageSnapshot] = field(default_factory=list)

    def __call__(self, program: StageGraph) -> None:
        """Add a snapshot; that of a captured graph starts anew."""
        taken = StageSnapshot.of(program)
        if taken.stage == STAGES[0]:
            self.stages.clear()
        self.stages.append(taken)


def byte_count(value: object) -> int | None:
    """Return the bytes of a (fake) tensor, or of several, at the traced sizes; else ``None``."""
    if isinstance(value, (tuple, list)):
        parts = [part for each in value if (part := byte_count(each)) is not None]
        return sum(parts) if parts else None
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    shape = [_hint(size) for size in value.shape]
    return None if None in shape else math.prod(s or 0 for s in shape) * value.element_size()


def corresponding(one: StageSnapshot, other: StageSnapshot) -> dict[str, tuple[str, ...]]:
    """Return for each node of ``one`` the nodes of ``other`` with a common origin, in order."""
    position = {node.name: index for index, node in enumerate(other.nodes)}
    found: dict[str, list[str]] = {}
    for node in other.nodes:
        for origin in node.origins:
            found.setdefault(origin, []).append(node.name)
    return {node.name: _joined(node.origins, found, position) for node in one.nodes}


def _joined(
    names: Sequence[str], found: dict[str, list[str]], position: dict[str, int]
) -> tuple[str, ...]:
    several = {name for origin in names for name in found.get(origin, ())}
    return tuple(sorted(several, key=position.__getitem__))


def _snapshot(node: Node) -> NodeSnapshot:
    meta = node.meta
    value = meta.get("val")
    return NodeSnapshot(
        name=node.name,
        op=op_text(node),
        inputs=tuple(operand.name for operand in node.all_input_nodes),
        type="" if node.op == "output" else type_text(value),
        bytes=byte_count(value),
        source=str(meta.get(SOURCE_META, "")),
        module=str(meta.get(MODULE_META, "")),
        rule=str(meta.get(RULE_META, "")),
        origins=origins(node),
        site=str(meta.get(SITE_META, "")),
    )


def _hint(size: int | torch.SymInt) -> int | None:
    """Return the traced size, without adding a guard."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return None if hint is None else int(hint)
