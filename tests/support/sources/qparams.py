"""Parameters of quantize and dequantize ops in tests of dialects, and ops that can never run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import strategies as st
from tests.support.sources.dialects import Source, run, scales
from torch.fx import Node

from qfuse.ir.errors import NormalizeError
from qfuse.normalize import normalize

SCALE_TYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])


@dataclass(frozen=True)
class Params:
    """A scale and a zero point, both constants or both inputs."""

    scale: torch.Tensor
    zero: torch.Tensor | None
    constant: bool

    @property
    def is_wide(self) -> bool:
        """Whether the scale has at least 32 bits."""
        return self.scale.dtype in {torch.float32, torch.float64}

    def into(self, source: Source) -> tuple[Node, Node | None]:
        """Add them to a graph."""
        scale = source.either(self.scale, constant=self.constant)
        if self.zero is None:
            return scale, None
        return scale, source.either(self.zero, constant=self.constant)

    def adds_in(self, x: torch.Tensor) -> bool:
        """Whether the zero point is added to ``x / scale`` in the dtype of the quotient."""
        assert self.zero is not None, "there is nothing to add"
        compute = torch.promote_types(x.dtype, self.scale.dtype)
        return torch.promote_types(compute, self.zero.dtype) == compute


def draw_params(
    data: st.DataObject,
    form: Sequence[int],
    zero_types: Sequence[torch.dtype],
    *,
    spreads: Sequence[int] = (20,),
    optional: bool = False,
) -> Params:
    """Draw parameters of a shape.

    Args:
        data: Draws.
        form: The shape.
        zero_types: Dtypes that the zero point may have.
        spreads: Standard deviations that it may have.
        optional: Whether it may be absent.
    """
    constant, kind = data.draw(st.booleans()), data.draw(st.sampled_from(zero_types))
    scale, zero = scales(form, data.draw(SCALE_TYPES)), None
    if not (optional and data.draw(st.booleans())):
        # The sum makes a zero of every negative zero.
        zero = (torch.randn(tuple(form)) * data.draw(st.sampled_from(spreads)) + 0.0).to(kind)
    return Params(scale, zero, constant)


def uneven(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random data that may lie on one side of zero, be constant, tiny or infinite."""
    offset, spread = torch.randint(-2, 3, ()) * 1.5, 10.0 ** int(torch.randint(-9, 4, ()))
    x = (torch.randn(shape) + offset) * spread
    if x.numel() and bool(torch.rand(()) < 0.1):
        x.reshape(-1)[0] = float("inf") if bool(torch.rand(()) < 0.5) else float("nan")
    return (x * (torch.rand(()) < 0.9)).to(dtype)


def assert_never_runs(
    source: Source, out: Node, complaint: str, *ran: type[Exception], says: str | None = None
) -> NormalizeError:
    """Assert that torch cannot run a graph, and that normalize says why; return its error.

    Args:
        source: The graph.
        out: Its result.
        complaint: What the error says.
        ran: What torch raises when it runs the graph.
        says: What torch says then, if that matters.
    """
    program = source.done(out)
    with pytest.raises(ran, match=says):
        run(program, source.inputs)

    with pytest.raises(NormalizeError, match=complaint) as caught:
        normalize(program)
    return caught.value
