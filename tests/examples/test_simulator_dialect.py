"""The example dialect: found by its entry point, exact where it speaks, clear where it cannot."""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.architecture.source import ROOT
from tests.support.sources.dialects import (
    Source,
    assert_same_bits,
    codes,
    fired,
    hard_numbers,
    only_miss,
    ops_of,
    scales,
)

from qfuse.ir.events import MissCode, Noted
from qfuse.ir.graph.text import to_text
from qfuse.normalize import normalize
from qfuse.normalize.importers.dialect import Dialect, discover

EXAMPLE = ROOT / "examples" / "simulator_dialect"
sim = torch.ops.simulator


@pytest.fixture(scope="module")
def dialect() -> Iterator[Dialect]:
    """The dialect, from its source folder."""
    sys.path.insert(0, str(EXAMPLE / "src"))
    yield importlib.import_module("simulator_dialect").dialect
    sys.path.remove(str(EXAMPLE / "src"))


@pytest.mark.usefixtures("dialect")
def test_its_entry_point_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project: dict[str, Any] = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    (points,) = project["entry-points"].items()
    info = tmp_path / "simulator_dialect-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: simulator-dialect\nVersion: 0.1\n")
    lines = "\n".join(f"{name} = {target}" for name, target in points[1].items())
    (info / "entry_points.txt").write_text(f"[{points[0]}]\n{lines}\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    assert [found.name for found in discover()] == ["simulator"]


def test_golden_a_static_linear_becomes_what_it_stands_for(dialect: Dialect) -> None:
    source = Source()
    x = source.b.arg("x", torch.int8, "B", 16)
    w, s = source.b.const("w", codes((8, 16), torch.int8)), source.b.const("ws", scales((8,)))
    bias = source.b.const("bias", torch.randn(8))
    op = sim.static_quant_linear.default
    y = source.b.call(op, x, 0.05, 3, w, s, bias, 0.3, -4)
    program = normalize(source.done(y), dialects=(dialect,))

    assert fired(program) == ["simulator-static-quant-linear"]
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: int8[s0, 16]
const %w: int8[8, 16]
const %bias: float32[8]
const %x_scale: float64[1, 1]
const %x_zero_point: int64[1, 1]
%0 = qfuse.dequantize(%x, %x_scale, %x_zero_point, 'int8[-128,127] *x* float32 float32:divide:round-zp int'): float32[s0, 16]
const %ws_grid: float32[8, 1]
%1 = qfuse.dequantize(%w, %ws_grid, None, 'int8[-128,127] 1x* float32 float32:divide:round-zp int'): float32[8, 16]
%2 = aten.linear(%0, %1, %bias): float32[s0, 8]
const %out_scale: float64[1, 1]
const %out_zero_point: int64[1, 1]
%3 = qfuse.quantize(%2, %out_scale, %out_zero_point, 'int8[-128,127] *x* float32 float32:divide:round-zp int'): int8[s0, 8]
return (%3)""",
    )


def test_golden_a_packed_weight_is_unpacked_ahead(dialect: Dialect) -> None:
    source = Source()
    x = source.b.arg("x", torch.float32, "B", "S", 16)
    w = source.b.const("w", codes((8, 8), torch.uint8))
    s = source.b.const("ws", scales((8, 2)))
    y = source.b.call(sim.int4_linear.default, x, w, s, None, 8)
    program = normalize(source.done(y), dialects=(dialect,))

    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[s0, s1, 16]
const %ws: float32[8, 2]
const %w_unpacked: int8[8, 16]
%0 = qfuse.dequantize(%w_unpacked, %ws, None, 'int8[-8,7] 1x8 float32 float32:divide:round-zp int'): float32[8, 16]
%1 = aten.linear(%x, %0): float32[s0, s1, 8]
return (%1)""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize("dims", [[-1], [0], [0, -1], [1, 2], [0, 1, 2]])
@pytest.mark.parametrize("symmetric", [True, False])
def test_dynamic_quantizes_have_the_bits_of_the_source(
    dialect: Dialect, dims: list[int], symmetric: bool
) -> None:
    source = Source()
    x = source.arg(torch.randn(3, 4, 16) + 1)
    kind = "symmetric" if symmetric else "asymmetric"
    many = source.b.call(getattr(sim, f"dynamic_quantize_{kind}").default, x, dims)
    outs = [source.b.item(many, i) for i in range(2 if symmetric else 3)]
    program = assert_same_bits(source, *outs, dialects=(dialect,))

    assert ops_of(program) == ["choose_qparams", "quantize"]


@pytest.mark.numeric
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_static_quantize_has_the_bits_of_the_source(dialect: Dialect, bits: int) -> None:
    source = Source()
    x = source.arg(hard_numbers((3, 16), torch.float32))
    s, z = source.arg(torch.tensor(0.0123)), source.arg(torch.tensor(1, dtype=torch.int8))
    program = assert_same_bits(
        source, source.b.call(sim.quantize.default, x, s, z, bits), dialects=(dialect,)
    )

    assert ops_of(program) == ["quantize"]


@pytest.mark.numeric
@pytest.mark.parametrize("shape", [(16,), (3, 16), (2, 3, 16)])
@pytest.mark.parametrize("bias", [True, False])
def test_linears_have_the_bits_of_the_source(
    dialect: Dialect, shape: tuple[int, ...], bias: bool
) -> None:
    source = Source()
    x, q = source.arg(torch.randn(shape)), source.arg(codes(shape, torch.int8))
    b = source.b.const("b", torch.randn(8)) if bias else None
    row, groups = source.b.const("row", scales((8,))), source.b.const("groups", scales((8, 2)))
    int8 = source.b.const("int8", codes((8, 16), torch.int8))
    int4 = source.b.const("int4", codes((8, 8), torch.uint8))
    float8 = source.b.const("float8", torch.randn(8, 16).to(torch.float8_e4m3fn))
    outs = [
        source.b.call(sim.static_quant_linear.default, q, 0.03, 3, int8, row, b, 0.37, -4),
        source.b.call(sim.int4_linear.default, x, int4, groups, b, 8),
        source.b.call(sim.fp8_linear.default, x, float8, row, b),
    ]
    program = assert_same_bits(source, *outs, dialects=(dialect,))

    assert ops_of(program, "simulator") == []


@pytest.mark.numeric
@pytest.mark.parametrize("group", [4, 8, 16])
def test_mxfp4_has_the_bits_of_the_source(dialect: Dialect, group: int) -> None:
    source = Source()
    scale = torch.exp2(torch.randint(-140, 100, (5, 16 // group)).float())
    hard = torch.randint(-28, 29, (5, 16)) / 4 * scale.repeat_interleave(group, -1)
    hard[0] = 0
    hard[1, ::3] = -0.0
    x, quiet = source.arg(hard), source.arg(torch.randn(3, 16))
    pair = source.b.call(sim.dynamic_quantize_mxfp4.default, x, group)
    w = source.b.const("w", codes((8, 16), torch.uint8) % 16)
    e = source.b.const("e", torch.randint(-8, 8, (8, 16 // group)).to(torch.int8))
    y = source.b.call(sim.mxfp4_linear.default, quiet, w, e, None)
    outs = [source.b.item(pair, 0), source.b.item(pair, 1), y]
    program = assert_same_bits(source, *outs, dialects=(dialect,))

    assert ops_of(program, "simulator") == []
    assert ops_of(program) == ["choose_qparams", "quantize", "dequantize"]


def test_refuses_groups_that_do_not_fill_the_axis(dialect: Dialect) -> None:
    source = Source()
    x = source.arg(torch.randn(3, 16), (3, "K"))
    pair = source.b.call(sim.dynamic_quantize_mxfp4.default, x, 8)
    program = normalize(source.done(source.b.item(pair, 0)), dialects=(dialect,))

    assert only_miss(program).code is MissCode.SHAPE


def test_refuses_a_weight_of_run_time(dialect: Dialect) -> None:
    source = Source()
    x, w = source.arg(torch.randn(3, 16)), source.arg(codes((8, 8), torch.uint8))
    s = source.b.const("ws", scales((8, 2)))
    y = source.b.call(sim.int4_linear.default, x, w, s, None, 8)
    program = assert_same_bits(source, y, dialects=(dialect,))

    assert only_miss(program).code is MissCode.NOT_CONSTANT
    assert program.log.of(Noted)[0].text.endswith("the weight is computed at run time")


def test_refuses_other_types(dialect: Dialect) -> None:
    source = Source()
    x = source.arg(torch.randn(3, 16).bfloat16())
    pair = source.b.call(sim.dynamic_quantize_symmetric.default, x, [-1])
    program = assert_same_bits(source, source.b.item(pair, 0), dialects=(dialect,))

    assert only_miss(program).code is MissCode.DTYPE
