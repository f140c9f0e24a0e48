from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import (
    assert_same_values,
    aten,
    calls,
    finish,
    golden,
    refusal,
    whole,
)

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.normalize.aten.linear.permute_features import PermuteFeatures
from qfuse.testing.build import GraphBuilder

K, N = 6, 6
ORDER = torch.tensor([3, 0, 5, 1, 4, 2])


def program_of(
    axis: int = 1,
    order: torch.Tensor | None = None,
    *,
    turned: bool = False,
    lead: tuple[int | str, ...] = ("m",),
    bias: bool = False,
) -> CapturedGraph:
    b = GraphBuilder()
    index = b.const("order", ORDER if order is None else order)
    w = b.call(aten.index_select.default, b.const("w", whole(N, K)), axis, index)
    w = b.call(aten.t.default, w) if turned else w
    operands = [b.arg("x", torch.float32, *lead, K), w]
    operands += [b.const("bias", whole(N))] if bias else []
    return finish(b, b.call(aten.linear.default, *operands))


def test_golden_the_input_is_permuted() -> None:
    assert_expected_inline(
        golden(program_of(bias=True), PermuteFeatures()),
        """\
const %w: float32[6, 6]
%x: float32[s0, 6]
const %bias: float32[6]
const %order_inverse: int64[6]
%0 = aten.index_select(%x, 1, %order_inverse): float32[s0, 6]
%1 = aten.linear(%0, %w, %bias): float32[s0, 6]
return (%1)
fired: permute-features 1""",
    )


@pytest.mark.parametrize(("axis", "turned"), [(0, False), (1, True)])
def test_refuses_permuted_output_features(axis: int, turned: bool) -> None:
    program = program_of(axis, turned=turned)
    assert refusal(program, PermuteFeatures())[0] is MissCode.AXIS


@pytest.mark.parametrize("order", [[0, 0, 1, 2, 3, 4], [1, 2, 3, 4, 5, 5]])
def test_refuses_indices_that_are_no_permutation(order: list[int]) -> None:
    program = program_of(order=torch.tensor(order))
    assert refusal(program, PermuteFeatures()) == (MissCode.ARGUMENT, "order")


def test_refuses_an_order_that_is_computed_at_run_time() -> None:
    b = GraphBuilder()
    w = b.call(
        aten.index_select.default, b.const("w", whole(N, K)), 1, b.arg("order", torch.int64, K)
    )
    y = b.call(aten.linear.default, b.arg("x", torch.float32, 3, K), w)
    assert refusal(finish(b, y), PermuteFeatures()) == (MissCode.NOT_CONSTANT, "order")


@pytest.mark.numeric
@pytest.mark.parametrize(("turned", "axis"), [(True, 0), (False, 1), (False, -1)])
@pytest.mark.parametrize("lead", [(), (1,), (3,), (2, 3), (0,)])
def test_sums_are_the_same(turned: bool, lead: tuple[int, ...], axis: int) -> None:
    program = program_of(axis, turned=turned, lead=lead, bias=True)
    result = assert_same_values(program, [whole(*lead, K)], PermuteFeatures(), exact=True)

    assert result.fired == {"permute-features": 1}
    assert calls(program).index("aten.index_select") < calls(program).index("aten.linear")
