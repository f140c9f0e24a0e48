from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx import Node

from qfuse import kernels
from qfuse.cost import CostModel, CostProfile
from qfuse.ir.graph.schema import arguments, is_call
from qfuse.ir.graph.stage_graph import CapturedGraph, OptimizedGraph
from qfuse.ir.ops.views import node_of
from qfuse.lower import lower
from qfuse.lower.floats.masks import without_allowing_parts
from qfuse.lower.kernels.registry import all_kernels
from qfuse.rewrite.clone import clone
from qfuse.targets import Target
from qfuse.testing.build import GraphBuilder
from qfuse.testing.run import random_inputs, run

aten = torch.ops.aten
BOOL, I64 = torch.bool, torch.int64
KEYS = 30

Build = Callable[[GraphBuilder], Node]


def positions(b: GraphBuilder, *args: int, dtype: torch.dtype = I64) -> Node:
    op = aten.arange.default if len(args) == 1 else aten.arange.start
    rows = b.call(op, *args, dtype=dtype)
    return b.call(aten.view.default, rows, [1, 1, -1, 1])


def compared(b: GraphBuilder, op: str, number: float, *args: int) -> Node:
    return b.call(getattr(aten, op).Scalar, positions(b, *args), number)


def counted(b: GraphBuilder, *start: int, dtype: torch.dtype = I64) -> Node:
    """As many positions as the first size of an input."""
    count = b.call(aten.sym_size.int, b.arg("x", torch.float32, "rows"), 0)
    op = aten.arange.start if start else aten.arange.default
    return b.call(op, *start, count, dtype=dtype)


def doubled(b: GraphBuilder, mask: Node, times: int) -> Node:
    for _ in range(times):
        mask = b.call(aten.__and__.Tensor, mask, mask)
    return mask


def ones(b: GraphBuilder) -> Node:
    return b.call(aten.ones.default, [1, 1, 20, 1], dtype=BOOL)


TRUE: dict[str, Build] = {
    "arange >= 0": lambda b: compared(b, "ge", 0, 20),
    "arange > -1": lambda b: compared(b, "gt", -1, 20),
    "arange < its end": lambda b: compared(b, "lt", 20, 20),
    "arange <= its last": lambda b: compared(b, "le", 19, 20),
    "arange from 3 >= 3": lambda b: compared(b, "ge", 3, 3, 23),
    "shifted": lambda b: b.call(aten.ge.Scalar, b.call(aten.add.Tensor, positions(b, 20), 5), 5),
    "ones": ones,
    "new ones": lambda b: b.call(
        aten.new_ones.default, positions(b, 20), [1, 1, 20, 1], dtype=BOOL
    ),
    "full": lambda b: b.call(aten.full.default, [1, 1, 20, 1], True, dtype=BOOL),
    "dynamic positions": lambda b: b.call(
        aten.ge.Scalar, b.call(aten.unsqueeze.default, counted(b), 1), 0
    ),
    "dynamic positions from 3 of 32 bits": lambda b: b.call(
        aten.gt.Scalar, b.call(aten.unsqueeze.default, counted(b, 3, dtype=torch.int32), 1), 2
    ),
    "filled like another": lambda b: b.call(
        aten.full_like.default, b.arg("like", BOOL, 20, 1), True
    ),
    "sliced": lambda b: b.call(
        aten.slice.Tensor, b.call(aten.ge.Scalar, positions(b, 40), 0), 2, 0, 20
    ),
    "selected": lambda b: b.call(
        aten.select.int, b.call(aten.expand.default, ones(b), [2, 3, 20, 1]), 1, 2
    ),
    "copied": lambda b: b.call(aten.clone.default, compared(b, "ge", 0, 20)),
    "shared parts": lambda b: doubled(b, ones(b), 40),
    "a constant": lambda b: b.const("all", torch.ones(1, 1, 20, 1, dtype=torch.bool)),
    "a conjunction": lambda b: b.call(aten.__and__.Tensor, ones(b), compared(b, "ge", 0, 20)),
    "moved": lambda b: b.call(
        aten.permute.default,
        b.call(aten.expand.default, compared(b, "ge", 0, 20), [1, 1, 20, KEYS]),
        [1, 0, 2, 3],
    ),
}
NARROW = [torch.uint8, torch.int8, torch.int16]
UNKNOWN: dict[str, Build] = {
    "arange > 0": lambda b: compared(b, "gt", 0, 20),
    "arange >= 1": lambda b: compared(b, "ge", 1, 20),
    "arange < its last": lambda b: compared(b, "lt", 19, 20),
    "arange from -1": lambda b: compared(b, "ge", 0, -1, 19),
    "not a whole number": lambda b: compared(b, "ge", -0.5, 20),
    "shifted": lambda b: b.call(aten.ge.Scalar, b.call(aten.sub.Tensor, positions(b, 20), 1), 0),
    "floats": lambda b: b.call(aten.ge.Scalar, positions(b, 20, dtype=torch.float32), 0),
    "equal": lambda b: compared(b, "eq", 0, 20),
    "zeros": lambda b: b.call(aten.zeros.default, [1, 1, 20, 1], dtype=BOOL),
    "half full": lambda b: b.call(aten.full.default, [1, 1, 20, 1], False, dtype=BOOL),
    "a constant": lambda b: b.const("some", torch.arange(20).view(1, 1, 20, 1) != 7),
    "an input": lambda b: b.arg("rows", BOOL, 1, 1, 20, 1),
    # The number wraps: all bytes are less than 255.
    "a number that does not fit": lambda b: b.call(
        aten.gt.Scalar, b.arg("bytes", torch.uint8, 1, 1, 20, 1), -1
    ),
    "a large number": lambda b: b.call(
        aten.le.Scalar, b.arg("bytes", torch.uint8, 1, 1, 20, 1), 300
    ),
    "shared parts": lambda b: doubled(b, b.arg("rows", BOOL, 1, 1, 20, 1), 40),
    "a conjunction": lambda b: b.call(aten.__and__.Tensor, ones(b), compared(b, "ge", 1, 20)),
}
ANDS = [
    aten.__and__.Tensor,
    aten.bitwise_and.Tensor,
    aten.logical_and.default,
    aten.mul.Tensor,
]


