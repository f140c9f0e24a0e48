"""Equal keys mean the same code: every fact that decides it changes the key, and no other does."""

from __future__ import annotations

import pytest
import torch
from tests.support.graphs.lowered import aten, finish

from qfuse.backends.key import (
    BAKED_BYTES,
    constant_digest,
    package_digest,
    program_digest,
    program_text,
)
from qfuse.backends.prepare import prepare
from qfuse.ir.errors import CacheError
from qfuse.ir.graph.stage_graph import LoweredGraph
from qfuse.testing.build import GraphBuilder


def graph(
    *,
    size: int | str = "n",
    dtype: torch.dtype = torch.float32,
    constant: torch.Tensor | None = None,
    alpha: float = 1.0,
    name: str = "x",
    padding: int = 0,
) -> LoweredGraph:
    """``x + alpha * constant``, with every fact about it to be chosen."""
    b = GraphBuilder()
    for i in range(padding):  # uses up the names of symbols and nodes
        b.arg(f"unused{i}", torch.float32, f"m{i}")
    x = b.arg(name, dtype, size, 8)
    c = b.const(f"{name}_weight", torch.zeros(8) if constant is None else constant)
    return finish(b, [b.call(aten.add.Tensor, x, c, alpha=alpha)])


def digest(lowered: LoweredGraph, **facts: str) -> str:
    return program_digest(prepare(lowered), facts)


LARGE = torch.zeros(BAKED_BYTES, 8)


@pytest.mark.parametrize(
    "other",
    [
        graph(size=4),
        graph(size="n", dtype=torch.float64),
        graph(alpha=2.0),
        graph(alpha=-0.0),
        graph(alpha=0.0),
        graph(constant=torch.full((8,), -0.0)),
        graph(constant=torch.ones(8)),
        graph(constant=torch.zeros(1, 8)),
        graph(constant=torch.zeros(8, dtype=torch.float64)),
        graph(constant=torch.zeros(1).expand(8)),
        graph(padding=1),
    ],
    ids=lambda g: str(g.graph.output_node().prev.format_node()),
)
def test_every_fact_is_in_the_key(other: LoweredGraph) -> None:
    assert digest(graph()) != digest(other)


def test_bounds_of_sizes_are_in_the_key() -> None:
    narrow = graph()
    symbols = dict(narrow.signature.symbols)
    ((name, bounds),) = symbols.items()
    narrow.signature.symbols[name] = type(bounds)(bounds.low, bounds.hint, 64)
    assert digest(graph()) != digest(narrow)


def test_outside_facts_are_in_the_key() -> None:
    keys = {digest(graph(), torch="2.13"), digest(graph(), torch="2.14"), digest(graph())}
    assert len(keys) == 3


def test_names_are_not_in_the_key() -> None:
    assert digest(graph(name="x")) == digest(graph(name="y"))


def test_values_of_large_constants_are_not_in_the_key() -> None:
    b = [graph(size=BAKED_BYTES, constant=value) for value in (LARGE, LARGE + 1)]
    assert digest(b[0]) == digest(b[1])


def test_shared_memory_is_in_the_key() -> None:
    def two(second: torch.Tensor) -> LoweredGraph:
        b = GraphBuilder()
        x = b.arg("x", torch.float32, 4)
        y = b.call(aten.add.Tensor, x, b.const("first", weight))
        return finish(b, [b.call(aten.add.Tensor, y, b.const("second", second))])

    weight = torch.randn(4)
    assert digest(two(weight)) != digest(two(weight.clone()))


def test_a_value_without_a_text_is_refused() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 4)
    y = b.call(aten.add.Tensor, x, 1.0)
    lowered = finish(b, [y])
    y.args = (x, torch.per_tensor_affine)  # type: ignore[assignment]
    with pytest.raises(CacheError, match="a qscheme has no stable text"):
        program_text(prepare(lowered))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_the_digest_of_a_constant_is_that_of_its_values_and_bits(dtype: torch.dtype) -> None:
    value = torch.arange(6).view(2, 3).to(dtype)
    assert constant_digest(value) == constant_digest(value.t().contiguous().t())
    assert constant_digest(value) != constant_digest(value.flip(1))


def test_the_sources_have_a_digest() -> None:
    assert package_digest() == package_digest()
