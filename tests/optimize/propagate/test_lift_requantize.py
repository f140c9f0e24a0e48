from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.propagate import Graph, applied, only_miss, priced, spec_of, steps

from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.qdq import Requantize
from qfuse.ir.ops.views import QuantParams
from qfuse.optimize.propagate.lift_requantize import LiftRequantize
from qfuse.optimize.schedule import move

aten = torch.ops.aten


def requantized(
    g: Graph, q: Any, block: tuple[int | None, ...], out: tuple[int | None, ...]
) -> Any:
    """A requantize of quantized values."""
    params = []
    for each, dtype in ((block, torch.int8), (out, torch.uint8)):
        spec = spec_of(*each, dtype=dtype)
        params.append(QuantParams(spec, *g.params(q, spec)))
    node = Requantize(q, q, params[0], params[1])
    return g.call(ops.requantize, *node.call_args())


def done(g: Graph, *made: Any) -> Any:
    """Finish a graph of quantized values."""
    return g.done(*(g.call(aten._to_copy.default, q, dtype=torch.int32) for q in made))


@pytest.mark.numeric
def test_golden_a_chain_is_crossed_at_once() -> None:
    g = Graph(1)
    turned = g.call(aten.permute.default, g.stored(2, 6, 8), [1, 0, 2])
    flat = g.call(aten.reshape.default, turned, [6, 16])
    program = done(g, requantized(g, flat, (1, None), (None, 8)))

    assert applied(program, LiftRequantize).fired == {"lift-requantize": 1}
    assert steps(program)[:3] == ["requantize[2, 6, 8]", "permute[6, 2, 8]", "reshape[6, 16]"]
    (made,) = [n for n in program.graph.nodes if n.target is ops.requantize]
    assert " *x1x* " in made.args[3]
    assert " 1x*x* " in made.args[6]
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[1]
%q1: int8[2, 6, 8]
const %scale2_1: float32[1, 6, 1]
const %zero3_1: int32[1, 6, 1]
const %scale4_1: float32[2, 1, 1]
const %zero5_1: int32[2, 1, 1]
%0 = qfuse.requantize(%q1, %scale2_1, %zero3_1, 'int8[-128,127] *x1x* float32 float32:reciprocal:round-zp int', %scale4_1, %zero5_1, 'uint8[0,255] 1x*x* float32 float32:reciprocal:round-zp int'): uint8[2, 6, 8]
%1 = aten.permute(%0, (1, 0, 2)): uint8[6, 2, 8]
%2 = aten.reshape(%1, (6, 16)): uint8[6, 16]
%3 = aten._to_copy(%2, dtype=int32): int32[6, 16]
%4 = aten._to_copy(%3, dtype=float32): float32[6, 16]
return (%4)""",
    )


MOVEMENTS: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.view.default, ([12, 8],)),
    (aten.permute.default, ([2, 0, 1],)),
    (aten.unsqueeze.default, (1,)),
    (aten.flip.default, ([0],)),
    (aten.clone.default, ()),
    (aten.expand.default, ([2, 6, 8],)),
]


@pytest.mark.numeric
@pytest.mark.parametrize(("op", "args"), MOVEMENTS, ids=str)
def test_both_parameters_move(op: Any, args: tuple[Any, ...]) -> None:
    g = Graph(1)
    moved = g.call(op, g.stored(2, 6, 8), *args)
    whole = (None,) * moved.meta["val"].ndim
    program = done(g, requantized(g, moved, whole, whole))

    assert applied(program, LiftRequantize).fired == {"lift-requantize": 1}


@pytest.mark.numeric
def test_requantizes_of_two_views_become_one() -> None:
    g = Graph(2, 6, 8)
    spec = spec_of(None, None, None)
    scale, zero = torch.tensor([[0.1]]), torch.tensor([[3]])
    other = torch.tensor([[0.2]])
    above = g.constant(scale[None], "scale"), g.constant(zero[None], "zero")
    x = g.dequantize(g.quantize(g.x, spec, above), spec, above)
    reals = []
    for shape in ([12, 8], [2, 48]):
        below = spec_of(None, None)
        params = g.constant(other.clone(), "scale"), g.constant(zero.clone(), "zero")
        flat = g.call(aten.view.default, x, shape)
        reals.append(g.dequantize(g.quantize(flat, below, params), below, params))
    program = g.done(*reals)

    move(program, priced())
    assert [step.partition("[")[0] for step in steps(program)].count("requantize") == 1


@pytest.mark.parametrize("side", ["read", "stored"])
def test_refuses_blocks_that_no_side_has_above(side: str) -> None:
    g = Graph(1)
    flat = g.call(aten.view.default, g.stored(4, 6), [6, 4])
    cut: tuple[int | None, ...] = (None, 1)
    whole: tuple[int | None, ...] = (None, None)
    blocks = (cut, whole) if side == "read" else (whole, cut)
    miss = only_miss(done(g, requantized(g, flat, *blocks)), LiftRequantize)

    assert (miss.code, miss.at) == (MissCode.GRANULARITY, flat)


def test_refuses_a_part() -> None:
    g = Graph(1)
    part = g.call(aten.slice.Tensor, g.stored(4, 6), 0, 0, 2)
    miss = only_miss(done(g, requantized(g, part, (None, None), (None, None))), LiftRequantize)

    assert (miss.code, miss.at) == (MissCode.ORDER, part)


def test_refuses_a_copy_that_others_read() -> None:
    g = Graph(1)
    copy = g.call(aten.clone.default, g.stored(4, 6))
    program = done(g, requantized(g, copy, (None, None), (None, None)), copy)
    miss = only_miss(program, LiftRequantize)

    assert (miss.code, miss.at) == (MissCode.ORDER, copy)


def test_refuses_stored_numbers_that_leave() -> None:
    g = Graph(1)
    flat = g.call(aten.view.default, g.stored(4, 6), [24])
    q = requantized(g, flat, (None,), (None,))
    miss = only_miss(g.b.done(q), LiftRequantize)

    assert (miss.code, miss.at) == (MissCode.SHARED, q)
