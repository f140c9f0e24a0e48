"""Sums, differences and products of two tensors, or of a tensor and a number."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch.fx import Node

from qfuse.ir.errors import NormalizeError
from qfuse.ir.ops.declare import Op, define_op
from qfuse.ir.ops.epilogue import Act, Epilogue
from qfuse.ir.ops.views import QuantParams, dtype_of, shape_of
from qfuse.ir.sizes import broadcast_shape, same_shape

_TEXT = re.compile(r"(?P<kind>add|sub|mul)( alpha=(?P<alpha>\S+))?( number=(?P<number>\S+))?")


class ElementwiseKind(StrEnum):
    """What is computed of two operands."""

    ADD = "add"
    SUB = "sub"
    MUL = "mul"


@dataclass(frozen=True, slots=True)
class ElementwiseSpec:
    """Everything about an elementwise op except its tensors.

    Attributes:
        kind: What is computed.
        alpha: The factor of the second operand of a sum or difference.
        number: The second operand, if it is a number.
    """

    kind: ElementwiseKind
    alpha: float = 1.0
    number: float | None = None

    def __post_init__(self) -> None:
        if self.kind is ElementwiseKind.MUL and self.alpha != 1:
            raise NormalizeError(f"a product has no alpha: {self.alpha}")

    def __str__(self) -> str:
        alpha = "" if self.alpha == 1 else f" alpha={self.alpha!r}"
        return f"{self.kind}{alpha}{'' if self.number is None else f' number={self.number!r}'}"

    @classmethod
    def parse(cls, text: str) -> ElementwiseSpec:
        """Parse the canonical text.

        >>> ElementwiseSpec.parse("sub alpha=2.0 number=0.5").number
        0.5

        Raises:
            NormalizeError: The text is not an elementwise op.
        """
        found = _TEXT.fullmatch(text)
        if found is None:
            raise NormalizeError(f"not the text of an elementwise op: {text!r}")
        try:
            alpha, number = float(found["alpha"] or 1), found["number"]
            known = None if number is None else float(number)
        except ValueError as error:
            raise NormalizeError(f"not the text of an elementwise op: {text!r}") from error
        return cls(ElementwiseKind(found["kind"]), alpha, known)

    def apply(self, x: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
        """Compute the op by the call that the source makes."""
        second = self.number if other is None else other
        assert second is not None, "there is a second operand"
        if self.kind is ElementwiseKind.MUL:
            return torch.mul(x, second)
        call = torch.add if self.kind is ElementwiseKind.ADD else torch.sub
        return call(x, second) if self.alpha == 1 else call(x, second, alpha=self.alpha)


@define_op("elementwise")
@dataclass(frozen=True, slots=True)
class Elementwise(Op):
    """A ``qfuse::elementwise`` call: ``x + alpha * other``, ``x - alpha * other``, ``x * other``.

    Operands broadcast as in torch; an activation may follow. Without quantization parameters an
    operand is float, and so is the result. Backends claim it; what none claims is expanded.
    """

    x: Node
    x_params: QuantParams | None
    other: Node | None
    other_params: QuantParams | None
    out_params: QuantParams | None
    elementwise: ElementwiseSpec
    epilogue: Epilogue

    @staticmethod
    def reference(
        x: torch.Tensor,
        other: torch.Tensor | None,
        elementwise: ElementwiseSpec,
        epilogue: Epilogue,
    ) -> torch.Tensor:
        """Compute the op in float."""
        return epilogue.apply(elementwise.apply(x, other), ())

    def problems(self) -> Iterator[str]:
        """Check the operands: one or a number, of one float dtype, of shapes that broadcast."""
        if not all(isinstance(step, Act) for step in self.epilogue.ops):
            yield f"an epilogue of other steps than activations: {self.epilogue}"
        if (self.other is None) != (self.elementwise.number is not None):
            yield "the second operand is a tensor or a number"
        if self.other is None:
            return
        params = self.other_params
        second = dtype_of(self.other) if params is None else params.spec.float_dtype
        if second != self.float_dtype:
            yield f"the operands are {self.float_dtype} and {second}"
        shape = broadcast_shape(shape_of(self.x), shape_of(self.other))
        if shape is None or not same_shape(shape, shape_of(self.node)):
            yield f"operands of shapes {tuple(shape_of(self.x))} and {tuple(shape_of(self.other))}"


as_elementwise = Elementwise.of
