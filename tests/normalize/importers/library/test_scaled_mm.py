from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.dialects import fired
from tests.support.sources.library import NOISE, Model, close, compiled, kernel_of, miss_of

from qfuse.capture import capture
from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.normalize import normalize
from qfuse.normalize.importers.library.scaled_mm import NormalizeScaledMm

ATEN = torch.ops.aten


def model(m: int, n: int, k: int, dtype: torch.dtype, *, rowwise: bool, bias: bool) -> Model:
    buffers = {
        "w": torch.randn(n, k).to(torch.float8_e4m3fn),
        "r": torch.rand(1, n) if rowwise else torch.tensor(0.07),
        "l": torch.rand(m, 1) if rowwise else torch.tensor(0.3),
    }
    if bias:
        buffers["b"] = torch.randn(n, dtype=dtype)
    return Model(
        lambda s, x: ATEN._scaled_mm(x, s.w.t(), s.l, s.r, s.b if bias else None, out_dtype=dtype),
        **buffers,
    )


def test_golden() -> None:
    source = model(5, 16, 32, torch.bfloat16, rowwise=True, bias=True)
    program = normalize(capture(source, (torch.ones(5, 32).to(torch.float8_e4m3fn),)))
    assert fired(program) == [NormalizeScaledMm.name]
    assert_expected_inline(
        to_text(program.graph),
        """\
%args_0: float8_e4m3fn[5, 32]
const %w: float8_e4m3fn[16, 32]
const %l: float32[5, 1]
const %b: bfloat16[16]
%0 = qfuse.dequantize(%args_0, %l, None, 'float8_e4m3fn[-448,448] 1x* float32 float32:reciprocal:round-zp int'): float32[5, 32]
const %r_t: float32[16, 1]
%1 = qfuse.dequantize(%w, %r_t, None, 'float8_e4m3fn[-448,448] 1x* float32 float32:reciprocal:round-zp int'): float32[16, 32]
%2 = aten._to_copy(%b, dtype=float32): float32[16]
%3 = aten.linear(%0, %1, %2): float32[5, 16]
%4 = aten._to_copy(%3, dtype=bfloat16): bfloat16[5, 16]
return (%4)""",
    )


@pytest.mark.own_kernels
@pytest.mark.numeric
@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_values(dtype: torch.dtype, rowwise: bool, bias: bool) -> None:
    source = model(5, 33, 48, dtype, rowwise=rowwise, bias=bias)
    x = torch.randn(5, 48).to(torch.float8_e4m3fn)
    done = compiled(source, x)
    assert done.report.fired["normalize-scaled-mm"] == 1
    assert kernel_of(done.report) == "qfuse.linear_w8a16"
    close(done(x), source(x), NOISE[dtype])


def test_refuses_a_product_of_activations() -> None:
    left, right = torch.randn(3, 64), torch.randn(16, 64)
    source = Model(
        lambda s, x, w: ATEN._scaled_mm(x, w.t(), s.s, s.s, out_dtype=torch.float32),
        s=torch.tensor(0.1),
    )
    miss = miss_of(source, left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn))
    assert miss.code is MissCode.NOT_CONSTANT
    assert miss.reason == "its right factor is not a constant"


def test_refuses_a_float8_result() -> None:
    source = Model(
        lambda s, x: ATEN._scaled_mm(x, s.w.t(), s.s, s.s),
        s=torch.tensor(0.1),
        w=torch.randn(16, 64).to(torch.float8_e4m3fn),
    )
    miss = miss_of(source, torch.randn(3, 64).to(torch.float8_e4m3fn))
    assert miss.code is MissCode.DTYPE
    assert miss.reason == "its result is torch.float8_e4m3fn"


def test_torch_rounds_activations_of_dynamic_4_bit_products_away_from_zero() -> None:
    """Why ``_dyn_quant_matmul_4bit`` is not imported: a quantize rounds ties to even."""
    size = 32
    ones = torch.full((size, size), 8, dtype=torch.uint8) + torch.eye(size, dtype=torch.uint8)
    packed = ATEN._dyn_quant_pack_4bit_weight(
        ones[:, 1::2] << 4 | ones[:, ::2], torch.ones(size, 1), None, size, size, size
    )
    x = torch.zeros(1, size)
    x[0, :4] = torch.tensor([0.5, 2.5, -0.5, -2.5])
    # The range makes the scale 1, so that these values are ties.
    x[0, 4:6] = torch.tensor([-128.0, 127.0])
    y = ATEN._dyn_quant_matmul_4bit(x, packed, size, size, size)
    assert y[0, :4].tolist() == [1.0, 3.0, -1.0, -3.0]
    assert y[0, :4].tolist() != x[0, :4].round().tolist()


@pytest.mark.own_kernels
def test_an_op_without_canonical_form_is_named() -> None:
    weight = torch.randint(0, 256, (8, 16), dtype=torch.uint8)
    packed = ATEN._dyn_quant_pack_4bit_weight(weight, torch.rand(8), None, 32, 32, 8)
    source = Model(lambda s, x: ATEN._dyn_quant_matmul_4bit(x, s.p, 32, 32, 8), p=packed)
    x = torch.randn(3, 32)
    done = compiled(source, x)
    close(done(x), source(x), 0)
    (note,) = (n for n in done.report.notes if n.warn)
    assert "_dyn_quant_matmul_4bit stays as it is: it rounds activations half away" in note.text
    assert "Use Int8DynamicActivationIntxWeightConfig" in note.text
    assert "the quantized ops are not supported" in str(done.report)
