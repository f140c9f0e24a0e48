from __future__ import annotations

from typing import Any

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
)
from tests.support.sources.dialects import hard_numbers
from torch.fx import Interpreter, Node

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.normalize.aten.qdq.choose_qparams import ChooseChain
from qfuse.normalize.aten.qdq.quantize import QuantizeChain
from qfuse.rewrite.driver import apply_rules
from qfuse.testing.build import GraphBuilder

K = 9


def source(  # noqa: PLR0913 - whatever may differ
    b: GraphBuilder,
    x: Node,
    *,
    of: Node | None = None,
    dims: Any = (-1,),
    least: tuple[Any, ...] = (1e-5,),
    top: Any = 127,
    bounds: tuple[int, int] = (-128, 127),
    zero: int = 0,
    magnitude: bool = True,
    dtype: torch.dtype = torch.int8,
) -> tuple[Node, Node]:
    """Quantize ``x`` by rows, as code without a quantization op does; return codes and scale."""
    peak = x if of is None else of
    peak = b.call(aten.abs.default, peak) if magnitude else peak
    peak = b.call(aten.amax.default, peak, list(dims), True)
    scale = b.call(aten.div.Tensor, b.call(aten.clamp.default, peak, *least), top)
    y = b.call(aten.round.default, b.call(aten.div.Tensor, x, scale))
    y = b.call(aten.add.Tensor, y, zero) if zero else y
    y = b.call(aten.clamp.default, y, *bounds)
    return b.call(aten._to_copy.default, y, dtype=dtype), scale


def program_of(dtype: torch.dtype = torch.float32, **changes: Any) -> CapturedGraph:
    b = GraphBuilder()
    return finish(b, *source(b, b.arg("x", dtype, 3, K), **changes))


def refused(program: CapturedGraph) -> tuple[MissCode, str]:
    assert apply_rules(program, [QuantizeChain()]).modified
    return refusal(program, ChooseChain())


def test_golden_the_greatest_magnitude_of_a_row() -> None:
    b = GraphBuilder()
    program = finish(b, *source(b, b.arg("x", torch.bfloat16, "m", K), bounds=(-127, 127)))

    assert_expected_inline(
        golden(program, QuantizeChain(), ChooseChain()),
        """\
%x: bfloat16[s0, 9]
%0 = qfuse.choose_qparams(%x, 'token-symmetric int8[-127,127] 1x* eps=1e-05 bfloat16 bfloat16'): (bfloat16[s0, 1], bfloat16[s0, 1])
%1 = getitem(%0, 0): bfloat16[s0, 1]
%2 = qfuse.quantize(%x, %1, None, 'int8[-127,127] 1x* bfloat16 bfloat16:divide:round-zp int'): int8[s0, 9]
return (%2, %1)
fired: quantize-chain 1, choose-chain 1""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "changes",
    [{}, {"dims": (2,), "bounds": (-127, 127)}, {"top": 7.0, "bounds": (-8, 7), "least": (0.3,)}],
    ids=["plain", "symmetric", "four-bits"],
)
def test_bits_are_those_of_the_chain(dtype: torch.dtype, changes: dict[str, Any]) -> None:
    b = GraphBuilder()
    program = finish(b, *source(b, b.arg("x", dtype, "b", 4, K), **changes))
    x = torch.randn(3, 4, K).to(dtype)
    x[0] = hard_numbers((4, K), dtype)
    x[1, 0], x[1, 1], x[1, 2] = 0.0, -0.0, -3.0
    result = assert_same_values(program, [x], QuantizeChain(), ChooseChain(), exact=True)
    assert result.fired == {"quantize-chain": 1, "choose-chain": 1}


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf"), 1e-42])
def test_rows_with_odd_numbers_have_the_same_scale(dtype: torch.dtype, odd: float) -> None:
    program, chosen = program_of(dtype), program_of(dtype)
    apply_rules(chosen, [QuantizeChain(), ChooseChain()])
    x = torch.randn(3, K).to(dtype)
    x[1, 2], x[2] = odd, odd

    (_, old), (_, new) = (Interpreter(p.module).run(x) for p in (program, chosen))
    assert "qfuse.choose_qparams" in calls(chosen)
    assert torch.equal(old.isnan(), new.isnan())
    assert torch.equal(old.nan_to_num(), new.nan_to_num())


@pytest.mark.parametrize(
    ("changes", "code", "at"),
    [
        ({"dtype": torch.float16}, MissCode.DTYPE, "x"),
        ({"top": 128}, MissCode.RANGE, "div_tensor"),
        ({"top": 127.5}, MissCode.RANGE, "div_tensor"),
        ({"bounds": (-100, 127)}, MissCode.RANGE, "quantize_default"),
        ({"bounds": (-128, 100)}, MissCode.RANGE, "quantize_default"),
        ({"zero": 3}, MissCode.ZERO_POINT, "_to_copy_default_zero_point"),
        ({"dims": (0,)}, MissCode.GRANULARITY, "amax_default"),
        ({"dims": (0, 1)}, MissCode.GRANULARITY, "amax_default"),
        ({"least": (1e-5, 10.0)}, MissCode.ARGUMENT, "clamp_default"),
        ({"least": (None, 10.0)}, MissCode.ARGUMENT, "clamp_default"),
        ({"least": (0.0,)}, MissCode.ARGUMENT, "clamp_default"),
        ({"magnitude": False}, MissCode.PATTERN, "x"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_refuses_other_choices(changes: dict[str, Any], code: MissCode, at: str) -> None:
    assert refused(program_of(**changes)) == (code, at)


def test_refuses_a_scale_of_other_data() -> None:
    b = GraphBuilder()
    x, other = b.arg("x", torch.float32, 3, K), b.arg("other", torch.float32, 3, K)
    program = finish(b, *source(b, x, of=other))

    assert refused(program) == (MissCode.PATTERN, "other")


def test_refuses_a_scale_without_a_least_one() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 3, K)
    peak = b.call(aten.amax.default, b.call(aten.abs.default, x), [-1], True)
    scale = b.call(aten.div.Tensor, peak, 127)
    y = b.call(aten.round.default, b.call(aten.div.Tensor, x, scale))
    y = b.call(aten.clamp.default, y, -128, 127)
    program = finish(b, b.call(aten._to_copy.default, y, dtype=torch.int8))

    assert refused(program) == (MissCode.PATTERN, "amax_default")
