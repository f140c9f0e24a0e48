"""Real models, quantized by the tools themselves: every recipe ends in one spelling."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from tests.support.sources.dialects import ops_of, run
from tests.support.sources.models import captured_each
from torch import nn

from qfuse.ir.events import Exactness, Fired, Noted
from qfuse.ir.graph.stage_graph import CapturedGraph, NormalGraph
from qfuse.ir.ops.linear import Linear, as_linear
from qfuse.ir.ops.qdq import as_dequantize
from qfuse.ir.ops.views import bits_equal, dtype_of
from qfuse.model_check import ModelCheck
from qfuse.normalize import normalize
from qfuse.rewrite.clone import clone
from qfuse.zoo import recipes

DYNAMIC = ("pt2e-dynamic", "w8a8-dynamic", "w8a8-dynamic-tensor", "w8a8-dynamic-asym", "w4a8")
STATIC = ("w8a8-static", "w8a8-static-bf16", "w8a8-static-ao")
WEIGHTS = ("w8a16", "w4a16")
EXACT = {"w8a8-static", "w8a8-static-bf16", "pt2e-dynamic", "w4a8", "w4a16"}
FLOATS = {"linear", "relu", "_to_copy"}


class TwoLinears(nn.Module):
    """64 -> 96 -> 32, with a bias in the first only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 96), nn.Linear(96, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(torch.relu(self.first(x)))
        return y


@cache
def captured(dtype: torch.dtype, shape: tuple[int, ...]) -> dict[str, CapturedGraph]:
    """A small model in all recipes, captured with dynamic leading sizes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        x = torch.randn(shape, dtype=dtype)
        sizes = {i: torch.export.Dim(f"d{i}", min=1, max=64) for i in range(len(shape) - 1)}
        shapes = {"x": sizes}
        model = TwoLinears().eval().to(dtype)
        models = {
            name: recipes.quantize(model, name, (x,), dynamic_shapes=shapes).model
            for name in (*DYNAMIC, *STATIC, *WEIGHTS)
        }
        return captured_each(models, x, shapes)


def both(recipe: str, dtype: torch.dtype, rank: int) -> tuple[CapturedGraph, NormalGraph]:
    """A captured graph, and the normal graph of a copy of it."""
    program = captured(dtype, (2, 8, 64)[-rank:])[recipe]
    return program, normalize(clone(program))


def is_stored(linear: Linear) -> bool:
    """Whether the weight of a linear is a dequantized constant of quantized values."""
    weight = as_dequantize(linear.weight)
    return weight is not None and weight.q.op == "get_attr" and dtype_of(weight.q) is torch.int8


@pytest.mark.zoo
@pytest.mark.numeric
@pytest.mark.parametrize(("rank", "dtype"), [(3, torch.float32), (2, torch.bfloat16)])
@pytest.mark.parametrize("recipe", [*DYNAMIC, *STATIC, *WEIGHTS])
def test_every_recipe_ends_in_one_spelling(recipe: str, rank: int, dtype: torch.dtype) -> None:
    program, normal = both(recipe, dtype, rank)

    assert ops_of(normal, "torchao") == ops_of(normal, "quantized_decomposed") == []
    assert [n for n in normal.log.of(Noted) if n.warn] == []
    assert ops_of(normal, "aten").count("linear") == 2
    assert set(ops_of(normal, "aten")) <= FLOATS
    per_layer = {True: ["quantize", "dequantize"], False: []}[recipe not in WEIGHTS]
    dynamic = recipe in DYNAMIC
    assert sorted(ops_of(normal)) == sorted(
        2 * (["choose_qparams"] * dynamic + per_layer + ["dequantize"])
    )
    assert all(map(is_stored, filter(None, map(as_linear, normal.graph.nodes))))
    exact = all(event.exactness is Exactness.EXACT for event in normal.log.of(Fired))
    assert exact == (recipe in EXACT)
    # Other sizes than those that it was captured with, one of them 1.
    for sizes in ((2, 8), (3, 5), (1, 1)):
        inputs = [torch.randn(*sizes[-rank + 1 :], 64, dtype=dtype)]
        old, new = run(program, inputs), run(normal, inputs)
        if exact:
            assert all(map(bits_equal, old, new))
        else:
            verdict = ModelCheck.measure(program, inputs).judge(new)
            assert verdict.wrong is None, verdict


@pytest.mark.zoo
@pytest.mark.numeric
def test_one_token_is_right_where_the_source_is_garbage() -> None:
    # Rows of a graph for many rows; what the source gives for one row is not looked at.
    _, normal = both("w8a8-dynamic", torch.float32, 3)
    x = torch.randn(1, 7, 64)

    (together,) = run(normal, [x])
    apart = [run(normal, [x[:, i : i + 1]])[0] for i in range(7)]
    torch.testing.assert_close(together, torch.cat(apart, 1))
