"""A rewrite that changes values is found where it happens, undone, logged and not tried again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.toy_rules import DoubleNegation, NegToMul, WrongAbs
from tests.support.values import bits_same

from qfuse.ir.events import Checked, Exactness, Fired, MissCode, RolledBack
from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops import library as ops
from qfuse.ir.stages.verify import verify
from qfuse.rewrite import site_check
from qfuse.rewrite.context import PassResult, RewriteContext
from qfuse.rewrite.driver import apply_rules
from qfuse.rewrite.rewriter import GraphEditor, Journal
from qfuse.rewrite.site_check import SiteChecker
from qfuse.rewrite.values import region_value
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import per_tensor
from qfuse.testing.run import run

aten = torch.ops.aten


def relu_neg() -> NormalGraph:
    """``neg(relu(x))``."""
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 4, 6)
    return b.done(b.call(aten.neg.default, b.call(aten.relu.default, x)))


def checked(program: NormalGraph, *rules: Any, inputs: list[torch.Tensor]) -> PassResult:
    """Apply rules, each rewrite checked by values."""
    context = RewriteContext("optimize", checker=SiteChecker(program, inputs))
    return apply_rules(program, list(rules), context)


def test_a_rule_that_changes_values_is_undone_and_logged() -> None:
    program, inputs = relu_neg(), [torch.ones(4, 6)]
    before, want = to_text(program.graph), run(program, inputs)

    result = checked(program, WrongAbs(), inputs=inputs)

    assert result.fired == {}
    assert to_text(program.graph) == before
    assert bits_same(run(program, inputs), want)
    verify(program)
    (undone,) = program.log.of(RolledBack)
    (check,) = program.log.of(Checked)
    assert (undone.rule, undone.key) == ("wrong-abs", "optimize/wrong-abs@neg_default")
    assert (check.passed, check.what) == (False, undone.key)
    assert undone.reason == check.note != ""
    assert not list(program.log.of(Fired))


def test_it_is_not_tried_again_there_and_the_report_says_why() -> None:
    program = relu_neg()
    result = checked(program, WrongAbs(), inputs=[torch.ones(4, 6)])

    ((name, miss),) = result.misses
    assert (name, miss.code) == ("wrong-abs", MissCode.BANNED)
    assert miss.reason.startswith("it was rolled back here: ")
    assert len(list(program.log.of(Checked))) == 1


def test_another_rule_takes_the_site_that_a_wrong_one_lost() -> None:
    program, inputs = relu_neg(), [torch.ones(4, 6)]
    want = run(program, inputs)

    result = checked(program, WrongAbs(), NegToMul(), inputs=inputs)

    assert result.fired == {"neg-to-mul": 1}
    assert [c.passed for c in program.log.of(Checked)] == [False, True]
    assert bits_same(run(program, inputs), want)


def test_what_counts_are_the_values_that_come_to_the_site() -> None:
    # Where the input is negative relu gives 0, of which -x and |x| differ in sign alone.
    program = relu_neg()
    result = checked(program, WrongAbs(), inputs=[-torch.ones(4, 6)])

    assert result.fired == {"wrong-abs": 1}
    assert [c.passed for c in program.log.of(Checked)] == [True]


def test_a_rule_that_keeps_values_stays() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 4)
    program = b.done(
        b.call(aten.relu.default, b.call(aten.neg.default, b.call(aten.neg.default, x)))
    )
    inputs = [torch.randn(4)]
    want = run(program, inputs)

    assert checked(program, DoubleNegation(), inputs=inputs).fired == {"double-negation": 1}
    assert bits_same(run(program, inputs), want)
    (check,) = program.log.of(Checked)
    assert (check.passed, check.exactness, check.note) == (True, Exactness.EXACT, "")


def replaced(
    factor: float, exactness: Exactness, *, parts: bool = False
) -> tuple[NormalGraph, str | None]:
    """Check the replacement of ``x * 3`` (or of a split of it) by ``x * factor``."""
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 4, 6)
    old = b.call(aten.mul.Tensor, x, 3.0)
    out = b.call(aten.split.Tensor, old, 2) if parts else old
    program = b.done(b.item(out, 1) if parts else b.call(aten.neg.default, out))
    checker = SiteChecker(program, [torch.randn(4, 6)])
    rw = GraphEditor(program.module).rewriter("toy", out)
    new = rw.call(aten.mul.Tensor, x, factor)
    rw.replace(out, rw.call(aten.split.Tensor, new, 2) if parts else new)
    return program, checker.check(rw.journal, exactness, "toy@here")


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize(
    ("factor", "exactness", "passes"),
    [
        (3.0, Exactness.EXACT, True),
        (3.0 * (1 + 2**-22), Exactness.EXACT, False),
        (3.0, Exactness.ROUNDING, True),
        (3.1, Exactness.ROUNDING, False),
    ],
)
def test_exactness_decides_what_may_change(
    factor: float, exactness: Exactness, passes: bool, parts: bool
) -> None:
    program, wrong = replaced(factor, exactness, parts=parts)

    assert (wrong is None) is passes
    checks = list(program.log.of(Checked))
    assert checks[-1].passed is passes
    assert all(check.what == "toy@here" for check in checks)
    assert checks[-1].note == (wrong or "")


def judged(
    program: NormalGraph, old: torch.fx.Node, new: torch.fx.Node, inputs: list[torch.Tensor]
) -> str | None:
    """Check the replacement of ``old`` by ``new`` as rounding."""
    journal = Journal()
    journal.replaced.append((old, new))
    return SiteChecker(program, inputs).check(journal, Exactness.ROUNDING, "the rewrite")


def test_a_rewrite_that_replaces_nothing_has_nothing_to_prove() -> None:
    program = relu_neg()
    checker = SiteChecker(program, [torch.randn(4, 6)])
    anchor = next(n for n in program.graph.nodes if n.target is aten.neg.default)
    rw = GraphEditor(program.module).rewriter("toy", anchor)
    rw.call(aten.abs.default, anchor.args[0])

    assert checker.check(rw.journal, Exactness.EXACT, "toy@here") is None
    assert not list(program.log.of(Checked))


@pytest.mark.numeric
@pytest.mark.parametrize(("factor", "wrong"), [(1 - 1e-6, ""), (1.0, ""), (0.9, "steps apart")])
def test_a_float_that_was_rounded_last_may_be_a_step_off(factor: float, wrong: str) -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 40, 50)
    spec = replace(per_tensor(2), dtype=torch.uint8, quant_min=0, quant_max=255)
    scale = b.const("scale", torch.full((1, 1), 0.25))

    def rounded(y: torch.fx.Node) -> torch.fx.Node:
        args = (y, None, None, "", f"round(0,-,{spec})", [scale], None, None, "", "", "")
        return b.item(b.call(ops.activation, *args), 0)

    old, new = rounded(x), rounded(b.call(aten.mul.Tensor, x, factor))
    program = b.done(old, new)
    values = torch.randint(1, 200, (40, 50)) * 0.25 + 0.05
    values[3, 7] = 2.625 + 5e-7  # beside a tie: 10.5 steps
    found = judged(program, old, new, [values])
    assert wrong in (found or "")
    assert (found is None) is (not wrong)


@pytest.mark.numeric
@pytest.mark.parametrize("rounded", [False, True], ids=["stored", "rounded"])
@pytest.mark.parametrize(
    ("factor", "wrong"),
    [(1 - 1e-7, ""), (1 + 1e-7, ""), (1.002, "differ by a step"), (1.5, "steps apart")],
)
def test_values_on_a_tie_may_fall_either_way(factor: float, wrong: str, rounded: bool) -> None:
    """With scales 0.02 and 0.08, every fourth product is on a tie."""
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 40, 50)
    spec = replace(per_tensor(2), dtype=torch.uint8, quant_min=0, quant_max=255)
    scale = b.const("scale", torch.full((1, 1), 0.08))
    grid = f"round(0,-,{spec})"

    def quantized(factor: float) -> torch.fx.Node:
        y = b.call(aten.mul.Tensor, x, 0.02 * factor)
        if not rounded:
            return b.call(ops.quantize, y, scale, None, str(spec))
        args = (y, None, None, "", grid, [scale], None, None, "", "", "")
        return b.item(b.call(ops.activation, *args), 0)

    old, new = quantized(1.0), quantized(factor)
    program = b.done(old, new)
    found = judged(program, old, new, [torch.randint(0, 1000, (40, 50)).float()])
    assert wrong in (found or "")
    assert (found is None) is (not wrong)


@pytest.mark.numeric
@pytest.mark.parametrize(("shift", "wrong"), [(1, ""), (-1, "differ by a step")])
def test_a_tie_takes_values_one_way_only(shift: int, wrong: str) -> None:
    """10.5 steps are rounded to 10, and may as well be 11; they are not 9."""
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 40, 50)
    scale = b.const("scale", torch.full((1, 1), 0.25))
    old, same = (b.call(ops.quantize, x, scale, None, str(per_tensor(2))) for _ in range(2))
    new = b.call(aten.add.Tensor, same, shift)
    found = judged(b.done(old, new), old, new, [torch.full((40, 50), 2.625)])
    assert wrong in (found or "")
    assert (found is None) is (not wrong)


@pytest.mark.numeric
@pytest.mark.parametrize(("shift", "wrong"), [(0, ""), (1, "steps apart")])
def test_a_source_that_quantizes_bfloat16_may_round_before(shift: int, wrong: str) -> None:
    """The exact sum is 7.492 steps, 7.505 in bfloat16; that of bfloat16 operands is 7.454."""
    b = GraphBuilder()
    q = b.arg("q", torch.int8, 16, 8)
    x_spec = replace(per_tensor(2), float_dtype=torch.bfloat16)
    spec = replace(x_spec, dtype=torch.uint8, quant_min=0, quant_max=255)
    numbers = {"x": 0.03612853214144707, "w": 0.0495808906853199, "y": 0.009563709609210491}
    scales = {name: b.const(f"{name}_scale", torch.full((1, 1), v)) for name, v in numbers.items()}
    w = b.const("w", torch.tensor([[-2, -2, 0, 0, -2, 2, -5, 3]], dtype=torch.int8))

    def multiplied(dtype: torch.dtype) -> torch.fx.Node:
        text = str(replace(x_spec, float_dtype=dtype))
        parts = [(q, scales["x"]), (w, scales["w"])]
        x, weight = (b.call(ops.dequantize, part, s, None, text) for part, s in parts)
        return b.call(aten.linear.default, x, weight)

    old = b.call(ops.quantize, multiplied(torch.bfloat16), scales["y"], None, str(spec))
    rounded = b.call(aten._to_copy.default, multiplied(torch.float32), dtype=torch.bfloat16)
    new = b.call(ops.quantize, rounded, scales["y"], None, str(spec))
    new = b.call(aten.add.Tensor, new, shift) if shift else new
    values = torch.zeros(16, 8, dtype=torch.int8)
    values[:2] = torch.tensor([-7, -8, 7, 4, -6, 5, 3, 1])
    found = judged(b.done(old, new), old, new, [values])
    assert wrong in (found or "")
    assert (found is None) is (not wrong)


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("factor", "shift", "wrong"),
    [
        (1.0, 0, ""),
        (1.002, 0, "differ by a step"),
        (1 / 1.002, 0, "differ by a step"),
        (1.0, 1, "differ by a step"),
        (1.0, -1, "differ by a step"),
    ],
)
def test_only_the_values_that_a_rounding_decides_may_fall_either_way(
    factor: float, shift: int, wrong: str
) -> None:
    """The source rounds to bfloat16 and then quantizes; its own flips excuse no others."""
    b = GraphBuilder()
    x = b.arg("x", torch.bfloat16, 40, 50)
    spec = replace(
        per_tensor(2), dtype=torch.uint8, quant_min=0, quant_max=255, float_dtype=torch.bfloat16
    )
    scale = b.const("scale", torch.full((1, 1), 0.0773))
    old = b.call(ops.quantize, b.call(aten.mul.Tensor, x, 0.02), scale, None, str(spec))
    wide = b.call(aten._to_copy.default, x, dtype=torch.float32)
    exact = b.call(aten.mul.Tensor, wide, 0.02 * factor)
    plain = replace(spec, float_dtype=torch.float32)
    new = b.call(ops.quantize, exact, scale, None, str(plain))
    new = b.call(aten.add.Tensor, new, shift) if shift else new
    found = judged(b.done(old, new), old, new, [(torch.rand(40, 50) * 250 + 4).bfloat16()])
    assert wrong in (found or "")
    assert (found is None) is (not wrong)


def test_a_check_that_finds_no_memory_says_nothing_about_the_rewrite(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program, inputs = relu_neg(), [torch.ones(4, 6)]
    context = RewriteContext("optimize", checker=SiteChecker(program, inputs))
    calls = []

    def starve(*args: Any) -> Any:
        calls.append(args)
        if len(calls) % 2 == 0:
            torch.empty(1 << 60, dtype=torch.uint8)
        return region_value(*args)

    monkeypatch.setattr(site_check, "region_value", starve)
    with pytest.raises(RuntimeError, match="you tried to allocate"):
        apply_rules(program, [NegToMul()], context)

    assert not program.log.of(RolledBack)


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("factor", "wrong"), [(1 + 2**-23, ""), (1 + 2**-18, "times the source's noise")]
)
def test_what_a_function_makes_of_one_unit_is_noise(factor: float, wrong: str) -> None:
    """The sigmoid of -50 makes 50 units of one, though the source may be exact by luck."""
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 1, 1)
    old = b.call(aten.sigmoid.default, x)
    new = b.call(aten.sigmoid.default, b.call(aten.mul.Tensor, x, factor))
    found = judged(b.done(old, new), old, new, [torch.full((1, 1), -50.0)])
    assert wrong in (found or "")
    assert (found is None) is (not wrong)


@pytest.mark.numeric
def test_a_step_that_a_tie_decides_is_no_noise_of_floats() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 1, 1)
    scale = b.const("scale", torch.full((1, 1), 0.08))
    spec = str(per_tensor(2))
    q = b.call(ops.quantize, x, scale, None, spec)
    old = b.call(ops.dequantize, q, scale, None, spec)
    new = b.call(aten.add.Tensor, old, 3 * 0.08)
    values = torch.full((1, 1), 0.12)  # 1.5 steps
    found = judged(b.done(old, new), old, new, [values])
    assert "times the source's noise" in (found or "")
