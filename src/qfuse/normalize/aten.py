"""The dialect of plain ATen: linears, weight-only and integer linears, quantization by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qfuse.normalize.cancel_transpose import CancelTranspose
from qfuse.normalize.choose_chain import ChooseChain
from qfuse.normalize.dequantize_chain import DequantizeChain
from qfuse.normalize.drop_copy import DropCopy
from qfuse.normalize.drop_view import DropView
from qfuse.normalize.expand_movement import ExpandMovement
from qfuse.normalize.float_zero_point import FloatZeroPoint
from qfuse.normalize.fold_stored import FoldStored
from qfuse.normalize.fuse_bias import FuseBias
from qfuse.normalize.int_mm_chain import IntMmChain
from qfuse.normalize.int_mm_exact import ExactIntMm
from qfuse.normalize.int_mm_shift import IntMmShift
from qfuse.normalize.lift_transpose import LiftTranspose
from qfuse.normalize.lift_view import LiftView
from qfuse.normalize.linear_from_addmm import LinearFromAddmm
from qfuse.normalize.linear_from_baddbmm import LinearFromBaddbmm
from qfuse.normalize.linear_from_bmm import LinearFromBmm
from qfuse.normalize.linear_from_einsum import LinearFromEinsum
from qfuse.normalize.linear_from_inner import LinearFromInner
from qfuse.normalize.linear_from_matmul import LinearFromMatmul
from qfuse.normalize.linear_from_mm import LinearFromMm
from qfuse.normalize.linear_from_mv import LinearFromMv
from qfuse.normalize.merge_views import MergeViews
from qfuse.normalize.quantize_chain import QuantizeChain
from qfuse.normalize.regroup_dequantize import RegroupDequantize
from qfuse.normalize.row_scale import RowScale
from qfuse.normalize.sink_view import SinkView
from qfuse.normalize.weight_only_scale import WeightOnlyScale

if TYPE_CHECKING:
    from qfuse.rewrite.rule import Rule

__all__ = ["rules"]

_RULES: tuple[type[Rule[Any]], ...] = (
    # Every spelling of a linear becomes one.
    LinearFromMm,
    LinearFromAddmm,
    LinearFromMatmul,
    LinearFromMv,
    LinearFromBmm,
    LinearFromBaddbmm,
    LinearFromInner,
    LinearFromEinsum,
    # Integer products: first right, then with the zero point inside, then with their scales.
    ExactIntMm,
    IntMmShift,
    IntMmChain,
    # What scales and shifts the result of a linear goes to its operands.
    WeightOnlyScale,
    RowScale,
    FloatZeroPoint,
    FuseBias,
    # Quantization written as arithmetic.
    QuantizeChain,
    ChooseChain,
    DequantizeChain,
    RegroupDequantize,
    # Movement: one spelling, whatever undoes itself goes, and weights end in constants.
    ExpandMovement,
    DropCopy,
    DropView,
    MergeViews,
    SinkView,
    LiftView,
    CancelTranspose,
    LiftTranspose,
    FoldStored,
)


def rules() -> tuple[Rule[Any], ...]:
    """Return the rules in the order in which they are tried at a node."""
    return tuple(rule() for rule in _RULES)
