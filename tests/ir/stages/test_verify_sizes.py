"""A size that may vary is a symbol in every stage."""

from __future__ import annotations

import pytest
import torch

from qfuse.ir.errors import VerifyError
from qfuse.ir.stages.verify import verify
from qfuse.testing.build import GraphBuilder


def test_a_size_that_became_a_number() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 3, "m")
    program = b.done(b.call(torch.ops.aten.neg.default, x))
    verify(program)
    size = int(x.meta["val"].shape[1])

    with pytest.raises(VerifyError, match=f"its size in axis 1 may vary, and became {size}"):
        verify(program)
