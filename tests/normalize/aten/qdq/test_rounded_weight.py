from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import finish, golden
from tests.support.sources.library import NOISE, Model, close, compiled, kernel_of

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.normalize.aten.qdq.rounded_weight import StoreRoundedWeight
from qfuse.rewrite.driver import apply_rules
from qfuse.rewrite.rule import Miss
from qfuse.testing.build import GraphBuilder
from qfuse.testing.terms import Term, aten

N, K = 64, 128


def source(weight: torch.Tensor, low: int = -128, high: int = 127) -> tuple[CapturedGraph, str]:
    """Return a graph that rounds a weight, and the name of the node that clamps it."""
    b = GraphBuilder()
    scale = b.const("s", torch.rand(len(weight), 1) + 0.5)
    rounded = (Term(b, b.const("w", weight)) / scale).call(aten.round.default)
    clamped = rounded.call(aten.clamp.default, low, high)
    x = b.arg("x", torch.float32, "n", weight.shape[1])
    y = b.call(aten.linear.default, x, (clamped * scale).node)
    return finish(b, y), clamped.node.name


def test_golden() -> None:
    program, _ = source(torch.randn(4, 8))
    assert_expected_inline(
        golden(program, StoreRoundedWeight()),
        """\
const %s: float32[4, 1]
const %w: float32[4, 8]
const %s: float32[4, 1]
%0 = qfuse.quantize(%w, %s, None, 'int8[-128,127] 1x* float32 float32:divide:round-zp int'): int8[4, 8]
%1 = aten._to_copy(%0, dtype=float32): float32[4, 8]
%x: float32[s0, 8]
%2 = aten.mul.Tensor(%1, %s): float32[4, 8]
%3 = aten.linear(%x, %2): float32[s0, 4]
return (%3)
fired: store-rounded-weight 1""",
    )


Form = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
FORMS: dict[str, Form] = {
    "divided": lambda w, s: (w / s).round().clamp(-128, 127) * s,
    "multiplied": lambda w, s: (w * (1 / s)).round().clamp(-128, 127) * s,
    "rounded last": lambda w, s: (w / s).clamp(-128, 127).round() * s,
    "4 bits": lambda w, s: (w / (s * 20)).round().clamp(-8, 7) * (s * 20),
    "minimum": lambda w, s: (
        torch.minimum(torch.maximum((w / s).round(), torch.tensor(-128.0)), torch.tensor(127.0)) * s
    ),
    "zero point": lambda w, s: (((w / s).round() + 120).clamp(0, 255) - 120) * s,
}


@pytest.mark.numeric
@pytest.mark.own_kernels
@pytest.mark.parametrize("form", list(FORMS))
def test_the_weight_of_a_linear_is_stored_in_8_bits(form: str) -> None:
    weight = torch.randn(N, K)
    model = Model(
        lambda s, x: torch.nn.functional.linear(x, FORMS[form](s.w, s.s)),
        w=weight,
        s=weight.abs().amax(1, keepdim=True) / 120,
    )
    x = torch.randn(3, K)
    done = compiled(model, x)
    assert done.report.fired[StoreRoundedWeight.name] == 1
    kernel = "qfuse.linear_w4a16" if form == "4 bits" else "qfuse.linear_w8a16"
    assert kernel_of(done.report) == kernel
    assert sum(b.untyped_storage().nbytes() for b in done.plan.lowered.module.buffers()) < 2 * N * K
    close(done(x), model(x), NOISE[torch.float32])


def refused(weight: torch.Tensor, *bounds: int) -> tuple[MissCode, str]:
    program, name = source(weight, *bounds)
    (node,) = (n for n in program.graph.nodes if n.name == name)
    miss = StoreRoundedWeight().match(node)
    assert isinstance(miss, Miss)
    assert not apply_rules(program, [StoreRoundedWeight()]).modified
    return miss.code, miss.at.name


def test_refuses_a_weight_that_is_not_finite() -> None:
    weight = torch.randn(4, 8)
    weight[0, 0] = math.nan
    assert refused(weight) == (MissCode.NOT_CONSTANT, "w")


def test_refuses_wide_integers() -> None:
    assert refused(torch.randn(4, 8), -32768, 32767)[0] is MissCode.RANGE


def test_refuses_an_activation() -> None:
    b = GraphBuilder()
    x = Term(b, b.arg("x", torch.float32, 4, 8))
    clamped = (x / 0.1).call(aten.round.default).call(aten.clamp.default, -128, 127)
    program = finish(b, (clamped * 0.1).node)
    miss = StoreRoundedWeight().match(clamped.node)
    assert isinstance(miss, Miss)
    assert (miss.code, miss.at.name) == (MissCode.NOT_CONSTANT, "x")
    assert not apply_rules(program, [StoreRoundedWeight()]).modified
