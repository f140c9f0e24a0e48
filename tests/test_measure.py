"""``measure=True``, ``prefer`` and ``float_memory``, from the call to the plan and the saved file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import qfuse
from qfuse import session
from qfuse.cost import CostProfile
from qfuse.cost.times import Times
from qfuse.ir.errors import OptionsError, PlanError
from qfuse.targets import Target
from tests.plans.test_plans import Siblings, close, compiled, data_of

pytestmark = pytest.mark.own_kernels

W8A8 = "qfuse.linear_w8a8"
SLOW_INT8 = replace(CostProfile.pinned(), int8_ops=60e9, int8_ops_one_row=6e9)


@pytest.fixture
def slow_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is faster in float."""
    monkeypatch.setattr(session, "load_or_measure", lambda _, **__: SLOW_INT8)


def wide(plan: Any = None, **options: Any) -> qfuse.CompiledModel:
    """Four linears whose float weights are too large to be folded anyway."""
    x = torch.randn(32, 256, generator=torch.Generator().manual_seed(2))
    given = {"backend": "eager", **options}
    target = Target.for_testing()
    return qfuse.compile(Siblings(256).eval(), (x,), plan=plan, options=given, target=target)


def kernels_of(fast: qfuse.CompiledModel) -> set[str]:
    return set(fast.report.claims.values())


@pytest.mark.usefixtures("slow_int8")
def test_options_decide() -> None:
    fast = wide()
    assert kernels_of(fast) == {"float"}
    assert len(fast.report.in_float) == 2  # the three siblings are merged
    assert fast.report.expanded == ()
    assert fast.report.facts.float_bytes == sum(e.added_bytes for e in fast.report.in_float)
    assert "2 in float" in repr(fast)
    assert fast.report.facts.rows()["float weights"] == "+0.8 MB"

    assert kernels_of(wide(prefer="memory")) == kernels_of(wide(float_memory=0)) == {W8A8}
    x = torch.randn(32, 256)
    assert (fast(x) - wide(prefer="memory")(x)).abs().max() < 0.05 * fast(x).abs().max()


@pytest.mark.usefixtures("slow_int8")
def test_strict_allows_what_is_faster_in_float() -> None:
    x = torch.randn(32, 256)
    options = {"backend": "eager"}
    report = qfuse.explain(
        Siblings(256).eval(), (x,), options=options, strict=True, target=Target.for_testing()
    )
    assert len(report.in_float) == 2


@pytest.mark.usefixtures("slow_int8")
def test_a_plan_with_floats_is_replayed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fast = wide()
    fast.plan.save(tmp_path / "plan.json")
    # The plan has its own speeds.
    monkeypatch.setattr(session, "load_or_measure", lambda _, **__: CostProfile.pinned())
    assert kernels_of(wide()) == {W8A8}
    again = wide(tmp_path / "plan.json")
    assert kernels_of(again) == {"float"}
    assert again.plan.to_json() == fast.plan.to_json()

    data = json.loads(fast.plan.to_json())
    data["kernels"][0]["kernel"] = W8A8
    edited = wide(data)
    assert sorted(edited.report.claims.values()) == ["float", W8A8]
    with pytest.raises(OptionsError, match="prefer is 'memory'"):
        wide(data, prefer="memory")


def test_a_plan_of_before_keeps_its_kernels() -> None:
    data = data_of(compiled())
    del data["options"]["prefer"], data["options"]["float_memory"]
    again = data_of(compiled(data))
    assert again["options"]["prefer"] == "memory"
    assert again["kernels"] == data["kernels"]


def timer(*seconds: float) -> Callable[..., Any]:
    """What session makes: a timer that gives the same times for every product."""

    def times(runs: Sequence[Callable[[], object]]) -> list[float]:
        for run in runs:
            run()
        # The first is the kernel that was predicted to be best in the order of the registry.
        return [seconds[0]] * (len(runs) - 1) + [seconds[-1]]

    return lambda: times


def test_measured_times_choose_and_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = Times()
    saved: list[Times] = []
    monkeypatch.setattr(session, "load_times", lambda *_: stored)
    monkeypatch.setattr(session, "save_times", lambda times, *_: saved.append(times))
    monkeypatch.setattr(session, "product_timer", timer(9e-4, 1e-4))
    here = Target.detect(extensions=False)

    plain = compiled(target=here)
    fast = compiled(target=here, measure=True)

    assert "float" not in kernels_of(plain)
    assert kernels_of(fast) == {"float"}
    assert all(event.measured for event in fast.report.in_float)
    assert saved == [stored]
    assert len(stored.known) == 2
    close(fast, plain)
    # Later compilations know the times, and so does the plan.
    assert kernels_of(compiled(target=here)) == {"float"}
    data = data_of(fast)
    assert data["times"] == stored.known
    stored.known.clear()
    assert kernels_of(compiled(data, target=here)) == {"float"}
    data["times"] = {"linear": {"float": -1}}
    with pytest.raises(PlanError, match="are not positive numbers"):
        compiled(data, target=here)


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(OptionsError, match="target is another one"):
        compiled(measure=True)
    with pytest.raises(OptionsError, match="measure must be a bool"):
        compiled(measure=3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prefer", "size"),
        ("float_memory", -1),
        ("float_memory", 1.5),
        ("float_memory", True),
        ("measure_seconds", 0),
        ("measure_seconds", "long"),
    ],
)
def test_wrong_options_say_so(name: str, value: object) -> None:
    with pytest.raises(OptionsError, match=name):
        qfuse.Options(**{name: value})  # type: ignore[arg-type]


@pytest.mark.usefixtures("slow_int8")
def test_a_saved_model_has_its_float_weights(tmp_path: Path) -> None:
    fast = wide()
    fast.save(tmp_path / "model.qfuse")
    again = qfuse.load(tmp_path / "model.qfuse")
    x = torch.randn(32, 256)
    assert torch.equal(again(x), fast(x))
    assert [event.kernel for event in again.report.in_float] == ["float", "float"]
