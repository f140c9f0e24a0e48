from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import (
    assert_same_values,
    aten,
    finish,
    golden,
    refusal,
    whole,
)

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.normalize.aten.linear.spellings import LINEAR_FROM
from qfuse.testing.build import GraphBuilder

EQUATIONS = ["bsk,nk->bsn", "b s k, k n -> b s n", "...k,nk->...n", "nk,bsk->bsn", "kn,...k->...n"]


def source(
    b: GraphBuilder, equation: str, make: Callable[..., torch.Tensor], dtype: torch.dtype
) -> CapturedGraph:
    """Add an einsum of ``x [2, 3, 33]`` and a weight of 33 to 7 features."""
    x = b.arg("x", dtype, 2, 3, 33)
    term = next(t for t in equation.replace(" ", "").split("->")[0].split(",") if "n" in t)
    shape = (7, 33) if term == "nk" else (33, 7)
    w = b.const("w", make(*shape).to(dtype))
    operands = [w, x] if equation.startswith(("nk", "kn")) else [x, w]
    return finish(b, b.call(aten.einsum.default, equation, operands))


def test_golden_an_equation_with_letters() -> None:
    program = source(GraphBuilder(), EQUATIONS[0], torch.randn, torch.float32)

    assert_expected_inline(
        golden(program, LINEAR_FROM["einsum"]()),
        """\
%x: float32[2, 3, 33]
const %w: float32[7, 33]
%0 = aten.linear(%x, %w): float32[2, 3, 7]
return (%0)
fired: linear-from-einsum 1""",
    )


def test_golden_an_equation_with_dots_and_the_weight_first() -> None:
    program = source(GraphBuilder(), EQUATIONS[4], torch.randn, torch.float32)

    assert_expected_inline(
        golden(program, LINEAR_FROM["einsum"]()),
        """\
%x: float32[2, 3, 33]
const %w_t: float32[7, 33]
%0 = aten.linear(%x, %w_t): float32[2, 3, 7]
return (%0)
fired: linear-from-einsum 1""",
    )


@pytest.mark.parametrize(
    "equation",
    [
        "bsk,nk->bns",
        "bsk,nk->nbs",
        "bsk,nk->sn",
        "bsk,nk->bsnk",
        "bsk,kk->bsk",
        "bbk,nk->bn",
        "bks,nk->bsn",
        "bsk,sk->bsk",
        "bsk,nk",
    ],
)
def test_refuses_more_than_a_product_over_the_last_axis(equation: str) -> None:
    b = GraphBuilder()
    x, w = b.arg("x", torch.float32, 8, 8, 8), b.const("w", torch.randn(8, 8))
    program = finish(b, b.call(aten.einsum.default, equation, [x, w]))

    assert refusal(program, LINEAR_FROM["einsum"]()) == (MissCode.PATTERN, "einsum_default")


@pytest.mark.parametrize(("k", "shape"), [(8, (16, 1)), (1, (16, 8))])
def test_refuses_an_axis_of_one_element_that_is_spread(k: int, shape: tuple[int, int]) -> None:
    b = GraphBuilder()
    x, w = b.arg("x", torch.float32, 2, k), b.const("w", torch.randn(shape))
    program = finish(b, b.call(aten.einsum.default, "bk,nk->bn", [x, w]))

    assert refusal(program, LINEAR_FROM["einsum"]()) == (MissCode.SHAPE, "einsum_default")


def test_refuses_two_activations() -> None:
    b = GraphBuilder()
    x, y = b.arg("x", torch.float32, 3, 8), b.arg("y", torch.float32, 4, 8)
    program = finish(b, b.call(aten.einsum.default, "mk,nk->mn", [x, y]))

    assert refusal(program, LINEAR_FROM["einsum"]()) == (MissCode.NOT_CONSTANT, "y")


def test_refuses_three_operands() -> None:
    b = GraphBuilder()
    x, w = b.arg("x", torch.float32, 3, 8), b.const("w", torch.randn(8, 8))
    program = finish(b, b.call(aten.einsum.default, "mk,nk,on->mo", [x, w, w]))

    assert refusal(program, LINEAR_FROM["einsum"]()) == (MissCode.PATTERN, "einsum_default")


@pytest.mark.numeric
@pytest.mark.parametrize("equation", EQUATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_agree(equation: str, dtype: torch.dtype) -> None:
    for exact in (True, False):
        make = whole if exact else torch.randn
        program = source(GraphBuilder(), equation, make, dtype)

        inputs = [make(2, 3, 33).to(dtype)]
        result = assert_same_values(program, inputs, LINEAR_FROM["einsum"](), exact=exact)

        assert result.fired == {"linear-from-einsum": 1}
