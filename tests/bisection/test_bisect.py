"""From a difference that a user sees to the rule, the site, the line, and what turns it off."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from tests.bisection.models import Twice
from tests.cases.package import write_package
from tests.plans.test_plans import Siblings, example
from tests.test_pipeline import Off
from torch import nn

import qfuse
from qfuse import pipeline
from qfuse.bisection import Origin
from qfuse.bisection.difference import ResultTolerance, largest, make_differs
from qfuse.cli import main
from qfuse.ir.errors import OptionsError
from qfuse.lower.kernels.registry import all_kernels
from qfuse.targets import Target

OPTIONS = {"backend": "eager", "own_kernels": False}


@pytest.fixture
def wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A wrong rule that the checks let pass: it is off by a millionth."""
    folder = write_package(tmp_path / "site", factor=1 + 1e-6)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    sys.modules.pop("doubtful_rules", None)


def x() -> torch.Tensor:
    return torch.randn(64, 8, generator=torch.Generator().manual_seed(5))


def bisect(**given: Any) -> qfuse.bisection.Bisection:
    steps: list[str] = []
    options = {**OPTIONS, **given.pop("options", {})}
    result = qfuse.bisect(
        Twice().eval(), (x(),), options=options, check="off", progress=steps.append,
        target=Target.for_testing(isa="portable"), **given,
    )  # fmt: skip
    assert steps
    return result


def compiled(**given: Any) -> qfuse.CompiledModel:
    given.setdefault("options", OPTIONS)
    target = Target.for_testing(isa="portable")
    return qfuse.compile(Twice().eval(), (x(),), check="off", target=target, **given)


def test_the_rule_and_the_line_are_named_and_what_turns_it_off_works(wrong: Path) -> None:
    del wrong
    result = bisect(atol=2e-7, rtol=0.0)
    assert result.origin is Origin.REWRITE
    # The first site is banned, then the other; the rule fires at both.
    assert {one.rule for one in result.culprits} == {"scale-tanh"}
    assert result.culprits[0].where.endswith("y = torch.tanh(self.first(x))")
    assert result.culprits[0].op == "aten.tanh"
    assert result.options == {"without": ["scale-tanh"]}
    assert result.verified
    assert result.error is not None
    assert result.error > 2e-7 >= (result.error_without or 0.0)
    text = str(result)
    assert "optimize/scale-tanh@tanh" in text
    assert "verified by a run" in text

    expected = Twice().eval()(x())
    assert not torch.allclose(compiled()(x()), expected, rtol=0, atol=2e-7)
    for fast in (
        compiled(options={**OPTIONS, **result.options}),
        compiled(plan=result.plan.to_dict() if result.plan else None),
    ):
        assert torch.allclose(fast(x()), expected, rtol=0, atol=2e-7)


def test_runs_grow_with_the_logarithm_of_the_rewrites(wrong: Path) -> None:
    del wrong
    model = nn.Sequential(*(layer for _ in range(24) for layer in (nn.Linear(8, 8), nn.Tanh())))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    target = Target.for_testing(isa="portable")
    result = qfuse.bisect(
        model.eval(), (x(),), rtol=0.0, atol=3e-7, options=OPTIONS, check="off", target=target
    )
    assert {one.rule for one in result.culprits} == {"scale-tanh"}
    sites = len([site for site in result.plan.sites if site.on]) + 24 if result.plan else 0
    # A search costs three runs besides the steps, and the second one disables the whole rule.
    assert result.runs <= 2 * (math.ceil(math.log2(sites)) + 3) + 6


def test_a_predicate_sees_results_in_the_structure_of_the_model(wrong: Path) -> None:
    del wrong
    seen: list[tuple[torch.Size, torch.Size]] = []

    def differs(got: torch.Tensor, expected: torch.Tensor) -> bool:
        seen.append((got.shape, expected.shape))
        # One site of two: the other stays.
        return bool((got - expected)[:, 0].abs().max() > 2e-7)

    result = bisect(differs=differs)
    assert result.found
    assert set(seen) == {(x().shape, x().shape)}


def test_equal_results_are_told() -> None:
    result = bisect(atol=1e-6)
    assert (result.origin, result.culprits, result.found) == (Origin.NONE, (), False)
    assert "the results do not differ" in str(result)


def test_a_model_that_writes_is_left_as_it_was(wrong: Path) -> None:
    del wrong

    class Counts(Twice):
        calls: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            return super().forward(x.mul_(1.0)) * self.calls

    model, given = Counts().eval(), x()
    result = qfuse.bisect(
        model, (given,), atol=2e-7, options=OPTIONS, check="off",
        target=Target.for_testing(isa="portable"),
    )  # fmt: skip
    assert result.origin is Origin.REWRITE
    assert float(model.calls) == 0
    assert torch.equal(given, x())


@pytest.mark.own_kernels
def test_the_kernel_of_one_op_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def more(library: Any) -> tuple[Any, ...]:
        return (*all_kernels(library), Off(n=64, name="wrong"))

    # Without cost it always wins.
    monkeypatch.setattr(pipeline, "all_kernels", more)
    model = Siblings().eval()
    result = qfuse.bisect(
        model, (example(),), atol=1e-2, options={"backend": "eager"}, check="off",
        target=Target.for_testing(),
    )  # fmt: skip
    assert result.origin is Origin.KERNEL
    assert {one.kernel for one in result.culprits} == {"wrong"}
    assert result.culprits[0].rule == "lower-linear"
    # There is no option for one kernel of a package, but a plan.
    assert result.options is None
    assert result.plan is not None
    fast = qfuse.compile(
        model, (example(),), options={"backend": "eager"}, check="off",
        target=Target.for_testing(), plan=result.plan.to_dict(),
    )  # fmt: skip
    assert torch.allclose(fast(example()), model(example()), rtol=0, atol=1e-2)


