from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch.fx import Node

from qfuse.cost import CostModel, CostProfile
from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import LoweredGraph, OptimizedGraph
from qfuse.ir.graph.text import to_text
from qfuse.kernels import KernelLibrary
from qfuse.lower import lower
from qfuse.lower.kernels.registry import all_kernels
from qfuse.rewrite.clone import clone
from qfuse.targets import Target
from qfuse.testing.build import GraphBuilder
from qfuse.testing.run import run

aten = torch.ops.aten
ROWS, WIDTH, COUNT = 40, 128, 160


def lowered(program: OptimizedGraph) -> LoweredGraph:
    registry = all_kernels(KernelLibrary(available=False, reason="torch's ops are enough"))
    return lower(clone(program), Target.for_testing(), CostModel(CostProfile.pinned()), registry)


def table(b: GraphBuilder, *shape: int, dtype: torch.dtype = torch.int8) -> Node:
    return b.const("table", torch.randint(-128, 128, shape).to(dtype))


def indexed(program: LoweredGraph) -> bool:
    return any(is_call(node, aten.index.Tensor) for node in program.graph.nodes)


def test_golden_rows_are_copied_whole() -> None:
    b = GraphBuilder()
    y = b.call(aten.index.Tensor, table(b, ROWS, WIDTH), [b.arg("ids", torch.int64, 4, COUNT)])

    assert_expected_inline(
        to_text(lowered(b.done(y, stage=OptimizedGraph)).graph),
        """\
const %table: int8[40, 128]
%ids: int64[4, 160]
%0 = aten.lt.Scalar(%ids, 0): bool[4, 160]
%1 = aten.add.Tensor(%ids, %0, alpha=40): int64[4, 160]
%2 = aten.embedding(%table, %1): int8[4, 160, 128]
return (%2)""",
    )


def test_golden_known_indices_and_a_table_of_matrices() -> None:
    b = GraphBuilder()
    ids = b.call(aten.clamp.default, b.arg("ids", torch.int64, COUNT), 0, ROWS - 1)
    y = b.call(aten.index.Tensor, table(b, ROWS, 4, WIDTH), [ids])

    assert_expected_inline(
        to_text(lowered(b.done(y, stage=OptimizedGraph)).graph),
        """\
%ids: int64[160]
%0 = aten.clamp(%ids, 0, 39): int64[160]
const %table: int8[40, 4, 128]
%1 = aten.index_select(%table, 0, %0): int8[160, 4, 128]
return (%1)""",
    )


@pytest.mark.parametrize("case", ["few", "floats", "run time", "axis", "mask", "matrices"])
def test_refuses_other_lookups(case: str) -> None:
    b = GraphBuilder()
    dtype = torch.float32 if case == "floats" else torch.int8
    held = table(b, COUNT if case == "mask" else ROWS, WIDTH, dtype=dtype)
    count = 8 if case == "few" else COUNT
    ids = b.arg("ids", torch.bool if case == "mask" else torch.int64, count)
    if case == "run time":
        held = b.arg("rows", torch.int8, ROWS, WIDTH)
    elif case == "matrices":
        held = b.const("matrices", torch.ones(ROWS, 4, WIDTH, dtype=torch.int8))
        ids = b.arg("more", torch.int64, 4, COUNT)
    y = b.call(aten.index.Tensor, held, [None, ids] if case == "axis" else [ids])

    assert indexed(lowered(b.done(y, stage=OptimizedGraph)))


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
@pytest.mark.parametrize("of", [torch.int64, torch.int32])
@pytest.mark.parametrize("shape", [(ROWS, WIDTH), (ROWS, 4, WIDTH), (ROWS * WIDTH,)])
def test_values_are_those_of_indexing(
    dtype: torch.dtype, of: torch.dtype, shape: tuple[int, ...]
) -> None:
    b = GraphBuilder()
    count = 1 << 14 if len(shape) == 1 else COUNT
    y = b.call(aten.index.Tensor, table(b, *shape, dtype=dtype), [b.arg("ids", of, count)])
    program = b.done(y, stage=OptimizedGraph)
    low = lowered(program)

    # Negative numbers count from the end.
    ids = torch.randint(-shape[0], shape[0], (count,), dtype=of)
    ids[:2] = torch.tensor([-shape[0], shape[0] - 1])
    (new,), (old,) = run(low, [ids]), run(program, [ids])
    assert not indexed(low)
    assert torch.equal(new, old)
    assert (new.dtype, new.stride()) == (old.dtype, old.stride())


@pytest.mark.parametrize("outside", [ROWS, -ROWS - 1])
def test_a_number_outside_of_the_table_is_an_error(outside: int) -> None:
    b = GraphBuilder()
    y = b.call(aten.index.Tensor, table(b, ROWS, WIDTH), [b.arg("ids", torch.int64, COUNT)])
    low = lowered(b.done(y, stage=OptimizedGraph))
    ids = torch.zeros(COUNT, dtype=torch.int64)
    ids[-1] = outside

    assert not indexed(low)
    with pytest.raises(IndexError):
        run(low, [ids])