@pytest.mark.parametrize("name", TRUE)
def test_what_allows_everything_is_dropped(name: str) -> None:
    b = GraphBuilder()
    keys, rows = b.arg("keys", BOOL, "n", 1, 1, KEYS), TRUE[name](b)
    masks = [b.call(op, keys, rows) for op in ANDS] + [b.call(op, rows, keys) for op in ANDS]
    assert all(without_allowing_parts(mask) is keys for mask in masks)

    program = b.done(*masks, stage=CapturedGraph)
    given = random_inputs(program, n=2, rows=20)
    for whole in run(program, given):
        assert torch.equal(whole, given[0].expand_as(whole))


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_may_exclude_keys_is_kept(name: str) -> None:
    b = GraphBuilder()
    keys, rows = b.arg("keys", BOOL, "n", 1, 1, KEYS), UNKNOWN[name](b)
    for op in ANDS:
        both = b.call(op, keys, rows)
        assert without_allowing_parts(both) is both


@pytest.mark.parametrize("dtype", NARROW)
def test_positions_of_few_bits_may_wrap(dtype: torch.dtype) -> None:
    b = GraphBuilder()
    rows = b.call(aten.unsqueeze.default, counted(b, dtype=dtype), 1)
    both = b.call(
        aten.__and__.Tensor, b.arg("keys", BOOL, 1, KEYS), b.call(aten.ge.Scalar, rows, 1)
    )
    assert without_allowing_parts(both) is both


@pytest.mark.parametrize("keys", [0, 1])
def test_axes_of_no_or_one_element(keys: int) -> None:
    b = GraphBuilder()
    mask = b.arg("keys", BOOL, 1, 1, 1, keys)
    both = b.call(aten.__and__.Tensor, b.call(aten.ones.default, [1, 1], dtype=BOOL), mask)
    assert without_allowing_parts(both) is mask


def test_numbers_that_are_multiplied_are_no_conjunction() -> None:
    b = GraphBuilder()
    keys = b.arg("keys", torch.float32, "n", 1, 1, KEYS)
    product = b.call(aten.mul.Tensor, keys, b.call(aten.ones.default, [1, 1, 20, 1]))
    assert without_allowing_parts(product) is product


def test_expansions_are_dropped_down_to_two_axes() -> None:
    b = GraphBuilder()
    keys, row = b.arg("keys", BOOL, 1, KEYS), b.arg("row", BOOL, KEYS)
    for source, expected in ((keys, keys), (row, None)):
        mask = b.call(aten.expand.default, source, [2, 4, 20, KEYS])
        assert without_allowing_parts(mask) is (expected or mask)


@pytest.mark.parametrize("rows", [20, "rows"])
def test_layers_share_the_mask_of_their_keys(rows: int | str) -> None:
    library = kernels.load()
    if not library.available:
        pytest.skip(library.reason)
    b = GraphBuilder()
    q = b.arg("q", torch.float32, "n", 4, rows, 8)
    k, v = (b.arg(name, torch.float32, "n", 4, KEYS, 8) for name in "kv")
    keys = b.arg("keys", BOOL, "n", 1, 1, KEYS)
    count = b.call(aten.sym_size.int, q, 2) if isinstance(rows, str) else rows
    index = b.call(aten.arange.default, count)
    allowed = b.call(aten.ge.Scalar, b.call(aten.unsqueeze.default, index, 1), 0)
    mask = b.call(aten.__and__.Tensor, allowed, keys)
    op = aten.scaled_dot_product_attention.default
    program = b.done(b.call(op, b.call(op, q, k, v, mask), k, v, mask), stage=OptimizedGraph)
    low = lower(
        clone(program), Target.for_testing(), CostModel(CostProfile.pinned()), all_kernels(library)
    )

    calls = [n for n in low.graph.nodes if is_call(n, torch.ops.qfuse.attention.default)]
    assert [node_of(arguments(call)["mask"]).name for call in calls] == [keys.name] * 2
    given = random_inputs(program, n=2, **({"rows": 21} if isinstance(rows, str) else {}))
    given[3][:, :, :, 0] = True
    for old, new in zip(run(program, given), run(low, given), strict=True):
        torch.testing.assert_close(old, new, rtol=2e-5, atol=2e-6)
