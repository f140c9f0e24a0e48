"""With ``strict``, a quantized op that runs in float is an error with its line and what to do."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.report.advice.cases import CASES, SIXTEEN_BITS
from tests.report.advice.models import Weighted, activations, linear, static, weight
from tests.report.advice.reports import reports

import qfuse
from qfuse.ir.errors import StrictError
from qfuse.ir.events import Estimated, Left, MissCode, Missed, Place
from qfuse.report import Report
from qfuse.report.strict import require_quantized
from qfuse.targets import Target

pytestmark = pytest.mark.export
# Problems with which every quantized op still runs on integers, or of which none is quantized.
_FINE = {
    *("quantize-weight", "quantize-parameter", "round-to-nearest", "clamp-before-cast"),
    *("recurrent-as-linears", "scale-before-product"),
    *("clamp-to-the-range", "least-scale", "scale-of-the-range", "integer-operands"),
    *("one-quantize", "same-scale-on-both-sides", "leaky-relu", "squared-relu"),
    *("multiply-by-the-reciprocal", "activation-scale-per-row", "activation-of-8-bits"),
    *("quantize-convolution", "cast-to-8-bits", "integer-zero-point", "zero-point-in-range"),
    # The weight alone is read quantized.
    *("zero-point-as-integer", "zero-point-before-scale", "activation-in-8-bits"),
    *("one-dtype-of-the-product", "scale-as-tensor", "activation-scale-per-tensor"),
    *("relu-before-scale", "mask-by-fill", "quantize-behind-op"),
    # Ops that are no products, between quantized ones.
    *("one-scale-for-parts", "float-op-between"),
}


def explain(model: torch.nn.Module, *inputs: torch.Tensor, **options: object) -> Report:
    made: Report = qfuse.explain(
        model, inputs, target=Target.for_testing(), options=options, strict=True
    )
    return made


@pytest.mark.own_kernels
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.advice)
def test_strict_refuses_what_runs_in_float(case: object) -> None:
    assert isinstance(case, type(CASES[0]))
    before, after = reports(case)
    require_quantized(after)
    if case.advice in _FINE and case is not SIXTEEN_BITS:
        require_quantized(before)
        return
    with pytest.raises(StrictError) as error:
        require_quantized(before)
    assert "not run on a quantized kernel" in error.value.what
    assert str(error.value.where)
    assert error.value.fix


@pytest.mark.own_kernels
def test_the_error_names_the_line_and_the_fix() -> None:
    def forward(m: Weighted, x: torch.Tensor) -> torch.Tensor:
        return F.linear(static(x), weight(m, axis=1))

    with pytest.raises(StrictError) as error:
        explain(Weighted(forward), *activations())
    assert "1 quantized op does not run" in error.value.what
    assert "qfuse.linear_w4a8: the weight's scales run along the input features" in error.value.what
    assert "test_strict.py" in str(error.value.where)
    assert "one scale per output feature" in str(error.value.fix)
    assert isinstance(error.value.report, Report)
    assert error.value.report.actions


def test_compile_refuses_before_it_compiles() -> None:
    steps: list[str] = []
    with pytest.raises(StrictError):
        qfuse.compile(
            Weighted(lambda m, x: F.linear(static(x), weight(m, axis=1))),
            activations(),
            target=Target.for_testing(),
            options={"backend": "eager"},
            progress=steps.append,
            strict=True,
        )
    assert "compiling" not in " ".join(steps)


def test_what_does_not_pay_is_no_error() -> None:
    at, q = Place("linear", "aten.linear"), Place("dq", "qfuse.dequantize")
    left = Left("lower", q, "its float values are used by aten.linear")
    miss = Missed("optimize", "fuse-linear", MissCode.PROFIT, "it would cost 1 us", at, at, 1000)
    size = Estimated("lower", at, 10, 1e-6, 2e-6, ("dq",))

    require_quantized(Report((miss, size, left)))
    with pytest.raises(StrictError):
        require_quantized(Report((size, left)))


def test_what_a_quantized_op_or_the_caller_needs_is_no_error() -> None:
    report = explain(Weighted(lambda m, x: (linear(m, x), static(x))), *activations())

    assert report.kernels.total() == 1
