"""What kernels compute and move, counted by hand."""

from __future__ import annotations

import pytest

from qfuse.cost import Bits, ComputeKind, ProductKind, SizeRange, Work, linear_work, pointwise_work
from qfuse.ir.errors import OptionsError


def test_linear() -> None:
    work = linear_work(3, 8, 5, Bits(x=8, weight=4, out=16), ComputeKind.INT8).hint

    assert work == Work(
        flops=2 * 3 * 8 * 5,
        kind=ComputeKind.INT8,
        weight_bytes=8 * 5 / 2,
        reads=(3 * 8,),
        writes=(3 * 5 * 2,),
        one_row_flops=2 * 8 * 5,
        kernel_calls=1,
        product=ProductKind.INT8_INT4,
        columns=5,
    )


def test_linear_at_all_sizes() -> None:
    work = linear_work(SizeRange(0, 1, 7), 4, 2, Bits(32, 8, 32), ComputeKind.F32)

    assert [w.flops for w in work.values] == [0, 16, 112]
    # No row needs no work, and the part of one row is never more than the whole.
    assert [w.one_row_flops for w in work.values] == [0, 16, 16]
    assert [w.weight_bytes for w in work.values] == [8, 8, 8]


def test_pointwise() -> None:
    work = pointwise_work(SizeRange(1, 10, 100), reads=[32, 8], writes=[4])

    assert work.low == Work(reads=(4.0, 1.0), writes=(0.5,))
    assert work.hint == Work(reads=(40.0, 10.0), writes=(5.0,))
    assert work.high.flops == 0


def test_more_to_move_and_other_calls() -> None:
    work = Work(flops=4, weight_bytes=1, reads=(2,), writes=(3,))

    more = work.moving(weight_bytes=10, reads=[20, 21], writes=[30]).with_calls(3, 2)

    assert more == Work(
        flops=4,
        weight_bytes=11,
        reads=(2, 20, 21),
        writes=(3, 30),
        kernel_calls=3,
        library_calls=2,
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"flops": -1},
        {"weight_bytes": -1},
        {"reads": (1, -1)},
        {"writes": (-1,)},
        {"kernel_calls": -1},
        {"flops": 1, "one_row_flops": 2},
        {"kernel_calls": 1, "library_calls": 2},
    ],
)
def test_impossible_work_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(OptionsError):
        Work(**fields)  # type: ignore[arg-type]


def test_products_know_their_weights() -> None:
    bits = {product: product.weight_bits for product in ProductKind}

    assert {p for p, n in bits.items() if n == 4} == {p for p in ProductKind if "int4" in p}
    assert {p for p, n in bits.items() if n > 8} == {ProductKind.F32, ProductKind.BF16}
    assert ProductKind.of(ComputeKind.BF16, 16) is ProductKind.BF16
    assert ProductKind.of(ComputeKind.INT8, 32) is ProductKind.of(ComputeKind.NONE, 8) is None
