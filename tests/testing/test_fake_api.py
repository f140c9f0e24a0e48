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
    patch.setattr(_fake_api._QuickMode, "_remembered", lambda *args: args[-1]())

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


CALLS: list[tuple[Any, list[Any]]] = [
    *((aten.transpose.int, [0, 1]), (aten.view.default, [[-1]]), (aten.reshape.default, [[6, 2]])),
    *((aten.slice.Tensor, [0, 1]), (aten.select.int, [1, 2]), (aten.expand.default, [[2, 3, 4]])),
    *((aten.split.Tensor, [2]), (aten.unbind.int, []), (aten.max.dim, [1]), (aten.t.default, [])),
    *((aten.native_layer_norm.default, [[4], None, None, 1e-5]), (aten.amax.default, [[0], True])),
    *((aten.contiguous.default, []), (aten.view.dtype, [I32]), (aten.sum.default, [])),
    *((aten.clone.default, []), (aten.topk.default, [2]), (aten.alias.default, [])),
]


def memory_of(result: Any, operand: torch.Tensor) -> list[tuple[Any, ...]]:
    """What each tensor of a result is, and whether it has the memory of the operand."""
    parts = result if isinstance(result, (tuple, list)) else [result]
    address = operand.untyped_storage()._cdata
    return [(*described(part), part.untyped_storage()._cdata == address) for part in parts]


@pytest.mark.parametrize(("op", "rest"), CALLS, ids=str)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_a_second_call_gives_what_the_first_gave(
    op: Any, rest: list[Any], order: tuple[int, ...]
) -> None:
    _fake_api._kept.cache_clear()
    seen: list[Any] = []
    for _ in range(2):
        b = GraphBuilder()
        x = b.arg("x", F32, 3, 4, order=order)
        # A view of it, so that a result may lie in the middle of an input.
        cut = b.call(aten.slice.Tensor, x, 0, 1)
        try:
            values = [b.call(op, node, *rest).meta["val"] for node in (x, cut)]
        except (RuntimeError, ValueError) as error:
            seen.append(type(error))
            continue
        kinds = [isinstance(value, (list, tuple)) for value in values]
        seen.append((kinds, [memory_of(value, x.meta["val"]) for value in values]))

    assert seen[0] == seen[1]


def test_what_was_seen_is_told_apart_by_the_type_of_a_number() -> None:
    _fake_api._kept.cache_clear()
    b = GraphBuilder()
    x = b.arg("x", I8, 3)

    types = [b.call(aten.mul.Tensor, x, n).meta["val"].dtype for n in (1, 1.0, True, 1, 1.0)]

    assert types == [I8, F32, I8, I8, F32]


def test_a_call_that_was_seen_is_not_inferred_again(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_api._kept.cache_clear()
    first, second = GraphBuilder(), GraphBuilder()
    given = [[b.arg("x", F32, 3, 4), b.arg("y", F32, 5, 4)] for b in (first, second)]
    made = first.call(aten.linear.default, *given[0])
    (torch_mode,) = _fake_api._QuickMode.__bases__
    monkeypatch.setattr(torch_mode, "_dispatch_impl", None)
    again = second.call(aten.linear.default, *given[1])

    assert described(again.meta["val"]) == described(made.meta["val"])
    assert again.meta["val"].fake_mode is given[1][0].meta["val"].fake_mode
    with pytest.raises(TypeError, match="not callable"):
        second.call(aten.mm.default, given[1][0], given[1][0])


def test_a_call_under_autocast_is_another_call() -> None:
    _fake_api._kept.cache_clear()
    b = GraphBuilder()
    x = b.arg("x", F32, 3, 4)
    types = []
    for enabled in (False, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            types.append(b.call(aten.mm.default, x, b.call(aten.t.default, x)).meta["val"].dtype)

    assert types == [F32, BF16, F32]


def test_a_size_that_is_symbolic_belongs_to_its_graph() -> None:
    _fake_api._kept.cache_clear()
    values = []
    for _ in range(2):
        b = GraphBuilder()
        x = b.call(aten.transpose.int, b.arg("x", F32, "m", 4), 0, 1)
        values.append(x.meta["val"].shape[1].node.shape_env)

    assert values[0] is not values[1]


def test_a_shortcut_adds_no_guard() -> None:
    b = GraphBuilder()
    x = b.arg("x", F32, "m", "k")
    y = b.call(aten.mul.Tensor, b.call(aten.clamp.default, x, -1, 1), b.arg("y", F32, 1, "k"))
    env = x.meta["val"].fake_mode.shape_env

    assert described(y.meta["val"]) == described(x.meta["val"])
    assert not env.guards
