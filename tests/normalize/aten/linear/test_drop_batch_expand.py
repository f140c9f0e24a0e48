from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import (
    assert_same_values,
    aten,
    calls,
    codes,
    finish,
    golden,
    scales,
)
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.matmul import as_fused_matmul
from qfuse.ir.ops.views import shape_of
from qfuse.normalize import normalize
from qfuse.normalize.aten.linear.drop_batch_expand import DropBatchExpand
from qfuse.optimize import optimize
from qfuse.rewrite.driver import apply_rules
from qfuse.rewrite.rule import Miss
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import per_tensor

F32 = torch.float32
Shape = tuple[int | str, ...]


class Heads:
    """Dequantized queries ``[b, h, m, d]`` and keys, which are shared by all heads."""

    def __init__(self, q: Shape = (2, 4, "m", 8), k: Shape = (2, 1, 5, 8)) -> None:
        self.b = GraphBuilder()
        self.q = self.dequantized("q", *q)
        self.k = self.dequantized("k", *k)

    def dequantized(self, name: str, *shape: int | str) -> Node:
        """A dequantize of an input."""
        b = self.b
        scale = b.const(f"{name}_scale", torch.full((1,) * len(shape), 0.05))
        q = b.arg(name, torch.int8, *shape)
        return b.call(ops.dequantize, q, scale, None, str(per_tensor(len(shape))))

    def expanded(self, *sizes: int, copy: bool = False) -> Node:
        """The keys for all heads, transposed."""
        k = self.b.call(aten.expand.default, self.k, list(sizes))
        if copy:
            k = self.b.call(aten.clone.default, k, memory_format=torch.contiguous_format)
        return self.b.call(aten.transpose.int, k, -1, -2)

    def done(self, k: Node, op: Any = aten.matmul.default) -> CapturedGraph:
        """Finish with the scores."""
        return finish(self.b, self.b.call(op, self.q, k))


def refusal(program: CapturedGraph) -> Miss:
    """Return why the rule, which must refuse once, does not fire."""
    result = apply_rules(program, [DropBatchExpand()])
    assert not result.modified
    (miss,) = [m for _, m in result.misses]
    return miss


def test_golden_keys_of_one_head() -> None:
    case = Heads()
    assert_expected_inline(
        golden(case.done(case.expanded(2, 4, 5, 8)), DropBatchExpand()),
        """\
const %q_scale: float32[1, 1, 1, 1]
%q: int8[2, 4, s0, 8]
%0 = qfuse.dequantize(%q, %q_scale, None, 'int8[-128,127] *x*x*x* float32 float32:reciprocal:round-zp int'): float32[2, 4, s0, 8]
const %k_scale: float32[1, 1, 1, 1]
%k: int8[2, 1, 5, 8]
%1 = qfuse.dequantize(%k, %k_scale, None, 'int8[-128,127] *x*x*x* float32 float32:reciprocal:round-zp int'): float32[2, 1, 5, 8]
%2 = aten.permute(%1, (0, 1, 3, 2)): float32[2, 1, 8, 5]
%3 = aten.matmul(%0, %2): float32[2, 4, s0, 5]
return (%3)
fired: drop-batch-expand 1""",
    )


KEYS: dict[str, tuple[Shape, tuple[int, ...]]] = {
    "one head": ((2, 1, 5, 8), (2, 4, 5, 8)),
    "one head of an implied size": ((2, 1, 5, 8), (-1, 4, -1, -1)),
    "one batch": ((1, 4, 5, 8), (2, 4, 5, 8)),
    "one of both": ((1, 1, 5, 8), (2, 4, 5, 8)),
    "no batch axes": ((5, 8), (2, 4, 5, 8)),
    "a new batch axis": ((4, 5, 8), (2, 4, 5, 8)),
}


@pytest.mark.numeric
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("copy", [False, True])
def test_values_are_the_same(keys: str, copy: bool) -> None:
    shape, sizes = KEYS[keys]
    case = Heads(k=shape)
    program = case.done(case.expanded(*sizes, copy=copy))

    assert_same_values(program, [codes(2, 4, 3, 8), codes(*map(int, shape))], DropBatchExpand())
    assert "aten.expand" not in calls(program)


@pytest.mark.numeric
def test_an_expanded_axis_is_permuted() -> None:
    case = Heads(k=(2, 5, 1, 8))
    wide = case.b.call(aten.expand.default, case.k, [2, 5, 4, 8])
    program = case.done(case.b.call(aten.permute.default, wide, [0, 2, 3, 1]))

    assert_same_values(program, [codes(2, 4, 3, 8), codes(2, 5, 1, 8)], DropBatchExpand())
    assert "aten.expand" not in calls(program)


