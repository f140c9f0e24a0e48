"""The canonical and the fused ops: schemas, meaning, shapes.

All are functional. Quantization parameters travel as ``(scale, zero_point, spec text)``; an empty
text is a float edge without quantization. A second level of scales comes last, since few have one.
The Python reference registered here *is* the meaning of each op: it is what an unclaimed op is
expanded to, and what every kernel is tested against.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch._ops import OpOverload

from qfuse.ir.ops import fused_reference as fused
from qfuse.ir.ops.epilogue import Epilogue
from qfuse.ir.quant.choose import ChooseSpec
from qfuse.ir.quant.choose import choose_qparams as choose_reference
from qfuse.ir.quant.reference import dequantize as dequantize_reference
from qfuse.ir.quant.reference import quantize as quantize_reference
from qfuse.ir.quant.spec import QuantSpec

_LIBRARY = torch.library.Library("qfuse", "FRAGMENT")  # type: ignore[no-untyped-call]

_SCHEMAS = (
    (
        "quantize(Tensor x, Tensor scale, Tensor? zero_point, str spec, "
        "Tensor? outer_scale=None) -> Tensor"
    ),
    (
        "dequantize(Tensor q, Tensor scale, Tensor? zero_point, str spec, "
        "Tensor? outer_scale=None) -> Tensor"
    ),
    "choose_qparams(Tensor x, str choose, Tensor? outer_scale=None) -> (Tensor, Tensor)",
    (
        "requantize(Tensor q, Tensor scale, Tensor? zero_point, str spec, "
        "Tensor out_scale, Tensor? out_zero_point, str out_spec, "
        "Tensor? outer_scale=None, Tensor? out_outer_scale=None) -> Tensor"
    ),
    (
        "linear(Tensor x, Tensor? x_scale, Tensor? x_zero_point, str x_spec, "
        "Tensor weight, Tensor? weight_scale, Tensor? weight_zero_point, str weight_spec, "
        "Tensor? bias, Tensor? out_scale, Tensor? out_zero_point, str out_spec, "
        "str epilogue, Tensor[] extras, Tensor? x_outer_scale=None, "
        "Tensor? weight_outer_scale=None, Tensor? out_outer_scale=None) -> Tensor"
    ),
    f"rms_norm(Tensor x, Tensor? residual, Tensor? weight, str norm, {fused.OUTPUT_SCHEMA}",
    (
        "layer_norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, str norm, "
        f"{fused.OUTPUT_SCHEMA}"
    ),
    (
        "activation(Tensor x, Tensor? x_scale, Tensor? x_zero_point, str x_spec, "
        f"str epilogue, Tensor[] extras, {fused.OUTPUT_SCHEMA}"
    ),
)


def _quantize(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    spec: str,
    outer_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    return quantize_reference(x, scale, zero_point, QuantSpec.parse(spec), outer_scale)


def _dequantize(
    q: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    spec: str,
    outer_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    return dequantize_reference(q, scale, zero_point, QuantSpec.parse(spec), outer_scale)


def _choose_qparams(
    x: torch.Tensor, choose: str, outer_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    return choose_reference(x, ChooseSpec.parse(choose), outer_scale)


def _requantize(  # noqa: PLR0913, PLR0917 - the schema's arguments
    q: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    spec: str,
    out_scale: torch.Tensor,
    out_zero_point: torch.Tensor | None,
    out_spec: str,
    outer_scale: torch.Tensor | None = None,
    out_outer_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    x = _dequantize(q, scale, zero_point, spec, outer_scale)
    return _quantize(x, out_scale, out_zero_point, out_spec, out_outer_scale)


def _edge(
    value: torch.Tensor,
    scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    spec: str,
    outer_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Give the real tensor of an operand."""
    if not spec:
        return value
    assert scale is not None, f"a quantized edge needs a scale: {spec}"
    return _dequantize(value, scale, zero_point, spec, outer_scale)


