"""The originals of packed weights do not stay until all weights are packed."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from tests.support.sources.library import Model

from qfuse.capture import capture
from qfuse.ir.graph.stage_graph import OptimizedGraph
from qfuse.lower import originals as module
from qfuse.lower.originals import Originals
from qfuse.rewrite.context import RewriteContext
from qfuse.rewrite.session import Applied, RewriteSession

COUNT = 8


def session() -> RewriteSession:
    def forward(s: Model, x: torch.Tensor) -> Any:
        return [x * getattr(s, f"w{i}") for i in range(COUNT)]

    source = Model(forward, **{f"w{i}": torch.rand(64) for i in range(COUNT)})
    captured = capture(source, (torch.rand(64),))
    program = OptimizedGraph(captured.module, captured.signature, captured.log)
    return RewriteSession(program, RewriteContext("lower", None))


def packed(on: RewriteSession, index: int) -> Applied[None]:
    """Replace a constant by one that is made from it."""
    node = next(n for n in on.program.graph.nodes if n.op == "get_attr" and n.target == f"w{index}")
    value = on.program.module.get_buffer(f"w{index}") + 1

    def edit(rw: Any) -> None:
        rw.replace(node, rw.constant(value, f"packed{index}"))

    done = on.rewrite_always("pack", node, edit, proof=None)  # type: ignore[arg-type]
    assert isinstance(done, Applied)
    return done


def names(on: RewriteSession) -> set[str]:
    return {name for name, _ in on.program.module.named_buffers()}


def test_an_original_goes_while_others_are_still_to_be_packed() -> None:
    on = session()
    originals, held = Originals(on), weakref.ref(on.program.module.get_buffer("w0"))
    originals.erased(packed(on, 0).erased)
    gc.collect()
    assert held() is None
    assert names(on) == {"packed0", *(f"w{i}" for i in range(1, COUNT))}


def test_few_bytes_are_dropped_later(monkeypatch: pytest.MonkeyPatch) -> None:
    on = session()
    monkeypatch.setattr(module, "_PARTS", 4)
    originals = Originals(on)
    for index in range(2):
        originals.erased(packed(on, index).erased)
    # Two of eight are a fourth, and no more than that.
    assert {"w0", "w1"} < names(on)
    originals.erased(packed(on, 2).erased)
    assert not {"w0", "w1", "w2"} & names(on)


def test_an_id_that_is_free_again_names_no_dropped_constant() -> None:
    on = session()
    originals = Originals(on)
    for index in range(COUNT):
        originals.erased(packed(on, index).erased)
        # A tensor that may have got the id of one that was dropped.
        fresh = torch.full((64,), float(index))
        name = on.editor.add_constant(fresh, f"fresh{index}")
        assert torch.equal(on.program.module.get_buffer(name), fresh)
        on.editor.drop_unused(names(on))
