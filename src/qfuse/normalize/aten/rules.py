"""The dialect of plain ATen: linears and convolutions of all kinds, hand-written quantization."""

from __future__ import annotations

from typing import Any

from qfuse.normalize.aten.activations.saturation import (
    SpellSaturation,
    SpellSaturationAtZero,
)
from qfuse.normalize.aten.activations.squared_relu import SpellSquaredRelu
from qfuse.normalize.aten.activations.two_clamps import MergeClamps
from qfuse.normalize.aten.activations.written_out import SpellActivation
from qfuse.normalize.aten.convolution.padding import SpellPadding
from qfuse.normalize.aten.convolution.weight import DequantizeWeight
from qfuse.normalize.aten.int_matmul.divided import Divided, DividedExactly
from qfuse.normalize.aten.int_matmul.exact import ExactIntMm
from qfuse.normalize.aten.int_matmul.expand_addmm import ExpandIntAddmm
from qfuse.normalize.aten.int_matmul.fold_factor import FoldFactor
from qfuse.normalize.aten.int_matmul.scaled_product import FuseScaledProduct
from qfuse.normalize.aten.int_matmul.shift import IntMmShift
from qfuse.normalize.aten.int_matmul.swap_factors import SwapFactors
from qfuse.normalize.aten.linear.batched_einsum import SpellBatchedEinsum
from qfuse.normalize.aten.linear.batched_scale import LiftBatchedScale
from qfuse.normalize.aten.linear.batched_weight import ExpandBatchedWeight
from qfuse.normalize.aten.linear.bias import FuseBias
from qfuse.normalize.aten.linear.half_weight import DequantizeHalfWeight
from qfuse.normalize.aten.linear.permute_features import PermuteFeatures
from qfuse.normalize.aten.linear.scaled_addmm import FoldAddmmFactors
from qfuse.normalize.aten.linear.spell_matmul import SpellBatchedSum
from qfuse.normalize.aten.linear.spellings import LINEAR_FROM
from qfuse.normalize.aten.linear.wide_einsum import SpellWideEinsum
from qfuse.normalize.aten.operands.narrow_activation import NarrowActivation
from qfuse.normalize.aten.qdq.addcmul import SpellAddcmul
from qfuse.normalize.aten.qdq.choose_asymmetric import ChooseAsymmetric
from qfuse.normalize.aten.qdq.choose_qparams import ChooseChain
from qfuse.normalize.aten.qdq.clamp_zero_point import ClampZeroPoint
from qfuse.normalize.aten.qdq.dequantize import DequantizeChain
from qfuse.normalize.aten.qdq.expanded_scale import ContractScale
from qfuse.normalize.aten.qdq.fake_quantize import ImportFakeQuantize
from qfuse.normalize.aten.qdq.float_offset import FloatOffset
from qfuse.normalize.aten.qdq.float_zero_point import FloatZero
from qfuse.normalize.aten.qdq.fold_constants import FoldStored
from qfuse.normalize.aten.qdq.fold_integers import FoldIntegers
from qfuse.normalize.aten.qdq.inverse_scale import InverseScale
from qfuse.normalize.aten.qdq.merge_weights import MergeWeights
from qfuse.normalize.aten.qdq.move_weight import MoveWeight
from qfuse.normalize.aten.qdq.narrow_integers import NarrowIntegers
from qfuse.normalize.aten.qdq.quantize import QuantizeChain
from qfuse.normalize.aten.qdq.regroup import RegroupDequantize
from qfuse.normalize.aten.qdq.rounded_weight import StoreRoundedWeight
from qfuse.normalize.aten.qdq.scale_of_product import ScaleOfProduct
from qfuse.normalize.aten.qdq.second_scale import FoldSecondScale
from qfuse.normalize.aten.spell_alias import SpellAlias
from qfuse.normalize.aten.views.cancel_transpose import CancelTranspose
from qfuse.normalize.aten.views.drop_copy import DropCopy
from qfuse.normalize.aten.views.drop_expand import DropExpand
from qfuse.normalize.aten.views.drop_view import DropView
from qfuse.normalize.aten.views.expand import ExpandMovement
from qfuse.normalize.aten.views.lift_movement import LiftMovement
from qfuse.normalize.aten.views.lift_size import LiftSize
from qfuse.normalize.aten.views.lift_transpose import LiftTranspose
from qfuse.normalize.aten.views.lift_view import LiftView
from qfuse.normalize.aten.views.merge_views import MergeViews
from qfuse.normalize.aten.views.sink_transpose import SinkTranspose
from qfuse.normalize.aten.views.sink_view import SinkView
from qfuse.normalize.aten.views.spell_cast import SpellCast
from qfuse.normalize.aten.views.spell_split import SpellSplit
from qfuse.rewrite.rule import Rule

_RULES: tuple[type[Rule[Any]], ...] = (
    SpellAlias,
    # Every spelling of a linear becomes `aten.linear`.
    *LINEAR_FROM.values(),
    SpellWideEinsum,
    SpellBatchedEinsum,
    FoldAddmmFactors,
    # Products of quantized values with all their scales and corrections; then the remaining integer
    # products, which have to be correct on every machine.
    DropExpand,
    SinkTranspose,
    ExpandIntAddmm,
    FoldFactor,
    DividedExactly,
    Divided,
    FuseScaledProduct,
    ExactIntMm,
    SwapFactors,
    IntMmShift,
    FuseBias,
    # Every padding of a convolution is in numbers, and every quantized weight is dequantized.
    SpellPadding,
    DequantizeWeight,
    DequantizeHalfWeight,
    # Parts of weights are weights, and so are weights that are joined.
    MoveWeight,
    MergeWeights,
    SpellBatchedSum,
    # Before each weight is a linear of its own, which has no scale for all of them behind it.
    LiftBatchedScale,
    ExpandBatchedWeight,
    PermuteFeatures,
    # Quantization written as arithmetic.
    SpellSaturation,
    SpellSaturationAtZero,
    ImportFakeQuantize,
    ContractScale,
    FloatZero,
    SpellAddcmul,
    NarrowIntegers,
    NarrowActivation,
    InverseScale,
    ScaleOfProduct,
    ClampZeroPoint,
    QuantizeChain,
    StoreRoundedWeight,
    ChooseChain,
    ChooseAsymmetric,
    DequantizeChain,
    RegroupDequantize,
    # Scales in two levels are one.
    FoldSecondScale,
    # Integers that a graph computes in floats have no offset.
    FoldIntegers,
    FloatOffset,
    # Activations of quantized linears and convolutions, written as arithmetic.
    MergeClamps,
    SpellActivation,
    SpellSquaredRelu,
    # Movement: one spelling; views and copies that cancel are dropped, and weights are constants.
    ExpandMovement,
    SpellSplit,
    SpellCast,
    DropCopy,
    DropView,
    MergeViews,
    SinkView,
    LiftView,
    CancelTranspose,
    LiftTranspose,
    LiftMovement,
    LiftSize,
    FoldStored,
)


def rules() -> tuple[Rule[Any], ...]:
    """Return the rules in the order in which they are tried at a node."""
    return tuple(rule() for rule in _RULES)
