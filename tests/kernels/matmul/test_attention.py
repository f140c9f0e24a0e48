"""Attention of float values."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.attention_operands import (
    BF16,
    BOUNDS,
    DTYPES,
    F32,
    MASKS,
    SCALE,
    SIZES,
    mask_of,
    operands,
    reference,
)
from tests.support.guard_pages import assert_same_with_guards

from qfuse.kernels import attention, instruction_set


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
    rows, keys = draw(st.integers(1, 110)), draw(st.integers(1, 600))
    depth, width = draw(st.integers(1, 140)), draw(st.integers(1, 140))
    return (draw(st.integers(1, 3)), *heads, rows, keys, depth, width)


@pytest.mark.parametrize("rows", [4, 50])
@pytest.mark.parametrize("dtype", DTYPES)
def test_padded_keys_do_not_change_a_bit(isa: str, rows: int, dtype: torch.dtype) -> None:
    """Wherever a sequence ends: whole panels of keys may be allowed, or excluded."""
    del isa
    torch.manual_seed(1)
    lengths = (1, 63, 64, 100, 127, 128, 230)
    q, k, v = operands((len(lengths), 4, 2, rows, max(lengths), 24, 40), dtype)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None, None, None]

    y = attention(q, k, v, mask, False, SCALE)

    for i, length in enumerate(lengths):
        alone = (q[i : i + 1], k[i : i + 1, :, :length], v[i : i + 1, :, :length])
        assert torch.equal(y[i : i + 1], attention(*alone, None, False, SCALE))


ORDERS = tuple(permutations(range(3)))


@given(
    *(any_size(), st.sampled_from(MASKS), st.sampled_from(ORDERS), st.booleans()),
    st.sampled_from(DTYPES),
)
def test_random_sizes(
    size: tuple[int, ...], kind: str, order: tuple[int, ...], wide: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    (q, k, v), mask = operands(size, dtype), mask_of(kind, size, F32 if wide else dtype)
    causal = kind == "causal"

    y = attention(q, k, v, mask, causal, SCALE, order)

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
    if dtype is BF16 and isa not in WIDE and size[3] >= 16:
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
@pytest.mark.parametrize("order", ORDERS)
def test_the_result_has_its_axes_in_any_order(isa: str, rows: int, order: tuple[int, ...]) -> None:
    del isa
    args = (*operands((2, 4, 2, rows, 70, 12, 12)), None, False, SCALE)

    y = attention(*args, order=order)

    assert torch.equal(y, attention(*args))
    assert y.permute(*order, 3).is_contiguous()


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
