"""Siblings become one product and a split, whatever they are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.frozen_inductor import freeze
from torch import nn
from torch.fx import GraphModule

from qfuse.ir.events import MissCode

aten = torch.ops.aten


class Three(nn.Module):
    """Queries, keys and values: unequal widths, one without a bias, one that leaves the model."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.q = nn.Linear(64, 64, dtype=dtype)
        self.k = nn.Linear(64, 32, bias=False, dtype=dtype)
        self.v = nn.Linear(64, 32, dtype=dtype)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.q(x).relu(), self.k(x).sigmoid(), self.v(x)


def same(a: Any, b: Any) -> bool:
    """Whether results are equal to the bit, and lie in memory alike."""
    pairs = list(zip(a, b, strict=True))
    return all(torch.equal(p, q) and p.stride() == q.stride() for p, q in pairs)


def close(a: Any, b: Any) -> bool:
    """Whether results differ by what a library's blocking does to sums of 64 products."""
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q)
    return True


def quantized(model: nn.Module, name: str) -> nn.Module:
    from torchao import quantization as ao  # noqa: PLC0415

    int4: Any = getattr(torch, "int4")  # noqa: B009 - it has no type yet

    group = ao.PerGroup(32)
    configs: dict[str, Callable[[], Any]] = {
        "int8-dynamic": ao.Int8DynamicActivationInt8WeightConfig,
        "int8-dynamic-int4": lambda: ao.Int8DynamicActivationIntxWeightConfig(
            weight_dtype=int4, weight_granularity=group
        ),
        "int4-weight": lambda: ao.IntxWeightOnlyConfig(weight_dtype=int4, granularity=group),
        "int8-weight": ao.Int8WeightOnlyConfig,
        "fp8-weight": ao.Float8WeightOnlyConfig,
    }
    if name != "float":
        ao.quantize_(model, configs[name]())
    return model


def stored_weights(graph: GraphModule) -> list[tuple[int, ...]]:
    """The int8 constants that are cast in every call, where Inductor's patterns find them."""
    cast = torch.ops.prims.convert_element_type.default
    reads = [n.args[0] for n in graph.graph.nodes if n.target is cast]
    sources = [n.args[0] if n.target is aten.permute.default else n for n in reads]
    found = [getattr(graph, n.target) for n in sources if n.op == "get_attr"]
    return [tuple(t.shape) for t in found if t.dtype is torch.int8]


KINDS = ("float", "int8-dynamic", "int8-dynamic-int4", "int4-weight", "int8-weight", "fp8-weight")
PRODUCTS = (aten.mm.default, aten.addmm.default, aten._int_mm.default)


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_siblings_of_every_kind(kind: str, dtype: torch.dtype) -> None:
    model = quantized(Three(dtype).eval(), kind)
    found = freeze(model, torch.randn(2, 8, 64, dtype=dtype))
    assert found.report.fired == {"merge-linears": 1}
    assert found.calls(*PRODUCTS) == 1
    assert found.calls(aten.cat.default) == 0
    if kind == "int8-weight" and dtype is torch.bfloat16:
        assert stored_weights(found.graphs[0]) == [(128, 64)]
    exact = kind == "int8-dynamic"
    assert (same if exact else close)(found.plain, found.merged)
    assert [t.stride() for t in found.plain] == [t.stride() for t in found.merged]


def test_an_output_has_memory_of_its_own() -> None:
    found = freeze(Three().eval(), torch.randn(4, 64))
    _, _, v = found.merged
    assert v.untyped_storage().nbytes() == v.numel() * v.element_size()


def test_without_freezing_it_is_a_miss_with_the_reason() -> None:
    found = freeze(Three().eval(), torch.randn(4, 64), freezing=False)
    assert not found.report.fired
    misses = found.report.closest_misses
    assert {miss.code for miss in misses} == {MissCode.NOT_CONSTANT}
    assert len(misses) == 3
    assert all("freezing = True" in miss.reason for miss in misses)
    assert same(found.plain, found.merged)
