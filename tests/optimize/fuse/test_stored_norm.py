from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.norm import Spelling, Writer, assert_lowered_alike, the_norm
from tests.support.cases.propagate import applied, only_miss
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops import library as ops
from qfuse.ir.quant.spec import QuantSpec
from qfuse.optimize.fuse.stored_norm import FuseStoredNorm
from qfuse.rewrite.clone import clone

aten = torch.ops.aten
F32, BF16 = torch.float32, torch.bfloat16
SPECS = [
    QuantSpec(torch.int8, -128, 127, (None, None)),
    QuantSpec(torch.uint8, 0, 255, (1, None)),
    QuantSpec(torch.int8, -128, 127, (None, None), BF16),
]
SPELLINGS = [
    Spelling(),
    Spelling(weight="none"),
    Spelling(centre="once", bias=True),
    Spelling(wide=F32, rounded=BF16, weight_dtype=BF16),
    Spelling(wide=F32, weight="none", out=BF16),
]


def dequantized(w: Writer, spec: QuantSpec = SPECS[0]) -> Node:
    grid = [int(size) for size in spec.grid((5, 12))]
    scale, zero = torch.rand(grid) * 0.05 + 1e-2, torch.randint(0, 20, grid, dtype=torch.int32)
    q = w.b.arg("q", spec.dtype, 5, 12)
    return w.call(ops.dequantize, q, w.const(scale), w.const(zero), str(spec))


def layer_norm(w: Writer, x: Node) -> Node:
    return w.call(aten.layer_norm.default, x, [12], w.const(torch.randn(12)), None, 1e-5, False)


def test_golden() -> None:
    w = Writer(5, 12)
    program = w.done(layer_norm(w, dequantized(w)))
    assert applied(program, FuseStoredNorm, context=None).fired == {"fuse-stored-norm": 1}
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[5, 12]
%q: int8[5, 12]
const %c1: float32[1, 1]
const %c2: int32[1, 1]
const %c3: float32[12]
%0 = qfuse.layer_norm(%q, %c1, %c2, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int', None, None, None, '', %c3, None, 'axes=1 eps=1e-05 float32:float32:float32:float32 rsqrt whole', None, None, '', '', ''): (float32[5, 12])
%1 = getitem(%0, 0): float32[5, 12]
return (%1)""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("spelling", SPELLINGS, ids=str)
def test_the_whole_norm_keeps_its_bits(spelling: Spelling, spec: QuantSpec) -> None:
    w = Writer(5, 12)
    y = w.spelled(spelling, dequantized(w, spec))
    program = w.done(w.call(aten.neg.default, y))
    source = clone(program)
    assert applied(program, FuseStoredNorm, context=None).fired == {"fuse-stored-norm": 1}
    norm = the_norm(program)
    assert norm.x_params is not None
    assert (norm.weight is None) == (spelling.weight == "none")
    assert_lowered_alike(program, source)


def test_a_float_input_is_no_near_miss() -> None:
    w = Writer(5, 12)
    result: Any = applied(w.done(layer_norm(w, w.x)), FuseStoredNorm, context=None)
    assert not result.modified


def test_refuses_a_part_that_others_read() -> None:
    w = Writer(5, 12)
    y = w.spelled(Spelling(), dequantized(w))
    (root,) = [n for n in w.b.graph.nodes if n.target is aten.rsqrt.default]
    program = w.done(y, w.call(aten.neg.default, root))
    assert only_miss(program, FuseStoredNorm, context=None).code is MissCode.SHARED
