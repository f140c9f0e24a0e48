from __future__ import annotations

import pytest
import torch
from tests.support.lint_graphs import LintBuilder, look
from torch.fx import Node

from qfuse.analysis.placement.finding import Severity
from qfuse.ir.aten import aten
from qfuse.ir.ops import library as ops
from qfuse.testing.quant import per_token


def test_it_is_one_finding_with_the_cost_of_all() -> None:
    def build(b: LintBuilder) -> Node:
        x = b.arg("x0", torch.float32, 64, 256)
        # Equal choices are combined, and cost once.
        first = [b.linear(b.dynamic(x), 256) for _ in range(3)]
        y = b.call(
            torch.ops.aten.add.Tensor, first[0], b.call(torch.ops.aten.mul.Tensor, *first[1:])
        )
        return b.linear(b.dynamic(y), 32)

    found = [f for f in look(build, torch.randn(64, 256)) if f.code == "dynamic-quantization"]
    (finding,) = found
    assert finding.severity is Severity.INFO
    assert finding.numbers == {"tensors": 2}
    # Twice 64 KiB from the cache, at 130 GB/s; one in an op of its own, which takes 1 us to call,
    # the other in the op that multiplies and adds.
    assert finding.predicted_us == pytest.approx(2 * 65536 / 130e3 + 1, rel=1e-3)


def test_static_parameters_are_not_reported() -> None:
    def build(b: LintBuilder) -> Node:
        return b.linear(b.quantized(b.arg("x0", torch.float32, 64, 256), 0.05, 128), 32)

    assert "dynamic-quantization" not in {f.code for f in look(build, torch.randn(64, 256))}


def test_a_scale_that_the_model_computes_itself_is_counted() -> None:
    def build(b: LintBuilder) -> Node:
        x = b.arg("x0", torch.float32, 64, 256)
        spec = per_token(2)
        scale = b.call(aten.amax.default, b.call(aten.exp.default, x), [-1], True)
        q = b.call(ops.quantize, x, scale, None, str(spec))
        return b.linear(b.call(ops.dequantize, q, scale, None, str(spec)), 32)

    found = [f for f in look(build, torch.randn(64, 256)) if f.code == "dynamic-quantization"]
    assert [f.numbers for f in found] == [{"tensors": 1}]
