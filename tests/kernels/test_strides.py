"""What torch calls contiguous can have any stride on axes of size 1; views can have any at all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.support.cases.linear_kernel import STORED, codes, linear

pytestmark = pytest.mark.numeric

K = 64


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("stride", [0, 1, 7, K, 100])
def test_one_row_of_any_stride(isa: str, stride: int, dtype: torch.dtype) -> None:
    del isa
    case = linear((1, K), 70, dtype=dtype)
    x = case.x.reshape(-1).as_strided((1, K), (stride, 1))
    assert x.stride(0) == stride

    assert torch.equal(replace(case, x=x).run(), case.expected())


@pytest.mark.parametrize("shape", [(1, 1, K), (1, 5, K), (5, 1, K), (1, 3, 1, 2, K)])
@pytest.mark.parametrize("stride", [0, 1, 3])
def test_axes_of_size_one_of_any_stride(isa: str, shape: tuple[int, ...], stride: int) -> None:
    del isa
    case = linear(shape, 20)
    strides = [
        stride if size == 1 else own for size, own in zip(shape, case.x.stride(), strict=True)
    ]

    assert torch.equal(replace(case, x=case.x.as_strided(shape, strides)).run(), case.expected())


@pytest.mark.parametrize("stride", [0, 1, 9])
def test_one_column_of_any_stride(isa: str, stride: int) -> None:
    del isa
    case = linear((9, 1), 20)
    x = case.x.reshape(-1).as_strided((9, 1), (1, stride))

    assert torch.equal(replace(case, x=x).run(), case.expected())


@pytest.mark.parametrize("k", [K, K - 2])
def test_views(isa: str, k: int) -> None:
    """Slices, transposes, expanded and overlapping rows."""
    del isa
    wide = codes((7, 3, 2 * K), torch.int8)
    views = {
        "slice of columns": wide[..., 5 : 5 + k],
        "slice of rows": wide[::2, :, :k],
        "select": wide[:, 1, :k],
        "transpose": codes((k, 9), torch.int8).t(),
        "permute": codes((k, 3, 4), torch.int8).permute(2, 1, 0),
        "swapped rows": codes((4, 3, k), torch.int8).transpose(0, 1),
        "expanded row": codes((1, k), torch.int8).expand(8, k),
        "expanded element": codes((8, 1), torch.int8).expand(8, k),
        "overlapping rows": codes((200,), torch.int8).as_strided((8, k), (3, 1)),
        "every second column": wide[:, 0, : 2 * k : 2],
    }
    for name, x in views.items():
        case = linear(tuple(x.shape), 70, zero_point=True)

        assert torch.equal(replace(case, x=x).run(), replace(case, x=x).expected()), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extras_of_any_stride(isa: str, dtype: torch.dtype) -> None:
    del isa
    case = linear((2, 9, K), 70)
    views = {
        "slice": torch.randn(2, 9, 100, dtype=dtype)[..., 3:73],
        "transpose": torch.randn(70, 9, 2, dtype=dtype).permute(2, 1, 0),
        "row": torch.randn(70, dtype=dtype),
        "column": torch.randn(2, 9, 1, dtype=dtype),
        "one row per batch": torch.randn(2, 1, 70, dtype=dtype),
        "one row in all": torch.randn(9, 70, dtype=dtype),
        "element": torch.randn(1, dtype=dtype),
    }
    for name, extra in views.items():
        y = case.with_options(extras=[extra], epilogue="mul(0)").run()

        assert torch.equal(y, case.expected() * extra), name


def test_parameters_of_any_stride(isa: str) -> None:
    del isa
    case = linear((4, K), 70)
    assert case.bias is not None
    strided = replace(
        case,
        x_scale=case.x_scale.repeat_interleave(2)[::2],
        w_scale=torch.stack([case.w_scale, case.w_scale], 1)[:, 0],
        bias=torch.stack([case.bias, case.bias], 1)[:, 1],
    )

    assert torch.equal(strided.run(), case.expected())