def _linear(  # noqa: PLR0913, PLR0917 - the schema's arguments
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    x_zero_point: torch.Tensor | None,
    x_spec: str,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    weight_zero_point: torch.Tensor | None,
    weight_spec: str,
    bias: torch.Tensor | None,
    out_scale: torch.Tensor | None,
    out_zero_point: torch.Tensor | None,
    out_spec: str,
    epilogue: str,
    extras: Sequence[torch.Tensor],
    x_outer_scale: torch.Tensor | None = None,
    weight_outer_scale: torch.Tensor | None = None,
    out_outer_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    real_x = _edge(x, x_scale, x_zero_point, x_spec, x_outer_scale)
    real_w = _edge(weight, weight_scale, weight_zero_point, weight_spec, weight_outer_scale)
    y = Epilogue.parse(epilogue).apply(F.linear(real_x, real_w, bias), extras)
    if not out_spec:
        return y
    assert out_scale is not None, f"a quantized output needs a scale: {out_spec}"
    return _quantize(y, out_scale, out_zero_point, out_spec, out_outer_scale)


def _fake_quantize(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    spec: str,
    outer_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    del scale, zero_point, outer_scale
    return torch.empty_like(x, dtype=QuantSpec.parse(spec).dtype)


def _fake_dequantize(
    q: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    spec: str,
    outer_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    del scale, zero_point, outer_scale
    return torch.empty_like(q, dtype=QuantSpec.parse(spec).real)


def _fake_choose_qparams(
    x: torch.Tensor, choose: str, outer_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    del outer_scale
    spec = ChooseSpec.parse(choose)
    grid = spec.grid(x.shape)
    scale = x.new_empty(grid, dtype=spec.scale_dtype)
    return scale, x.new_empty(grid, dtype=spec.zero_point_dtype)


def _fake_requantize(  # noqa: PLR0913, PLR0917 - the schema's arguments
    q: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    spec: str,
    out_scale: torch.Tensor,
    out_zero_point: torch.Tensor | None,
    out_spec: str,
    outer_scale: torch.Tensor | None = None,
    out_outer_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    del scale, zero_point, spec, out_scale, out_zero_point, outer_scale, out_outer_scale
    return torch.empty_like(q, dtype=QuantSpec.parse(out_spec).dtype)


_REFERENCES: dict[str, tuple[Callable[..., object], Callable[..., object]]] = {
    "quantize": (_quantize, _fake_quantize),
    "dequantize": (_dequantize, _fake_dequantize),
    "choose_qparams": (_choose_qparams, _fake_choose_qparams),
    "requantize": (_requantize, _fake_requantize),
    # These references run on fake tensors as they are, so shapes and promotion cannot differ.
    "linear": (_linear, _linear),
    "rms_norm": (fused.rms_norm, fused.rms_norm),
    "layer_norm": (fused.layer_norm, fused.layer_norm),
    "activation": (fused.activation, fused.activation),
}

for _schema in _SCHEMAS:
    _name = _schema.partition("(")[0]
    _reference, _fake = _REFERENCES[_name]
    _LIBRARY.define(_schema)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(_name, _reference, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"qfuse::{_name}", _fake, lib=_LIBRARY)

quantize: OpOverload = torch.ops.qfuse.quantize.default
dequantize: OpOverload = torch.ops.qfuse.dequantize.default
choose_qparams: OpOverload = torch.ops.qfuse.choose_qparams.default
requantize: OpOverload = torch.ops.qfuse.requantize.default
linear: OpOverload = torch.ops.qfuse.linear.default
rms_norm: OpOverload = torch.ops.qfuse.rms_norm.default
layer_norm: OpOverload = torch.ops.qfuse.layer_norm.default
activation: OpOverload = torch.ops.qfuse.activation.default

CANONICAL: tuple[OpOverload, ...] = (quantize, dequantize, choose_qparams, requantize)
FUSED: tuple[OpOverload, ...] = (linear, rms_norm, layer_norm, activation)


def reference_of(op: OpOverload) -> Callable[..., object]:
    """Return the Python function that is the meaning of one of the ops of this file."""
    return _REFERENCES[op._schema.name.partition("::")[2]][0]  # noqa: SLF001
