"""Quantization and the functional collectives that move rows between ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.propagate import Graph, priced, spec_of, steps
from tests.support.graphs.ranks import run_on_ranks
from tests.support.sources.dialects import equal_but_for_nan

from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.ir.movement.registry import movement_of
from qfuse.ir.ops import library as ops
from qfuse.ir.stages.verify import verify
from qfuse.optimize.propagate.lift_choose import LiftChoose
from qfuse.optimize.propagate.lift_quantize import LiftQuantize
from qfuse.optimize.propagate.sink_below_collective import SinkBelowCollective
from qfuse.optimize.propagate.sink_dequantize import SinkDequantize
from qfuse.optimize.schedule import move
from qfuse.rewrite.clone import clone
from qfuse.rewrite.driver import apply_rules

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no distributed"),
]

aten = torch.ops.aten
RANKS = 3


def gathered(g: Graph, x: Any) -> Any:
    """The rows of all ranks."""
    start = g.call(torch.ops._c10d_functional.all_gather_into_tensor.default, x, RANKS, "0")
    return g.call(torch.ops._c10d_functional.wait_tensor.default, start)


def exchanged(g: Graph, x: Any, rows: list[int]) -> Any:
    """Rows of every rank; as many come as go."""
    start = g.call(torch.ops._c10d_functional.all_to_all_single.default, x, rows, rows, "0")
    return g.call(torch.ops._c10d_functional.wait_tensor.default, start)


def sunk(g: Graph, y: Any, *, dynamic: bool) -> Any:
    """Sink the dequantize, and compare all ranks; each has constants of its own."""
    program = g.done(y)
    source = clone(program)
    assert apply_rules(program, [SinkBelowCollective()], priced()).fired == {
        "sink-below-collective": 1
    }
    verify(program)
    shapes = [[int(s) for s in spec.shape] for spec in program.signature.inputs]
    inputs = [[torch.randn(shape) for shape in shapes] for _ in range(RANKS)]
    own: list[dict[str, torch.Tensor]] = []
    names = [n.target for n in source.graph.nodes if n.op == "get_attr" and "scale" in n.target]
    for _ in range(RANKS):
        scales = {name: source.module.get_buffer(name) for name in names}
        own.append({name: torch.rand_like(value) * 0.05 + 0.01 for name, value in scales.items()})
    assert dynamic or names
    before, after = (run_on_ranks(p, inputs, own) for p in (source, program))
    for old, new in zip(before, after, strict=True):
        assert equal_but_for_nan(old[0], new[0])
    return program


BLOCKS: list[tuple[int | None, ...]] = [
    (None, None),
    (1, None),
    (2, None),
    (3, 4),
    (6, 1),
    (9, None),
]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_parameters_are_gathered_with_their_rows(block: tuple[int | None, ...]) -> None:
    g = Graph(6, 8)
    spec = spec_of(*block)
    params = g.params(g.x, spec)
    x = g.dequantize(g.quantize(g.x, spec, params), spec, params)
    program = sunk(g, gathered(g, x), dynamic=False)

    (made,) = [n for n in program.graph.nodes if n.target is ops.dequantize]
    rows = 6 if block[0] in {None, 9} else block[0]
    assert f" {rows}x" in made.args[3]


def test_golden_dynamic_rows_are_gathered() -> None:
    g = Graph(6, 8)
    spec = spec_of(1, None)
    params = g.choose(g.x, (1, None))
    x = g.dequantize(g.quantize(g.x, spec, params), spec, params)
    program = sunk(g, gathered(g, x), dynamic=True)

    assert steps(program)[2:] == [
        *("quantize[6, 8]", "all_gather_into_tensor[18, 8]", "wait_tensor[18, 8]"),
        *("all_gather_into_tensor[18, 1]", "wait_tensor[18, 1]") * 2,
        *("dequantize[18, 8]", "neg[18, 8]"),
    ]
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[6, 8]
%0 = qfuse.choose_qparams(%x, 'ao-asymmetric int8[-128,127] 1x* eps=1e-07 float32 int32'): (float32[6, 1], int32[6, 1])
%1 = getitem(%0, 0): float32[6, 1]
%2 = getitem(%0, 1): int32[6, 1]
%3 = qfuse.quantize(%x, %1, %2, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): int8[6, 8]
%4 = _c10d_functional.all_gather_into_tensor(%3, 3, '0'): int8[18, 8]
%5 = _c10d_functional.wait_tensor(%4): int8[18, 8]
%6 = _c10d_functional.all_gather_into_tensor(%1, 3, '0'): float32[18, 1]
%7 = _c10d_functional.wait_tensor(%6): float32[18, 1]
%8 = _c10d_functional.all_gather_into_tensor(%2, 3, '0'): int32[18, 1]
%9 = _c10d_functional.wait_tensor(%8): int32[18, 1]
%10 = qfuse.dequantize(%5, %7, %9, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[18, 8]
%11 = aten.neg(%10): float32[18, 8]
return (%11)""",
    )


