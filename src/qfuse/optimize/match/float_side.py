"""Why a product of a quantized and a float operand is not fused."""

from __future__ import annotations

from qfuse.ir.graph.schema import arguments, overload_of
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.movement.registry import movement_of
from qfuse.ir.ops.qdq import as_dequantize
from qfuse.ir.ops.views import dtype_of
from qfuse.rewrite.prelude import Miss, MissCode, Node, aten

_LOOKUPS = {
    aten.index.Tensor: "self",
    aten.index_select.default: "self",
    aten.embedding.default: "weight",
}
# Bounds the walk above quantized values.
_STEPS = 16


def refuse_float_side(side: str, operand: Node, other: Node) -> Miss:
    """Refuse a product whose ``side`` operand is float, while the ``other`` one is quantized.

    A weight that is looked up per row, as those of experts are per token, is named as such.
    """
    table = _looked_up(other)
    if table is None:
        text = "the {} operand is {}, the other one is quantized"
        return Miss(MissCode.NOT_QUANTIZED, operand, text, side, dtype_of(operand), progress=2)
    text = (
        "its weights are looked up in %{} for each row, and no kernel multiplies float "
        "activations by such weights: quantize the activations too"
    )
    return Miss(MissCode.NOT_QUANTIZED, operand, text, table.name, progress=3)


def _looked_up(value: Node) -> Node | None:
    """Return the constant whose entries a dequantize reads by computed indices."""
    dequantize = as_dequantize(value)
    node = value if dequantize is None else dequantize.q
    for _ in range(_STEPS):
        op = overload_of(node)
        if op in _LOOKUPS:
            table = arguments(node)[_LOOKUPS[op]]
            return table if isinstance(table, Node) and constant_of(table) is not None else None
        movement = movement_of(node)
        if movement is None:
            return None
        node = movement.source
    return None
