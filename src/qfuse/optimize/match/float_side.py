"""Why a product of a quantized and a float operand is not fused."""

from __future__ import annotations

from qfuse.ir.movement.lookup import looked_up_in, looked_up_reason
from qfuse.patterns.quantized_operand import refuse_float_operand
from qfuse.rewrite.prelude import Miss, MissCode, Node


def refuse_float_side(side: str, operand: Node, other: Node) -> Miss:
    """Refuse a product whose ``side`` operand is float, while the ``other`` one is quantized.

    A weight that is looked up per row, as those of experts are per token, is named as such.
    """
    table = looked_up_in(other)
    if table is None:
        return refuse_float_operand(side, operand)
    return refuse_looked_up(operand, table)


def refuse_looked_up(operand: Node, table: Node) -> Miss:
    """Refuse a product of the float ``operand`` with weights that are looked up in ``table``."""
    return Miss(MissCode.NOT_QUANTIZED, operand, "{}", looked_up_reason(table), progress=3)
