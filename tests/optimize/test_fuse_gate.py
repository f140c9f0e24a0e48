"""The product of a linear's halves as one op, where it stays float."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.optimize.epilogue_cases import Case, fuse, only_miss

from qfuse.ir.events import MissCode
from qfuse.ir.fused_views import as_activation
from qfuse.ir.views import as_fused_linear
from qfuse.optimize import optimize
from qfuse.optimize.fuse_add import FuseAdd
from qfuse.optimize.fuse_gate import FuseGate
from qfuse.optimize.fuse_linear import FuseLinear
from qfuse.optimize.fuse_output_quantize import FuseOutputQuantize
from qfuse.rewrite.clone import clone
from qfuse.rewrite.driver import apply_rules
from qfuse.testing.quant import per_tensor
from qfuse.testing.run import bits_same, random_inputs, run

if TYPE_CHECKING:
    from torch.fx import Node

    from qfuse.ir.program import NormalGraph
    from qfuse.rewrite.rule import Miss, Rule

aten = torch.ops.aten


def halves(case: Case, *, at: int = 2, cut: str = "split") -> tuple[Node, Node]:
    """Both halves of the linear's four features, cut by a split or by slices."""
    if cut == "split":
        parts = case.b.call(aten.split_with_sizes.default, case.y, [at, 4 - at], -1)
        return case.b.item(parts, 0), case.b.item(parts, 1)
    axis = len(case.y.meta["val"].shape) - 1
    low = case.b.call(aten.slice.Tensor, case.y, axis, 0, at)
    return low, case.b.call(aten.slice.Tensor, case.y, axis, at, 4)


def product(case: Case, gate: Node, up: Node, *, gate_left: bool = True) -> Node:
    """``silu(gate) * up``, in one order or the other."""
    act = case.b.call(aten.silu.default, gate)
    return case.b.call(aten.mul.Tensor, *((act, up) if gate_left else (up, act)))


def epilogues(program: NormalGraph) -> list[str]:
    """The steps of what was made."""
    found = map(as_activation, program.graph.nodes)
    return [str(op.epilogue) for op in found if op is not None]


@pytest.mark.numeric
@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("cut", ["split", "slice"])
@pytest.mark.parametrize("gate_left", [True, False])
@pytest.mark.parametrize("up_first", [True, False])
def test_golden_halves_become_one_step(
    rank: int, cut: str, *, gate_left: bool, up_first: bool
) -> None:
    case = Case(rank)
    parts = halves(case, cut=cut)
    gate, up = parts[::-1] if up_first else parts
    program = case.done(product(case, gate, up, gate_left=gate_left))

    assert fuse(program, FuseGate).fired == {"fuse-gate": 1}
    assert epilogues(program) == [f"glu(silu,{'up' if up_first else 'gate'}-first)"]
    (op,) = [op for n in program.graph.nodes if (op := as_activation(n)) is not None]
    assert as_fused_linear(op.x) is not None
    assert op.output.count == 1


@pytest.mark.numeric
def test_golden_casts_on_both_sides_stay_steps() -> None:
    case = Case(3)
    gate, up = halves(case)
    narrow = [case.b.call(aten._to_copy.default, x, dtype=torch.bfloat16) for x in (gate, up)]
    program = case.done(product(case, *narrow))

    assert fuse(program, FuseGate).fired == {"fuse-gate": 1}
    assert epilogues(program) == ["cast(bfloat16)|act(silu)|mul(0)"]


@pytest.mark.numeric
def test_it_comes_after_what_quantizes_the_product() -> None:
    """With given parameters and alone: which rule takes it depends on the reader only."""
    for stored in (True, False):
        case = Case()
        y = product(case, *halves(case))
        out = case.block.quantized(y, per_tensor(2)) if stored else y
        program = case.done(out)
        done = optimize(clone(program))
        (op,) = [op for n in done.graph.nodes if (op := as_activation(n)) is not None]
        assert (op.output.spec is not None) == stored
        inputs = random_inputs(program, m=5)
        assert bits_same(run(done, inputs), run(program, inputs))


def unequal(case: Case) -> Node:
    gate, up = halves(case, at=1)
    return product(case, gate, case.b.call(aten.slice.Tensor, up, 1, 0, 1))


def of_two(case: Case) -> Node:
    other = case.b.call(aten.slice.Tensor, case.residual, 1, 2, 4)
    return product(case, halves(case)[0], other)


def of_a_float(case: Case) -> Node:
    case.y = case.residual
    return product(case, *halves(case))


def whole(case: Case) -> Node:
    return product(case, case.y, case.residual)


@pytest.mark.parametrize("build", [unequal, of_two, of_a_float, whole])
def test_refuses_what_are_no_halves_of_one_linear(build: Any) -> None:
    case = Case()
    y = build(case)
    miss = only_miss(case.done(y, case.x), FuseGate)

    assert (miss.code, miss.at) == (MissCode.PATTERN, y)
    assert miss.reason == "its factors are no halves of one quantized linear"


def test_refuses_a_factor_that_is_spread() -> None:
    case = Case()
    gate, up = halves(case)
    one = case.b.call(aten.slice.Tensor, up, 1, 0, 1)
    miss = only_miss(case.done(product(case, gate, one), case.x), FuseGate)

    assert (miss.code, miss.at) == (MissCode.SHAPE, one)
    assert "is spread over" in miss.reason


def test_refuses_a_linear_that_gives_stored_numbers() -> None:
    """Those are floats of eight bits. No kernel runs the graph, but it can be written."""
    case = Case()
    case.y, _, _ = case.block.stored(case.y, per_tensor(2, torch.float8_e4m3fn))
    program = case.done(product(case, *halves(case)))
    miss = miss_behind(program, FuseOutputQuantize())

    assert miss.code is MissCode.ORDER
    linear = as_fused_linear(miss.at)
    assert linear is not None
    assert linear.out_params is not None
    assert miss.reason == "the linear gives its result quantized"


def test_refuses_results_in_another_order_than_rows() -> None:
    """A sum has the order of its first operand, and so has the linear that takes it in."""
    case = Case(4)
    other = case.b.arg("o", torch.float32, 2, 3, 4, "m")
    turned = case.b.call(aten.permute.default, other, [0, 1, 3, 2])
    case.y = case.b.call(aten.add.Tensor, turned, case.y)
    y = product(case, *halves(case))
    miss = miss_behind(case.done(y), FuseAdd())

    assert (miss.code, miss.at) == (MissCode.SHAPE, y)
    assert miss.reason == "the product lies in memory in another order than rows"


def miss_behind(program: NormalGraph, rule: Rule[Any]) -> Miss:
    """The refusal of a gate whose linear another rule has grown."""
    assert apply_rules(program, [FuseLinear(), rule]).fired[rule.name] == 1
    before = str(program.graph)
    result = apply_rules(program, [FuseGate()])
    assert not result.modified
    assert str(program.graph) == before
    (miss,) = [m for _, m in result.misses]
    return miss


def test_refuses_an_activation_that_others_read() -> None:
    case = Case()
    gate, up = halves(case)
    act = case.b.call(aten.silu.default, gate)
    y = case.b.call(aten.mul.Tensor, act, up)
    miss = only_miss(case.done(y, act), FuseGate)

    assert (miss.code, miss.at) == (MissCode.SHARED, act)


def test_refuses_a_product_of_no_activation() -> None:
    case = Case()
    program = case.done(case.b.call(aten.mul.Tensor, *halves(case)))

    assert not fuse(program, FuseGate).modified
    assert epilogues(program) == []
