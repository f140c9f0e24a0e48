"""Attention of float values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tests.support.cases.fake_kernels import OPCHECKS
from tests.support.guard_pages import assert_same_with_guards

from qfuse.ir.errors import InputError
from qfuse.kernels import attention, instruction_set

# Batch, heads, heads of keys, queries, keys, features and width: around vectors, panels of 64 keys,
# blocks of 48 queries and chunks of 512 keys.
SIZES = (
    (1, 2, 2, 16, 5, 8, 8),
    (2, 4, 2, 64, 64, 32, 32),
    (1, 1, 1, 49, 65, 3, 5),
    (1, 3, 1, 97, 513, 20, 36),
    (3, 2, 2, 17, 70, 80, 80),
    (1, 1, 1, 16, 1, 1, 1),
    (1, 1, 1, 48, 1030, 128, 130),
)
MASKS = ("none", "causal", "rows", "keys", "heads", "bool", "batch", "future", "one")
SCALE = 0.3
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = (F32, BF16, F16)
# Of the largest value. Sums of products of up to 130 features, and of weights of up to 1030 keys that
# sum to 1; the result is rounded, and where products are in bfloat16 so are weights.
BOUNDS = {F32: 4e-6, BF16: 2**-8 + 4e-6, F16: 2**-11 + 4e-6}


def operands(
    size: tuple[int, ...], dtype: torch.dtype = F32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values as projections leave them: heads beside features."""
    batch, heads, shared, rows, keys, depth, width = size
    return (
        torch.randn(batch, rows, heads, depth).to(dtype).transpose(1, 2),
        torch.randn(batch, keys, shared, depth).to(dtype).transpose(1, 2),
        torch.randn(batch, keys, shared, width).to(dtype).transpose(1, 2),
    )


def mask_of(kind: str, size: tuple[int, ...], dtype: torch.dtype = F32) -> torch.Tensor | None:
    batch, heads, _, rows, keys, _, _ = size
    if kind in ("none", "causal"):
        return None
    if kind == "future":
        return torch.full((rows, keys), -torch.inf, dtype=dtype).triu(1)
    if kind in ("bool", "batch"):
        shape = (rows, keys) if kind == "bool" else (batch, 1, 1, keys)
        kept = torch.rand(shape) > 0.4
        kept[..., 0] = True
        return kept
    shapes = {
        "rows": (batch, 1, rows, keys), "keys": (1, keys), "heads": (heads, rows, keys),
        "one": (batch, heads, rows, 1),
    }  # fmt: skip
    return torch.randn(shapes[kind]).to(dtype)


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool
) -> torch.Tensor:
    """The same in float64."""
    wide = mask.double() if mask is not None and mask.is_floating_point() else mask
    return F.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), wide, 0.0, causal, scale=SCALE,
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_those_of_float64(
    isa: str, size: tuple[int, ...], kind: str, dtype: torch.dtype
) -> None:
    del isa
    torch.manual_seed(0)
    (q, k, v), mask = operands(size, dtype), mask_of(kind, size, dtype)
    causal = kind == "causal"

    y = attention(q, k, v, mask, causal, SCALE)

    expected = reference(q, k, v, mask, causal)
    assert y.dtype is dtype
    assert (y - expected).abs().max() <= BOUNDS[dtype] * v.abs().max()


@st.composite
def any_size(draw: st.DrawFn) -> tuple[int, ...]:
    heads = draw(st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 2), (3, 1)]))
    rows, keys = draw(st.integers(16, 110)), draw(st.integers(1, 600))
    depth, width = draw(st.integers(1, 140)), draw(st.integers(1, 140))
    return (draw(st.integers(1, 3)), *heads, rows, keys, depth, width)


