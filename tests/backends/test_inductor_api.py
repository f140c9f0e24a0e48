"""Compiling with Inductor: nothing of the process is changed, and nothing is assumed in silence."""

from __future__ import annotations

import importlib
import os
import random
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from tests.support.graphs.lowered import aten, finish
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from qfuse.backends import BackendOptions, CompiledModule, _inductor_api, compile_graph
from qfuse.backends.eager import EagerRunner
from qfuse.ir.errors import BackendError
from qfuse.ir.events import Noted
from qfuse.ir.graph.stage_graph import LoweredGraph
from qfuse.testing._fake_api import declare_range
from qfuse.testing.build import GraphBuilder


def wide_graph() -> LoweredGraph:
    """A sum over none to 10,000 rows, which Inductor compiles differently from 4,096 on."""
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "n", 3)
    declare_range(x.meta["val"].shape[0], 0, 10_000)
    weight = b.const("weight", torch.randn(3, 400))
    bias = b.const("bias", torch.tensor([1.0, -2.0, 4.0]))
    total = b.call(aten.sum.dim_IntList, b.call(aten.add.Tensor, x, bias), [0])
    made = finish(b, [total, b.call(aten.mm.default, x, weight)])
    symbols = {name: replace(s, low=0, high=10_000) for name, s in made.signature.symbols.items()}
    return replace(made, signature=replace(made.signature, symbols=symbols))


def process_state() -> dict[str, Any]:
    config: Any = importlib.import_module("torch._inductor.config")
    return {
        "config": config.save_config_portable(),
        "torch random": torch.get_rng_state().tolist(),
        "python random": random.getstate(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "threads": torch.get_num_threads(),
        "warnings": list(warnings.filters),
        "environment": dict(os.environ),
        "folder": Path.cwd(),
        "children": [child.name() for child in psutil.Process().children(recursive=True)],
    }


class Wide(NamedTuple):
    graph: LoweredGraph
    fast: CompiledModule
    plain: CompiledModule
    before: dict[str, Any]
    after: dict[str, Any]


@pytest.fixture(scope="module")
def wide(cache_folder: Path, needs_compiler: None) -> Wide:
    del needs_compiler
    graph = wide_graph()
    plain = CompiledModule(graph.signature, compile_graph(graph, backend="eager"))
    before = process_state()
    # The modes of a careless caller: none of them may get into the code.
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        options = BackendOptions(cache=False, cache_folder=cache_folder)
        runner = compile_graph(graph, backend="aoti", options=options)
    after = process_state()
    return Wide(graph, CompiledModule(graph.signature, runner), plain, before, after)


def test_the_process_is_as_it_was(wide: Wide) -> None:
    for name, value in wide.before.items():
        assert wide.after[name] == value, name


def test_the_symbols_of_the_graph_are_as_they_were(wide: Wide) -> None:
    (x,) = wide.graph.graph.find_nodes(op="placeholder")
    env: ShapeEnv = x.meta["val"].fake_mode.shape_env
    (symbol,) = x.meta["val"].size(0).node.expr.free_symbols
    assert str(env.var_to_range[symbol]) == "VR[0, 10000]"
    assert not [guard for guard in env.guards if "4096" in str(guard.expr)]


@pytest.mark.numeric
@pytest.mark.parametrize("rows", [0, 1, 2, 300, 4096, 4097, 9999])
def test_sizes_beyond_what_was_assumed_are_right(wide: Wide, rows: int) -> None:
    x = torch.randn(rows, 3)
    have, want = wide.fast(x), wide.plain(x)
    torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-3)
    # Beyond the assumptions the same ops run as in the eager module, to the bit.
    assert torch.equal(have[0], want[0]) or 1 <= rows <= 4096


def test_only_sizes_beyond_what_was_assumed_run_op_by_op(
    wide: Wide, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    run = EagerRunner.run

    def spy(self: EagerRunner, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        ran.append(len(inputs[0]))
        return run(self, inputs)

    monkeypatch.setattr(EagerRunner, "run", spy)
    for rows in (0, 1, 2, 4096, 4097):
        wide.fast(torch.randn(rows, 3))
    assert ran == [0, 4097]


def test_what_was_assumed_is_said(wide: Wide) -> None:
    notes = [note.text for note in wide.graph.log.of(Noted) if note.warn]
    assert notes == [
        f"compiled code is used if x.shape[0] {bound}; calls of other sizes run op by op"
        for bound in ("<= 4096", ">= 1")
    ]


def test_large_constants_are_not_copied(wide: Wide) -> None:
    """Code reads the source's own memory: what is written there is seen, without a second copy."""
    weight = wide.graph.module.get_buffer("weight")
    x = torch.randn(2, 3)
    kept = weight.clone()
    try:
        weight.fill_(2.0)
        torch.testing.assert_close(wide.fast(x)[1], x.sum(1, keepdim=True).expand(2, 400) * 2.0)
    finally:
        weight.copy_(kept)


def test_an_inductor_failure_is_a_backend_error(
    monkeypatch: pytest.MonkeyPatch, cache_folder: Path, needs_compiler: None
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        del args, kwargs
        raise NotImplementedError("lowering of everything\nand more")

    del needs_compiler
    monkeypatch.setattr("torch._inductor.aot_compile", fail)
    options = BackendOptions(cache=False, cache_folder=cache_folder)
    with pytest.raises(BackendError, match=r"could not compile .*: lowering of everything\n"):
        compile_graph(wide_graph(), backend="aoti", options=options)

    graph = wide_graph()
    runner = compile_graph(graph, backend="auto", options=options)
    assert runner.backend == "eager"
    assert "lowering of everything" in graph.log.of(Noted)[0].text


def test_a_remainder_of_a_smaller_number_needs_no_check() -> None:
    size: Any = ShapeEnv().create_unbacked_symint()
    name = str(size)
    expressions = [(1 % (26 * (size // 2)) != 0).node.expr]

    assert _inductor_api._conditions(expressions, {name: (2, 64)}) == ()
    assert len(_inductor_api._conditions(expressions, {name: (1, 64)})) == 1
    assert len(_inductor_api._conditions([(size % 4 == 0).node.expr], {name: (2, 64)})) == 1


def test_conditions_that_are_declared_need_no_check() -> None:
    env = ShapeEnv()
    n = env.create_unbacked_symint().node.expr
    expressions = [n <= 4096, n >= 1, n * 2 <= 4096]
    names = {str(n): (1, 4096)}
    assert _inductor_api._conditions(expressions, names) == (f"2*{n} <= 4096",)
    assert _inductor_api._conditions(expressions, {}) == (
        f"{n} <= 4096",
        f"{n} >= 1",
        f"2*{n} <= 4096",
    )
