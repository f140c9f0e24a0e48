"""Shows a small model of simulator ops before and after ``qfuse``."""

from __future__ import annotations

import torch
from torch import nn

from qfuse.capture import capture
from qfuse.ir.events import Noted
from qfuse.ir.graph.text import to_text
from qfuse.normalize import normalize
from simulator_dialect import ops


class Model(nn.Module):
    """An int4 linear, an int8 linear on quantized values, and an MX linear."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("int4", torch.randint(0, 256, (16, 16), dtype=torch.uint8))
        self.register_buffer("int4_scale", torch.rand(16, 4) * 0.1)
        self.register_buffer("int8", torch.randint(-128, 128, (8, 16), dtype=torch.int8))
        self.register_buffer("int8_scale", torch.rand(8) * 0.01)
        self.register_buffer("fp4", torch.randint(0, 16, (4, 8), dtype=torch.uint8))
        self.register_buffer("fp4_exponent", torch.randint(-3, 3, (4, 2), dtype=torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the three."""
        x = torch.relu(ops.int4_linear(x, self.int4, self.int4_scale, None, 8))
        q, _ = ops.dynamic_quantize_symmetric(x, [-1])
        q = ops.static_quant_linear(q, 0.05, 0, self.int8, self.int8_scale, None, 0.3, 4)
        y: torch.Tensor = ops.mxfp4_linear(q.float(), self.fp4, self.fp4_exponent, None)
        return y


def main() -> None:
    """Print the graph of a model before and after normalizing, and what stayed."""
    captured = capture(Model().eval(), (torch.randn(3, 32),))
    print(to_text(captured.graph), end="\n\n")
    normal = normalize(captured)
    print(to_text(normal.graph), end="\n\n")
    for note in normal.log.of(Noted):
        print(note.text)


if __name__ == "__main__":
    main()
