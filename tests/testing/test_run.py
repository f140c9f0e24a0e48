from __future__ import annotations

import pytest
import torch

from qfuse.testing.build import GraphBuilder
from qfuse.testing.run import run


@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_a_nan_in_an_input_is_not_a_write(shape: tuple[int, ...]) -> None:
    b = GraphBuilder()
    program = b.done(b.call(torch.ops.aten.relu.default, b.arg("x", torch.float32, *shape)))

    (y,) = run(program, [torch.full(shape, float("nan"))])

    assert y.isnan().all()


def test_a_write_to_an_input_is_found() -> None:
    b = GraphBuilder()
    program = b.done(b.call(torch.ops.aten.relu_.default, b.arg("x", torch.float32, 2)))

    with pytest.raises(AssertionError, match="wrote to its inputs"):
        run(program, [torch.tensor([-1.0, float("nan")])])
