"""Python code of graph modules is written when it is read while a model is captured."""

from __future__ import annotations

from threading import Thread

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule, symbolic_trace

from qfuse.capture import capture
from qfuse.capture._export_api import late_code

aten = torch.ops.aten


class _Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layers(x)) + 1


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """The graphs whose code was written."""
    found: list[Graph] = []
    write = Graph.python_code

    def noting(graph: Graph, *args: object, **kwargs: object) -> object:
        found.append(graph)
        return write(graph, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Graph, "python_code", noting)
    return found


def _doubled(module: GraphModule) -> None:
    """Edit a module that returns ``x + 1`` to return twice that."""
    output = module.graph.output_node()
    with module.graph.inserting_before(output):
        twice = module.graph.call_function(aten.mul.Tensor, (output.args[0], 2))
    output.args = (twice,)
    module.recompile()


@pytest.mark.export
def test_a_capture_writes_little_code(written: list[Graph]) -> None:
    captured = capture(_Deep().eval(), (torch.ones(2, 4),))
    assert captured.graph in written
    # torch reads the signature of `forward` here and there; it would write code some 30 times.
    assert len(written) < 10


def test_code_is_written_when_it_is_read(written: list[Graph]) -> None:
    module = symbolic_trace(_Deep().eval())
    stale = module.code
    written.clear()
    with late_code():
        _doubled(module)
        assert not written
        assert "mul" in module.code
        assert len(written) == 1
        _doubled(module)
        result = module(torch.ones(2, 4))
    assert module.code != stale
    assert len(written) == 2
    torch.testing.assert_close(result, module(torch.ones(2, 4)), rtol=0, atol=0)


def test_code_that_was_never_read_is_there_afterwards() -> None:
    module = symbolic_trace(_Deep().eval())
    before = module(torch.ones(2, 4))
    with late_code():
        _doubled(module)
    assert torch.equal(module(torch.ones(2, 4)), 2 * before)
    assert "mul" in module.code
    assert type(module).forward is not GraphModule.forward


def test_other_threads_write_their_code_at_once(written: list[Graph]) -> None:
    module = symbolic_trace(_Deep().eval())
    written.clear()
    with late_code():
        thread = Thread(target=_doubled, args=(module,))
        thread.start()
        thread.join()
        assert len(written) == 1


def test_what_was_replaced_comes_back() -> None:
    before = GraphModule.recompile
    with late_code():
        with late_code():
            pass
        assert GraphModule.recompile is not before
    assert GraphModule.recompile is before

    def inner() -> None:
        with late_code():
            pass

    with late_code():
        thread = Thread(target=inner)
        thread.start()
        thread.join()
    assert GraphModule.recompile is before
