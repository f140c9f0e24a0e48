"""How a fused op gives its result, and what it gives besides: the block that such ops share.

The result is float; quantized with given parameters; or quantized with parameters that are chosen
for it. The op returns a list: the result; the chosen scale and zero point; then what is kept, in
the order of :class:`Keep`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Self

import torch

from qfuse.ir.errors import NormalizeError
from qfuse.ir.ops.views import QuantParams
from qfuse.ir.quant.choose import ChooseSpec, choose_qparams, fixed_zero_point
from qfuse.ir.quant.reference import quantize
from qfuse.ir.quant.spec import QuantSpec


class Keep(StrEnum):
    """What a fused op gives besides its quantized result: values that have other users.

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


@dataclass(frozen=True, slots=True)
class Output:
    """How a fused op gives its result.

    Attributes:
        params: Given parameters, if it is quantized with them.
        chosen: What it is quantized as with parameters that are chosen for it, and how they are.
        keep: What it gives besides.
    """

    params: QuantParams | None = None
    chosen: tuple[QuantSpec, ChooseSpec] | None = None
    keep: frozenset[Keep] = frozenset()

    def __post_init__(self) -> None:
        assert self.params is None or self.chosen is None, "its parameters are given or chosen"
        is_float = self.params is None and self.chosen is None
        assert self.chosen is None or not self.chosen[1].outer, "one level of scales is chosen"
        assert not (is_float and Keep.FLOAT in self.keep), "a float result is not kept besides"

    @property
    def spec(self) -> QuantSpec | None:
        """What the result is quantized as; ``None`` if it is float."""
        if self.chosen is not None:
            return self.chosen[0]
        return None if self.params is None else self.params.spec

    @property
    def choose(self) -> ChooseSpec | None:
        """How parameters are chosen, if they are."""
        return None if self.chosen is None else self.chosen[1]

    @property
    def keep_text(self) -> str:
        """What is kept, as its text."""
        return keep_text(self.keep)

    @property
    def count(self) -> int:
        """How many results the op has."""
        return self.place(None)

    def place(self, what: Keep | None) -> int:
        """Return the index of a kept value; of ``None``, what follows the last one."""
        first = 1 if self.chosen is None else 3
        order = [k for k in Keep if k in self.keep]
        return first + (len(order) if what is None else order.index(what))

    def widened(self) -> Self:
        """Return the block that computes in float64."""
        if self.chosen is not None:
            spec, choose = self.chosen
            return replace(self, chosen=(spec.widened(), choose.widened()))
        return self if self.params is None else replace(self, params=self.params.widened())

    def results(self, y: torch.Tensor, total: torch.Tensor | None) -> list[torch.Tensor]:
        """Return all results of an op; the parameters hold tensors.

        Args:
            y: The float result.
            total: The sum of input and residual, if the op adds them.
        """
        values = {Keep.FLOAT: y, Keep.SUM: total}
        kept = [value for k in Keep if k in self.keep and (value := values[k]) is not None]
        assert len(kept) == len(self.keep), "without a residual there is no sum to keep"
        if self.chosen is None:
            params: Any = self.params
            return [y if params is None else quantize(y, *params.reference_args), *kept]
        spec, choose = self.chosen
        scale, zero_point = choose_qparams(y, choose)
        # Adding zeros changes nothing, whether the source did it or not.
        added = None if fixed_zero_point(choose) == 0 else zero_point
        return [quantize(y, scale, added, spec), scale, zero_point, *kept]
