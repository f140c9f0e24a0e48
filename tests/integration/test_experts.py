"""Weights of experts that are looked up at run time stay quantized, and the report says why in float."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.support.sources.library import Model, compiled

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
    said = [miss.reason for miss in done.report.closest_misses]
    assert any(reason in text for text in (*said, *(left.reason for left in done.report.left)))
