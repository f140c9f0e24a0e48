"""A size of 1 is allowed where the graph is right for it, and refused where it is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.graphs.capture_models import Stack, assert_same_run, captured, module
from torch.export import Dim

from qfuse.capture import size_one
from qfuse.ir.errors import InputError
from qfuse.ir.events import Noted
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.ir.signature.run import run_functional

pytestmark = pytest.mark.numeric

ROWS = Dim("rows", min=1, max=64)
COLUMNS = Dim("columns", min=1, max=64)


def lows(program: CapturedGraph) -> dict[str, int]:
    return {symbol.label: symbol.low for symbol in program.signature.symbols.values()}


def refused(program: CapturedGraph) -> list[str]:
    notes = program.log.of(Noted)
    assert all(note.warn and "is refused" in note.text for note in notes)
    return [note.text.split(" = ")[0] for note in notes]


def grid(forward: Any) -> CapturedGraph:
    return captured(module(forward), torch.randn(3, 4), dynamic_shapes={"x": {0: ROWS, 1: COLUMNS}})


def test_another_path_with_other_results() -> None:
    # torch.export traces the branch for sizes from 2 on, and promises the range from 1 on.
    program = grid(lambda _self, x: x * 2 if x.shape[1] == 1 else x * 3)

    assert refused(program) == ["columns"]
    assert lows(program) == {"rows": 1, "columns": 2}
    assert_same_run(program, lambda x: x * 3, torch.randn(1, 2))
    with pytest.raises(InputError, match=r"with 1 <= rows <= 64 and 2 <= columns <= 64, got 1"):
        run_functional(program, torch.randn(3, 1))


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: x @ (self.b_a if x.shape[1] == 1 else self.b_b)[: x.shape[1]],
        lambda self, x: x - self.b_a[0, 0] if x.shape[1] == 1 else self.b_a[0, 0] - x,
    ],
    ids=["another constant", "another order"],
)
def test_another_path_with_the_same_ops(forward: Any) -> None:
    model = module(forward, b_a=torch.randn(64, 64), b_b=torch.randn(64, 64))
    model.b_a[0] = 1.5
    shapes = {"x": {0: ROWS, 1: COLUMNS}}
    program = captured(model, torch.randn(3, 64), dynamic_shapes=shapes)

    assert refused(program) == ["columns"]


def test_another_path_with_the_same_results() -> None:
    model = module(lambda _self, x: x + x if x.shape[0] > 1 else x * 2)
    program = captured(model, torch.randn(3), dynamic_shapes={"x": {0: ROWS}})

    assert refused(program) == []
    assert_same_run(program, model, torch.randn(1))


def test_only_both_together() -> None:
    program = grid(lambda _self, x: x.sum() if x.numel() == 1 else x.sum() + 1)
    assert refused(program) == ["rows", "columns"]
    assert lows(program) == {"rows": 2, "columns": 2}


def test_a_model_that_fails_for_one() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        del self
        assert x.shape[0] > 1, "two rows at least"
        return x - x.mean(0)

    assert refused(grid(forward)) == ["rows"]


def test_the_model_is_left_alone_for_one_as_well() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.b_seen.add_(1)
        if x.shape[0] == 1:
            self.last = x
            return x
        return x + torch.rand(1)

    model = module(forward, b_seen=torch.zeros(()))
    x, state = torch.randn(3), torch.random.get_rng_state()
    program = captured(model, x, dynamic_shapes={"x": {0: ROWS}})

    assert lows(program) == {"rows": 2}
    assert not hasattr(model, "last")
    assert model.b_seen == 0
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    ("shapes", "traces"),
    [({0: Dim("rows", min=2)}, 1), ({0: Dim.AUTO}, 1), (None, 1), ({0: ROWS}, 2)],
)
def test_one_more_trace_where_it_is_needed(
    monkeypatch: pytest.MonkeyPatch, shapes: Any, traces: int
) -> None:
    calls = []
    export = torch.export.export

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return export(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", counted)
    monkeypatch.setattr(size_one, "run_flat", lambda *_: pytest.fail("nothing differs"))
    captured(Stack().eval(), torch.randn(3, 32), dynamic_shapes={"x": shapes})

    assert len(calls) == traces
