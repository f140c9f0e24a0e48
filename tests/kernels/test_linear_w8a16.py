"""Weight-only linears: against float64, with the error that float32 sums of K terms may have."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tests.support.cases.linear_kernel import REAL, codes, views_of_rows

from qfuse.ir.ops.epilogue import Epilogue
from qfuse.kernels import KernelLibrary, instruction_set, linear_w8a16, pack_weight

# Around the rows of tiles and of strips, and where streaming ends.
ROWS = (1, 2, 3, 4, 5, 7, 13, 49, 260)
FEATURES = (1, 15, 16, 17, 48, 63, 64, 65, 130)
DEPTHS = (1, 2, 3, 4, 5, 66, 129, 516, 1030)

# A sum of K products in float32 in any order: K/2 roundings of the sum of magnitudes at worst, in
# practice the square root of that; and one rounding of the result to the dtype of `x`.
SUM_EPSILONS = 4.0
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@dataclass(frozen=True)
class Linear:
    """One problem."""

    x: torch.Tensor
    weight: torch.Tensor
    w_scale: torch.Tensor
    bias: torch.Tensor | None

    def run(self, **options: Any) -> torch.Tensor:
        packed, _ = pack_weight(self.weight)
        return linear_w8a16(self.x, packed, self.w_scale, bias=self.bias, **options)

    def check(self, y: torch.Tensor) -> None:
        """Assert that ``y`` is as near to the exact result as the arithmetic allows."""
        x, w, scale = self.x.double(), self.weight.double(), self.w_scale.double()
        bias = torch.zeros(()) if self.bias is None else self.bias.double()
        exact = (x @ w.t()) * scale + bias
        magnitude = (x.abs() @ w.abs().t()) * scale + bias.abs()
        eps = torch.finfo(torch.float32).eps
        allowed = SUM_EPSILONS * eps * magnitude + ROUNDING[self.x.dtype] * exact.abs()
        assert y.dtype == self.x.dtype
        assert y.shape == exact.shape
        assert ((y.double() - exact).abs() <= allowed).all()


def linear(
    shape: tuple[int, ...], n: int, *, dtype: torch.dtype = torch.float32, bias: bool = True
) -> Linear:
    return Linear(
        x=torch.randn(shape).to(dtype),
        weight=codes((n, shape[-1]), torch.int8),
        w_scale=torch.rand(n) * 0.01 + 0.003,
        bias=torch.randn(n) if bias else None,
    )


@pytest.mark.numeric
@pytest.mark.parametrize("rows", ROWS)
def test_every_size(isa: str, rows: int) -> None:
    del isa
    for index, (n, k) in enumerate(itertools.product(FEATURES, DEPTHS)):
        case = linear((rows, k), n, dtype=REAL[index % 3], bias=index % 2 == 0)

        case.check(case.run())


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("shape", [(20,), (3, 20), (2, 3, 20), (2, 1, 4, 20), (1, 1, 20)])
def test_every_rank(isa: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    del isa
    case = linear(shape, 10, dtype=dtype)

    case.check(case.run())


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (2, 0), (9, 0)])
def test_empty(isa: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    del isa
    case = linear(shape, 10, dtype=dtype)
    assert case.bias is not None

    assert torch.equal(case.run(), case.bias.to(dtype).expand(*shape[:-1], 10))
    assert linear(shape, 0, dtype=dtype).run().shape == (*shape[:-1], 0)


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("rows", [1, 6])
def test_whole_numbers_are_exact(isa: str, dtype: torch.dtype, rows: int) -> None:
    """Every weight times small whole numbers: nothing is rounded, so nothing may differ."""
    del isa
    weight = torch.arange(-128, 128, dtype=torch.int8).reshape(64, 4).repeat(1, 3)
    x = torch.randint(-3, 4, (rows, 12)).to(dtype)
    case = Linear(x, weight, torch.ones(64), None)
    expected = (x.double() @ weight.double().t()).float()

    y = case.run(epilogue="cast(float32)", out_dtype=torch.float32)

    assert torch.equal(y, expected.to(dtype).float())


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("rows", [1, 9])
def test_views(isa: str, dtype: torch.dtype, rows: int) -> None:
    del isa
    for name, x in views_of_rows(rows, 64, dtype).items():
        case = replace(linear(tuple(x.shape), 70, dtype=dtype), x=x)

        assert torch.equal(case.run(), replace(case, x=x.clone()).run()), name
        case.check(case.run())


@pytest.mark.numeric
def test_threads_do_not_change_a_bit(isa: str) -> None:
    del isa
    before = torch.get_num_threads()
    # With 600 rows and 3 threads, two of them begin inside a block.
    for rows, dtype in itertools.product((3, 500, 600), REAL):
        case = linear((rows, 1030), 200, dtype=dtype)
        results = []
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            results.append(case.run())
        torch.set_num_threads(before)

        case.check(results[0])
        assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("rows", [2, 30, 300])
def test_the_epilogue_is_the_same(isa: str, dtype: torch.dtype, rows: int) -> None:
    del isa
    case = linear((rows, 40), 70, dtype=dtype)
    extra = torch.randn(rows, 70)
    text = "act(relu)|mul(0)|cast(bfloat16)|add(0,1.0)"

    y = case.run(extras=[extra], epilogue=text, out_dtype=torch.float32)

    assert torch.equal(y, Epilogue.parse(text).apply(case.run(), [extra]))


@pytest.mark.numeric
@pytest.mark.parametrize("rows", [1, 9])
def test_extremes(isa: str, rows: int) -> None:
    """Nothing overflows or vanishes on the way that does not in the result; NaN stays in its row."""
    del isa
    for value in (1e30, 1e-30, 5e37):
        case = linear((rows, 5), 20, bias=False)
        case = replace(case, x=torch.full((rows, 5), value), weight=case.weight // 128)
        case.check(case.run())
    spoilt = linear((rows + 1, 6), 20)
    spoilt.x[0, 5] = torch.nan

    y = spoilt.run()

    assert y[0].isnan().all()
    assert y[1:].isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 8, dtype=torch.int8)}, "x must be float32"),
        ({"x": torch.zeros(3, 12)}, "w_packed must be"),
        ({"x": torch.zeros(())}, "at least one axis"),
        ({"w_scale": torch.ones(65)}, "w_packed must be"),
        ({"w_scale": torch.ones(5, 1), "out_features": 5}, r"w_scale must be \[1, 1, 64\]"),
        ({"w_scale": torch.ones(5, dtype=torch.int32)}, "w_scale has type Int"),
        ({"bias": torch.ones(4)}, "bias has 4 elements"),
        ({"out_dtype": torch.bfloat16}, "the epilogue gives Float"),
        ({"epilogue": "add(0,1.0)"}, "wants an extra that is not there"),
    ],
)
def test_refuses(library: KernelLibrary, change: dict[str, Any], message: str) -> None:
    del library
    packed, _ = pack_weight(codes((5, 8), torch.int8))
    arguments: dict[str, Any] = {
        "x": torch.randn(3, 8),
        "w_packed": packed,
        "w_scale": torch.ones(5),
    }
    linear_w8a16(**arguments)

    with pytest.raises(RuntimeError, match=message):
        linear_w8a16(**{**arguments, **change})


def test_inputs_are_not_written_to(library: KernelLibrary) -> None:
    for name in library.instruction_sets:
        case = linear((7, 22), 70)
        before = case.x.clone(), case.weight.clone(), case.w_scale.clone()
        with instruction_set(name):
            case.run()

        assert all(
            torch.equal(a, b)
            for a, b in zip(before, (case.x, case.weight, case.w_scale), strict=True)
        )
