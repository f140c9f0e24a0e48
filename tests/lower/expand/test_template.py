"""Expansions of fixed sizes are kept for later compiles, and differ in nothing from new ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.fx import Node

from qfuse.cost import CostModel, CostProfile
from qfuse.ir.graph.stage_graph import LoweredGraph, OptimizedGraph
from qfuse.ir.graph.text import to_text
from qfuse.lower import lower
from qfuse.lower.expand import template
from qfuse.targets import Target
from qfuse.testing import GraphBuilder, random_inputs, run
from qfuse.testing.quant import QuantizedLinear, per_tensor


class Traces:
    """Counts the traces."""

    def __init__(self, trace: Any) -> None:
        self._trace = trace
        self.count = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self._trace(*args, **kwargs)


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traces]:
    """Count the traces of a test that starts and ends with nothing kept."""
    counter = Traces(template._trace)
    monkeypatch.setattr(template, "_trace", counter)
    template._kept.cache_clear()
    yield counter
    template._kept.cache_clear()


def lowered(
    *shape: int | str,
    dtype: torch.dtype = torch.float32,
    order: tuple[int, ...] | None = None,
    stored: torch.dtype = torch.int8,
) -> LoweredGraph:
    torch.manual_seed(0)
    b = GraphBuilder()
    block = QuantizedLinear(b, shape[-1] if isinstance(shape[-1], int) else 8, 8)
    y = block.quantized(b.arg("x", dtype, *shape, order=order), per_tensor(len(shape), stored))
    program = b.done(b.call(torch.ops.aten.relu.default, y), stage=OptimizedGraph)
    return lower(program, Target.for_testing(), CostModel(CostProfile.pinned()), ())


def types(low: LoweredGraph) -> list[Any]:
    def type_of(node: Node) -> Any:
        value = node.meta["val"]
        plain = value.dtype, value.device, value.shape, value.stride(), value.storage_offset()
        return (*plain, value.requires_grad, type(value))

    return [type_of(node) for node in low.graph.nodes if "val" in node.meta]


def modes(low: LoweredGraph) -> set[int]:
    nodes = [node for node in low.graph.nodes if "val" in node.meta]
    return {id(node.meta["val"].fake_mode) for node in nodes}


def test_a_second_compile_of_fixed_sizes_traces_nothing(traces: Traces) -> None:
    first = lowered(4, 8)
    traced = traces.count
    second = lowered(4, 8)

    assert traced > 0
    assert traces.count == traced
    assert to_text(second.graph) == to_text(first.graph)
    assert types(second) == types(first)


def test_values_belong_to_their_own_compile(traces: Traces) -> None:
    first, second = modes(lowered(4, 8)), modes(lowered(4, 8))

    assert traces.count > 0
    assert len(first) == len(second) == 1
    assert first != second


def test_values_of_a_kept_expansion_are_the_same(traces: Traces) -> None:
    first, second = lowered(4, 8), lowered(4, 8)
    inputs = random_inputs(first)

    assert traces.count > 0
    assert all(map(torch.equal, run(first, inputs), run(second, inputs)))


def test_symbolic_sizes_are_traced_anew(traces: Traces) -> None:
    lowered("n", 8)
    traced = traces.count
    lowered("n", 8)

    assert traced > 0
    assert traces.count == 2 * traced
    assert template._kept.cache_info().currsize == 0


@pytest.mark.parametrize(
    "other",
    [
        {"shape": (5, 8)},
        {"dtype": torch.float64},
        {"order": (1, 0)},
        {"stored": torch.uint8},
    ],
    ids=str,
)
def test_another_call_is_traced(traces: Traces, other: dict[str, Any]) -> None:
    lowered(4, 8)
    traced = traces.count
    changed = dict(other)
    again = lowered(*changed.pop("shape", (4, 8)), **changed)
    text = to_text(again.graph)
    count = traces.count
    template._kept.cache_clear()

    assert count > traced
    assert to_text(lowered(*other.get("shape", (4, 8)), **changed).graph) == text


def test_a_default_dtype_is_part_of_the_key(traces: Traces) -> None:
    lowered(4, 8)
    traced = traces.count
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        lowered(4, 8)
    finally:
        torch.set_default_dtype(before)

    assert traces.count == 2 * traced


def fakes(*shape: int) -> list[torch.Tensor]:
    b = GraphBuilder()
    value = b.arg("x", torch.float32, *shape).meta["val"]
    # As the values of a captured graph, whose expansions may have literals.
    value.fake_mode.allow_non_fake_inputs = True
    return [value]


def numbered(values: torch.Tensor) -> object:
    """Add a tensor of numbers, and return a slice of the sum too."""
    total = values + torch.tensor([1.0, 2.0])
    return total, total[:, 1:]


def kept_twice() -> tuple[template.Template, template.Template]:
    first = template.template_of(numbered, fakes(3, 2), "numbered")
    return first, template.template_of(numbered, fakes(3, 2), "numbered")


def test_literals_are_not_shared_by_compiles(traces: Traces) -> None:
    literals = [
        step.tensor
        for made in (*kept_twice(), kept_twice()[1])
        for step in made.steps
        if isinstance(step, template._Literal)
    ]

    assert traces.count == 1
    assert [literal.tolist() for literal in literals] == 3 * [[1.0, 2.0]]
    literals[0].zero_()
    literals[1].zero_()
    assert literals[2].tolist() == [1.0, 2.0]
    after = kept_twice()[0].steps
    assert [s.tensor.tolist() for s in after if isinstance(s, template._Literal)] == [[1.0, 2.0]]


def test_views_keep_strides_and_offset(traces: Traces) -> None:
    made, again = (
        [s.value for s in one.steps if isinstance(s, template._Call)] for one in kept_twice()
    )

    assert traces.count == 1
    for old, new in zip(made, again, strict=True):
        assert type(new) is type(old)
        assert (new.shape, new.stride()) == (old.shape, old.stride())
        assert new.storage_offset() == old.storage_offset()
    assert any(value.storage_offset() for value in again)


def test_other_settings_of_the_process_are_traced(traces: Traces) -> None:
    kept_twice()
    with torch.autocast("cpu", torch.bfloat16):
        kept_twice()

    assert traces.count == 2


def test_a_size_that_depends_on_data_is_not_kept(traces: Traces) -> None:
    def drawn(values: torch.Tensor) -> torch.Tensor:
        return values.nonzero()

    for _ in range(2):
        template.template_of(drawn, fakes(3, 2), "drawn")

    assert traces.count == 2


def test_tensors_with_values_are_not_kept(traces: Traces) -> None:
    for _ in range(2):
        template.template_of(numbered, [torch.ones(3, 2)], "real")

    assert traces.count == 2


def test_what_is_kept_is_bounded() -> None:
    template._kept.cache_clear()
    for size in range(template._KEPT + 3):
        template._kept(("bound", size))

    assert template._kept.cache_info().currsize == template._KEPT
    template._kept.cache_clear()


def test_an_object_that_is_passed_twice_is_two_tensors() -> None:
    """As the values of two nodes are that one expansion made at two places."""
    (x,) = fakes(2, 3)
    made = template._trace(lambda a, b: a - b, [x, x])

    (step,) = made.steps
    assert isinstance(step, template._Call)
    assert step.args == (template._Ref(0), template._Ref(1))
