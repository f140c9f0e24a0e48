from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.dialects import fired, ops_of
from tests.support.sources.mx import MODES, Quantizes, hard, normalized

from qfuse.ir.events import MissCode
from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.ir.graph.text import to_text
from qfuse.normalize.importers.torchao_mx.quantize import NormalizeMxQuantize
from qfuse.rewrite.rule import Miss

aten = torch.ops.aten


def test_golden_rows_in_blocks() -> None:
    program = normalized(Quantizes("floor"), torch.randn(2, 3, 64))
    assert NormalizeMxQuantize.name in fired(program)
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[2, 3, 64]
%0 = qfuse.choose_qparams(%x, 'mx-floor float8_e4m3fn[-448,448] 1x1x32 eps=0.0 float8_e8m0fnu int32'): (float8_e8m0fnu[2, 3, 2], int32[2, 3, 2])
%1 = getitem(%0, 0): float8_e8m0fnu[2, 3, 2]
%2 = qfuse.quantize(%x, %1, None, 'float8_e4m3fn[-448,448] 1x1x32 float32 float32:divide:round-zp none e8m0'): float8_e4m3fn[2, 3, 64]
%3 = aten._to_copy(%2, dtype=float32): float32[2, 3, 64]
return (%3)""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize("float_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
def test_stored_numbers_keep_their_bits(mode: str, float_dtype: torch.dtype) -> None:
    program = normalized(Quantizes(mode), hard(float_dtype, 7, 96))
    assert ops_of(program) == ["choose_qparams", "quantize"]


@pytest.mark.numeric
@pytest.mark.parametrize("mode", MODES)
def test_e5m2_only_where_it_is_clamped(mode: str) -> None:
    # Traced, torchao leaves the clamp to the cast, and torch's cast to e5m2 gives infinities.
    program = normalized(Quantizes(mode, torch.float8_e5m2), hard(torch.bfloat16, 7, 96))
    assert ("quantize" in ops_of(program)) == (mode == "rceil")


def test_one_block_per_row_is_not_viewed() -> None:
    program = normalized(Quantizes("rceil"), torch.randn(4, 32))
    assert ops_of(program) == ["choose_qparams", "quantize"]


def _replaced(program: CapturedGraph, op: torch._ops.OpOverload, **changes: object) -> None:
    node = [n for n in program.graph.nodes if is_call(n, op)][-1]
    names = [a.name for a in op._schema.arguments]
    node.args = tuple(changes.get(name, arg) for name, arg in zip(names, node.args, strict=False))


@pytest.mark.parametrize("top", [440.0, 500.0])
def test_refuses_another_range(top: float) -> None:
    program = normalized(
        Quantizes("rceil"),
        torch.randn(2, 64),
        edit=lambda p: _replaced(p, aten.clamp.default, min=-top, max=top),
    )
    assert "quantize" not in ops_of(program)
    cast = [n for n in program.graph.nodes if is_call(n, aten._to_copy.default)][-1]
    miss = NormalizeMxQuantize().match(cast)
    assert isinstance(miss, Miss)
    # Without the clamp of this range, the cast is that of a plain view.
    assert (miss.code, miss.at.target) == (MissCode.PATTERN, aten.view.default)


def test_refuses_scales_of_other_numbers() -> None:
    def turned(program: CapturedGraph) -> None:
        node = next(n for n in program.graph.nodes if is_call(n, aten.div.Tensor))
        with program.graph.inserting_before(node):
            other = program.graph.call_function(aten.neg.default, (node.args[0],))
        other.meta |= {"val": node.args[0].meta["val"]}
        node.args = (other, *node.args[1:])

    program = normalized(Quantizes("floor"), torch.randn(2, 64), edit=turned)
    assert "quantize" not in ops_of(program)
