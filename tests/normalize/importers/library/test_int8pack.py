from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.dialects import fired
from tests.support.sources.library import NOISE, Model, close, compiled, kernel_of, miss_of

from qfuse.capture import capture
from qfuse.ir.dtypes import FLOATS
from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.normalize import normalize
from qfuse.normalize.importers.library.int8pack import NormalizeInt8PackMm
from qfuse.passes import MergeLinears

ATEN = torch.ops.aten


def model(n: int, k: int, dtype: torch.dtype) -> Model:
    weight = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    scale = (torch.rand(n) * 0.02 + 1e-3).to(dtype)
    return Model(lambda s, x: ATEN._weight_int8pack_mm(x, s.w, s.s), w=weight, s=scale)


def test_golden() -> None:
    program = normalize(capture(model(16, 32, torch.bfloat16), (torch.ones(3, 32).bfloat16(),)))
    assert fired(program) == [NormalizeInt8PackMm.name]
    assert_expected_inline(
        to_text(program.graph),
        """\
%args_0: bfloat16[3, 32]
const %w: int8[16, 32]
const %s_grid: bfloat16[16, 1]
%0 = qfuse.dequantize(%w, %s_grid, None, 'int8[-128,127] 1x* bfloat16 float32:reciprocal:round-zp int'): bfloat16[16, 32]
%1 = aten.linear(%args_0, %0): bfloat16[3, 16]
return (%1)""",
    )


@pytest.mark.own_kernels
@pytest.mark.numeric
@pytest.mark.pairs
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize(("n", "k"), [(48, 32), (33, 64)])
def test_values(dtype: torch.dtype, rows: int, n: int, k: int) -> None:
    source, x = model(n, k, dtype), torch.randn(rows, k, dtype=dtype)
    done = compiled(source, x)
    assert kernel_of(done.report) in {"qfuse.linear_w8a16", "aten._weight_int8pack_mm"}
    close(done(x), source(x), NOISE[dtype])


def test_siblings_merge_in_a_pass() -> None:
    source = Model(
        lambda s, x: (ATEN._weight_int8pack_mm(x, s.a, s.s), ATEN._weight_int8pack_mm(x, s.b, s.s)),
        a=torch.randint(-9, 9, (32, 16), dtype=torch.int8),
        b=torch.randint(-9, 9, (32, 16), dtype=torch.int8),
        s=torch.rand(32),
    )
    x = torch.randn(3, 16)
    module = torch.export.export(source, (x,)).module()
    assert MergeLinears()(module, [x]).fired == {"merge-linears": 1}
    for new, old in zip(module(x), source(x), strict=True):
        close(new, old, 1e-5)


def test_refuses_weights_beyond_float16() -> None:
    source = Model(
        lambda s, x: ATEN._weight_int8pack_mm(x, s.w, s.s),
        w=torch.ones(16, 64, dtype=torch.int8),
        s=torch.full((16,), 1000.0, dtype=torch.float16),
    )
    miss = miss_of(source, torch.ones(3, 64, dtype=torch.float16))
    assert miss.code is MissCode.RANGE
    assert "leave the range of float16" in miss.reason
