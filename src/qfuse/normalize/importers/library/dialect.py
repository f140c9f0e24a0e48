"""The dialect of library products, whose packed weights are unpacked at compile time."""

from __future__ import annotations

from typing import Any

from qfuse.normalize.importers.dialect import Dialect
from qfuse.normalize.importers.library.int4pack import NormalizeInt4PackMm
from qfuse.normalize.importers.library.int8pack import NormalizeInt8PackMm
from qfuse.normalize.importers.library.onednn_convolution import NormalizeOnednnConvolution
from qfuse.normalize.importers.library.onednn_linear import NormalizeOnednnLinear
from qfuse.normalize.importers.library.scaled_mm import NormalizeScaledMm
from qfuse.normalize.importers.library.scaled_mm_v2 import NormalizeScaledMmV2
from qfuse.rewrite.rule import Rule

_EAGER = "its result is a quantized tensor of eager mode, which has no canonical form"
_GROUPED = "its rows are split between several weights at run time"


def _rules() -> list[Rule[Any]]:
    return [
        NormalizeInt8PackMm(),
        NormalizeInt4PackMm(),
        NormalizeScaledMm(),
        NormalizeScaledMmV2(),
        NormalizeOnednnLinear(),
        NormalizeOnednnConvolution(),
    ]


LIBRARY = Dialect(
    "library-products",
    _rules,
    frozenset({"onednn"}),
    {
        "aten::quantize_per_tensor": _EAGER,
        "aten::quantize_per_tensor_dynamic": _EAGER,
        "aten::quantize_per_channel": _EAGER,
        "aten::_weight_int8pack_mm": "its operands have no canonical form",
        "aten::_weight_int4pack_mm_for_cpu": "its operands have no canonical form",
        "aten::_scaled_mm": "its operands have no canonical form",
        "aten::_scaled_mm_v2": "its operands have no canonical form",
        "aten::_scaled_grouped_mm": _GROUPED,
        "aten::_dyn_quant_matmul_4bit": (
            "it rounds activations half away from zero, and a quantize rounds them half to even: "
            "values at a tie would be one step off. Use Int8DynamicActivationIntxWeightConfig"
        ),
        "torchao::da8w4_linear_cpu": (
            "its packed layout depends on how torchao was built, and is not documented"
        ),
        "torchao::float8_linear_cpu": (
            "its packed layout depends on how torchao was built, and is not documented"
        ),
    },
)
