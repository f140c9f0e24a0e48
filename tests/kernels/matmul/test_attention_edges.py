"""Attention with nothing to attend, special values, and arguments that do not fit."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.attention_operands import BF16, DTYPES, F32, SCALE, mask_of, operands
from tests.support.cases.fake_kernels import OPCHECKS

from qfuse.ir.errors import InputError
from qfuse.kernels import attention

ORDERS = tuple(permutations(range(3)))


@pytest.mark.parametrize("rows", [15, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_without_keys_is_zero(isa: str, rows: int, dtype: torch.dtype) -> None:
    del isa
    q, k, v = operands((1, 1, 1, rows, 600, 8, 8), dtype)
    kept = torch.rand(rows, 600) > 0.5
    kept[3] = False
    # The first chunk has no key of this row.
    kept[5] = False
    kept[5, 520] = True
    added = torch.zeros(rows, 600).masked_fill(~kept, -torch.inf)

    for mask in (kept, added):
        y = attention(q, k, v, mask, False, SCALE)

        assert torch.equal(y[0, 0, 3], torch.zeros(8, dtype=dtype))
        assert torch.equal(y[0, 0, 5], v[0, 0, 520])


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_key_that_is_masked_by_the_least_float_counts_only_if_all_are(
    isa: str, dtype: torch.dtype
) -> None:
    del isa
    q, k, v = operands((1, 1, 1, 16, 8, 8, 8), dtype)
    mask = torch.zeros(16, 8, dtype=dtype)
    mask[0] = torch.finfo(dtype).min
    mask[1, 1:] = torch.finfo(dtype).min
    y = attention(q, k, v, mask, False, SCALE)

    assert torch.equal(y[0, 0, 1], v[0, 0, 0])
    large = torch.cat([v[:, :, :1], v[:, :, 1:] * 1e30], dim=2)
    assert torch.equal(attention(q, k, large, mask, False, SCALE)[0, 0, 1], v[0, 0, 0])
    error = 1e-6 if dtype is F32 else 2**-8
    expected = v[0, 0].double().mean(0).to(dtype)
    torch.testing.assert_close(y[0, 0, 0], expected, rtol=error, atol=error)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores_do_not_overflow(isa: str, dtype: torch.dtype) -> None:
    del isa
    q, k, v = operands((1, 1, 1, 16, 1030, 8, 8), dtype)
    q, k = q * 1e4, k * 1e3

    y = attention(q, k, v, None, False, 1.0)

    best = (q.double() @ k.double().mT).argmax(-1)
    assert torch.equal(y[0, 0], v[0, 0][best[0, 0]])


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_later_chunk_that_counts_nothing_may_overflow(
    isa: str, rows: int, dtype: torch.dtype
) -> None:
    del isa
    q, k = torch.ones(1, 1, rows, 8, dtype=dtype), torch.zeros(1, 1, 514, 8, dtype=dtype)
    v = torch.ones(1, 1, 514, 8, dtype=dtype)
    k[:, :, 512:] = -15
    v[:, :, 512:] = 2e38

    y = attention(q, k, v, None, False, 1.0)

    torch.testing.assert_close(y, torch.ones_like(y), rtol=1e-5, atol=0)
    v[:, :, 513] = torch.nan
    assert attention(q, k, v, None, False, 1.0).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [5, 16])
def test_what_is_not_a_number_stays_in_its_row(isa: str, rows: int, dtype: torch.dtype) -> None:
    del isa
    q, k, v = operands((1, 1, 1, rows, 600, 8, 8), dtype)
    expected = attention(q, k, v, None, False, SCALE)
    q[0, 0, 4, 2] = torch.nan

    y = attention(q, k, v, None, False, SCALE)

    assert y[0, 0, 4].isnan().all()
    y[0, 0, 4] = expected[0, 0, 4]
    assert torch.equal(y, expected)


@pytest.mark.parametrize("key", [0, 77, 599])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_key_that_is_not_a_number_makes_all_rows_so(
    isa: str, key: int, dtype: torch.dtype
) -> None:
    del isa
    for rows in (3, 16):
        q, k, v = operands((1, 1, 1, rows, 600, 8, 8), dtype)
        k[0, 0, key, 0] = torch.nan

        assert attention(q, k, v, None, False, SCALE).isnan().all()


@pytest.mark.parametrize("rows", [15, 16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_key_that_a_mask_leaves_out_counts_as_in_torch(
    isa: str, rows: int, value: float, dtype: torch.dtype
) -> None:
    del isa
    q, k, v = operands((1, 1, 1, rows, 70, 8, 8), dtype)
    kept = torch.ones(rows, 70, dtype=torch.bool)
    kept[:, 3] = False
    k[0, 0, 3, 0] = value

    y = attention(q, k, v, kept, False, SCALE)

    expected = F.scaled_dot_product_attention(q, k, v, kept, scale=SCALE)
    error = 1e-5 if dtype is F32 else 2**-6
    torch.testing.assert_close(y, expected, rtol=error, atol=error, equal_nan=True)
    assert y.isnan().any()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_nothing_to_attend(axis: int, order: tuple[int, ...]) -> None:
    sizes = [2, 2, 16, 8]
    sizes[axis] = 0
    queries, keys = torch.randn(sizes), torch.randn(sizes)
    if axis == 1:
        with pytest.raises(RuntimeError, match="heads of queries"):
            attention(queries, keys, keys, None, False, SCALE)
        return

    y = attention(queries, keys, keys, None, False, SCALE, order)

    meta = attention(*(x.to("meta") for x in (queries, keys, keys)), None, False, SCALE, order)
    assert y.shape == queries.shape
    assert y.stride() == meta.stride()


def test_no_keys_give_zeros() -> None:
    queries, nothing = torch.randn(2, 2, 16, 8), torch.randn(2, 2, 0, 8)

    y = attention(queries, nothing, nothing, None, False, SCALE)

    assert torch.equal(y, torch.zeros(2, 2, 16, 8))


def bad(what: str) -> tuple[list[Any], str]:
    """Arguments that do not fit, and what the error says."""
    q, k, v = operands((2, 4, 2, 16, 9, 8, 8))
    mask = torch.zeros(16, 9)
    cases: dict[str, tuple[dict[int, Any], str]] = {
        "dtype": ({1: k.double()}, "key must be"),
        "axes": ({0: q[0]}, "query must be"),
        "doubles": ({i: x.double() for i, x in enumerate((q, k, v))}, "query must be"),
        "mixed": ({2: v.bfloat16()}, "value must be"),
        "other halves": ({3: mask.half()}, "the mask must be bool, float32 or of"),
        "keys": ({2: v[:, :, :-1]}, "do not fit"),
        "features": ({1: k[..., :-1]}, "do not fit"),
        "heads": ({0: q[:, :3]}, "3 heads of queries are not a multiple of 2"),
        "mask": ({3: mask.long()}, "the mask must be bool, float32 or of"),
        "columns": ({3: mask[:, 1:]}, "does not broadcast to the scores"),
        "rows": ({3: mask[1:]}, "does not broadcast to the scores"),
        "batches": ({3: mask.expand(3, 1, 16, 9)}, "does not broadcast to the scores"),
        "order": ({6: (0, 1, 1)}, "a permutation of 0, 1 and 2"),
        "all axes": ({6: (0, 1, 2, 3)}, "a permutation of 0, 1 and 2"),
        "one axis": ({3: mask[0]}, "two to four axes"),
        "small": ({5: 1e-50}, "the scale must be positive"),
        "large": ({5: 1e50}, "the scale must be positive"),
        "too large to be multiplied": ({5: 3e38}, "the scale must be positive"),
        "no scale": ({5: 0.0}, "the scale must be positive"),
        "not a number": ({5: torch.nan}, "the scale must be positive"),
        "batch": ({0: q[:1]}, "do not fit"),
        "both": ({3: mask, 4: True}, "takes no mask"),
    }
    changes, message = cases[what]
    args = enumerate((q, k, v, None, False, SCALE, (0, 2, 1)))
    return [changes.get(i, arg) for i, arg in args], message


BAD = (
    "dtype", "axes", "keys", "features", "batch", "heads", "mask", "columns", "one axis", "small",
    "large", "no scale", "not a number", "both", "doubles", "mixed", "other halves",
    "rows", "batches", "order", "all axes",
)  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_arguments_that_do_not_fit(what: str) -> None:
    args, message = bad(what)

    with pytest.raises(RuntimeError, match=message):
        attention(*args)


@pytest.mark.parametrize("what", BAD)
def test_tracing_sees_what_shapes_and_dtypes_show(what: str) -> None:
    args, message = bad(what)
    meta = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in args]

    with pytest.raises(InputError, match=message):
        attention(*meta)


@pytest.mark.parametrize("rows", [4, 20])
@pytest.mark.parametrize("kind", ["none", "bool"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_fake_has_the_layout_of_the_result(rows: int, kind: str, dtype: torch.dtype) -> None:
    size = (2, 4, 2, rows, 9, 8, 8)
    args = (*operands(size, dtype), mask_of(kind, size), False, SCALE)

    for order in ((0, 2, 1), (2, 0, 1)):
        whole = (*args, order)
        torch.library.opcheck(torch.ops.qfuse.attention.default, whole, test_utils=OPCHECKS)
        meta = attention(*(x.to("meta") if isinstance(x, torch.Tensor) else x for x in whole))
        assert meta.stride() == attention(*whole).stride()
