"""Weights of experts that are looked up at run time stay quantized, and the report says why in float."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.support.sources.library import NOISE, Model, compiled

from qfuse.ir.errors import StrictError
from qfuse.report.strict import require_quantized

E, K, N, TOKENS = 4, 32, 48, 6
Form = Callable[[Model, torch.Tensor, torch.Tensor], torch.Tensor]


def real(s: Model) -> torch.Tensor:
    return s.w.float() * s.s  # type: ignore[operator]


LOOKED_UP = "for each row, and no kernel multiplies float activations by such weights"

FORMS: dict[str, tuple[Form, str]] = {
    "lookup, dequantize, bmm": (
        lambda s, x, ids: (x[:, None] @ (s.w[ids].float() * s.s[ids]))[:, 0],  # type: ignore[index]
        LOOKED_UP,
    ),
    "dequantize, lookup, bmm": (
        lambda s, x, ids: torch.bmm(x[:, None], real(s)[ids])[:, 0],
        LOOKED_UP,
    ),
    "dequantize, lookup, transposed bmm": (
        lambda s, x, ids: torch.bmm(real(s)[ids].transpose(1, 2), x[:, :, None])[:, :, 0],
        LOOKED_UP,
    ),
    "dequantize, index_select, einsum": (
        lambda s, x, ids: torch.einsum("tk,tkn->tn", x, torch.index_select(real(s), 0, ids)),
        LOOKED_UP,
    ),
    "dequantize, lookup, product, sum": (
        lambda s, x, ids: (real(s)[ids] * x[:, :, None]).sum(1),
        LOOKED_UP,
    ),
    "dequantize, lookup, baddbmm": (
        lambda s, x, ids: torch.baddbmm(x[:, :1, None], x[:, None], real(s)[ids])[:, 0],
        LOOKED_UP,
    ),
}


@pytest.mark.numeric
@pytest.mark.parametrize("form", list(FORMS))
def test_weights_of_experts_are_looked_up_quantized(form: str) -> None:
    forward, reason = FORMS[form]
    source = Model(
        forward, w=torch.randint(-127, 128, (E, K, N), dtype=torch.int8), s=torch.rand(E, 1, N)
    )
    x, ids = torch.randn(TOKENS, K), torch.tensor([0, 3, 3, 1, 2, 0])
    done = compiled(source, x, ids)

    assert torch.equal(done(x, ids), source(x, ids))
    held = [b for b in done.plan.lowered.module.buffers() if b.numel() >= E * K * N]
    assert [b.dtype for b in held] == [torch.int8]
    lookups = [
        node.meta["val"].dtype
        for node in done.plan.lowered.graph.nodes
        if "index" in str(node.target) and node.meta["val"].numel() == TOKENS * K * N
    ]
    assert lookups == [torch.int8]
    (action,) = done.report.actions
    assert reason in action.reason
    assert action.advice is not None
    assert action.advice.name == "quantize-activations-of-experts"
    with pytest.raises(StrictError, match="does not run on a quantized kernel"):
        require_quantized(done.report)


def chosen(s: Model, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """One expert for all tokens."""
    return F.linear(x, real(s)[ids[0]].t())


def test_a_linear_of_one_expert_is_no_linear_of_a_constant() -> None:
    source = Model(
        chosen, w=torch.randint(-127, 128, (E, K, N), dtype=torch.int8), s=torch.rand(E, 1, N)
    )
    done = compiled(source, torch.randn(TOKENS, K), torch.tensor([2, 0]))
    (action,) = done.report.actions
    assert LOOKED_UP in action.reason
    assert action.advice is not None
    assert action.advice.name == "quantize-activations-of-experts"


@pytest.mark.numeric
def test_a_linear_of_quantized_activations_and_one_expert_is_fused() -> None:
    def forward(s: Model, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        q = (x / 0.05).round().clamp(-128, 127).to(torch.int8)
        return chosen(s, q.float() * 0.05, ids)

    source = Model(
        forward, w=torch.randint(-127, 128, (E, K, N), dtype=torch.int8), s=torch.rand(E, 1, N)
    )
    x = torch.randn(TOKENS, K)
    done = compiled(source, x, torch.tensor([2, 0]))
    fired = done.report.fired
    assert (fired["spell-matmul"], fired["fuse-matmul"]) == (1, 1)
    for expert in range(E):
        ids = torch.tensor([expert, 0])
        want = source(x, ids)
        assert (done(x, ids) - want).abs().max() <= NOISE[torch.float32] * want.abs().max()


@pytest.mark.parametrize("quantized", [False, True])
def test_products_of_few_small_experts_have_the_reason_that_decides(quantized: bool) -> None:
    def forward(s: Model, x: torch.Tensor) -> torch.Tensor:
        q = (x / 0.05).round().clamp(-128, 127).to(torch.int8)
        return torch.bmm(q.float() * 0.05 if quantized else x, real(s))

    source = Model(
        forward, w=torch.randint(-127, 128, (E, K, N), dtype=torch.int8), s=torch.rand(E, 1, N)
    )
    done = compiled(source, torch.randn(E, TOKENS, K))
    (action,) = done.report.actions
    assert action.reason == f"{E} weights of {K * N} elements are not worth a call of a kernel each"
