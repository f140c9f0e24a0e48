"""The integer product, its scales and bias: bit for bit against exact arithmetic."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tests.support.cases.linear_kernel import STORED, Linear, codes, linear

from qfuse.kernels import KernelLibrary, instruction_set, linear_w8a8, pack_weight

# Around the sizes of tiles, groups, blocks and vectors, on every path.
ROWS = (1, 2, 5, 6, 7, 17, 70)
FEATURES = (1, 2, 15, 16, 17, 48, 63, 64, 65, 130)
DEPTHS = (1, 2, 3, 4, 5, 62, 63, 64, 65, 66, 127, 129, 516)


def granularities() -> list[dict[str, Any]]:
    flags = ("per_token", "zero_point", "weight_zero_point", "bias")
    return [
        dict(zip(flags, values, strict=True))
        for values in itertools.product((False, True), repeat=len(flags))
    ]


@pytest.mark.numeric
@pytest.mark.parametrize("rows", ROWS)
def test_every_size(isa: str, rows: int) -> None:
    for index, (n, k) in enumerate(itertools.product(FEATURES, DEPTHS)):
        case = linear((rows, k), n, dtype=STORED[index % 2])

        assert torch.equal(case.run(), case.expected()), (isa, rows, n, k)


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("kind", granularities(), ids=lambda k: "-".join(f for f in k if k[f]))
def test_every_granularity(isa: str, dtype: torch.dtype, kind: dict[str, Any]) -> None:
    del isa
    for shape, n in (((9, 36), 70), ((1, 7), 3), ((70, 130), 65)):
        case = linear(shape, n, dtype=dtype, **kind)

        assert torch.equal(case.run(), case.expected())


@pytest.mark.numeric
@pytest.mark.parametrize("shape", [(20,), (3, 20), (2, 3, 20), (2, 1, 4, 20), (1, 1, 20)])
def test_every_rank(isa: str, shape: tuple[int, ...]) -> None:
    del isa
    case = linear(shape, 10, zero_point=True)
    y = case.run()

    assert y.shape == (*shape[:-1], 10)
    assert torch.equal(y, case.expected())


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (4, 0)])
def test_empty(isa: str, shape: tuple[int, ...]) -> None:
    del isa
    case = linear(shape, 10, per_token=False, zero_point=True)
    y = case.run()

    assert y.shape == (*shape[:-1], 10)
    assert torch.equal(y, case.expected())


def test_no_output_features(isa: str) -> None:
    del isa
    assert linear((3, 8), 0).run().shape == (3, 0)


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("x", "zero", "w"), [(255, 0, -128), (0, 255, -128), (0, 255, 127), (255, 255, 5)]
)
def test_the_largest_sums_are_exact(isa: str, x: int, zero: int, w: int) -> None:
    del isa
    k = 1 << 16
    case = Linear(
        x=torch.full((2, k), x, dtype=torch.uint8),
        weight=torch.full((3, k), w, dtype=torch.int8),
        x_scale=torch.ones(1),
        w_scale=torch.ones(3),
        x_zero_point=torch.tensor([zero], dtype=torch.int32),
    )

    assert torch.equal(case.run(), ((x - zero) * w * k) * torch.ones(2, 3))


@pytest.mark.numeric
def test_the_largest_sums_with_a_weight_zero_point_are_exact(isa: str) -> None:
    del isa
    k = 1 << 15
    case = Linear(
        x=torch.full((1, k), 255, dtype=torch.uint8),
        weight=torch.full((1, k), 127, dtype=torch.int8),
        x_scale=torch.ones(1),
        w_scale=torch.ones(1),
        x_zero_point=torch.tensor([0]),
        w_zero_point=torch.tensor([-128]),
    )

    assert case.run().item() == 255 * 255 * k


@pytest.mark.numeric
def test_paths_and_threads_agree_bit_for_bit(library: KernelLibrary) -> None:
    case = linear((61, 200), 203, zero_point=True, weight_zero_point=True).with_options(
        epilogue="act(gelu)|act(silu)|act(tanh)|act(gelu_tanh)"
    )
    results = []
    before = torch.get_num_threads()
    for name in library.instruction_sets:
        with instruction_set(name):
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                results.append(case.run())
    torch.set_num_threads(before)

    assert len(results) == 3 * len(library.instruction_sets)
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize(
    ("float_dtype", "int_dtype"),
    [(torch.float64, torch.int64), (torch.bfloat16, torch.int8), (torch.float16, torch.int16)],
)
def test_scales_and_zero_points_of_other_types(
    library: KernelLibrary, float_dtype: torch.dtype, int_dtype: torch.dtype
) -> None:
    del library
    case = linear((6, 20), 10, zero_point=True, weight_zero_point=True)
    assert case.x_zero_point is not None
    assert case.w_zero_point is not None
    assert case.bias is not None
    other = Linear(
        case.x,
        case.weight,
        case.x_scale.to(float_dtype).reshape(6, 1),
        case.w_scale.to(float_dtype),
        case.x_zero_point.to(int_dtype).reshape(6, 1),
        case.w_zero_point.to(int_dtype),
        case.bias.to(float_dtype),
    )

    assert torch.equal(other.run(), other.expected())


def test_one_weight_scale_for_all(library: KernelLibrary) -> None:
    del library
    case = linear((6, 20), 10)
    one = Linear(case.x, case.weight, case.x_scale, case.w_scale[:1], bias=case.bias)

    assert torch.equal(one.run(), one.expected())


def test_inputs_are_not_written_to(isa: str) -> None:
    del isa
    case = linear((7, 21), 70, zero_point=True, weight_zero_point=True)
    extra = torch.randn(7, 70)
    args, options = case.with_options(extras=[extra], epilogue="act(relu)|add(0,1.0)").arguments()
    tensors = [a for a in (*args, *options.values(), extra) if isinstance(a, torch.Tensor)]
    before = [t.clone() for t in tensors]

    first = linear_w8a8(*args, **options)
    second = linear_w8a8(*args, **options)

    assert torch.equal(first, second)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 8)}, "x must be int8 or uint8"),
        ({"x": torch.zeros(3, 12, dtype=torch.int8)}, "w_packed must be"),
        ({"x": torch.zeros((), dtype=torch.int8)}, "at least one axis"),
        ({"x_scale": torch.ones(2)}, "x_scale has 2 elements, expected 1 or 3"),
        ({"x_scale": torch.ones(3, dtype=torch.int32)}, "x_scale has type Int"),
        ({"x_zero_point": torch.tensor([128])}, "outside of the range"),
        ({"x_zero_point": torch.tensor([0, 0, -129])}, "outside of the range"),
        ({"x_zero_point": torch.tensor([0.0])}, "whole numbers"),
        ({"w_scale": torch.ones(4)}, "w_scale has 4 elements"),
        ({"w_sums": torch.zeros(5)}, "w_sums must be"),
        ({"w_sums": torch.zeros(5, 1, dtype=torch.int32)}, "w_sums must be"),
        ({"bias": torch.ones(4)}, "bias has 4 elements"),
        ({"w_zero_point": torch.zeros(4, dtype=torch.int32)}, "w_zero_point has 4 elements"),
        ({"out_dtype": torch.bfloat16}, "the epilogue gives Float"),
        ({"product_dtype": torch.float64}, "must be float32, bfloat16 or float16"),
        ({"epilogue": "relu"}, "not an epilogue step"),
        ({"epilogue": "act(softplus)"}, "unknown activation"),
        ({"epilogue": "act(hardtanh,0.0)"}, "has 2 arguments, expected 3"),
        ({"epilogue": "act(leaky_relu,x)"}, "not a number"),
        ({"epilogue": "add(0,1.0)"}, "wants an extra that is not there"),
        ({"epilogue": "add(-1,1.0)", "extras": [torch.ones(5)]}, "wants an extra"),
        ({"epilogue": "cast(float64)"}, "cannot cast"),
        ({"epilogue": "|"}, "not an epilogue step"),
        ({"epilogue": "|".join(["act(relu)"] * 9)}, "at most 8"),
        ({"extras": [torch.ones(5)] * 5}, "at most 4 extras"),
        ({"extras": [torch.ones(2, 3, 5)]}, "expand"),
        ({"extras": [torch.ones(5, dtype=torch.float64)]}, "an extra must be"),
    ],
)
def test_refuses(library: KernelLibrary, change: dict[str, Any], message: str) -> None:
    del library
    packed, sums = pack_weight(codes((5, 8), torch.int8))
    arguments = {
        "x": codes((3, 8), torch.int8),
        "x_scale": torch.ones(1),
        "x_zero_point": None,
        "w_packed": packed,
        "w_sums": sums,
        "w_scale": torch.ones(5),
    }
    linear_w8a8(**arguments)

    with pytest.raises(RuntimeError, match=message):
        linear_w8a8(**{**arguments, **change})


def test_refuses_sums_that_could_overflow(library: KernelLibrary) -> None:
    del library
    k = (1 << 15) + 4
    case = linear((1, k), 1, weight_zero_point=True)

    with pytest.raises(RuntimeError, match="int32 sums are exact up to 32768"):
        case.run()