@pytest.mark.numeric
@pytest.mark.parametrize("keys", [(1, 5, 8), (5, 8)])
def test_a_bmm(keys: tuple[int, ...]) -> None:
    case = Heads((4, "m", 8), keys)
    program = case.done(case.expanded(4, 5, 8), aten.bmm.default)

    assert_same_values(program, [codes(4, 3, 8), codes(*keys)], DropBatchExpand())
    assert "aten.matmul" in calls(program)


@pytest.mark.numeric
def test_the_left_operand() -> None:
    case = Heads((2, 1, 3, 8), (2, 4, 8, 5))
    wide = case.b.call(aten.expand.default, case.q, [2, 4, 3, 8])
    program = finish(case.b, case.b.call(aten.matmul.default, wide, case.k))

    assert_same_values(program, [codes(2, 1, 3, 8), codes(2, 4, 8, 5)], DropBatchExpand())
    assert "aten.expand" not in calls(program)


@pytest.mark.numeric
def test_only_one_of_two_expansions_gives_the_batch() -> None:
    case = Heads((1, 4, 3, 8), (1, 1, 5, 8))
    q = case.b.call(aten.expand.default, case.q, [2, 4, 3, 8])
    program = finish(case.b, case.b.call(aten.matmul.default, q, case.expanded(2, 4, 5, 8)))

    assert_same_values(program, [codes(1, 4, 3, 8), codes(1, 1, 5, 8)], DropBatchExpand())
    assert calls(program).count("aten.expand") == 1


@pytest.mark.numeric
def test_a_cache_that_is_scaled_at_run_time() -> None:
    case = Heads()
    b = case.b
    cast = b.call(aten._to_copy.default, b.arg("c", torch.int8, 2, 1, 5, 8), dtype=F32)
    case.k = b.call(aten.mul.Tensor, cast, b.arg("s", F32, 2, 1, 5, 1))
    program = case.done(case.expanded(2, 4, 5, 8))
    keys = codes(2, 1, 5, 8)
    given = [codes(2, 4, 3, 8), keys, keys, scales(2, 1, 5, 1)]

    assert_same_values(program, given, DropBatchExpand())
    assert "aten.expand" not in calls(program)


def test_the_kernel_reads_one_head() -> None:
    case = Heads()
    done = optimize(normalize(case.done(case.expanded(2, 4, 5, 8))))

    (fused,) = [view for node in done.graph.nodes if (view := as_fused_matmul(node))]
    assert tuple(shape_of(fused.other)) == (2, 1, 8, 5)
    assert fused.other_params is not None


def test_refuses_axes_that_are_multiplied() -> None:
    case = Heads(k=(2, 4, 1, 8))
    miss = refusal(case.done(case.expanded(2, 4, 5, 8)))

    assert miss.code is MissCode.AXIS
    assert miss.reason == "the expansion repeats axes that are multiplied"


@pytest.mark.parametrize("q", [(1, 4, 3, 8), (4, 3, 8), ("n", 4, 3, 8)], ids=str)
def test_refuses_an_expansion_that_gives_the_result_its_batch(q: Shape) -> None:
    case = Heads(q, (1, 4, 5, 8))
    if q[0] == "n":
        # The batch of the queries is 2 only in the example, as far as anybody knows.
        case.q = case.b.call(aten.slice.Tensor, case.q, 0, 0, 1)
    miss = refusal(case.done(case.expanded(2, 4, 5, 8)))

    assert miss.code is MissCode.SHAPE
    assert miss.reason == "the result has its batch axes only from the expanded operand"


@pytest.mark.parametrize("kind", ["float", "no expansion", "a view after it", "a weight"])
def test_what_is_not_its_business(kind: str) -> None:
    case = Heads((2, 4, 3, 8))
    b = case.b
    if kind == "float":
        case.q = b.arg("x", F32, 2, 4, 3, 8)
    elif kind == "a weight":
        case.k = b.const("w", torch.randn(2, 1, 5, 8))
    k = case.expanded(2, 4, 5, 8)
    if kind == "no expansion":
        k = b.call(aten.transpose.int, case.k, -1, -2)
    elif kind == "a view after it":
        k = b.call(aten.reshape.default, k, [2, 4, 8, 5])
        k = b.call(aten.slice.Tensor, k, 3, 0, 3)
    result = apply_rules(case.done(k), [DropBatchExpand()])

    assert (result.modified, list(result.misses)) == (False, [])
