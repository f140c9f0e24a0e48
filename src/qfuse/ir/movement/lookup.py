"""Constants whose entries are read by indices that are computed at run time."""

from __future__ import annotations

from torch.fx import Node

from qfuse.ir.aten import aten
from qfuse.ir.graph.schema import arguments, overload_of
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.movement.registry import movement_of
from qfuse.ir.ops.qdq import as_dequantize

_LOOKUPS = {
    aten.index.Tensor: "self",
    aten.index_select.default: "self",
    aten.embedding.default: "weight",
    aten.select.int: "self",
}
# Bounds the walk above quantized values.
_STEPS = 16


def looked_up_in(value: Node) -> Node | None:
    """Return the constant whose entries a dequantize reads by computed indices."""
    dequantize = as_dequantize(value)
    node = value if dequantize is None else dequantize.q
    for _ in range(_STEPS):
        op = overload_of(node)
        # A select by a literal is a part of a constant, or of what is looked up.
        fixed = op is aten.select.int and not isinstance(arguments(node)["index"], Node)
        if op in _LOOKUPS and not fixed:
            table = arguments(node)[_LOOKUPS[op]]
            return table if isinstance(table, Node) and constant_of(table) is not None else None
        movement = movement_of(node)
        if movement is None:
            return None
        node = movement.source
    return None


def looked_up_reason(table: Node) -> str:
    """Return why products of floats and weights that are looked up in ``table`` stay."""
    return (
        f"its weights are looked up in %{table.name} for each row, and no kernel multiplies float "
        "activations by such weights: quantize the activations too"
    )