@given(any_size(), st.sampled_from(MASKS), st.booleans(), st.booleans(), st.sampled_from(DTYPES))
def test_random_sizes(
    size: tuple[int, ...], kind: str, first: bool, wide: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    (q, k, v), mask = operands(size, dtype), mask_of(kind, size, F32 if wide else dtype)
    causal = kind == "causal"

    y = attention(q, k, v, mask, causal, SCALE, first)

    expected = reference(q, k, v, mask, causal)
    assert (y - expected).abs().max() <= BOUNDS[dtype] * v.abs().max()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_threads(isa: str, size: tuple[int, ...], dtype: torch.dtype) -> None:
    del isa
    torch.manual_seed(1)
    args = (*operands(size, dtype), mask_of("rows", size, dtype), False, SCALE)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = attention(*args)
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(attention(*args), expected)
    finally:
        torch.set_num_threads(before)


# Those whose products of bfloat16 are float32; others depend on the processor.
WIDE = ("portable", "avx2", "avx_vnni")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_those_of_float32_on_any_instruction_set(
    isa: str, size: tuple[int, ...], dtype: torch.dtype
) -> None:
    if dtype is BF16 and isa not in WIDE:
        pytest.skip("products may be bfloat16")
    torch.manual_seed(1)
    q, k, v = operands(size, dtype)
    mask = mask_of("rows", size, dtype)
    assert mask is not None
    # Without instructions for it, multiply-adds are rounded twice.
    with instruction_set("portable" if isa == "portable" else "avx2"):
        wide = attention(q.float(), k.float(), v.float(), mask.float(), False, SCALE)

    y = attention(q, k, v, mask, False, SCALE)

    assert torch.equal(y, wide.to(dtype))


def test_subnormal_values_of_bfloat16_may_be_zero(isa: str) -> None:
    q, k, v = operands((1, 1, 1, 16, 1, 8, 8), BF16)
    v.fill_(1e-39)

    y = attention(q, k, v, None, False, SCALE)

    assert torch.equal(y, v.expand_as(y)) or (isa not in WIDE and not y.any())


def test_a_mask_of_halves_is_that_of_float32(isa: str) -> None:
    del isa
    q, k, v = operands((2, 4, 2, 20, 70, 12, 12), BF16)
    for mask in (torch.randn(20, 70), torch.randn(4, 1, 70), torch.randn(20, 1)):
        halves = mask.bfloat16()
        for added in (halves, halves.expand(2, 4, 20, -1)):
            y = attention(q, k, v, added, False, SCALE)
            assert torch.equal(y, attention(q, k, v, halves.float(), False, SCALE))


@pytest.mark.parametrize("rows", [4, 50])
def test_both_layouts_of_the_result_have_the_same_values(isa: str, rows: int) -> None:
    del isa
    args = (*operands((2, 4, 2, rows, 70, 12, 12)), None, False, SCALE)

    beside, first = attention(*args), attention(*args, heads_first=True)

    assert torch.equal(beside, first)
    assert first.is_contiguous()
    assert beside.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("kind", ["causal", "heads", "bool"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_around_the_operands_is_not_touched(isa: str, kind: str, dtype: torch.dtype) -> None:
    del isa
    for size in SIZES:
        q, k, v = (x.contiguous() for x in operands(size, dtype))
        args = (q, k, v, mask_of(kind, size, dtype), kind == "causal", SCALE)

        assert_same_with_guards(attention, args, {})


@pytest.mark.parametrize("layout", ["features", "steps", "shared", "offset"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_operands_may_have_any_strides(isa: str, layout: str, dtype: torch.dtype) -> None:
    del isa
    plain = operands((2, 2, 2, 20, 70, 13, 13), dtype)
    if layout == "features":
        q, k, v = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in plain)
    elif layout == "offset":
        q, k, v = (x.contiguous()[..., 1:] for x in plain)
    elif layout == "steps":
        q, k, v = (x.repeat_interleave(2, dim=3)[..., ::2] for x in plain)
    else:
        q = plain[0]
        k, v = (x[:1, :1].expand(2, 2, -1, -1) for x in plain[1:])
    mask = torch.randn(70, 20).t() if layout == "steps" else torch.randn(20, 100)[..., 10:80]
    mask = mask.to(dtype)

    y = attention(q, k, v, mask, False, SCALE)

    assert torch.equal(y, attention(*(x.contiguous() for x in (q, k, v, mask)), False, SCALE))


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


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_a_number_stays_in_its_row(isa: str, dtype: torch.dtype) -> None:
    del isa
    q, k, v = operands((1, 1, 1, 16, 600, 8, 8), dtype)
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
    q, k, v = operands((1, 1, 1, 16, 600, 8, 8), dtype)
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


@pytest.mark.parametrize("width", [16, 20])
@pytest.mark.parametrize("rows", [1, 15])
@pytest.mark.parametrize("dtype", DTYPES)
def test_few_queries_are_left_to_torch(rows: int, width: int, dtype: torch.dtype) -> None:
    q, k, v = operands((2, 4, 2, rows, 30, 16, width), dtype)
    mask = torch.randn(rows, 30)

    y = attention(q, k, v, mask, False, SCALE)

    wanted = F.scaled_dot_product_attention(q, k, v, mask, scale=SCALE, enable_gqa=True)
    assert torch.equal(y, wanted)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_nothing_to_attend(axis: int, first: bool) -> None:
    sizes = [2, 2, 16, 8]
    sizes[axis] = 0
    queries, keys = torch.randn(sizes), torch.randn(sizes)
    if axis == 1:
        with pytest.raises(RuntimeError, match="heads of queries"):
            attention(queries, keys, keys, None, False, SCALE)
        return

    y = attention(queries, keys, keys, None, False, SCALE, first)

    meta = attention(*(x.to("meta") for x in (queries, keys, keys)), None, False, SCALE, first)
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
        "columns": ({3: mask[:, 1:]}, "a column per key"),
        "one axis": ({3: mask[0]}, "two to four axes"),
        "small": ({5: 1e-50}, "the scale must be positive"),
        "large": ({5: 1e50}, "the scale must be positive"),
        "no scale": ({5: 0.0}, "the scale must be positive"),
        "not a number": ({5: torch.nan}, "the scale must be positive"),
        "batch": ({0: q[:1]}, "do not fit"),
        "both": ({3: mask, 4: True}, "takes no mask"),
    }
    changes, message = cases[what]
    args = enumerate((q, k, v, None, False, SCALE))
    return [changes.get(i, arg) for i, arg in args], message


BAD = (
    "dtype", "axes", "keys", "features", "batch", "heads", "mask", "columns", "one axis", "small",
    "large", "no scale", "not a number", "both", "doubles", "mixed", "other halves",
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

    for first in (False, True):
        whole = (*args, first)
        torch.library.opcheck(torch.ops.qfuse.attention.default, whole, test_utils=OPCHECKS)
        meta = attention(*(x.to("meta") if isinstance(x, torch.Tensor) else x for x in whole))
        assert meta.stride() == attention(*whole).stride()
