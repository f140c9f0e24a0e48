"""The output arguments that fused ops share: quantization of the result, and extra outputs.

The result is float, quantized with static parameters, or quantized with dynamic parameters. The op
returns a list: the result; with dynamic parameters, the scale and zero point; then the extra
outputs, in the order of :class:`ExtraOutput`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Self

import torch

from qfuse.ir.errors import NormalizeError
from qfuse.ir.ops.views import QuantParams
from qfuse.ir.quant.choose import ChooseSpec, choose_qparams, fixed_zero_point
from qfuse.ir.quant.reference import quantize
from qfuse.ir.quant.spec import QuantSpec


class ExtraOutput(StrEnum):
    """Extra outputs of a fused op: intermediate values that have other users.

    ``FLOAT``: the result before it is quantized. ``SUM``: the sum of input and residual.
    """

    FLOAT = "float"
    SUM = "sum"


def extra_outputs_text(keep: frozenset[ExtraOutput]) -> str:
    """Format the extra outputs as ``float|sum``."""
    return "|".join(k for k in ExtraOutput if k in keep)


def parse_extra_outputs(text: str) -> frozenset[ExtraOutput]:
    """Parse the canonical text.

    Raises:
        NormalizeError: The text is malformed.
    """
    try:
        keep = frozenset(map(ExtraOutput, text.split("|"))) if text else frozenset()
    except ValueError as error:
        raise NormalizeError(f"not the text of what is kept: {text!r}") from error
    # Specs are compared as text, so there must be one text per meaning.
    if extra_outputs_text(keep) != text:
        raise NormalizeError(f"not the canonical text of what is kept: {text!r}")
    return keep


@dataclass(frozen=True, slots=True)
class Output:
    """The output arguments of a fused op.

    Attributes:
        params: Static parameters, if the result is quantized with them.
        chosen: For dynamic parameters, the spec and how they are chosen.
        keep: The extra outputs.
    """

    params: QuantParams | None = None
    chosen: tuple[QuantSpec, ChooseSpec] | None = None
    keep: frozenset[ExtraOutput] = frozenset()

    def __post_init__(self) -> None:
        assert self.params is None or self.chosen is None, "parameters are static or dynamic"
        is_float = self.params is None and self.chosen is None
        assert self.chosen is None or not self.chosen[1].outer, "one level of scales is chosen"
        assert not (is_float and ExtraOutput.FLOAT in self.keep), (
            "a float result is not an extra output"
        )

    @property
    def spec(self) -> QuantSpec | None:
        """The spec of the result; ``None`` if it is float."""
        if self.chosen is not None:
            return self.chosen[0]
        return None if self.params is None else self.params.spec

    @property
    def choose(self) -> ChooseSpec | None:
        """How dynamic parameters are chosen; ``None`` if they are static."""
        return None if self.chosen is None else self.chosen[1]

    @property
    def extra_outputs_text(self) -> str:
        """The extra outputs as text."""
        return extra_outputs_text(self.keep)

    @property
    def count(self) -> int:
        """Number of results of the op."""
        return self.place(None)

    def place(self, what: ExtraOutput | None) -> int:
        """Return the index of an extra output; for ``None``, the index after the last one."""
        # With dynamic parameters, scale and zero point stand before the extra outputs.
        first = 1 if self.chosen is None else 3
        order = [k for k in ExtraOutput if k in self.keep]
        return first + (len(order) if what is None else order.index(what))

    def widened(self) -> Self:
        """Return the output arguments that compute in float64."""
        if self.chosen is not None:
            spec, choose = self.chosen
            return replace(self, chosen=(spec.widened(), choose.widened()))
        return self if self.params is None else replace(self, params=self.params.widened())

    def results(
        self,
        y: torch.Tensor,
        total: torch.Tensor | None,
        to_stored: Callable[..., torch.Tensor] = quantize,
    ) -> list[torch.Tensor]:
        """Return all results of an op, with parameters that hold tensors.

        Args:
            y: The float result.
            total: The sum of input and residual, if the op adds them.
            to_stored: Quantizes the result.
        """
        values = {ExtraOutput.FLOAT: y, ExtraOutput.SUM: total}
        kept = [value for k in ExtraOutput if k in self.keep and (value := values[k]) is not None]
        assert len(kept) == len(self.keep), "without a residual there is no sum to keep"
        if self.chosen is None:
            params: Any = self.params
            return [y if params is None else to_stored(y, *params.reference_args), *kept]
        spec, choose = self.chosen
        scale, zero_point = choose_qparams(y, choose)
        # Zero zero points do not change the result, so it is the same with or without them.
        added = None if fixed_zero_point(choose) == 0 else zero_point
        return [to_stored(y, scale, added, spec), scale, zero_point, *kept]
