from __future__ import annotations

import math

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.fold import PRODUCTS, C, N, Product, check_folded
from tests.support.sources.aten_spellings import golden, refusal

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.ops import library as ops
from qfuse.ir.quant.spec import QuantSpec
from qfuse.ir.stages.verify import verify
from qfuse.optimize.fold.scale import FoldScale
from qfuse.rewrite.rule import Miss
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import stored_like

aten = torch.ops.aten


def scaled(product: Product, factor: torch.Tensor | float, *, divide: bool = False) -> NormalGraph:
    """A product times a constant."""
    b = GraphBuilder()
    y = product.node(b)
    c = b.const("c", factor) if isinstance(factor, torch.Tensor) else factor
    return b.done(b.call(aten.div.Tensor if divide else aten.mul.Tensor, y, c))


def test_golden_a_factor_per_channel() -> None:
    product = Product(channels=False, zero=True)
    program = scaled(product, product.wide(torch.rand(N) + 0.5))

    assert_expected_inline(
        golden(program, FoldScale()),
        """\
%x: float32[s0, 4, 5, 7]
const %w: int8[6, 4, 3, 2]
const %w_z_per_channel: int32[6, 1, 1, 1]
const %w_scale: float32[6, 1, 1, 1]
%0 = qfuse.dequantize(%w, %w_scale, %w_z_per_channel, 'int8[-128,127] 1x*x*x* float32 float32:reciprocal:round-zp int'): float32[6, 4, 3, 2]
const %bias_folded: float32[6]
%1 = aten.conv2d(%x, %0, %bias_folded, (1, 2), (1, 0), (1, 1), 1): float32[s0, 6, 5, 3]
return (%1)
fired: fold-scale 1""",
    )
    verify(program)


@pytest.mark.numeric
@pytest.mark.parametrize("product", PRODUCTS, ids=str)
@pytest.mark.parametrize("divide", [False, True])
def test_values_agree(product: Product, divide: bool) -> None:
    factor = torch.randn(N).sign() * (torch.rand(N) + 0.1)
    found = check_folded(scaled(product, product.wide(factor), divide=divide), FoldScale())
    assert found.params.spec.block[product.axis] == 1

    found = check_folded(scaled(product, 0.3, divide=divide), FoldScale())
    assert (found.params.spec.block[product.axis] == 1) == product.channels


@pytest.mark.numeric
@pytest.mark.parametrize("factor", [3, torch.tensor(0.3), torch.tensor([[[0.7]]])])
def test_numbers_in_every_form(factor: torch.Tensor | int) -> None:
    check_folded(scaled(Product(), factor), FoldScale())


@pytest.mark.numeric
def test_a_constant_on_the_left() -> None:
    b = GraphBuilder()
    y = Product("linear").node(b)
    check_folded(b.done(b.call(aten.mul.Tensor, b.const("c", torch.rand(N) + 1), y)), FoldScale())


@pytest.mark.numeric
def test_groups_of_a_transposed_convolution_share_a_number() -> None:
    product = Product("transposed", groups=2)
    check_folded(scaled(product, 0.3), FoldScale())
    code, _ = refusal(scaled(product, product.wide(torch.rand(N) + 1)), FoldScale())
    assert code is MissCode.AXIS


@pytest.mark.parametrize(
    ("shape", "kind"),
    [((5, 3), "unbatched"), ((5, 1), "conv"), ((1, N, 1, 1), "unbatched")],
)
def test_refuses_other_axes(shape: tuple[int, ...], kind: str) -> None:
    b = GraphBuilder()
    y = Product(kind, channels=False).node(b)
    miss = FoldScale().match(b.call(aten.mul.Tensor, y, b.const("c", torch.rand(shape) + 1)))
    assert isinstance(miss, Miss)
    assert miss.code is MissCode.AXIS


@pytest.mark.parametrize("factor", [0.0, math.inf, math.nan, 1e-40, 1e38])
def test_refuses_scales_that_are_no_floats(factor: float) -> None:
    assert refusal(scaled(Product(), factor), FoldScale())[0] is MissCode.RANGE


def test_refuses_to_divide_by_zero() -> None:
    assert refusal(scaled(Product(), 0.0, divide=True), FoldScale())[0] is MissCode.RANGE


def test_refuses_other_users() -> None:
    b = GraphBuilder()
    y = Product().node(b)
    program = b.done(b.call(aten.mul.Tensor, y, 2.0), y)

    assert refusal(program, FoldScale()) == (MissCode.SHARED, y.name)


def test_refuses_groups_of_a_weight() -> None:
    b = GraphBuilder()
    spec = QuantSpec(torch.int8, -128, 127, (1, 2))
    scale = b.const("s", torch.rand(N, 2))
    weight = b.call(ops.dequantize, b.const("w", stored_like(spec, N, 4)), scale, None, str(spec))
    y = b.call(aten.linear.default, b.arg("x", torch.float32, "m", 4), weight)

    program = b.done(b.call(aten.mul.Tensor, y, 2.0))
    assert refusal(program, FoldScale())[0] is MissCode.GRANULARITY


@pytest.mark.parametrize("factor", [torch.tensor(2.0, dtype=torch.float64).reshape(1, 1, 1)])
def test_refuses_another_dtype(factor: torch.Tensor) -> None:
    b = GraphBuilder()
    y = Product().node(b)
    program = b.done(b.call(aten.mul.Tensor, y, b.const("c", factor.expand(N, 1, 1).contiguous())))

    assert refusal(program, FoldScale())[0] is MissCode.DTYPE


def test_refuses_factors_of_the_run_without_a_report() -> None:
    b = GraphBuilder()
    y = Product().node(b)
    miss = FoldScale().match(b.call(aten.mul.Tensor, y, b.arg("c", torch.float32, N, 1, 1)))

    assert isinstance(miss, Miss)
    assert (miss.code, miss.progress) == (MissCode.NOT_CONSTANT, 0)


def test_refuses_float_products_without_a_report() -> None:
    b = GraphBuilder()
    y = b.call(
        aten.linear.default, b.arg("x", torch.float32, 2, 3), b.arg("w", torch.float32, 3, 3)
    )
    miss = FoldScale().match(b.call(aten.mul.Tensor, y, 2.0))

    assert isinstance(miss, Miss)
    assert (miss.code, miss.progress) == (MissCode.PATTERN, 0)


def test_refuses_a_vector_as_weight() -> None:
    """Its result has one number per row: the last axis does not hold output channels."""
    b = GraphBuilder()
    spec = QuantSpec(torch.int8, -128, 127, (None,))
    scale = b.const("s", torch.full((1,), 0.1))
    weight = b.call(ops.dequantize, b.const("w", stored_like(spec, C)), scale, None, str(spec))
    y = b.call(aten.linear.default, b.arg("x", torch.float32, C, C), weight)

    program = b.done(b.call(aten.mul.Tensor, y, b.const("c", torch.rand(C) + 1)))
    assert refusal(program, FoldScale())[0] is MissCode.SHAPE
