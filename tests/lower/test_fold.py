"""What is computed at compile time is no larger than the constants of the source."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.graphs.tiny_models import tiny
from tests.support.sources.library import Model
from torch import nn

import qfuse
from qfuse.api import CompiledModel
from qfuse.capture import capture
from qfuse.ir.graph.stage_graph import StageGraph, constant_of
from qfuse.lower.fold import GROWN_BYTES
from qfuse.targets import Target
from qfuse.zoo.recipes import quantize


def compiled(model: nn.Module, *args: Any, **kwargs: Any) -> CompiledModel:
    return qfuse.compile(
        model.eval(),
        args,
        kwargs,
        target=Target.for_testing(isa="avx512_vnni"),
        options={"backend": "eager", "prefer": "memory"},
    )


def held(program: StageGraph) -> int:
    """Return the bytes of all constants that the graph reads, each counted once."""
    values = (constant_of(n) for n in program.graph.nodes if n.op == "get_attr")
    memory = {
        v.untyped_storage().data_ptr(): v.untyped_storage().nbytes()
        for v in values
        if v is not None
    }
    return sum(memory.values())


def test_a_small_weight_without_a_kernel_stays_quantized() -> None:
    # One that no fused op covers: the greatest of products.
    source = Model(
        lambda s, x: (x[:, None, :, None] * (s.w.float() * s.s)).amax(2),
        w=torch.randint(-127, 128, (4, 32, 48), dtype=torch.int8),
        s=torch.rand(4, 1, 48),
    )
    x = torch.randn(3, 32)
    done = compiled(source, x)
    assert held(done.plan.lowered) <= held(capture(source, (x,)))
    assert torch.equal(done(x), source(x))


def test_the_rows_of_a_lookup_are_no_constant() -> None:
    def forward(s: Model, x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.embedding(s.ids.expand(64, -1), s.table)  # type: ignore[operator, arg-type]

    source = Model(forward, ids=torch.arange(8)[None], table=torch.randn(8, 16))
    x = torch.randn(64, 8, 16)
    done = compiled(source, x)
    assert held(done.plan.lowered) <= held(capture(source, (x,)))
    assert torch.equal(done(x), source(x))


def test_what_is_smaller_than_its_constants_is_folded() -> None:
    def forward(s: Model, x: torch.Tensor) -> torch.Tensor:
        # The float table in between is larger than both.
        return x + s.table.expand(9, -1, -1).sin().sum(0)  # type: ignore[operator]

    source, x = Model(forward, table=torch.randn(8, 16)), torch.randn(8, 16)
    done = compiled(source, x)
    ops = [str(n.target) for n in done.plan.lowered.graph.nodes if n.op == "call_function"]
    assert ops == ["aten.add.Tensor"]
    assert torch.equal(done(x), source(x))


def test_operands_of_what_is_not_folded_are() -> None:
    def forward(s: Model, x: torch.Tensor) -> torch.Tensor:
        return x + s.row.sin().expand(512, -1).exp()  # type: ignore[operator]

    source, x = Model(forward, row=torch.randn(1, 16)), torch.randn(512, 16)
    done = compiled(source, x)
    ops = [str(n.target) for n in done.plan.lowered.graph.nodes if n.op == "call_function"]
    assert ops == ["aten.expand.default", "aten.exp.default", "aten.add.Tensor"]
    assert torch.equal(done(x), source(x))


def test_scalars_may_grow() -> None:
    def forward(s: Model, x: torch.Tensor) -> torch.Tensor:
        return x * s.scale.double().expand(4)  # type: ignore[operator]

    source, x = Model(forward, scale=torch.rand(1)), torch.randn(3, 4)
    done = compiled(source, x)
    assert held(done.plan.lowered) <= GROWN_BYTES
    assert torch.equal(done(x), source(x))


@pytest.mark.zoo
@pytest.mark.thorough
@pytest.mark.parametrize("recipe", ["w4a16", "w8a8-dynamic"])
def test_constants_of_a_zoo_model_are_no_larger_than_in_the_source(recipe: str) -> None:
    model = tiny("bert")
    made = quantize(model.module, recipe, model.args, model.kwargs)
    source = capture(made.model, model.args, model.kwargs)
    done = compiled(made.model, *model.args, **model.kwargs)
    assert held(done.plan.lowered) <= held(source)
