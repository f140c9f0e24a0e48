"""Products of two activations: which run on the int8 kernel, and why others do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.cases.lowering import NO_KERNELS
from tests.support.cases.matmul import Products, rowwise
from torch.fx import Node

from qfuse import kernels
from qfuse.cost import CostModel, CostProfile
from qfuse.ir.events import Exactness, Lowered
from qfuse.ir.graph.stage_graph import LoweredGraph, NormalGraph
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.matmul import as_fused_matmul
from qfuse.ir.quant.spec import QuantSpec, ZeroPointDomain
from qfuse.ir.refusal import Refusal
from qfuse.kernels import KernelLibrary
from qfuse.lower import lower
from qfuse.lower.kernels.registry import all_kernels
from qfuse.lower.operands.matmul import MATMUL_CONDITIONS
from qfuse.lower.problems.conditions import hold
from qfuse.lower.problems.matmul import matmul_problem
from qfuse.optimize import optimize
from qfuse.rewrite.clone import clone
from qfuse.rewrite.compare import compare
from qfuse.rewrite.tolerance import SITE
from qfuse.targets import Target
from qfuse.testing.quant import per_tensor, per_token
from qfuse.testing.run import random_inputs, run

aten = torch.ops.aten
F32, BF16 = torch.float32, torch.bfloat16
NAME = "qfuse.matmul_a8a8"
ISAS = ("portable", "avx2", "avx512_vnni", "amx")
# Large enough that the kernel is predicted to be faster.
X, K = (2, 3, 64, 64), (2, 3, 70, 64)
Specs = tuple[QuantSpec, QuantSpec]


def lowered(
    program: NormalGraph, isa: str = "avx512_vnni", library: KernelLibrary | None = None
) -> LoweredGraph:
    """Optimize and lower a copy for a pinned machine."""
    registry = all_kernels(library or kernels.load())
    cost = CostModel(CostProfile.pinned())
    return lower(optimize(clone(program)), Target.for_testing(isa=isa), cost, registry)


def event_of(low: LoweredGraph) -> Lowered:
    """Return how the only product was lowered."""
    (event,) = (e for e in low.log.of(Lowered) if " x " in e.what)
    return event


def why_not(program: NormalGraph) -> str:
    """Return why the kernel does not take the only product."""
    event = event_of(lowered(program))
    assert event.kernel == "expand"
    return dict(event.losers)[NAME]


def runs(program: NormalGraph, isa: str = "avx512_vnni", **sizes: int) -> Lowered:
    """Check that the kernel runs the only product, with the same values; return the event."""
    low = lowered(program, isa)
    event = event_of(low)
    assert event.kernel == NAME, event.losers
    inputs = random_inputs(program, **sizes)
    for new, old in zip(run(low, inputs), run(program, inputs), strict=True):
        assert compare(new, old, None, Exactness.ROUNDING, SITE).wrong is None
        assert new.stride() == old.stride()
    return event


def specs(*dtypes: torch.dtype) -> Specs:
    """Return specs with one scale."""
    return per_tensor(4, dtypes[0]), per_tensor(4, dtypes[1])


@pytest.mark.numeric
@pytest.mark.pairs
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("left", [torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("right", [torch.int8, torch.uint8], ids=str)
def test_static_per_tensor(isa: str, left: torch.dtype, right: torch.dtype) -> None:
    case = Products(X, K, specs(left, right))
    event = runs(case.done(case.product()), isa)

    names = [str(dtype).removeprefix("torch.") for dtype in (left, right)]
    assert event.what == " x ".join(f"{n} per-tensor asymmetric" for n in names) + " [2, 3, 64, 70]"


@pytest.mark.numeric
@pytest.mark.pairs
@pytest.mark.parametrize("float_dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("right", [False, True])
def test_scales_per_row_and_per_column(float_dtype: torch.dtype, left: bool, right: bool) -> None:
    made = [per_token(4) if rows else per_tensor(4) for rows in (left, right)]
    pair = [replace(spec, float_dtype=float_dtype) for spec in made]
    case = Products(X, K, (pair[0], pair[1]), float_dtype=float_dtype)
    event = runs(case.done(case.product()))

    kinds = ["per-token dynamic" if rows else "per-tensor asymmetric" for rows in (left, right)]
    assert event.what == f"int8 {kinds[0]} x int8 {kinds[1]} [2, 3, 64, 70]"


@pytest.mark.numeric
@pytest.mark.parametrize(
    "block", [(1, None, None, None), (None, 1, None, None), (1, 1, None, None), (None, 1, 1, None)]
)
def test_scales_per_entry_of_the_batch(block: tuple[int | None, ...]) -> None:
    spec = per_tensor(4).with_block(block)
    case = Products(X, K, (spec, spec))

    assert runs(case.done(case.product())).why == ""


@pytest.mark.numeric
def test_a_scale_and_a_mask_and_a_quantized_result() -> None:
    case = Products(X, K)
    mask = case.b.arg("mask", F32, 2, 1, 1, 70)
    scaled = case.b.call(aten.div.Tensor, case.product(), 8.0)
    masked = case.b.call(aten.add.Tensor, scaled, mask)
    event = runs(case.done(case.quantized(masked, per_tensor(4, torch.uint8), "out")))

    assert event.what.endswith("[2, 3, 64, 70] | mul(0)|add(1,1.0) -> uint8")
    assert event.why == ""


@pytest.mark.numeric
def test_steps_that_the_kernel_does_not_know_come_after_it() -> None:
    case = Products(X, K, rowwise(4))
    y = case.product()
    for index in range(5):
        y = case.b.call(aten.add.Tensor, y, case.b.arg(f"r{index}", F32, 70))
    event = runs(case.done(y))

    assert event.why == "after the kernel: add(4,1.0)"


@pytest.mark.numeric
def test_dynamic_sizes() -> None:
    case = Products(("b", 3, "m", 64), ("b", 3, "n", 64), rowwise(4))
    program = case.done(case.product())
    low = lowered(program)
    assert event_of(low).kernel in {NAME, "float"}
    for b, m, n in ((2, 3, 4), (1, 1, 1), (3, 130, 67)):
        inputs = random_inputs(program, b=b, m=m, n=n)
        for new, old in zip(run(low, inputs), run(program, inputs), strict=True):
            assert compare(new, old, None, Exactness.ROUNDING, SITE).wrong is None


@pytest.mark.parametrize("isa", ISAS)
def test_a_small_product_stays_float(isa: str) -> None:
    case = Products((1, 1, 2, 4), (1, 1, 3, 4))
    event = event_of(lowered(case.done(case.product()), isa))

    assert event.kernel == "float"
    assert event.why.startswith("runs in float: predicted ")
    assert ", float " in dict(event.losers)[NAME]


def test_the_report_shows_both_prices() -> None:
    case = Products(X, K)
    event = event_of(lowered(case.done(case.product())))

    assert event.predicted is not None
    assert dict(event.losers)["float"].startswith("predicted ")


def test_without_a_compiler() -> None:
    case = Products(X, K)
    event = event_of(lowered(case.done(case.product()), library=NO_KERNELS))

    assert (event.kernel, event.why) == ("expand", "no kernel accepts it")
    assert dict(event.losers)[NAME] == "switched off by the test"


def with_scale(case: Products, name: str, shape: tuple[int, ...], spec: QuantSpec) -> Node:
    """Add an input of quantized values, dequantized with a constant scale."""
    q = case.b.arg(f"{name}_q", spec.dtype, *shape)
    grid = [int(size) for size in spec.grid(shape)]
    scale = case.b.const(f"{name}_grid", torch.rand(grid) * 0.01 + 1e-3)
    return case.b.call(ops.dequantize, q, scale, None, str(spec))


def program_of(left: QuantSpec, right: QuantSpec) -> NormalGraph:
    """Return a product of ``X`` and the transpose of ``K``."""
    case = Products(X, K)
    turned = (K[0], K[1], K[3], K[2])
    x, other = with_scale(case, "left", X, left), with_scale(case, "right", turned, right)
    return case.done(case.b.call(aten.matmul.default, x, other))


PLAIN = per_tensor(4)


@pytest.mark.parametrize(
    ("left", "right", "reason"),
    [
        (
            PLAIN.with_block((None, None, None, 16)),
            PLAIN,
            "the left operand is scaled in blocks of *x*x*x16, along the axis that is summed",
        ),
        (
            PLAIN,
            PLAIN.with_block((1, 1, 32, 1)),
            "the right operand is scaled in blocks of 1x1x32x1, along the axis that is summed",
        ),
        (
            PLAIN.with_block((1, 1, 2, None)),
            PLAIN,
            "the left operand is scaled in blocks of 1x1x2x*",
        ),
        (
            PLAIN,
            PLAIN.with_block((None, None, None, 7)),
            "the right operand is scaled in blocks of *x*x*x7",
        ),
        (
            per_tensor(4, torch.float8_e4m3fn),
            PLAIN,
            "the left operand is stored as torch.float8_e4m3fn",
        ),
        (
            PLAIN,
            per_tensor(4, torch.int16),
            "the right operand is stored as torch.int16",
        ),
        (
            PLAIN,
            replace(PLAIN, arithmetic=replace(PLAIN.arithmetic, compute=torch.float16)),
            "the right operand is dequantized in float16, kernels compute in float32",
        ),
    ],
    ids=str,
)
def test_other_operands_are_expanded_with_the_reason(
    left: QuantSpec, right: QuantSpec, reason: str
) -> None:
    assert why_not(program_of(left, right)) == reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"zero": torch.full((1, 1, 1, 1), 300)}, "the right operand has a zero point outside"),
        ({"zero": None}, "the right operand's zero point may be outside"),
        (
            {"zero": torch.full((1, 1, 1, 1), 0.5), "domain": ZeroPointDomain.FLOAT_OFFSET},
            "the right operand's zero point is a float offset",
        ),
    ],
    ids=str,
)
def test_other_zero_points_are_expanded_with_the_reason(
    change: dict[str, Any], reason: str
) -> None:
    case = Products(X, K)
    spec = replace(PLAIN, domain=change.get("domain", PLAIN.domain))
    q = case.b.arg("q", torch.int8, 2, 3, 64, 70)
    scale = case.b.const("scale", torch.full((1, 1, 1, 1), 0.1))
    zero = change["zero"]
    node = (
        case.b.arg("zero", torch.int32, 1, 1, 1, 1) if zero is None else case.b.const("zero", zero)
    )
    other = case.b.call(ops.dequantize, q, scale, node, str(spec))

    assert why_not(case.done(case.b.call(aten.matmul.default, case.x, other))).startswith(reason)


@pytest.mark.numeric
def test_a_zero_point_that_is_chosen_at_run_time() -> None:
    case = Products(X, K)
    q = case.b.arg("q", torch.int8, 2, 3, 64, 70)
    scale = case.b.arg("scale", F32, 1, 1, 1, 1)
    zero = case.b.arg("zero", torch.int8, 1, 1, 1, 1)
    other = case.b.call(ops.dequantize, q, scale, zero, str(PLAIN))

    assert runs(case.done(case.b.call(aten.matmul.default, case.x, other))).why == ""


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
def test_sums_that_int32_does_not_hold(dtype: torch.dtype) -> None:
    case = Products(X, K)
    x = with_scale(case, "left", (64, (1 << 16) + 1), per_tensor(2))
    other = with_scale(case, "right", ((1 << 16) + 1, 8), per_tensor(2, dtype))

    assert check_of(case.done(case.b.call(aten.mm.default, x, other))) is None


def test_a_summed_axis_without_a_bound() -> None:
    case = Products((2, 3, 64, "s"), (2, 3, 70, "s"))

    assert check_of(case.done(case.product())) is None


def check_of(program: NormalGraph) -> Refusal | None:
    """Return why the kernel does not take the operands of the only product."""
    (fused,) = (v for n in optimize(program).graph.nodes if (v := as_fused_matmul(n)))
    return hold(MATMUL_CONDITIONS, matmul_problem(fused, {}))


def test_a_product_in_float64_is_expanded() -> None:
    wide = replace(PLAIN, float_dtype=torch.float64)
    program = program_of(wide, wide)

    assert why_not(program) == "the product is computed in float64"


@pytest.mark.numeric
def test_expanded_products_have_the_same_values() -> None:
    program = program_of(PLAIN.with_block((None, None, None, 16)), PLAIN)
    inputs = random_inputs(program)
    for new, old in zip(run(lowered(program), inputs), run(program, inputs), strict=True):
        assert torch.equal(new, old)
