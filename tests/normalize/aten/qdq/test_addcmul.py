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
    scales,
)

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.normalize import normalize
from qfuse.normalize.aten.qdq.addcmul import SpellAddcmul
from qfuse.normalize.aten.qdq.dequantize import DequantizeChain
from qfuse.testing.build import GraphBuilder

N, K = 6, 24
F32, B16 = torch.float32, torch.bfloat16


def weight(
    dtype: torch.dtype = F32,
    *,
    swapped: bool = False,
    zero: int = 0,
    offset: torch.Tensor | None = None,
    run_time: str = "",
    **value: Any,
) -> CapturedGraph:
    """A linear, the weight of which is an ``addcmul``.

    Args:
        dtype: The float dtype.
        swapped: The scale comes first.
        zero: An integer that is subtracted before.
        offset: What is added, by default one number per row.
        run_time: An operand that is an input.
        value: The factor of the op.
    """
    b = GraphBuilder()
    given = {"s": scales(N, 1), "z": torch.randn(N, 1) if offset is None else offset}
    parts = {
        name: b.arg(name, dtype, *part.shape)
        if name == run_time
        else b.const(name, part if part.dtype == torch.int32 else part.to(dtype))
        for name, part in given.items()
    }
    q = b.const("q", torch.randint(0, 16, (N, K), dtype=torch.uint8))
    cast = b.call(aten._to_copy.default, q, dtype=dtype)
    if zero:
        cast = b.call(aten.sub.Tensor, cast, zero)
    pair = (parts["s"], cast) if swapped else (cast, parts["s"])
    real = b.call(aten.addcmul.default, parts["z"], *pair, **value)
    x = b.arg("x", dtype, 3, K)
    return finish(b, b.call(aten.linear.default, x, real))


def test_golden_a_factor_is_part_of_the_scale() -> None:
    assert_expected_inline(
        golden(weight(value=0.5), SpellAddcmul()),
        """\
const %q: uint8[6, 24]
%0 = aten._to_copy(%q, dtype=float32): float32[6, 24]
const %s_scaled: float32[6, 1]
%1 = aten.mul.Tensor(%0, %s_scaled): float32[6, 24]
const %z: float32[6, 1]
%2 = aten.add.Tensor(%1, %z): float32[6, 24]
%x: float32[3, 24]
%3 = aten.linear(%x, %2): float32[3, 6]
return (%3)
fired: spell-addcmul 1""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [F32, B16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("form", [{}, {"swapped": True}, {"value": 0.75}, {"zero": 7}], ids=str)
def test_values(dtype: torch.dtype, form: dict[str, Any]) -> None:
    program = weight(dtype, **form)
    assert_same_values(program, [torch.randn(3, K).to(dtype)], SpellAddcmul(), DequantizeChain())
    assert "aten.addcmul" not in calls(program)


@pytest.mark.parametrize("dtype", [F32, B16], ids=str)
def test_the_sum_is_the_offset_of_a_dequantize(dtype: torch.dtype) -> None:
    done = normalize(weight(dtype))

    assert [name for name in calls(done) if name != "aten.linear"] == ["qfuse.dequantize"]


@pytest.mark.parametrize(
    ("form", "code"),
    [
        ({"run_time": "s"}, MissCode.NOT_CONSTANT),
        ({"run_time": "z"}, MissCode.NOT_CONSTANT),
        ({"offset": torch.ones(N, 1, dtype=torch.int32)}, MissCode.DTYPE),
    ],
    ids=str,
)
def test_refuses_what_is_no_scale_or_offset(form: dict[str, Any], code: MissCode) -> None:
    assert refusal(weight(**form), SpellAddcmul())[0] is code


def test_refuses_a_sum_that_is_larger_than_the_weight() -> None:
    b = GraphBuilder()
    q = b.const("q", torch.randint(0, 16, (1, K), dtype=torch.uint8))
    cast = b.call(aten._to_copy.default, q, dtype=F32)
    s, z = b.const("s", scales(1, 1)), b.const("z", torch.randn(N, 1))
    real = b.call(aten.addcmul.default, z, cast, s)
    out = b.call(aten.linear.default, b.arg("x", F32, 3, K), real)

    assert refusal(finish(b, out), SpellAddcmul())[0] is MissCode.SHAPE


def test_other_sums_are_not_its_business() -> None:
    b = GraphBuilder()
    x, y, z = (b.arg(name, F32, N, K) for name in "xyz")
    out = b.call(aten.addcmul.default, x, y, z)

    assert refusal(finish(b, out), SpellAddcmul()) == (MissCode.PATTERN, out.name)
