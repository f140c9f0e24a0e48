from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import aten, codes, finish, golden, refusal, scales
from tests.support.sources.library import NOISE, Model, close, compiled
from torch.nn import functional as F

from qfuse.ir.events import MissCode
from qfuse.ir.ops import library as ops
from qfuse.normalize.aten.views.spell_split import SpellSplit
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import per_channel

ROWS = str(per_channel(2))


def test_golden() -> None:
    b = GraphBuilder()
    w = b.call(ops.dequantize, b.const("w", codes(6, 8)), b.const("s", scales(6, 1)), None, ROWS)
    x = b.arg("x", torch.float32, 3, 8)
    parts = b.call(aten.split_with_sizes.default, w, [2, 4])
    y = [b.call(aten.linear.default, x, b.item(parts, i)) for i in (0, 1)]
    assert_expected_inline(
        golden(finish(b, *y), SpellSplit()),
        """\
const %w: int8[6, 8]
const %s: float32[6, 1]
%0 = qfuse.dequantize(%w, %s, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[6, 8]
%x: float32[3, 8]
%1 = aten.slice.Tensor(%0, 0, 0, 2, 1): float32[2, 8]
%2 = aten.slice.Tensor(%0, 0, 2, 6, 1): float32[4, 8]
%3 = aten.linear(%x, %1): float32[3, 2]
%4 = aten.linear(%x, %2): float32[3, 4]
return (%3, %4)
fired: spell-split 1""",
    )


Split = Callable[[torch.Tensor], Sequence[torch.Tensor]]
SPLITS: dict[str, Split] = {
    "chunk": lambda w: w.chunk(3),
    "split": lambda w: torch.split(w, [64, 128]),
    "split from the end": lambda w: torch.split(w, [64, 128], -2),
    "tensor_split": lambda w: w.tensor_split([10, 100]),
    "unbind": lambda w: w.view(3, 64, -1).unbind(),
    "a part that is not read": lambda w: w.chunk(3)[1:],
}


@pytest.mark.numeric
@pytest.mark.own_kernels
@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize("before", ["cast", "scale", "product"])
def test_parts_of_a_weight_stay_quantized(name: str, before: str) -> None:
    split = SPLITS[name]

    def forward(m: Model, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        w, s = m.get_buffer("w"), m.get_buffer("s")
        if before == "product":
            return tuple(F.linear(x[:, : part.shape[1]], part) for part in split(w.float() * s))
        parts = split(w if before == "cast" else w.float())
        pairs = zip(parts, split(s), strict=True)
        return tuple(F.linear(x, part.float() * scale) for part, scale in pairs)

    weight = torch.randint(-128, 128, (192, 64), dtype=torch.int8)
    source, x = Model(forward, w=weight, s=torch.rand(192, 1) * 0.1), torch.randn(5, 64)
    done = compiled(source, x)

    assert {fused.kernel for fused in done.report.fused} == {"qfuse.linear_w8a16"}
    for mine, other in zip(done(x), source(x), strict=True):
        close(mine, other, NOISE[torch.float32])


@pytest.mark.numeric
@pytest.mark.own_kernels
def test_columns_of_a_weight_stay_quantized() -> None:
    def forward(m: Model, x: torch.Tensor) -> torch.Tensor:
        left, right = (m.get_buffer("w").float() * m.get_buffer("s")).chunk(2, 1)
        return F.linear(x[:, :64], left) + F.linear(x[:, 64:], right)

    weight = torch.randint(-128, 128, (72, 128), dtype=torch.int8)
    source, x = Model(forward, w=weight, s=torch.rand(72, 1) * 0.1), torch.randn(5, 128)
    done = compiled(source, x)

    assert {fused.kernel for fused in done.report.fused} == {"qfuse.linear_w8a16"}
    close(done(x), source(x), NOISE[torch.float32])


def test_refuses_an_activation() -> None:
    b = GraphBuilder()
    parts = b.call(aten.split.Tensor, b.arg("x", torch.float32, 6, 8), 3)
    assert refusal(finish(b, b.item(parts, 0), b.item(parts, 1)), SpellSplit()) == (
        MissCode.NOT_CONSTANT,
        "split_tensor",
    )


def test_refuses_parts_that_are_not_read() -> None:
    b = GraphBuilder()
    b.call(aten.split.Tensor, b.const("w", codes(6, 8)), 3)
    assert refusal(finish(b, b.arg("x", torch.float32, 6, 8)), SpellSplit()) == (
        MissCode.PATTERN,
        "split_tensor",
    )
