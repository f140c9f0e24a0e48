from __future__ import annotations

from typing import Any

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
from qfuse.normalize.importers.library.int4pack import NormalizeInt4PackMm
from qfuse.normalize.importers.library.unpack_int4 import unpack_int4
from qfuse.passes import MergeLinears

ATEN = torch.ops.aten


def packed(n: int, k: int) -> torch.Tensor:
    values = torch.randint(0, 16, (n, k), dtype=torch.int32)
    made: torch.Tensor = ATEN._convert_weight_to_int4pack_for_cpu(values, 1)
    return made


def pairs(n: int, groups: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    scale, zero = torch.rand(groups, n) * 0.1 + 0.01, torch.randn(groups, n)
    return torch.stack([scale, zero], -1).to(dtype)


def model(n: int, k: int, group: int, dtype: torch.dtype) -> Model:
    return Model(
        lambda s, x: ATEN._weight_int4pack_mm_for_cpu(x, s.p, group, s.z),
        p=packed(n, k),
        z=pairs(n, k // group, dtype),
    )


def test_golden() -> None:
    program = normalize(capture(model(16, 64, 32, torch.float32), (torch.ones(3, 64),)))
    assert fired(program) == [NormalizeInt4PackMm.name]
    assert_expected_inline(
        to_text(program.graph),
        """\
%args_0: float32[3, 64]
const %p_unpacked: uint8[16, 64]
const %_weight_int4pack_mm_for_cpu_scale: float32[16, 2]
const %_weight_int4pack_mm_for_cpu_zero_point: float32[16, 2]
%0 = qfuse.dequantize(%p_unpacked, %_weight_int4pack_mm_for_cpu_scale, %_weight_int4pack_mm_for_cpu_zero_point, 'uint8[0,15] 1x32 float32 float32:reciprocal:round-zp float_offset'): float32[16, 64]
%1 = aten.linear(%args_0, %0): float32[3, 16]
return (%1)""",
    )


@pytest.mark.own_kernels
@pytest.mark.numeric
@pytest.mark.pairs
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize(("n", "k", "group"), [(64, 128, 32), (80, 128, 64), (16, 256, 128)])
def test_values(dtype: torch.dtype, rows: int, n: int, k: int, group: int) -> None:
    source, x = model(n, k, group, dtype), torch.randn(rows, k, dtype=dtype)
    done = compiled(source, x)
    assert kernel_of(done.report) == "qfuse.linear_w4a16"
    close(done(x), source(x), NOISE[dtype])


@pytest.mark.parametrize(("n", "k"), [(16, 2), (32, 34), (64, 64), (112, 50), (144, 128)])
def test_weights_are_unpacked_exactly(n: int, k: int) -> None:
    values = torch.randint(0, 16, (n, k), dtype=torch.int32)
    found = unpack_int4(ATEN._convert_weight_to_int4pack_for_cpu(values, 1), n, k)
    assert found is not None
    assert torch.equal(found.int(), values)


def test_what_was_not_packed_is_not_unpacked() -> None:
    assert unpack_int4(torch.zeros(17, 4, dtype=torch.uint8), 17, 8) is None
    assert unpack_int4(torch.zeros(16, 5, dtype=torch.uint8), 16, 8) is None


def test_siblings_merge_in_a_pass() -> None:
    buffers = {f"p{i}": packed(64, 128) for i in range(3)}
    buffers |= {f"z{i}": pairs(64, 4) for i in range(3)}

    def forward(s: Any, x: torch.Tensor) -> Any:
        calls = ((getattr(s, f"p{i}"), getattr(s, f"z{i}")) for i in range(3))
        return tuple(ATEN._weight_int4pack_mm_for_cpu(x, p, 32, z) for p, z in calls)

    source, x = Model(forward, **buffers), torch.randn(2, 128)
    module = torch.export.export(source, (x,)).module()
    assert MergeLinears()(module, [x]).fired == {"merge-linears": 1}
    for new, old in zip(module(x), source(x), strict=True):
        close(new, old, 1e-5)


def test_refuses_what_is_not_constant() -> None:
    x = torch.randn(3, 64)
    source = Model(lambda _, x, p, z: ATEN._weight_int4pack_mm_for_cpu(x, p, 32, z))
    miss = miss_of(source, x, packed(16, 64), pairs(16, 2))
    assert miss.code is MissCode.NOT_CONSTANT
    assert miss.reason == "its pair of scale and zero is not a constant"
    source = Model(lambda s, x, p: ATEN._weight_int4pack_mm_for_cpu(x, p, 32, s.z), z=pairs(16, 2))
    assert miss_of(source, x, packed(16, 64)).reason == "its packed weight is not a constant"


@pytest.mark.own_kernels
@pytest.mark.numeric
def test_weights_that_the_graph_packs_are_packed_once() -> None:
    source = Model(
        lambda s, x: ATEN._weight_int4pack_mm_for_cpu(
            x, ATEN._convert_weight_to_int4pack_for_cpu(s.q, 1), 32, torch.stack([s.s, s.o], -1)
        ),
        q=torch.randint(0, 16, (64, 128), dtype=torch.int32),
        s=torch.rand(4, 64) * 0.1 + 0.01,
        o=torch.randn(4, 64),
    )
    x = torch.randn(3, 128)
    done = compiled(source, x)
    assert kernel_of(done.report) == "qfuse.linear_w4a16"
    close(done(x), source(x), NOISE[torch.float32])
