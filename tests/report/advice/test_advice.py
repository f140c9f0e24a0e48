"""Every suggestion helps: it is shown for its problem, and following it fuses what was not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.passes.test_equality import static
from tests.report.advice.cases import CASES, Case
from tests.report.advice.models import Forward, Weighted, activations, linear, weight
from tests.report.advice.models import static as quantized
from tests.report.advice.reports import reports
from torch import nn

import qfuse
from qfuse import kernels
from qfuse.ir.events import MissCode
from qfuse.kernels.build import build
from qfuse.kernels.compilation.compiler import KernelBuildError
from qfuse.passes import MergeLinears
from qfuse.report import Report
from qfuse.report.actions import Action
from qfuse.report.advice import ADVICE, NEEDS_NONE, Cause, advice_for
from qfuse.targets import Target

PAGE = Path(__file__).parents[3] / "docs" / "report.md"
pytestmark = pytest.mark.export
# The settings of the machine and of the standalone passes.
OTHERS = {"build-kernels", "cache-folder", "assumed-equality"}
# What helps depends on the surrounding ops; the suggestions that they have say what.
GENERAL = {MissCode.SHARED, MissCode.PATTERN}


def explained(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Report:
    made: Report = qfuse.explain(model, inputs, target=Target.for_testing())
    return made


def advised(report: Report, name: str) -> list[Action]:
    return [a for a in report.actions if a.advice is not None and a.advice.name == name]


def _reads_floats(report: Report) -> bool:
    """Whether a kernel multiplies floats by a quantized weight."""
    return any(e.weight_only for e in report.fused)


def stray(report: Report) -> int:
    """How many quantizes and dequantizes are left that no quantized op needs."""
    return sum(not left.needed for left in report.left)


@pytest.mark.own_kernels
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.advice)
def test_a_suggestion_helps_when_it_is_followed(case: Case) -> None:
    before, after = reports(case)

    (action, *_) = advised(before, case.advice)
    assert advised(after, case.advice) == []
    assert stray(after) == 0
    assert [e for e in after.expanded if e.failed] == []
    fires = after.fired[action.tried] > before.fired[action.tried]
    fewer = len(after.left) < len(before.left)
    opened = _reads_floats(before) and not _reads_floats(after)
    assert fires or fewer or opened or len(after.fused) > len(before.fused)
    assert action.advice is not None
    assert action.code is case.code
    assert case.code in action.advice.codes
    shown = before.text(verbose=True)
    assert f"do: {action.advice.do}" in shown
    assert action.advice.link in shown


@pytest.mark.own_kernels
def test_a_folder_for_the_cache_that_can_be_written_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    with monkeypatch.context() as patch:
        patch.setenv("QFUSE_CACHE_DIR", str(file / "below"))
        missing = kernels.KernelLibrary(available=False, reason=_unusable())
        patch.setattr(kernels, "load", lambda *_: missing)
        before = explained(Weighted(linear), activations())
    after = explained(Weighted(linear), activations())

    (action,) = advised(before, "cache-folder")
    assert "\n" not in action.reason
    assert "do: point QFUSE_CACHE_DIR at a folder that can be written to" in before.text()
    assert advised(after, "cache-folder") == []
    assert "qfuse.linear_w8a8" in after.kernels


def _unusable() -> str:
    """Why kernels cannot be built in the folder of the cache."""
    with pytest.raises(KernelBuildError) as error:
        build(None)
    return str(error.value)


@pytest.mark.own_kernels
def test_kernels_that_are_not_there_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of PyTorch's kernels none takes an activation of uint8.
    missing = kernels.KernelLibrary(available=False, reason="no C++ compiler was found")
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "load", lambda *_: missing)
        before = explained(Weighted(linear), activations())
    after = explained(Weighted(linear), activations())

    assert advised(before, "build-kernels")
    assert before.actions[0].reason.endswith("no C++ compiler was found")
    assert advised(after, "build-kernels") == []
    assert "qfuse.linear_w8a8" in after.kernels
    assert "qfuse.linear_w8a8" not in before.kernels


@pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning")
def test_equality_is_assumed_without_values() -> None:
    before = MergeLinears()(static("meta"))
    after = MergeLinears(equality="assumed")(static("meta"))

    assert advised(before.report, "assumed-equality")
    assert before.fired["merge-linears"] == 0
    assert advised(after.report, "assumed-equality") == []
    assert after.fired["merge-linears"] == 1


def test_every_suggestion_has_an_example() -> None:
    names = [advice.name for advice in ADVICE]

    assert len(set(names)) == len(names)
    assert {case.advice for case in CASES} | OTHERS == set(names)


def test_every_miss_code_has_a_suggestion_or_a_reason_for_none() -> None:
    answered = {code for advice in ADVICE for code in advice.codes if code is not None}

    assert answered | set(NEEDS_NONE) == set(MissCode)
    assert all(NEEDS_NONE.values())


def test_every_miss_code_has_an_entry_in_the_documentation() -> None:
    section = PAGE.read_text("utf-8").split("## Miss codes")[1]
    rows = re.findall(r"^\| `([a-z-]+)` \| ([^|]+) \| ([^|]+) \|$", section, re.MULTILINE)

    assert sorted(code for code, _, _ in rows) == sorted(MissCode)
    # What usually helps is there for each code that has a suggestion.
    without = {code for code, _, helps in rows if helps.strip() == "-"}
    assert without <= set(NEEDS_NONE) | GENERAL


def test_every_miss_code_has_an_example() -> None:
    seen = {case.code for case in CASES} | set(WITHOUT) | {MissCode.NO_VALUES}

    assert seen - {None} == set(MissCode)


def test_every_suggestion_has_an_entry_in_the_documentation() -> None:
    page = PAGE.read_text("utf-8")
    entries = dict(
        re.findall(r"^\| <a id=\"([a-z0-9-]+)\"></a>[^|]* \| ([^|]*) \|", page, re.MULTILINE)
    )

    assert set(entries) == {advice.name for advice in ADVICE}
    assert all(advice.link == f"docs/report.md#{advice.name}" for advice in ADVICE)


@pytest.mark.parametrize("advice", ADVICE, ids=lambda advice: advice.name)
def test_a_suggestion_fits_its_line(advice: object) -> None:
    assert len(getattr(advice, "do", "")) in range(1, 75)


WITHOUT: dict[MissCode, Forward] = {
    MissCode.SHAPE: lambda m, x: linear(m, x) + x.expand(4, *x.shape),
    MissCode.PROFIT: lambda m, x: F.linear(
        quantized(torch.cat([quantized(x[:, :128], 0.05), quantized(x[:, 128:], 0.06)], 1), 0.07),
        weight(m),
    ),
    # A norm over the rows.
    MissCode.AXIS: lambda m, x: F.linear(
        quantized(x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6) * m.s), weight(m)
    ),
}
"""Models whose misses nothing helps against: the model needs what the rule refuses."""


@pytest.mark.parametrize("code", WITHOUT, ids=str)
def test_codes_without_a_suggestion_have_an_example(code: MissCode) -> None:
    report = explained(Weighted(WITHOUT[code]), activations())
    seen = [miss for miss in report.closest_misses if miss.code is code]

    assert seen
    assert all(advice_for(Cause(code, miss.rule, miss.reason)) is None for miss in seen)


def test_codes_that_need_no_suggestion_are_these() -> None:
    assert set(WITHOUT) == set(NEEDS_NONE)
