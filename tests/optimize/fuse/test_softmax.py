from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.norm import Writer, assert_lowered_alike
from tests.support.cases.propagate import applied, only_miss
from torch.fx import Node

from qfuse.ir.errors import NormalizeError, VerifyError
from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import OptimizedGraph
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.output import ExtraOutput
from qfuse.ir.ops.softmax import Softmax, SoftmaxSpec, as_softmax
from qfuse.ir.quant.spec import QuantSpec
from qfuse.ir.stages.verify import verify
from qfuse.optimize.fuse.softmax import FuseSoftmaxQuantize
from qfuse.rewrite.clone import clone

aten = torch.ops.aten
F32, BF16 = torch.float32, torch.bfloat16
SPEC = QuantSpec(torch.uint8, 0, 255, (None, None, None))


def fused(program: OptimizedGraph, **sizes: int) -> Softmax:
    """Fuse the only softmax: outputs keep their bits and strides, also when it is lowered."""
    source = clone(program)
    found = applied(program, FuseSoftmaxQuantize, context=None, **sizes)
    assert found.fired == {"fuse-softmax-quantize": 1}
    assert_lowered_alike(program, source, **sizes)
    (softmax,) = [v for v in map(as_softmax, program.graph.nodes) if v is not None]
    return softmax


def dequantized(w: Writer, spec: QuantSpec = SPEC) -> Node:
    q = w.b.arg("q", spec.dtype, *w.shape)
    grid = [int(size) for size in spec.grid([1 if isinstance(s, str) else s for s in w.shape])]
    zero = torch.randint(0, 20, grid, dtype=torch.int32)
    return w.call(ops.dequantize, q, w.const(torch.rand(grid) + 0.01), w.const(zero), str(spec))


def masked(w: Writer, x: Node, how: str) -> Node:
    """Mask ``x``."""
    real = x.meta["val"].dtype
    match how:
        case "added":
            return w.call(aten.add.Tensor, x, w.const(torch.randn(5, 7).to(real)))
        case "added to the mask":
            return w.call(aten.add.Tensor, w.const(torch.randn(1, 1, 7).to(real)), x)
        case "filled":
            bools = w.const(torch.rand(5, 7) > 0.7)
            return w.call(aten.masked_fill.Scalar, x, bools, -float("inf"))
        case "whole rows":
            bools = w.const(torch.ones(5, 7, dtype=torch.bool))
            return w.call(aten.masked_fill.Scalar, x, bools, -float("inf"))
        case _:
            return x


def test_golden_a_masked_softmax_of_quantized_scores() -> None:
    w = Writer("m", 5, 7)
    y = w.call(aten.softmax.int, masked(w, dequantized(w), "added"), -1)
    program = w.done(w.static(y, torch.uint8))

    fused(program, m=3)
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[s0, 5, 7]
%q: uint8[s0, 5, 7]
const %c1: float32[1, 1, 1]
const %c2: int32[1, 1, 1]
const %c3: float32[5, 7]
const %scale4: float32[1, 1, 1]
const %zero5: int32[1, 1, 1]
%0 = qfuse.softmax(%q, %c1, %c2, 'uint8[0,255] *x*x* float32 float32:reciprocal:round-zp int', %c3, 'axis=-1 float32:float32', %scale4, %zero5, 'uint8[0,255] *x*x* float32 float32:reciprocal:round-zp int', '', ''): (uint8[s0, 5, 7])
%1 = getitem(%0, 0): uint8[s0, 5, 7]
return (%1)""",
    )


@pytest.mark.numeric
@pytest.mark.pairs
@pytest.mark.parametrize("how", ["none", "added", "added to the mask", "filled", "whole rows"])
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("axis", [-1, 1, 0])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_bits_stay(how: str, stored: bool, axis: int, dtype: torch.dtype) -> None:
    w = Writer("m", 5, 7, dtype=dtype)
    spec = QuantSpec(torch.int8, -128, 127, (None, None, None), dtype)
    scores = dequantized(w, spec) if stored else w.x
    y = w.call(aten.softmax.int, masked(w, scores, how), axis)
    found = fused(w.done(w.dynamic(y)), m=3)
    assert (found.x_params is not None) == stored
    assert (found.mask is not None) == (how != "none")
    assert (found.softmax.fill is not None) == (how in {"filled", "whole rows"})


@pytest.mark.numeric
@pytest.mark.parametrize("wide", [None, F32])
@pytest.mark.parametrize("last", [BF16, F32])
def test_casts_stay_where_they_round(wide: torch.dtype | None, last: torch.dtype) -> None:
    w = Writer("m", 5, 7, dtype=BF16)
    y = w.call(aten.softmax.int, w.x, -1, wide)
    found = fused(w.done(w.static(w.cast(y, last), torch.uint8)), m=2)
    assert (found.softmax.compute, found.softmax.out) == (wide or BF16, last)


@pytest.mark.numeric
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (1, 1), (7,)])
def test_odd_sizes(shape: tuple[int, ...]) -> None:
    w = Writer(*shape)
    y = w.call(aten._softmax.default, w.x, -1, False)
    assert fused(w.done(w.static(y, torch.uint8))).x.name == "x"


@pytest.mark.numeric
def test_the_float_result_is_kept_for_others() -> None:
    w = Writer("m", 5, 7)
    y = w.call(aten.softmax.int, w.x, -1)
    assert fused(w.done(w.static(y), w.call(aten.neg.default, y)), m=3).output.keep == {
        ExtraOutput.FLOAT
    }


@pytest.mark.numeric
def test_masked_scores_that_others_read_stay_outside() -> None:
    w = Writer("m", 5, 7)
    scores = masked(w, w.x, "added")
    y = w.call(aten.softmax.int, scores, -1)
    found = fused(w.done(w.static(y), w.call(aten.neg.default, scores)), m=3)
    assert found.mask is None
    assert found.x.target is aten.add.Tensor


def test_refuses_a_result_before_the_cast_that_others_read() -> None:
    w = Writer("m", 5, 7, dtype=BF16)
    y = w.call(aten.softmax.int, w.x, -1, F32)
    program = w.done(w.static(w.cast(y, BF16)), y)
    assert only_miss(program, FuseSoftmaxQuantize, context=None, m=2).code is MissCode.SHARED


@pytest.mark.parametrize("text", ["", "axis=1", "axis=-1 float32", "axis=0 a:b", "axis=0 x:y z"])
def test_other_texts_are_no_softmax(text: str) -> None:
    with pytest.raises(NormalizeError):
        SoftmaxSpec.parse(text)


@pytest.mark.parametrize("fill", ["", " fill=-inf"])
def test_a_mask_of_bools_is_filled_and_no_other(fill: str) -> None:
    w = Writer(5, 7)
    wrong: Any = w.x if fill else w.const(torch.ones(5, 7, dtype=torch.bool))
    plain = (None, None, "")
    spec = f"axis=-1 float32:float32{fill}"
    node = w.call(ops.softmax, w.x, *plain, None, "axis=-1 float32:float32", *plain, "", "")
    program = w.done(w.b.item(node, 0))
    verify(program)
    node.update_arg(4, wrong)
    node.update_arg(5, spec)
    with pytest.raises(VerifyError, match="a mask of bools"):
        verify(program)
