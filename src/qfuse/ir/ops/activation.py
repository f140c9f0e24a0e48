"""Elementwise steps as an op of their own, between quantized tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch.fx import Node

from qfuse.ir.ops.declare import Op, define_op
from qfuse.ir.ops.epilogue import Epilogue
from qfuse.ir.ops.fields import Arg
from qfuse.ir.ops.output import Keep, Output
from qfuse.ir.ops.steps import first_type, float_types, rounding_problems
from qfuse.ir.ops.views import QuantParams


@define_op("activation")
@dataclass(frozen=True, slots=True)
class Activation(Op):
    """A ``qfuse::activation`` call; without parameters ``x`` is float."""

    x: Node
    x_params: Annotated[QuantParams | None, Arg(levels=1)]
    epilogue: Epilogue
    extras: tuple[Node, ...]
    output: Output

    @staticmethod
    def reference(
        x: torch.Tensor, epilogue: Epilogue, extras: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, None]:
        """Run the steps."""
        return epilogue.apply(x, extras), None

    @property
    def real(self) -> torch.dtype:
        """Float type that its steps begin with."""
        return first_type(self)

    def float_type(self) -> torch.dtype:
        """Return the type behind the steps."""
        return float_types(self)[-1]

    def problems(self) -> Iterator[str]:
        """Check what it keeps, and what the steps round."""
        if Keep.SUM in self.output.keep:
            yield "an activation has no sum to keep"
        if Keep.FLOAT in self.output.keep and not self.epilogue.steps:
            yield "without steps its float result is its input"
        yield from rounding_problems(self)


as_activation = Activation.of
