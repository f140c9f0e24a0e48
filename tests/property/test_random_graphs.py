"""Random graphs keep their values through optimize and lower, whatever stands in them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.cases.lowering import NO_KERNELS
from tests.support.strategies.linear_steps import Case, cases
from torch.fx import Node

from qfuse import kernels
from qfuse.cost import CostModel, CostProfile
from qfuse.ir.events import EventLog, Exactness, RolledBack
from qfuse.ir.graph.stage_graph import LoweredGraph, NormalGraph, OptimizedGraph, StageGraph
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops import library as ops
from qfuse.ir.stages.verify import verify
from qfuse.lower import lower
from qfuse.lower.kernels.registry import all_kernels, linear_kernels
from qfuse.optimize import optimize
from qfuse.optimize.schedule import FUSION_RULES
from qfuse.rewrite.budget import RewriteBudget
from qfuse.rewrite.clone import clone
from qfuse.rewrite.compare import compare
from qfuse.rewrite.context import RewriteContext
from qfuse.rewrite.driver import apply_rules
from qfuse.rewrite.rewriter import Journal
from qfuse.rewrite.site_check import SiteChecker
from qfuse.rewrite.tolerance import SITE
from qfuse.targets import Target
from qfuse.testing.build import GraphBuilder
from qfuse.testing.fixed_order import run_fixed_order
from qfuse.testing.quant import per_channel, per_token
from qfuse.testing.run import run

aten = torch.ops.aten

pytestmark = [pytest.mark.property, pytest.mark.numeric]


def assert_same(
    new: Sequence[torch.Tensor], old: Sequence[torch.Tensor], program: StageGraph
) -> None:
    """Assert that all outputs have equal types and bits; NaN is NaN."""
    assert len(new) == len(old)
    for index, (a, b) in enumerate(zip(new, old, strict=True)):
        verdict = compare(a, b, None, Exactness.EXACT, SITE)
        assert verdict.wrong is None, f"output {index}: {verdict.wrong}\n{to_text(program.graph)}"


def assert_same_sums(
    new: Sequence[torch.Tensor], old: Sequence[torch.Tensor], program: StageGraph
) -> None:
    """Assert equal types and bits, but for the sign of a zero.

    A sum of one product is that product in some libraries, so that 0 * -1 is -0.0, and 0 + 0 * -1
    in others, which is 0.0. A sum of integers has one zero.
    """
    assert_same(
        list(map(without_negative_zero, new)), list(map(without_negative_zero, old)), program
    )


def without_negative_zero(x: torch.Tensor) -> torch.Tensor:
    """Give every zero the same sign."""
    return torch.where(x.double() == 0, torch.zeros_like(x), x) if x.is_floating_point() else x


# These round the bias or the scale of the weight instead of the result.
FOLDS = frozenset({"optimize/fold-scale", "optimize/fold-shift"})


def exact_only(fuel: int | None = None) -> RewriteContext:
    """Allow rewrites that keep the bits of sums in one order."""
    return RewriteContext("optimize", budget=RewriteBudget(fuel, FOLDS))


def optimized(case: Case, context: RewriteContext | None = None) -> OptimizedGraph:
    """Optimize a copy."""
    return optimize(clone(case.program), context)


def lowered(
    program: OptimizedGraph, library: kernels.KernelLibrary, context: RewriteContext | None = None
) -> LoweredGraph:
    """Lower a copy on the pinned machine."""
    cost = CostModel(CostProfile.pinned())
    return lower(clone(program), Target.for_testing(), cost, all_kernels(library), context)


def run_code(program: StageGraph, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run the module's generated code; neither inputs nor constants may be written to."""
    held = [*inputs, *program.module.buffers()]
    before = [t.clone() for t in held]
    with torch.no_grad():
        outputs = list(program.module(*inputs))
    assert all(map(torch.equal, before, held)), "a functional graph wrote to what it reads"
    return outputs


