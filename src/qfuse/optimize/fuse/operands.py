"""The quantized operands of fused ops, for the rules that fuse them."""

from __future__ import annotations

from dataclasses import dataclass

from qfuse.ir.dtypes import BYTES, FLOAT8
from qfuse.ir.graph.schema import overload_of
from qfuse.ir.graph.stage_graph import REFUSED_META, constant_of, op_name
from qfuse.ir.movement.lookup import looked_up_in
from qfuse.ir.ops.constants import is_constant_expression, operands_first
from qfuse.ir.ops.qdq import Dequantize, as_dequantize
from qfuse.ir.ops.views import QuantParams, dtype_of, shape_of
from qfuse.ir.quant.spec import dtype_name
from qfuse.ir.sizes import is_one
from qfuse.optimize.match.float_side import refuse_looked_up
from qfuse.rewrite.prelude import Miss, MissCode, Node

_KNOWN = frozenset({"aten", "prims", "qfuse"})


@dataclass(frozen=True, slots=True)
class Operands:
    """An activation, which may be quantized, and a quantized weight.

    Attributes:
        x: The activation that the fused op reads: quantized values, or floats.
        x_params: Its parameters; ``None`` if it is float.
        weight: The quantized weight.
    """

    x: Node
    x_params: QuantParams | None
    weight: Dequantize


def stored_edge(x: Node) -> tuple[Node, QuantParams | None]:
    """Return the operand that replaces ``x``: quantized values behind a one-level dequantize."""
    dequantize = as_dequantize(x)
    if dequantize is None or dequantize.params.outer_scale is not None:
        return x, None
    return dequantize.q, dequantize.params


def quantized_operands(x: Node, weight: Node, *, transposed: bool = False) -> Operands | Miss:
    """Return the operands before their dequantizes.

    Refuses: a float weight; a weight that is not a constant.

    Args:
        x: The activation.
        weight: The weight.
        transposed: Whether its first axis is not that of the outputs.
    """
    stored, act = as_dequantize(weight), as_dequantize(x)
    if stored is None:
        return _float_weight(weight, quantized=act is not None, transposed=transposed)
    if constant_of(stored.q) is None:
        table = looked_up_in(weight)
        if table is not None and act is None:
            return refuse_looked_up(x, table)
        text = "the weight is computed at run time, so it cannot be prepacked"
        return Miss(MissCode.NOT_CONSTANT, stored.q, text, progress=3)
    if act is None:
        return Operands(x, None, stored)
    return Operands(act.q, act.params, stored)


def _float_weight(weight: Node, *, quantized: bool, transposed: bool) -> Miss:
    """Say that a weight is not quantized, or that an op which no dialect knows makes it."""
    op = overload_of(weight)
    known = op is None or op.namespace in _KNOWN
    if known and not transposed and all(is_one(size) for size in shape_of(weight)[1:]):
        # Where the source quantized it so, normalizing has folded it.
        text = "the weight has one entry per output, so a scale for each is the weight itself"
        return Miss(MissCode.PROFIT, weight, text, progress=3)
    stored = _stored_below(weight) if known else None
    if stored is not None:
        text = "the weight is computed from {} values by {}, and is not a dequantize of them"
        details = dtype_name(dtype_of(stored)), op_name(weight)
        return Miss(MissCode.NOT_QUANTIZED, weight, text, *details, progress=2)
    if quantized:
        text = "the activation is quantized but the weight is {}"
        return Miss(MissCode.NOT_QUANTIZED, weight, text, dtype_of(weight), progress=2)
    if known:
        return Miss(MissCode.NOT_QUANTIZED, weight, "the weight is not quantized")
    why = weight.meta.get(REFUSED_META, "no dialect translated")
    text = "the weight comes from {}, which {}"
    return Miss(MissCode.NOT_QUANTIZED, weight, text, op_name(weight), why)


def _stored_below(weight: Node) -> Node | None:
    """Return stored 8-bit values that a weight is computed from; ``None`` if there are none."""
    if not is_constant_expression(weight):
        return None
    for node in operands_first(weight):
        value = constant_of(node)
        # A mask of 8 bits may be one number; weights are not.
        if value is not None and value.dtype in (*BYTES, *FLOAT8) and value.ndim > 1:
            return node
    return None
