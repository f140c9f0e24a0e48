"""Quantization moves through random graphs of movements without changing a bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.sources.dialects import difference, equal_but_for_nan, results, strides
from tests.support.strategies.linear_steps import Case
from tests.support.strategies.movement_steps import move_cases
from torch.fx import Node

from qfuse.cost import CostModel, CostProfile
from qfuse.ir.events import Exactness, RolledBack
from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops import library as ops
from qfuse.ir.quant.element import CONTAINER, Element, ScaleFormat
from qfuse.ir.quant.spec import Arithmetic, QuantSpec, ZeroPointDomain
from qfuse.ir.stages.verify import verify
from qfuse.optimize.merge.cse import Combine
from qfuse.optimize.schedule import MOVING_RULES, move
from qfuse.rewrite.budget import RewriteBudget
from qfuse.rewrite.clone import clone
from qfuse.rewrite.context import RewriteContext
from qfuse.rewrite.driver import apply_rules
from qfuse.rewrite.rewriter import Journal
from qfuse.rewrite.site_check import SiteChecker
from qfuse.testing.build import GraphBuilder
from qfuse.testing.fixed_order import run_fixed_order

pytestmark = [pytest.mark.property, pytest.mark.numeric]

aten = torch.ops.aten

_SPECIAL = (0.0, -0.0, float("inf"), -float("inf"), 3e38, -3e38, 1e-40)


def moved_phase(program: NormalGraph, *, priced: bool) -> Counter[str]:
    """Run the phase as the schedule does."""
    cost = CostModel(CostProfile.pinned()) if priced else None
    context = RewriteContext("optimize", cost)
    Combine().run(program, context)
    return move(program, context)


def hard_inputs(case: Case) -> list[torch.Tensor]:
    """Inputs of a graph; every other one has infinities, negative zeros and the like among them."""
    inputs = case.inputs()
    random = torch.Generator().manual_seed(case.seed)
    for values in inputs if case.seed % 2 else []:
        for special in _SPECIAL if values.numel() else ():
            where = int(torch.randint(values.numel(), (), generator=random))
            values.view(-1)[where] = special
    return inputs


def assert_unchanged(case: Case, program: NormalGraph) -> None:
    """Assert that all outputs have the bits, the types and the strides that they had."""
    inputs = hard_inputs(case)
    before, after = run_fixed_order(case.program, inputs), run_fixed_order(program, inputs)
    for old, new, node in zip(before, after, results(program), strict=True):
        same = old.dtype == new.dtype and old.shape == new.shape and equal_but_for_nan(old, new)
        assert same, f"{to_text(program.graph)}\n{difference(old, new)}"
        assert strides(old) == strides(new), f"strides of {node}\n{to_text(program.graph)}"


@pytest.mark.parametrize("priced", [False, True], ids=["free", "priced"])
@given(case=move_cases())
def test_moving_keeps_every_bit_and_comes_to_rest(priced: bool, case: Case) -> None:
    verify(case.program)
    program = clone(case.program)
    moved_phase(program, priced=priced)

    verify(program)
    assert_unchanged(case, program)
    text = to_text(program.graph)
    assert not moved_phase(program, priced=priced), f"{text}\n-->\n{to_text(program.graph)}"
    assert to_text(program.graph) == text


def nvfp4(rank: int) -> QuantSpec:
    """Elements of four bits with scales of two levels."""
    whole = (None,) * rank
    return QuantSpec(
        *(CONTAINER, -6, 6, whole, torch.float32, Arithmetic(), ZeroPointDomain.NONE),
        *(Element.E2M1, ScaleFormat.E4M3, whole),
    )


def turned_elements(padded: bool) -> Case:
    """A transposed tensor that goes to elements of four bits and back, or is padded by nothing."""
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 3, 4)
    if not padded:
        x = b.call(aten.permute.default, x, [1, 0])
    scale = b.const("scale", torch.full((1, 1), 0.25).to(torch.float8_e4m3fn))
    edge = (scale, None, str(nvfp4(2)), b.const("outer", torch.full((1, 1), 0.5)))
    q = b.call(ops.quantize, x, *edge)
    y = b.call(ops.dequantize, q, *edge)
    if padded:
        y = b.call(aten.constant_pad_nd.default, y, [0, 0], 0.0)
        y = b.call(aten.permute.default, y, [1, 0])
        y = b.call(ops.dequantize, b.call(ops.quantize, y, *edge), *edge)
    return Case(b.done(b.call(aten.neg.default, y)), {}, exact=False, seed=0)


@pytest.mark.parametrize("padded", [True, False], ids=["padded by nothing", "transposed"])
@pytest.mark.parametrize("fuel", [0, 1, 2, 100])
def test_strides_of_elements_of_four_bits_stay(padded: bool, fuel: int) -> None:
    case = turned_elements(padded)
    program = clone(case.program)
    move(program, RewriteContext("optimize", budget=RewriteBudget(fuel)))

    verify(program)
    assert_unchanged(case, program)


class RefuseAll:
    """A checker to which nothing is right."""

    def check(self, journal: Journal, exactness: Exactness, what: str) -> str | None:
        del journal, exactness
        return f"{what} is not wanted"

    def forget(self, nodes: Sequence[Node]) -> None:
        del nodes


@given(case=move_cases())
def test_undone_rewrites_leave_no_trace(case: Case) -> None:
    program = clone(case.program)
    before = to_text(program.graph)
    context = RewriteContext("optimize", checker=RefuseAll())

    assert not apply_rules(program, [rule() for rule in MOVING_RULES], context).modified
    assert to_text(program.graph) == before
    verify(program)


@given(case=move_cases(), fuel=st.integers(0, 8))
def test_any_number_of_rewrites_keeps_every_bit(case: Case, fuel: int) -> None:
    program = clone(case.program)
    inputs = case.inputs()
    checker = SiteChecker(program, inputs)
    context = RewriteContext("optimize", budget=RewriteBudget(fuel), checker=checker)
    move(program, context)

    verify(program)
    assert not program.log.of(RolledBack)
    assert_unchanged(case, program)
