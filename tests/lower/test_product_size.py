"""What the report promises for a quantized product is what it predicts for one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qfuse import kernels
from qfuse.cost import CostModel, CostProfile, ProductKind, ProductRates, RowRate
from qfuse.ir.events import Estimated, MissCode
from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.ops import library as ops
from qfuse.kernels import KernelLibrary
from qfuse.lower import lower
from qfuse.lower.kernels.registry import all_kernels
from qfuse.optimize import optimize
from qfuse.report import Report
from qfuse.report.facts import Facts, TargetFacts
from qfuse.report.work import WorkShare
from qfuse.targets import Target
from qfuse.testing.build import GraphBuilder
from qfuse.testing.lowering import NO_OWN_KERNELS
from qfuse.testing.quant import QuantizedLinear, per_tensor, per_token

aten = torch.ops.aten
# As measured with AVX512-VNNI: what a column takes besides is most of a product with a short sum.
_RATES = {
    ProductKind.F32: ((1, 15e9, 2e-9), (4, 41e9, 0.0), (32, 180e9, 15e-9), (128, 288e9, 7e-9)),
    ProductKind.INT8: ((1, 55e9, 3e-9), (4, 190e9, 3e-9), (32, 1.3e12, 7e-9), (128, 2.8e12, 9e-9)),
    ProductKind.ATEN_INT8: ((4, 130e9, 0.0), (32, 1.1e12, 4e-9), (128, 2.4e12, 25e-9)),
}
RATES = replace(
    CostProfile.pinned(),
    products=tuple(
        ProductRates(product, tuple(RowRate(*rate) for rate in rates))
        for product, rates in _RATES.items()
    ),
)
# Short sums take most of their time beside the products.
SLOW_COLUMNS = replace(
    RATES,
    products=tuple(
        replace(one, rates=tuple(r._replace(column_seconds=6e-8) for r in one.rates))
        if one.product is ProductKind.INT8
        else one
        for one in RATES.products
    ),
)


def report_of(
    program: NormalGraph,
    profile: CostProfile = RATES,
    library: KernelLibrary | None = None,
    target: Target | None = None,
) -> Report:
    registry = all_kernels(library or kernels.load())
    target = target or Target.for_testing()
    low = lower(optimize(program), target, CostModel(profile), registry)
    facts = Facts(target=TargetFacts("CPU", "x86_64", "AVX512", (), 1))
    return Report(tuple(low.log), facts)


def in_float(rows: int, k: int, n: int) -> NormalGraph:
    b = GraphBuilder()
    x, weight = b.arg("x", torch.float32, rows, k), b.const("w", torch.randn(n, k))
    return b.done(b.call(aten.linear.default, x, weight, b.const("bias", torch.randn(n))))


def quantized(rows: int, k: int, n: int) -> NormalGraph:
    """One scale per row, as dynamic quantization chooses them."""
    b, spec = GraphBuilder(), str(per_token(2))
    scale = b.arg("scale", torch.float32, rows, 1)
    q = b.call(ops.quantize, b.arg("x", torch.float32, rows, k), scale, None, spec)
    return b.done(QuantizedLinear(b, n, k).linear(b.call(ops.dequantize, q, scale, None, spec)))


def work_of(report: Report) -> WorkShare:
    assert report.work is not None
    return report.work


def claimed(report: Report) -> float:
    """Return the cost of what is to do."""
    return sum(action.seconds or 0.0 for action in report.actions)


def gained(
    sizes: tuple[int, int, int], profile: CostProfile, library: KernelLibrary | None = None
) -> float:
    """Return by how much less the product takes when it is quantized, with its quantize."""
    before = work_of(report_of(in_float(*sizes), profile, library))
    after = report_of(quantized(*sizes), profile, library)
    (quantize,) = [e for e in after.events if isinstance(e, Estimated) and e.int8_seconds is None]
    saved = before.predicted_seconds - work_of(after).predicted_seconds
    return saved - quantize.float_seconds


SIZES = [
    *((256, 128, 128), (512, 128, 128), (1024, 128, 128), (512, 256, 64), (256, 256, 256)),
    *((512, 128, 512), (512, 512, 512), (1, 1024, 1024), (8, 128, 128)),
]


@pytest.mark.own_kernels
@pytest.mark.parametrize("profile", [RATES, SLOW_COLUMNS, CostProfile.pinned()])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_suggestion_gains_what_it_costs(
    sizes: tuple[int, int, int], profile: CostProfile
) -> None:
    cost, gain = claimed(report_of(in_float(*sizes), profile)), gained(sizes, profile)
    # What is slower on integers runs in float then, which is no gain either.
    assert cost == pytest.approx(max(gain, 0.0), rel=0.01, abs=1e-7)


@pytest.mark.own_kernels
def test_a_short_sum_gains_less_than_the_rate_of_a_large_product() -> None:
    sizes = (512, 32, 256)
    assert claimed(report_of(in_float(*sizes), RATES)) > 0
    assert claimed(report_of(in_float(*sizes), SLOW_COLUMNS)) == 0


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_without_own_kernels_it_is_that_of_aten(sizes: tuple[int, int, int]) -> None:
    cost = claimed(report_of(in_float(*sizes), RATES, NO_OWN_KERNELS))
    assert cost == pytest.approx(max(gained(sizes, RATES, NO_OWN_KERNELS), 0.0), rel=0.01, abs=1e-7)


@pytest.mark.parametrize("sizes", [(1, 1024, 1024), (8, 64, 64)], ids=str)
def test_nothing_is_promised_that_no_kernel_of_the_target_takes(
    sizes: tuple[int, int, int],
) -> None:
    assert claimed(report_of(in_float(*sizes), RATES, NO_OWN_KERNELS)) == 0


def test_a_quantized_product_without_a_kernel_costs_what_own_kernels_gain() -> None:
    b = GraphBuilder()
    block = QuantizedLinear(b, 128, 128)
    x = block.quantized(b.arg("x", torch.float32, 8, 128), per_tensor(2))
    # `aten._int_mm` takes no activation with a zero point, and is slower than float here.
    report = report_of(b.done(block.linear(x)), RATES, NO_OWN_KERNELS)
    (action,) = [one for one in report.actions if one.code is MissCode.NO_KERNEL]
    assert action.seconds is not None
    assert action.seconds > work_of(report).predicted_seconds / 4
