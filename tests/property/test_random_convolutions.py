"""Random graphs of convolutions keep their values, strides and inputs through the whole pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from tests.support.cases.lowering import NO_KERNELS
from tests.support.sources.dialects import strides
from tests.support.strategies.convolutions.cases import ConvCase, conv_cases
from tests.support.strategies.convolutions.in_place import dynamic_shapes, writing_modules
from tests.support.strategies.convolutions.qparams import pt2e
from torch.fx import GraphModule

import qfuse
from qfuse import kernels
from qfuse.backends import CompiledModule, compile_graph
from qfuse.cost import CostModel, CostProfile
from qfuse.ir.events import Exactness, Noted, RolledBack
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.ir.graph.text import to_text
from qfuse.ir.signature.run import run_flat
from qfuse.ir.stages.verify import verify
from qfuse.model_check import ModelCheck
from qfuse.options import Check
from qfuse.pipeline import Pipeline, Plan
from qfuse.rewrite.compare import compare
from qfuse.rewrite.tolerance import SITE
from qfuse.targets import Target
from qfuse.testing.build import GraphBuilder

aten = torch.ops.aten

pytestmark = [pytest.mark.property, pytest.mark.numeric]


def planned(
    program: CapturedGraph, inputs: Sequence[torch.Tensor], own: bool, check: Check
) -> Plan:
    """Rewrite the graph; no rewrite may have to be undone."""
    verify(program)
    library = kernels.load() if own else NO_KERNELS
    cost = CostModel(CostProfile.pinned())
    pipeline = Pipeline(Target.for_testing(), cost, library, check)
    plan = pipeline.plan(program, inputs)
    undone = plan.lowered.log.of(RolledBack)
    assert not undone, "\n".join(f"{e.key}: {e.reason}" for e in undone)
    bugs = [e.text for e in plan.lowered.log.of(Noted) if "which is a bug" in e.text]
    assert not bugs, "\n".join(bugs)
    return plan


def called(
    model: CompiledModule, program: CapturedGraph, inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Call it twice; the answers are the same, and neither inputs nor constants are written to."""
    held = [*inputs, *program.module.buffers()]
    before = [t.clone() for t in held]
    first, second = model(*inputs), model(*inputs)
    assert all(map(torch.equal, first, second)), "a second call gives another answer"
    assert all(map(torch.equal, before, held)), "a functional graph wrote to what it reads"
    return list(first)


def assert_alike(case: ConvCase, model: CompiledModule, which: int, plan: Plan) -> None:
    """Assert the values and the strides of the source for one of its inputs."""
    inputs = case.inputs(which)
    new = called(model, case.program, inputs)
    text = to_text(plan.lowered.graph)
    old = [value for value in run_flat(case.program.module, inputs) if value is not None]
    for index, (a, b) in enumerate(zip(new, old, strict=True)):
        if not case.ambiguous:
            assert strides(a) == strides(b), f"output {index}: {a.stride()} {b.stride()}\n{text}"
        if case.exact:
            verdict = compare(_one_zero(a), _one_zero(b), None, Exactness.EXACT, SITE)
            assert verdict.wrong is None, f"output {index}: {verdict.wrong}\n{text}"
    if not case.exact:
        verdict = ModelCheck.measure(case.program, inputs).judge(new)
        assert verdict.wrong is None, f"{verdict.wrong}\n{text}"


def _one_zero(x: torch.Tensor) -> torch.Tensor:
    """Give every zero the same sign: a sum of integers has one zero."""
    return torch.where(x.double() == 0, torch.zeros_like(x), x) if x.is_floating_point() else x


def assert_kept(case: ConvCase, own: bool) -> None:
    """Assert that the compiled graph does what the source does, for both inputs."""
    # Bits tell by themselves; what is rounded is checked where it is rewritten, since a value that
    # flips in one layer is not held against the layers after it.
    check = Check.OFF if case.exact else Check.SITE
    plan = planned(case.program, case.inputs(), own, check)
    model = CompiledModule(plan.lowered.signature, compile_graph(plan.lowered, backend="eager"))
    for which in (0, 1):
        assert_alike(case, model, which, plan)


DEFAULT = settings()
# Together at least 300 networks, whatever the profile.
MORE = settings(max_examples=max(120, DEFAULT.max_examples))
REST = settings(max_examples=max(60, DEFAULT.max_examples))


@pytest.mark.own_kernels
@MORE
@given(case=conv_cases(exact=True))
def test_sums_that_are_exact_keep_every_bit(case: ConvCase) -> None:
    assert_kept(case, own=True)


@REST
@given(case=conv_cases(exact=True))
def test_without_own_kernels_every_bit_is_kept(case: ConvCase) -> None:
    assert_kept(case, own=False)


@pytest.mark.own_kernels
@MORE
@given(case=conv_cases(exact=False))
def test_values_stay_within_rounding(case: ConvCase) -> None:
    assert_kept(case, own=True)


FEWER = settings(max_examples=max(10, DEFAULT.max_examples // 4))


@pytest.mark.export
@FEWER
@given(drawn=writing_modules(exact=True))
def test_modules_that_write_to_their_values_keep_every_bit(
    drawn: tuple[ConvCase, GraphModule],
) -> None:
    """Values are those of eager torch; its strides, which a capture may not keep, are not compared."""
    case, module = drawn
    inputs = case.inputs()
    fast = qfuse.compile(
        module,
        tuple(inputs),
        dynamic_shapes=dynamic_shapes(case),
        target=Target.for_testing(),
        check="off",
        options={"backend": "eager", "own_kernels": False},
    )
    for which in (0, 1):
        inputs = case.inputs(which)
        with torch.no_grad():
            old = module(*inputs)
        for index, (a, b) in enumerate(zip(called(fast, case.program, inputs), old, strict=True)):
            verdict = compare(_one_zero(a), _one_zero(b), None, Exactness.EXACT, SITE)
            assert verdict.wrong is None, f"output {index}: {verdict.wrong}\n{fast.plan}"


@pytest.mark.parametrize("sizes", [(12, 12), (5, 5, 6)], ids=str)
def test_channels_last_pools_of_8_bits(sizes: tuple[int, ...]) -> None:
    rank = len(sizes)
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 1, 2, *sizes, order=(0, *range(2, rank + 2), 1))
    params = (0.05, 3, -128, 127, torch.int8)
    for op in (None, {2: aten.max_pool2d.default, 3: aten.max_pool3d.default}[rank]):
        x = x if op is None else b.call(op, x, [2] * rank)
        q = b.call(pt2e.quantize_per_tensor.default, x, *params)
        x = b.call(pt2e.dequantize_per_tensor.default, q, *params)
    case = ConvCase(b.done(x, stage=CapturedGraph), ({}, {}), exact=True, seed=0)
    assert_kept(case, own=False)
