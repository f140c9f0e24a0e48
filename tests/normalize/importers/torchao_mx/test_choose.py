from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.dialects import fired, ops_of
from tests.support.sources.mx import MODES, Scales, hard, normalized
from torch import nn

from qfuse.ir.events import MissCode, Missed
from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.ir.graph.text import to_text
from qfuse.normalize.importers.torchao_mx.choose import NormalizeMxChoose

aten = torch.ops.aten


def test_golden_scales_of_rows() -> None:
    program = normalized(Scales("rceil"), torch.randn(2, 64).bfloat16())
    assert fired(program)[0] == NormalizeMxChoose.name
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: bfloat16[2, 64]
%0 = qfuse.choose_qparams(%x, 'mx-rceil float8_e4m3fn[-448,448] 1x32 eps=0.0 float8_e8m0fnu int32'): (float8_e8m0fnu[2, 2], int32[2, 2])
%1 = getitem(%0, 0): float8_e8m0fnu[2, 2]
%2 = aten.unsqueeze(%1, -1): float8_e8m0fnu[2, 2, 1]
%3 = aten.squeeze.dim(%2, -1): float8_e8m0fnu[2, 2]
%4 = aten._to_copy(%3, dtype=float32): float32[2, 2]
return (%4)""",
    )


@pytest.mark.numeric
@pytest.mark.pairs
@pytest.mark.parametrize("float_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("mode", MODES)
def test_scales_keep_their_bits(mode: str, dtype: torch.dtype, float_dtype: torch.dtype) -> None:
    program = normalized(Scales(mode, dtype), hard(float_dtype, 3, 5, 96))
    assert ops_of(program) == ["choose_qparams"]


@pytest.mark.numeric
@pytest.mark.parametrize("block", [16, 8])
def test_any_block(block: int) -> None:
    assert ops_of(normalized(Scales("floor", block=block), hard(torch.float32, 6, 32)))


def _change(program: CapturedGraph, op: torch._ops.OpOverload, old: object, new: object) -> None:
    """Change one number in the first call that has it."""
    node = next(n for n in program.graph.nodes if is_call(n, op) and old in n.args)
    node.args = tuple(new if a == old else a for a in node.args)


@pytest.mark.parametrize(
    ("op", "old", "new"),
    [
        (aten.clamp.default, 127, 126),
        (aten.add.Tensor, 127, 128),
        (aten.where.ScalarSelf, 254, 253),
        (aten.div.Tensor, 448.0, 440.0),
    ],
)
def test_refuses_a_spelling_that_computes_something_else(
    op: torch._ops.OpOverload, old: object, new: object
) -> None:
    x = torch.randn(2, 64)
    program = normalized(Scales("rceil"), x, edit=lambda p: _change(p, op, old, new))
    assert not ops_of(program)
    (miss,) = [m for m in program.log.of(Missed) if m.rule == NormalizeMxChoose.name]
    assert miss.code is MissCode.PATTERN
    assert miss.reason.startswith(f"expected {str(op).removesuffix('.default')} with ")
    assert miss.reason.endswith(f"={old:g}, found {new}")


class Narrow(nn.Module):
    """The ratio is rounded to bfloat16, which torchao does not do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        peak = x.view(-1, 2, 32).abs().amax(-1).unsqueeze(-1)
        ratio = peak / 448.0
        finite = (ratio.log2().ceil().clamp(-127, 127) + 127).to(torch.uint8)
        codes = torch.where(ratio.isinf(), 254, finite)
        codes = torch.where(ratio.isnan(), 255, codes)
        return codes.view(torch.float8_e8m0fnu).to(torch.float32)


@pytest.mark.numeric
@pytest.mark.parametrize(("dtype", "known"), [(torch.float32, True), (torch.bfloat16, False)])
def test_refuses_arithmetic_in_bfloat16(dtype: torch.dtype, known: bool) -> None:
    assert bool(ops_of(normalized(Narrow(), torch.randn(4, 64).to(dtype)))) == known


def test_refuses_a_peak_of_something_else() -> None:
    def turned(program: CapturedGraph) -> None:
        node = next(n for n in program.graph.nodes if is_call(n, aten.amax.default))
        with program.graph.inserting_before(node):
            other = program.graph.call_function(aten.neg.default, (node.args[0],))
        other.meta |= {"val": node.args[0].meta["val"]}
        node.args = (other, *node.args[1:])

    assert not ops_of(normalized(Scales("floor"), torch.randn(2, 64), edit=turned))