def source_values(case: Case) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Verify the source and run it; return inputs and outputs."""
    verify(case.program)
    inputs = case.inputs()
    return inputs, list(run(case.program, inputs))


@given(st.one_of(cases(exact=False), cases(exact=True)))
def test_optimize_keeps_every_bit_and_comes_to_rest(case: Case) -> None:
    inputs, _ = source_values(case)
    # Merging linears changes the order in which a library sums, and nothing else.
    old = list(run_fixed_order(case.program, inputs))
    before = to_text(case.program.graph)
    program = optimized(case, exact_only())

    verify(program)
    assert to_text(case.program.graph) == before, "the copy was rewritten, the source was not"
    assert_same(list(run_fixed_order(program, inputs)), old, program)
    text = to_text(program.graph)
    assert to_text(optimized(case, exact_only()).graph) == text, "optimizing is deterministic"
    again = NormalGraph(program.module, program.signature, EventLog())
    assert to_text(optimize(again, exact_only()).graph) == text, (
        "optimizing twice is optimizing once"
    )


@given(cases(exact=False), st.integers(0, 6))
def test_any_number_of_rewrites_keeps_every_bit(case: Case, fuel: int) -> None:
    inputs, _ = source_values(case)
    # Merging linears changes the order in which a library sums, and nothing else.
    old = list(run_fixed_order(case.program, inputs))
    program = optimized(case, exact_only(fuel))
    assert_same(list(run_fixed_order(program, inputs)), old, program)


class RefuseAll:
    """A checker to which nothing is right."""

    def check(self, journal: Journal, exactness: Exactness, what: str) -> str | None:
        del journal, exactness
        return f"{what} is not wanted"

    def forget(self, nodes: Sequence[Node]) -> None:
        del nodes


@given(cases(exact=False))
def test_undone_rewrites_leave_no_trace(case: Case) -> None:
    program = clone(case.program)
    before = to_text(program.graph)
    context = RewriteContext("optimize", checker=RefuseAll())
    result = apply_rules(program, [rule() for rule in FUSION_RULES], context)

    assert not result.modified
    assert to_text(program.graph) == before
    verify(program)


LIBRARIES = pytest.mark.parametrize(
    "own",
    [
        pytest.param(True, id="own-kernels", marks=pytest.mark.own_kernels),
        pytest.param(False, id="without"),
    ],
)


def library(own: bool) -> kernels.KernelLibrary:
    """The own kernels, or none."""
    return kernels.load() if own else NO_KERNELS


@LIBRARIES
@given(case=cases(exact=True))
def test_lower_has_the_bits_of_sums_that_are_exact(own: bool, case: Case) -> None:
    inputs, old = source_values(case)
    program = lowered(optimized(case), library(own))
    assert_same_sums(run_code(program, inputs), old, program)


def one_product(x_dtype: torch.dtype) -> Case:
    """A linear of one input feature, where products of 0 and a negative number are among the sums."""
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 4, 1)
    x_spec, w_spec = per_token(2, x_dtype), per_channel(2, torch.uint8)
    edge = (b.const("x_scale", torch.full((4, 1), 0.25)), None, str(x_spec))
    real_x = b.call(ops.dequantize, b.call(ops.quantize, x, *edge), *edge)
    codes, zero = torch.arange(33, dtype=torch.uint8)[:, None], torch.full((33, 1), 16)
    weight = (b.const("scale", torch.full((33, 1), 0.125)), b.const("zero", zero), str(w_spec))
    real_w = b.call(ops.dequantize, b.const("w", codes), *weight)
    return Case(b.done(b.call(aten.linear.default, real_x, real_w)), {}, exact=True, seed=0)


@LIBRARIES
@pytest.mark.parametrize("x_dtype", [torch.int8, torch.uint8])
def test_a_sum_of_one_product_may_have_either_zero(own: bool, x_dtype: torch.dtype) -> None:
    case = one_product(x_dtype)
    inputs = [torch.tensor([[0.0], [1.0], [0.5], [-3.0]])]
    old = list(run(case.program, inputs))
    program = lowered(optimized(case), library(own))
    (new,) = run_code(program, inputs)

    assert_same_sums([new], old, program)
    if own:
        assert "linear_w8a8" in to_text(program.graph)
        assert not torch.signbit(new[0]).any(), "the sum of integers is 0"


@LIBRARIES
@given(case=cases(exact=False))
def test_lower_stays_within_rounding(own: bool, case: Case) -> None:
    inputs, _ = source_values(case)
    middle = optimized(case)
    text = to_text(lowered(middle, library(own)).graph)
    program = clone(middle)
    # The truth of each kernel is what it replaces, in float64, on the values that come there: a
    # code that flips in one layer is not held against the layers behind it.
    checker = SiteChecker(program, inputs)
    cost = CostModel(CostProfile.pinned())
    registry = linear_kernels(library(own))
    context = RewriteContext("lower", checker=checker)
    low = lower(program, Target.for_testing(), cost, registry, context)

    undone = low.log.of(RolledBack)
    assert not undone, "\n".join(e.reason for e in undone)
    assert to_text(low.graph) == text, "checking changes nothing"