def test_what_no_rewrite_changes_is_not_blamed_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    real = pipeline.Pipeline.rewrite

    def off(self: pipeline.Pipeline, *given: Any) -> Any:
        lowered = real(self, *given)
        weight = lowered.module.get_buffer("first.weight")
        lowered.module.get_submodule("first").weight = weight * 2
        return lowered

    monkeypatch.setattr(pipeline.Pipeline, "rewrite", off)
    result = bisect(atol=1e-3)
    assert (result.origin, result.culprits) == (Origin.EXPANSION, ())
    assert "please report" in result.note


def test_the_code_of_a_backend_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    real = pipeline.Plan.compile

    def off(self: pipeline.Plan, *_: Any) -> Any:
        lowered = self.lowered
        module = torch.fx.GraphModule(lowered.module, lowered.graph)
        changed = replace(self, lowered=replace(lowered, module=module))
        runner = real(changed, "eager")
        module.get_submodule("first").weight = lowered.module.get_buffer("first.weight") * 2
        return runner

    monkeypatch.setattr(pipeline.Plan, "compile", off)
    result = bisect(atol=1e-3)
    assert result.origin is Origin.BACKEND
    assert result.options == {"backend": "eager"}
    assert result.error_without is not None
    assert result.error_without <= 1e-3


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({}, "give a tolerance or a predicate"),
        ({"atol": 1e-3, "differs": max}, "give a tolerance or a predicate"),
        ({"atol": -1.0}, "atol must not be negative"),
        ({"rtol": math.nan}, "rtol must not be negative"),
        ({"differs": 3}, "must be a function"),
    ],
)
def test_what_a_difference_is_must_be_said(given: dict[str, Any], word: str) -> None:
    with pytest.raises(OptionsError, match=word):
        qfuse.bisect(Twice().eval(), (x(),), **given)


def test_a_predicate_that_is_true_for_equal_results_is_told() -> None:
    with pytest.raises(OptionsError, match="true for equal results"):
        bisect(differs=lambda *_: True)


def test_a_predicate_that_fails_is_named() -> None:
    with pytest.raises(OptionsError, match="the predicate failed: KeyError"):
        qfuse.bisect(
            Twice().eval(), (x(),), differs=lambda *_: dict[str, bool]()["logits"], options=OPTIONS
        )


@pytest.mark.parametrize(
    ("got", "expected", "differ", "error"),
    [
        (torch.ones(2), torch.ones(2), False, 0.0),
        (torch.ones(2), torch.ones(3), True, None),
        (torch.tensor([math.nan]), torch.tensor([math.nan]), False, 0.0),
        (torch.tensor([math.nan]), torch.tensor([1.0]), True, math.inf),
        (torch.tensor([math.inf]), torch.tensor([math.inf]), False, 0.0),
        (torch.ones(2), torch.ones(2).double(), True, 0.0),
        (torch.tensor([3]), torch.tensor([4]), True, 1.0),
        (torch.ones(0), torch.ones(0), False, 0.0),
        ({"a": torch.ones(1), "b": 2}, {"a": torch.ones(1), "b": 3}, True, 0.0),
        ((torch.ones(1),), (torch.ones(1), torch.ones(1)), True, None),
    ],
)
def test_tolerance_and_error(got: Any, expected: Any, differ: bool, error: float | None) -> None:
    assert ResultTolerance(0.0, 1e-6)(got, expected) is differ
    assert make_differs(None, None, 1e-6)(got, expected) is differ
    assert largest(got, expected) == error


def test_the_command_names_the_rule_and_exits_with_1(
    wrong: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_predicate.py").write_text(
        "def differs(got, expected):\n    return bool((got - expected).abs().max() > 2e-7)\n"
    )
    monkeypatch.chdir(tmp_path)
    del wrong
    command = ["bisect", "tests.bisection.models:twice", "--backend=eager", "--no-own-kernels"]
    plan = tmp_path / "plan.json"
    result = CliRunner().invoke(
        main, [*command, "--predicate=my_predicate:differs", f"--save-plan={plan}"]
    )
    assert result.exit_code == 1, result.output
    assert "optimize/scale-tanh@tanh" in result.stdout
    assert "options={'without': ['scale-tanh']}" in result.stdout
    assert plan.is_file()
    none = tmp_path / "none.json"
    same = CliRunner().invoke(main, [*command, "--atol=1e-3", f"--save-plan={none}"])
    assert (same.exit_code, same.stdout.partition("\n")[0]) == (0, "the results do not differ")
    assert "none.json is not written" in same.stderr
    assert not none.exists()
    for text, word in (
        ("my_predicate", "is incomplete"),
        ("my_predicate:none", "my_predicate has no 'none'"),
    ):
        bad = CliRunner().invoke(main, [*command, f"--predicate={text}"])
        assert bad.exit_code == 2
        assert word in bad.output


@pytest.mark.parametrize("given", [[], ["--atol=1", "--predicate=my:function"]])
def test_the_command_says_which_of_its_options_to_give(given: list[str]) -> None:
    result = CliRunner().invoke(main, ["bisect", "tests.bisection.models:twice", *given])
    assert result.exit_code == 2
    assert "--atol 1e-3" in result.stderr
    assert "--predicate module:function" in result.stderr
    assert "lambda" not in result.stderr


class Draws(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) + torch.rand(4)


def test_all_runs_draw_the_same_numbers() -> None:
    given, before = torch.randn(4), torch.get_rng_state()
    result = qfuse.bisect(Draws().eval(), (given,), atol=1e-6, options=OPTIONS)
    assert not result.found, str(result)
    assert torch.equal(torch.get_rng_state(), before)
