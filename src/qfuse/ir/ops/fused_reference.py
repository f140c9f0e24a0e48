"""The meaning of the fused ops whose result may be quantized as it is made.

They share one block of arguments that says how they give their result::

    Tensor? out_scale, Tensor? out_zero_point, str out_spec, str choose, str keep

It is float if ``out_spec`` is empty; quantized with the given scale and zero point; or, if
``choose`` is not empty, quantized with parameters that are chosen for it. They return a list: the
result; the chosen scale and zero point; then what ``keep`` asks for, in the order of :class:`Keep`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import torch

from qfuse.ir.errors import NormalizeError
from qfuse.ir.ops import norm_spec
from qfuse.ir.ops.epilogue import Epilogue
from qfuse.ir.ops.norm_spec import NormSpec
from qfuse.ir.quant.choose import ChooseSpec, choose_qparams, fixed_zero_point
from qfuse.ir.quant.reference import dequantize, quantize
from qfuse.ir.quant.spec import QuantSpec

OUTPUT_SCHEMA = (
    "Tensor? out_scale, Tensor? out_zero_point, str out_spec, str choose, str keep) -> Tensor[]"
)
"""The end of the schema of every op of this file."""


class Keep(StrEnum):
    """What a fused op gives besides its quantized result: values that others read too.

    ``FLOAT``: the result before it is quantized. ``SUM``: the sum of input and residual.
    """

    FLOAT = "float"
    SUM = "sum"


def keep_text(keep: frozenset[Keep]) -> str:
    """Write what is kept, as ``float|sum``."""
    return "|".join(k for k in Keep if k in keep)


def parse_keep(text: str) -> frozenset[Keep]:
    """Read the canonical text back.

    Raises:
        NormalizeError: The text does not say what is kept.
    """
    try:
        keep = frozenset(map(Keep, text.split("|"))) if text else frozenset()
    except ValueError as error:
        raise NormalizeError(f"not the text of what is kept: {text!r}") from error
    if keep_text(keep) != text:
        raise NormalizeError(f"not the canonical text of what is kept: {text!r}")
    return keep


def rms_norm(  # noqa: PLR0913, PLR0917 - the schema's arguments
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    norm: str,
    out_scale: torch.Tensor | None,
    out_zero_point: torch.Tensor | None,
    out_spec: str,
    choose: str,
    keep: str,
) -> list[torch.Tensor]:
    """Add the residual, divide by the root of the mean square, and quantize."""
    total = x if residual is None else x + residual
    y = norm_spec.rms_norm(total, weight, NormSpec.parse(norm))
    kept = _kept(keep, y, None if residual is None else total)
    return [*_results(y, out_scale, out_zero_point, out_spec, choose), *kept]


def layer_norm(  # noqa: PLR0913, PLR0917 - the schema's arguments
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    norm: str,
    out_scale: torch.Tensor | None,
    out_zero_point: torch.Tensor | None,
    out_spec: str,
    choose: str,
    keep: str,
) -> list[torch.Tensor]:
    """Add the residual, centre, divide by the deviation, and quantize."""
    total = x if residual is None else x + residual
    y = norm_spec.layer_norm(total, weight, bias, NormSpec.parse(norm))
    kept = _kept(keep, y, None if residual is None else total)
    return [*_results(y, out_scale, out_zero_point, out_spec, choose), *kept]


def activation(  # noqa: PLR0913, PLR0917 - the schema's arguments
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    x_zero_point: torch.Tensor | None,
    x_spec: str,
    epilogue: str,
    extras: Sequence[torch.Tensor],
    out_scale: torch.Tensor | None,
    out_zero_point: torch.Tensor | None,
    out_spec: str,
    choose: str,
    keep: str,
) -> list[torch.Tensor]:
    """Dequantize, apply the steps, and quantize."""
    if x_spec:
        assert x_scale is not None, f"a quantized edge needs a scale: {x_spec}"
        x = dequantize(x, x_scale, x_zero_point, QuantSpec.parse(x_spec))
    y = Epilogue.parse(epilogue).apply(x, extras)
    kept = _kept(keep, y, None)
    return [*_results(y, out_scale, out_zero_point, out_spec, choose), *kept]


def _results(
    y: torch.Tensor,
    scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    spec: str,
    choose: str,
) -> list[torch.Tensor]:
    if not spec:
        return [y]
    if not choose:
        assert scale is not None, f"a quantized output needs a scale: {spec}"
        return [quantize(y, scale, zero_point, QuantSpec.parse(spec))]
    how = ChooseSpec.parse(choose)
    chosen, zero = choose_qparams(y, how)
    # Adding zeros changes nothing, whether the source did it or not.
    added = None if fixed_zero_point(how) == 0 else zero
    return [quantize(y, chosen, added, QuantSpec.parse(spec)), chosen, zero]


def _kept(keep: str, y: torch.Tensor, total: torch.Tensor | None) -> list[torch.Tensor]:
    values, wanted = {Keep.FLOAT: y, Keep.SUM: total}, parse_keep(keep)
    asked = [values[k] for k in Keep if k in wanted]
    kept = [value for value in asked if value is not None]
    assert len(kept) == len(asked), "without a residual there is no sum to keep"
    return kept
