from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.dialects import fired, ops_of
from tests.support.sources.mx import Dequantizes, normalized
from torch import nn

from qfuse.ir.events import MissCode, Missed
from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.text import to_text
from qfuse.normalize.importers.torchao_mx.dequantize import NormalizeMxDequantize
from qfuse.zoo._torchao_api import quiet_imports

with quiet_imports():
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

from qfuse.ir.graph.stage_graph import CapturedGraph

aten = torch.ops.aten
E8M0 = torch.float8_e8m0fnu


def stored(dtype: torch.dtype, *shape: int, block: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantized values, and scales of which one is the least, one the greatest and one NaN."""
    q = (torch.randn(shape) * 100).to(dtype)
    scale = torch.randint(90, 160, (*shape[:-1], shape[-1] // block)).to(torch.uint8)
    scale.view(-1)[:3] = torch.tensor([0, 254, 255], dtype=torch.uint8)
    return q, scale.view(E8M0)


def test_golden_rows() -> None:
    program = normalized(Dequantizes(torch.bfloat16), *stored(torch.float8_e4m3fn, 2, 3, 64))
    assert NormalizeMxDequantize.name in fired(program)
    assert_expected_inline(
        to_text(program.graph),
        """\
%q: float8_e4m3fn[2, 3, 64]
%scale: float8_e8m0fnu[2, 3, 2]
%0 = qfuse.dequantize(%q, %scale, None, 'float8_e4m3fn[-448,448] 1x1x32 bfloat16 float32:reciprocal:round-zp none e8m0'): bfloat16[2, 3, 64]
return (%0)""",
    )


@pytest.mark.numeric
@pytest.mark.pairs
@pytest.mark.parametrize("float_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("block", [32, 8])
def test_real_numbers_keep_their_bits(
    dtype: torch.dtype, float_dtype: torch.dtype, block: int
) -> None:
    program = normalized(Dequantizes(float_dtype, block), *stored(dtype, 3, 96, block=block))
    assert ops_of(program) == ["dequantize"]


class Weight(nn.Module):
    """A weight whose scales are in the order that tensor cores want."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(48, 96).bfloat16()
        self.weight = MXTensor.to_mx(weight, torch.float8_e4m3fn, is_swizzled_scales=True)
        self.q = nn.Buffer(self.weight.qdata)
        self.scale = nn.Buffer(self.weight.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = self.weight
        again = MXTensor(
            self.q,
            self.scale,
            held.elem_dtype,
            held.block_size,
            held.orig_dtype,
            held.kernel_preference,
            held.act_quant_kwargs,
            held.is_swizzled_scales,
        )
        real: torch.Tensor = again.dequantize()
        return x @ real.t()


@pytest.mark.numeric
def test_scales_of_a_weight_are_put_in_order_now() -> None:
    program = normalized(Weight(), torch.randn(5, 96).bfloat16())
    assert ops_of(program) == ["dequantize"]
    constants = {n.meta["val"].shape for n in program.graph.nodes if n.op == "get_attr"}
    assert constants == {(48, 96), (48, 3)}


def test_refuses_scales_that_are_not_one_per_block() -> None:
    class Transposed(nn.Module):
        def forward(self, q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            real: torch.Tensor = Dequantizes(torch.float32)(q.reshape(4, 64), scale)
            return real

    # The rows of the quantized values are not those of the scales, though there are as many blocks.
    q, scale = stored(torch.float8_e4m3fn, 2, 128)
    program = normalized(Transposed(), q, scale)
    assert "dequantize" not in ops_of(program)
    (miss,) = [m for m in program.log.of(Missed) if m.rule == NormalizeMxDequantize.name]
    assert miss.code is MissCode.GRANULARITY
    assert "not one per block of a row" in miss.reason


def test_refuses_another_base() -> None:
    def changed(program: CapturedGraph) -> None:
        node = next(n for n in program.graph.nodes if is_call(n, aten.full_like.default))
        node.args = (node.args[0], 4.0)

    program = normalized(
        Dequantizes(torch.float32), *stored(torch.float8_e4m3fn, 2, 64), edit=changed
    )
    assert "dequantize" not in ops_of(program)
