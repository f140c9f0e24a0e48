"""Softmax with an optional mask, a quantized input, and quantization after."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch.fx import Node

from qfuse.ir.errors import NormalizeError
from qfuse.ir.ops.declare import Op, define_op
from qfuse.ir.ops.fields import ArgInfo
from qfuse.ir.ops.output import Output
from qfuse.ir.ops.views import QuantParams, dtype_of
from qfuse.ir.quant.spec import dtype_name, parse_dtype

_TEXT = re.compile(r"axis=(?P<axis>-?\d+) (?P<compute>\w+):(?P<out>\w+)( fill=(?P<fill>\S+))?")


@dataclass(frozen=True, slots=True)
class SoftmaxSpec:
    """Everything about a softmax except its tensors.

    Attributes:
        axis: The axis that sums to 1.
        compute: The dtype that the input is cast to, and that torch rounds the result to.
        out: The dtype that the result is cast to.
        fill: What replaces the elements that a mask of bools selects; ``None`` if a mask is added.
    """

    axis: int
    compute: torch.dtype
    out: torch.dtype
    fill: float | None = None

    def __str__(self) -> str:
        text = f"axis={self.axis} {dtype_name(self.compute)}:{dtype_name(self.out)}"
        return text if self.fill is None else f"{text} fill={self.fill!r}"

    @classmethod
    def parse(cls, text: str) -> SoftmaxSpec:
        """Parse the canonical text.

        >>> spec = SoftmaxSpec(-1, torch.float32, torch.bfloat16, float("-inf"))
        >>> str(spec)
        'axis=-1 float32:bfloat16 fill=-inf'
        >>> SoftmaxSpec.parse(str(spec)) == spec
        True

        Raises:
            NormalizeError: The text is not a softmax.
        """
        found = _TEXT.fullmatch(text)
        if found is None:
            raise NormalizeError(f"not the text of a softmax: {text!r}")
        fill = found["fill"]
        return cls(
            int(found["axis"]),
            parse_dtype(found["compute"]),
            parse_dtype(found["out"]),
            None if fill is None else float(fill),
        )

    def widened(self) -> SoftmaxSpec:
        """Return the softmax that computes in float64."""
        return replace(self, compute=torch.float64, out=torch.float64)


@define_op("softmax")
@dataclass(frozen=True, slots=True)
class Softmax(Op):
    """A ``qfuse::softmax`` call; its results are its ``getitem`` users.

    Without quantization parameters ``x`` is float.
    """

    x: Node
    x_params: Annotated[QuantParams | None, ArgInfo(levels=1)]
    mask: Node | None
    softmax: SoftmaxSpec
    output: Output

    @staticmethod
    def reference(
        x: torch.Tensor, mask: torch.Tensor | None, softmax: SoftmaxSpec
    ) -> tuple[torch.Tensor, None]:
        """Mask the input, and compute ``exp(x) / sum(exp(x))`` along an axis."""
        if mask is not None:
            x = x + mask if softmax.fill is None else x.masked_fill(mask, softmax.fill)
        # Without a cast it is the call that the source makes, which returns the same bits.
        wide = None if x.dtype == softmax.compute else softmax.compute
        return torch.softmax(x, softmax.axis, wide).to(softmax.out), None

    def float_types(self) -> tuple[torch.dtype, ...]:
        """Return the result dtype of the softmax's spec."""
        return (self.softmax.out,)

    def problems(self) -> Iterator[str]:
        """Check that the mask is of bools exactly if it selects what to fill."""
        fills = self.softmax.fill is not None
        if fills != (self.mask is not None and dtype_of(self.mask) is torch.bool):
            yield "what a mask of bools selects is filled, and nothing else"


as_softmax = Softmax.of
