from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.fold import PRODUCTS, N, Product, check_folded
from tests.support.sources.aten_spellings import golden, refusal
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.optimize.fold.batch_norm import FoldBatchNorm
from qfuse.rewrite.rule import Miss
from qfuse.testing.build import GraphBuilder

aten = torch.ops.aten
NATIVE, PLAIN = aten._native_batch_norm_legit_no_training.default, aten.batch_norm.default


def statistics(b: GraphBuilder, n: int = N, *, affine: bool = True) -> list[Node | None]:
    """Add weight, bias, running mean and variance."""
    weight = b.const("gamma", torch.randn(n)) if affine else None
    bias = b.const("beta", torch.randn(n)) if affine else None
    return [weight, bias, b.const("mean", torch.randn(n)), b.const("var", torch.rand(n) + 0.1)]


def normed(b: GraphBuilder, y: Node, *, plain: bool = False, **changes: Any) -> Node:
    """Add a norm of ``y``; return its result."""
    given = statistics(b, **changes)
    if plain:
        return b.call(PLAIN, y, *given, False, 0.1, 1e-5, False)
    return b.item(b.call(NATIVE, y, *given, 0.1, 1e-5), 0)


def test_golden_a_norm_after_a_convolution() -> None:
    b = GraphBuilder()
    y = normed(b, Product(channels=False, bias=False).node(b))

    assert_expected_inline(
        golden(b.done(y), FoldBatchNorm()),
        """\
%x: float32[s0, 4, 5, 7]
const %w: int8[6, 4, 3, 2]
const %w_scale: float32[6, 1, 1, 1]
%0 = qfuse.dequantize(%w, %w_scale, None, 'int8[-128,127] 1x*x*x* float32 float32:reciprocal:round-zp int'): float32[6, 4, 3, 2]
const %w_bias: float32[6]
%1 = aten.conv2d(%x, %0, %w_bias, (1, 2), (1, 0), (1, 1), 1): float32[s0, 6, 5, 3]
return (%1)
fired: fold-batch-norm 1""",
    )


@pytest.mark.numeric
@pytest.mark.pairs
@pytest.mark.parametrize("product", [p for p in PRODUCTS if p.kind != "unbatched"], ids=str)
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_values_agree(product: Product, plain: bool, affine: bool) -> None:
    b = GraphBuilder()
    y = normed(b, product.node(b), plain=plain, affine=affine)

    assert check_folded(b.done(y), FoldBatchNorm()).params.spec.block[product.axis] == 1


def test_refuses_another_axis() -> None:
    b = GraphBuilder()
    y = normed(b, Product("unbatched").node(b), n=5)

    assert refusal(b.done(y), FoldBatchNorm())[0] is MissCode.AXIS


def test_refuses_training() -> None:
    b = GraphBuilder()
    y = b.call(PLAIN, Product().node(b), None, None, None, None, True, 0.1, 1e-5, False)

    assert refusal(b.done(y), FoldBatchNorm())[0] is MissCode.ARGUMENT


def test_refuses_statistics_of_the_run() -> None:
    b = GraphBuilder()
    mean = b.arg("mean", torch.float32, N)
    norm = b.call(
        NATIVE, Product().node(b), None, None, mean, b.const("v", torch.ones(N)), 0.1, 1e-5
    )

    assert refusal(b.done(b.item(norm, 0)), FoldBatchNorm())[0] is MissCode.NOT_CONSTANT


def test_refuses_other_users() -> None:
    b = GraphBuilder()
    y = Product().node(b)

    assert refusal(b.done(normed(b, y), y), FoldBatchNorm()) == (MissCode.SHARED, y.name)


def test_refuses_a_variance_of_zero_without_eps() -> None:
    b = GraphBuilder()
    zeros = b.const("zeros", torch.zeros(N))
    norm = b.call(NATIVE, Product().node(b), None, None, zeros, zeros, 0.1, 0.0)

    assert refusal(b.done(b.item(norm, 0)), FoldBatchNorm())[0] is MissCode.RANGE


def test_refuses_float_convolutions_without_a_report() -> None:
    b = GraphBuilder()
    x, w = b.arg("x", torch.float32, 2, 3, 5, 5), b.arg("w", torch.float32, N, 3, 1, 1)
    miss = FoldBatchNorm().match(normed(b, b.call(aten.conv2d.default, x, w)).args[0])  # type: ignore[arg-type]

    assert isinstance(miss, Miss)
    assert (miss.code, miss.progress) == (MissCode.PATTERN, 0)