@pytest.mark.parametrize("block", [(None, None), (1, None), (2, None)], ids=str)
def test_parameters_are_exchanged_with_their_rows(block: tuple[int | None, ...]) -> None:
    g = Graph(6, 8)
    spec = spec_of(*block)
    params = g.params(g.x, spec)
    x = g.dequantize(g.quantize(g.x, spec, params), spec, params)
    program = sunk(g, exchanged(g, x, [2, 2, 2]), dynamic=False)
    assert steps(program)[-2:] == ["dequantize[6, 8]", "neg[6, 8]"]


def test_rows_of_unequal_shares() -> None:
    g = Graph(6, 8)
    spec = spec_of(1, None)
    params = g.params(g.x, spec)
    x = g.dequantize(g.quantize(g.x, spec, params), spec, params)
    y = exchanged(g, x, [2, 2, 2])
    y.all_input_nodes[0].args = (x, [1, 2, 3], [1, 2, 3], "0")
    movement = movement_of(y)
    assert movement is not None
    assert not hasattr(movement.forward((1, None)), "reason")
    assert hasattr(movement.forward((None, None)), "reason")


def test_refuses_to_quantize_before_rows_are_gathered() -> None:
    g = Graph(6, 8)
    y = gathered(g, g.x)
    spec = spec_of(None, None)
    program = g.done(g.quantize(y, spec, g.params(y, spec)))
    result = apply_rules(program, [LiftQuantize()])

    ((_, miss),) = result.misses
    assert (miss.code, miss.at) == (MissCode.GRANULARITY, y)
    assert "all_gather_into_tensor" in miss.reason
    assert "every rank" in miss.reason


def test_refuses_to_choose_before_rows_are_gathered() -> None:
    g = Graph(6, 8)
    y = gathered(g, g.x)
    spec = spec_of(1, None)
    program = g.done(g.quantize(y, spec, g.choose(y, (1, None))))
    result = apply_rules(program, [LiftChoose()])

    ((_, miss),) = result.misses
    assert miss.code is MissCode.GRANULARITY


@pytest.mark.parametrize("block", [4, 5])
def test_refuses_blocks_that_would_be_cut_between_ranks(block: int) -> None:
    g = Graph(6, 8)
    spec = spec_of(block, None)
    params = g.params(g.x, spec)
    x = g.dequantize(g.quantize(g.x, spec, params), spec, params)
    y = gathered(g, x)
    program = g.done(y)
    result = apply_rules(program, [SinkBelowCollective()])

    ((_, miss),) = result.misses
    assert (miss.code, miss.at) == (MissCode.GRANULARITY, y)


def test_refuses_what_does_not_wait() -> None:
    g = Graph(6, 8)
    start = g.call(torch.ops._c10d_functional.all_gather_into_tensor.default, g.x, RANKS, "0")
    wait = g.call(torch.ops._c10d_functional.wait_tensor.default, start)
    assert movement_of(start) is None
    assert movement_of(wait) is not None
    g.call(aten.neg.default, start)
    assert movement_of(wait) is None


def test_refuses_sums_over_ranks() -> None:
    g = Graph(6, 8)
    start = g.call(torch.ops._c10d_functional.all_reduce.default, g.x, "sum", "0")

    assert movement_of(g.call(torch.ops._c10d_functional.wait_tensor.default, start)) is None


def test_the_phase_leaves_a_gather_of_constants_to_run_time() -> None:
    g = Graph(6, 8)
    spec = spec_of(None, None)
    table = g.constant(torch.randint(-128, 128, (6, 8)).to(torch.int8), "table")
    y = gathered(g, g.dequantize(table, spec, g.params(g.x, spec)))
    program = g.done(y)
    move(program, priced(), across_ranks=True)

    assert any("all_gather" in str(n.target) for n in program.graph.nodes)


def test_refuses_to_add_collectives_unless_all_ranks_do() -> None:
    g = Graph(6, 8)
    spec = spec_of(None, None)
    params = g.params(g.x, spec)
    y = gathered(g, g.dequantize(g.quantize(g.x, spec, params), spec, params))
    program = g.done(y)
    result = apply_rules(program, [SinkDequantize()])

    ((_, miss),) = result.misses
    assert (miss.code, miss.at) == (MissCode.ORDER, y)
    assert "all_gather_into_tensor" in miss.reason
    assert "sink-below-collective" not in move(program, priced())
