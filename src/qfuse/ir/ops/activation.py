"""Elementwise epilogue ops as a separate op between quantized tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch.fx import Node

from qfuse.ir.ops.declare import Op, define_op
from qfuse.ir.ops.epilogue import Epilogue
from qfuse.ir.ops.fields import ArgInfo
from qfuse.ir.ops.output import ExtraOutput, Output
from qfuse.ir.ops.views import QuantParams


@define_op("activation")
@dataclass(frozen=True, slots=True)
class Activation(Op):
    """A ``qfuse::activation`` call; without quantization parameters ``x`` is float."""

    x: Node
    x_params: Annotated[QuantParams | None, ArgInfo(levels=1)]
    epilogue: Epilogue
    extras: tuple[Node, ...]
    output: Output

    @staticmethod
    def reference(
        x: torch.Tensor, epilogue: Epilogue, extras: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, None]:
        """Apply the epilogue."""
        return epilogue.apply(x, extras), None

    def problems(self) -> Iterator[str]:
        """Check that the op does not return its input as its float result."""
        if ExtraOutput.FLOAT in self.output.keep and not self.epilogue.ops:
            yield "with an empty epilogue its float result is its input"


as_activation = Activation.of
