"""The lint as users call it: on modules and exported programs, with their own source lines."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed
from torch import nn

import qfuse
from qfuse import api
from qfuse.analysis import Severity
from qfuse.analysis.placement.lint import CHECKS, lint_captured, note_warnings
from qfuse.ir.errors import CaptureError
from qfuse.targets import Target
from qfuse.zoo import recipes

Q = torch.ops.quantized_decomposed

pytestmark = pytest.mark.export

OPTIONS = {"own_kernels": False}


class Twice(nn.Module):
    """Quantizes its input twice, and the weight along its input features."""

    def __init__(self, second: float = 0.05, axis: int = 1) -> None:
        super().__init__()
        self.second, self.axis = second, axis
        weight = torch.randint(-127, 128, (32, 64)).to(torch.int8)
        self.register_buffer("weight", weight)
        count = weight.shape[axis]
        self.register_buffer("scales", torch.rand(count) * 1e-3 + 1e-2)
        self.register_buffer("zeros", torch.zeros(count, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in (0.04, self.second):
            q = Q.quantize_per_tensor.default(x, scale, 128, 0, 255, torch.uint8)
            x = Q.dequantize_per_tensor.default(q, scale, 128, 0, 255, torch.uint8)
        w = Q.dequantize_per_channel.default(
            self.weight, self.scales, self.zeros, self.axis, -127, 127, torch.int8
        )
        return nn.functional.linear(x, w)


def test_findings_name_the_line_of_the_user() -> None:
    x = torch.randn(16, 64)
    findings = qfuse.lint(Twice(), (x,), target=Target.for_testing(), options=OPTIONS)

    assert {f.code for f in findings} >= {"double-rounding", "weight-axis"}
    for finding in findings:
        assert f"{Path(__file__)}:" in finding.place.source
    by_code = {f.code: f for f in findings}
    assert "nn.functional.linear(x, w)" in by_code["weight-axis"].place.source
    assert "quantize_per_tensor" in by_code["double-rounding"].place.source


def test_what_the_findings_say_makes_them_disappear() -> None:
    x = torch.randn(16, 64)
    findings = qfuse.lint(Twice(0.04, 0), (x,), target=Target.for_testing(), options=OPTIONS)
    assert [f.code for f in findings if f.severity is Severity.WARNING] == []


def test_warnings_come_first_and_then_what_costs_most() -> None:
    findings = qfuse.lint(
        Twice(), (torch.randn(16, 64),), target=Target.for_testing(), options=OPTIONS
    )
    keys = [
        (f.severity is Severity.INFO, -(f.predicted_us or 0), -(f.lost_db or 0)) for f in findings
    ]
    assert keys == sorted(keys)


def test_an_exported_program_brings_its_own_inputs() -> None:
    program = torch.export.export(Twice().eval(), (torch.randn(16, 64),))
    findings = qfuse.lint(program, target=Target.for_testing(), options=OPTIONS)
    assert {f.code for f in findings} >= {"double-rounding", "weight-axis"}


def test_sizes_may_be_dynamic() -> None:
    batch = torch.export.Dim("batch", min=1, max=64)
    findings = qfuse.lint(
        Twice(),
        (torch.randn(16, 64),),
        dynamic_shapes={"x": {0: batch}},
        target=Target.for_testing(),
        options=OPTIONS,
    )
    assert {f.code for f in findings} >= {"double-rounding", "weight-axis"}


def test_a_float_model_has_no_findings() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    assert qfuse.lint(model, (torch.randn(4, 16),), target=Target.for_testing()) == []


def test_findings_are_data() -> None:
    findings = qfuse.lint(
        Twice(), (torch.randn(16, 64),), target=Target.for_testing(), options=OPTIONS
    )
    data = json.loads(json.dumps([f.to_dict() for f in findings]))
    assert set(data[0]) == {
        *("code", "severity", "place", "seen", "fix"),
        *("predicted_us", "lost_db", "numbers"),
    }
    assert str(findings[0]).startswith("warning ")


def test_the_model_is_not_changed() -> None:
    model = Twice().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    qfuse.lint(model, (torch.randn(16, 64),), target=Target.for_testing(), options=OPTIONS)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_codes_are_unique() -> None:
    codes = [check.code for check in CHECKS]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize(
    "recipe", ["w8a8-static", "w8a8-static-ao", "w8a16", "w4a8", "w8a8-dynamic"]
)
def test_a_healthy_model_gives_no_warning(recipe: str) -> None:
    """Two layers of a size at which int8 pays, calibrated on the example."""
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).eval()
    args = (torch.randn(256, 512),)
    quantized = recipes.quantize(model, recipe, args)
    findings = qfuse.lint(quantized.model, args, target=Target.for_testing())
    assert [str(f) for f in findings if f.severity is Severity.WARNING] == []


def test_one_capture_serves_the_report_and_the_findings() -> None:
    model = Twice().eval()
    given: dict[str, Any] = {"target": Target.for_testing(), "options": OPTIONS}
    x = torch.randn(16, 64)
    alone, report = qfuse.lint(model, (x,), **given), qfuse.explain(model, (x,), **given)
    with api.captured_model(model, (x,), **given) as captured:
        before = captured.plan()[1]
        found = lint_captured(captured)
        note_warnings(captured)
        after = captured.plan()[1]

    assert found == alone
    assert before.events == report.events
    warnings = tuple(f.note() for f in alone if f.severity is Severity.WARNING)
    assert warnings
    assert after.events == (*report.events, *warnings)


class OutOfRange(nn.Module):
    """Looks up a row that its table does not have."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", torch.randn(4, 8))

    def forward(self, x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x) + self.table[row]
        return y


@pytest.mark.parametrize(
    "work",
    [
        qfuse.lint,
        partial(qfuse.bisect, atol=1.0),
        lambda model, args: qfuse.measure_accuracy(model, model, args),
        lambda model, args: recipes.quantize(model, "w8a8-static", args),
    ],
    ids=["lint", "bisect", "accuracy", "quantize"],
)
def test_an_example_that_does_not_run_is_an_error_of_the_model(work: Any) -> None:
    with pytest.raises(CaptureError, match="index 9 is out of bounds") as raised:
        work(OutOfRange().eval(), (torch.randn(3, 8), torch.tensor([1, 2, 9])))
    assert "While executing" not in str(raised.value)
