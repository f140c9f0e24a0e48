"""Fake values of hand-built graphs are those that torch infers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from qfuse.testing import GraphBuilder, _fake_api

aten = torch.ops.aten
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
I8, I32 = torch.int8, torch.int32

Size = int | str
# A shape, and its axes from the largest stride to the smallest.
Layout = tuple[tuple[Size, ...], tuple[int, ...] | None]
LAYOUTS: list[Layout] = [
    *(((), None), ((3,), None), ((3, 0, 2), None), ((1, 1), None), ((2, 1, 5), None)),
    *((("m", 7), None), ((1, "m", 1), None), (("m", "k"), None), (("m", 3, "m"), None)),
    *(((2, 3, 4), (0, 2, 1)), (("m", 7), (1, 0)), (("m", 3, "k", 5), (0, 2, 3, 1))),
]
# The other operand: the same layout, one that is broadcast, or one that broadcasts the first.
OTHERS: list[Layout | None] = [None, ((), None), ((1,), None), ((2, 1, 1, 1), None)]
UNARY = sorted(_fake_api._OF_FLOATS - {aten.div.Tensor}, key=str)
BINARY = [
    *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor),
    *(aten.maximum.default, aten.minimum.default),
]


def test_every_shortcut_is_here() -> None:
    known = {*UNARY, *BINARY, aten.clamp.default}
    assert known == _fake_api._OF_FLOATS | _fake_api._OF_NUMBERS


def described(value: torch.Tensor) -> tuple[Any, ...]:
    sizes = tuple(map(str, value.shape)), tuple(map(str, value.stride()))
    return value.dtype, value.device, sizes, value.requires_grad, value.storage_offset()


def assert_alike(
    op: Any,
    operands: Sequence[tuple[torch.dtype, Layout]],
    patch: pytest.MonkeyPatch,
    *rest: Any,
    **named: Any,
) -> None:
    """Assert that the shortcut and torch infer the same, or refuse with the same error."""

    def inferred() -> object:
        b = GraphBuilder()
        args = [
            b.arg(f"x{index}", dtype, *shape, order=order)
            for index, (dtype, (shape, order)) in enumerate(operands)
        ]
        try:
            return described(b.call(op, *args, *rest, **named).meta["val"])
        except (RuntimeError, TypeError, ValueError) as error:
            return type(error)

    quick = inferred()
    with patch.context() as context:
        context.setattr(_fake_api._QuickMode, "_like", lambda *_: None)
        plain = inferred()
    assert quick == plain


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ops_of_one_operand(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    for op in (aten.neg.default, aten.rsqrt.default):
        assert_alike(op, [(F32, layout)], monkeypatch)
    for dtype, low, high in [
        *((F32, -1, 1), (BF16, -0.5, None), (F32, None, 2.5), (I8, -3, 3), (I8, 0.5, 2)),
        *((I32, None, None), (F64, True, 3)),
    ]:
        assert_alike(aten.clamp.default, [(dtype, layout)], monkeypatch, low, high)
    for dtype in (F32, I8, torch.float8_e4m3fn, torch.bool):
        assert_alike(aten._to_copy.default, [(BF16, layout)], monkeypatch, dtype=dtype)
    assert_alike(aten._to_copy.default, [(F32, layout)], monkeypatch, dtype=F32, device="cpu")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_ops_of_two_operands(
    layout: Layout, other: Layout | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # These take all the same way.
    for op in (aten.add.Tensor, aten.maximum.default):
        assert_alike(op, [(F32, layout), (F32, other or layout)], monkeypatch)
    assert_alike(aten.mul.Tensor, [(F32, other or layout), (F32, layout)], monkeypatch)


@pytest.mark.parametrize("op", [*UNARY, *BINARY], ids=str)
@pytest.mark.parametrize("dtype", [F32, F64, BF16, I8, torch.bool])
def test_types(op: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    layout: Layout = ((4, "m"), None)
    if op in UNARY:
        assert_alike(op, [(dtype, layout)], monkeypatch)
        return
    assert_alike(op, [(dtype, layout), (dtype, layout)], monkeypatch)
    assert_alike(op, [(dtype, layout), (I8, ((), None))], monkeypatch)
    if str(op).startswith(("aten.m", "aten.d")) and "imum" not in str(op):
        for number in (2, 2.5, True):
            assert_alike(op, [(dtype, layout)], monkeypatch, number)


def test_a_shortcut_adds_no_guard() -> None:
    b = GraphBuilder()
    x = b.arg("x", F32, "m", "k")
    y = b.call(aten.mul.Tensor, b.call(aten.clamp.default, x, -1, 1), b.arg("y", F32, 1, "k"))
    env = x.meta["val"].fake_mode.shape_env

    assert described(y.meta["val"]) == described(x.meta["val"])
    assert not env.guards
