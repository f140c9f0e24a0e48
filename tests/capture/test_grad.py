"""Parts of a model that enable or disable gradients are captured like others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.graphs.capture_models import assert_same_run, captured, module

from qfuse.capture import capture

pytestmark = pytest.mark.numeric


def enabled(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        out: torch.Tensor = self.weight @ x
        return out


def both(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        first = self.weight @ x
        first.mul_(2)
    with torch.enable_grad():
        second = (self.weight @ first).relu_()
        with torch.no_grad():
            third = second + 1
    return second, third


def test_ops_of_such_a_part_have_its_line() -> None:
    model = module(enabled)
    model.weight = torch.nn.Parameter(torch.randn(4, 4))
    (product,) = captured(model, torch.randn(4, 3)).graph.find_nodes(
        op="call_function", target=torch.ops.aten.matmul.default
    )
    assert product.meta["qfuse_source"].endswith("out: torch.Tensor = self.weight @ x")


@pytest.mark.parametrize("forward", [enabled, both])
@pytest.mark.parametrize("exported", [False, True])
def test_gradients_are_enabled_inside(forward: Callable[..., Any], exported: bool) -> None:
    model = module(forward)
    model.weight = torch.nn.Parameter(torch.randn(4, 4))
    x = torch.randn(4, 3)
    if not exported:
        assert_same_run(captured(model, x), model, x)
        return
    with torch.no_grad():
        program = torch.export.export(model, (x,))
    before = program.graph_module.print_readable(print_output=False)
    assert_same_run(capture(program), model, x)
    # The program of the user is as it was.
    assert program.graph_module.print_readable(print_output=False) == before
