"""What keeps a model from its speed on a machine, each with its cost and what to do."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from tests.report.advice.models import Weighted, activations, linear, static, weight

import qfuse
from qfuse import kernels
from qfuse.cli import main
from qfuse.cli.latency import measure_latency
from qfuse.report import Report
from qfuse.report.preflight import ModelFinding, preflight
from qfuse.targets import Environment, Level, Target, diagnose

TARGET = Target.for_testing()


def found(
    model: torch.nn.Module, target: Target = TARGET, environment: Environment | None = None
) -> dict[str, ModelFinding]:
    report: Report = qfuse.explain(model, activations(), target=target)
    findings = diagnose(target, environment or Environment())
    return {one.what: one for one in preflight(report, findings, target)}


@pytest.mark.own_kernels
def test_what_is_fine_is_left_out() -> None:
    fine = Environment(freezing=True, grad_enabled=False)

    assert set(found(Weighted(linear), environment=fine)) == {
        "kernels that are only declared",
        "plain AOTInductor",
    }


def test_ops_without_a_kernel_come_with_their_cost_and_what_to_do() -> None:
    one = found(Weighted(lambda m, x: F.linear(static(x), weight(m, axis=1))))[
        "quantized ops without a kernel"
    ]

    assert one.level is Level.WARN
    assert "1 of them" in one.detail
    assert one.predicted_seconds is not None
    assert one.predicted_seconds > 0
    assert one.cost.startswith("predicted ")
    assert "one scale per output feature" in one.fix


def test_idle_threads_cost_at_most_their_share() -> None:
    target = replace(TARGET, threads=1)
    one = found(Weighted(linear), target)["threads"]
    whole = qfuse.explain(Weighted(linear), activations(), target=target).work

    assert whole is not None
    assert one.predicted_seconds == pytest.approx(whole.predicted_seconds / 2)
    assert "set_num_threads" in one.fix


def test_what_concerns_inductor_costs_nothing_here() -> None:
    seen = found(Weighted(linear))
    pitfall = seen["plain torch.compile: freezing is off"]

    assert pitfall.predicted_seconds == 0
    assert "nothing with qfuse.compile; with Inductor up to" in pitfall.cost
    assert "nothing: " in seen["kernels that are only declared"].cost


def test_headers_concern_torch_compile_alone() -> None:
    one = found(Weighted(linear), environment=Environment(python_headers=False))["Python headers"]

    assert one.costs_nothing
    assert one.cost.startswith("nothing with qfuse.compile")


def test_what_slows_the_machine_down_is_in_the_prediction() -> None:
    target = replace(TARGET, onednn_isa_limit="AVX2")
    one = found(Weighted(linear), target)["oneDNN's instruction set"]

    assert one.predicted_seconds is None
    assert one.cost.startswith("a part of the predicted ")
    assert one.cost.endswith(" us, which is for this machine as it is")


def test_what_costs_nothing_comes_last() -> None:
    free = [
        one.costs_nothing for one in found(Weighted(linear), replace(TARGET, threads=1)).values()
    ]

    assert free == sorted(free)
    assert set(free) == {True, False}


def test_missing_kernels_are_the_worst(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = kernels.KernelLibrary(available=False, reason="no C++ compiler was found")
    monkeypatch.setattr(kernels, "load", lambda *_: missing)
    target = replace(TARGET, compiler=None)
    seen = found(Weighted(linear), target)

    assert next(iter(seen)) in {"qfuse's kernels", "C++ compiler"}
    assert seen["qfuse's kernels"].level is Level.BAD
    assert "build-kernels" in seen["qfuse's kernels"].fix
    assert seen["C++ compiler"].cost == "all of qfuse's kernels"


def doctor(*args: str) -> str:
    result = CliRunner().invoke(main, ["doctor", *args])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_command_shows_a_model() -> None:
    model = "tests.report.test_preflight:factory"
    data = json.loads(doctor(model, "--json"))

    assert data["work"]["products"] == 1
    assert {"level", "what", "cost", "predicted_seconds", "fix"} <= set(data["findings"][0])
    text = doctor(model)
    assert "1 of 1 products" in text
    assert "costs here" in text or "costs nothing here" in text


def factory() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """A model for the command line."""
    return Weighted(linear), activations()


def test_latency_is_the_median_of_interleaved_calls() -> None:
    calls: list[str] = []

    def model(name: str) -> object:
        return lambda _: calls.append(name)

    made = measure_latency(model("source"), model("fast"), (1,), {})  # type: ignore[arg-type]

    assert calls == ["source", "fast"] * 8
    assert made.calls == 7
    assert str(made).startswith("measured: source eager ")
    assert "median of 7 interleaved calls each" in str(made)
