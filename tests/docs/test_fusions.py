"""The page shows what runs each quantized product, on every instruction set."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch.fx import Node

from qfuse import kernels
from qfuse.cost import CostModel, CostProfile
from qfuse.ir.events import Lowered
from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.ops import library as ops
from qfuse.ir.quant.choose import ChooseSpec, Formula
from qfuse.ir.quant.spec import QuantSpec
from qfuse.lower import Wishes, lower
from qfuse.lower.floats.policy import QUANTIZED
from qfuse.lower.kernels.registry import all_kernels
from qfuse.optimize import optimize
from qfuse.rewrite.clone import clone
from qfuse.targets import Target
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import per_tensor, per_token, stored_like
from qfuse_bench.report.markdown import replace_section

PAGE = Path(__file__).resolve().parents[2] / "docs" / "fusions.md"
ISAS = ("portable", "avx2", "avx512_vnni", "amx")
CHANNELS = 64

aten = torch.ops.aten


@dataclass(frozen=True)
class Family:
    """A kind of product.

    Attributes:
        x: The shape of the activation.
        weight: The shape of the weight.
        op: The op.
        settings: Its arguments after the bias.
    """

    x: tuple[int, ...]
    weight: tuple[int, ...]
    op: torch._ops.OpOverload
    settings: tuple[object, ...] = ()

    @property
    def is_linear(self) -> bool:
        """Whether it is a linear."""
        return len(self.weight) == 2


def conv(spatial: int, groups: int = 1) -> Family:
    """A convolution with a kernel of three taps per axis."""
    op = getattr(aten, f"conv{spatial}d").default
    sizes, taps = (8,) * spatial, (3,) * spatial
    settings = ([1] * spatial, [1] * spatial, [1] * spatial, groups)
    shape = (CHANNELS, CHANNELS // groups, *taps)
    return Family((2, CHANNELS, *sizes), shape, op, settings)


FAMILIES = {
    "linear": Family((32, CHANNELS), (CHANNELS, CHANNELS), aten.linear.default),
    "convolution, 1d": conv(1),
    "convolution, 2d": conv(2),
    "convolution, 3d": conv(3),
    "grouped convolution": conv(2, groups=4),
    "depthwise convolution": conv(2, groups=CHANNELS),
    "transposed convolution": Family(
        (2, CHANNELS, 8, 8),
        (CHANNELS, CHANNELS, 3, 3),
        aten.conv_transpose2d.input,
        ([2, 2], [1, 1], [1, 1]),
    ),
    "transposed depthwise convolution": Family(
        (2, CHANNELS, 8, 8),
        (CHANNELS, 1, 3, 3),
        aten.conv_transpose2d.input,
        ([2, 2], [1, 1], [1, 1], CHANNELS),
    ),
}


@dataclass(frozen=True)
class Scheme:
    """How the operands are quantized.

    Attributes:
        x: Storage of the activation; ``None`` if it is float.
        rows: Whether the activation has one scale per row.
        weight: Storage of the weight.
        bits: Bits of the weight.
        scales: Granularity of the weight: ``tensor``, ``channel`` or ``group``.
        dynamic: Whether the activation's parameters are chosen at run time.
        float_dtype: The float dtype.
    """

    x: torch.dtype | None
    weight: torch.dtype
    scales: str = "channel"
    rows: bool = False
    bits: int = 8
    dynamic: bool = False
    float_dtype: torch.dtype = torch.float32

    def weight_spec(self, family: Family) -> QuantSpec:
        """Return the spec of a weight."""
        rank, axis = len(family.weight), 1 if family.op is aten.conv_transpose2d.input else 0
        spec = per_tensor(rank, self.weight)
        if self.bits == 4:
            spec = replace(spec, quant_min=-8, quant_max=7)
        sizes: dict[int, int] = {}
        if self.scales != "tensor":
            sizes[axis] = 1
        if self.scales == "group":
            sizes[1 - axis] = 16
        return replace(
            spec.with_block(tuple(map(sizes.get, range(rank)))), float_dtype=self.float_dtype
        )


SCHEMES = {
    "uint8 static, int8 per channel": Scheme(torch.uint8, torch.int8),
    "int8 static, int8 per channel": Scheme(torch.int8, torch.int8),
    "int8 static, int8 per tensor": Scheme(torch.int8, torch.int8, "tensor"),
    "int8 static, uint8 per channel": Scheme(torch.int8, torch.uint8),
    "int8 static, int8 in groups of inputs": Scheme(torch.int8, torch.int8, "group"),
    "int8 dynamic per tensor, int8 per channel": Scheme(torch.int8, torch.int8, dynamic=True),
    "int8 dynamic per row, int8 per channel": Scheme(
        torch.int8, torch.int8, rows=True, dynamic=True
    ),
    "int8 static, 4 bits per channel": Scheme(torch.int8, torch.int8, bits=4),
    "int8 dynamic per row, 4 bits in groups": Scheme(
        torch.int8, torch.int8, "group", rows=True, bits=4, dynamic=True
    ),
    "float32, int8 per channel": Scheme(None, torch.int8),
    "bfloat16, int8 per channel": Scheme(None, torch.int8, float_dtype=torch.bfloat16),
    "float32, 4 bits in groups": Scheme(None, torch.int8, "group", bits=4),
    "float32, float8 per channel": Scheme(None, torch.float8_e4m3fn),
    "bfloat16, float8 per channel": Scheme(None, torch.float8_e5m2, float_dtype=torch.bfloat16),
    "float8 static, float8 per channel": Scheme(torch.float8_e4m3fn, torch.float8_e4m3fn),
    "float8 dynamic per row, float8 per channel": Scheme(
        torch.float8_e4m3fn, torch.float8_e4m3fn, rows=True, dynamic=True
    ),
    "float32, float16": Scheme(None, torch.float16, "tensor"),
}


MATMUL = (2, 64, CHANNELS)
"""The shape of both operands of a product of activations, before the transpose of the right one."""

ROWS = per_token(3)
GROUPS = per_tensor(3).with_block((1, 1, 16))
PRODUCTS = {
    "int8 static, int8 static": (per_tensor(3), per_tensor(3)),
    "uint8 static, int8 static": (per_tensor(3, torch.uint8), per_tensor(3)),
    "int8 static, uint8 static": (per_tensor(3), per_tensor(3, torch.uint8)),
    "int8 dynamic per row, int8 dynamic per column": (ROWS, ROWS),
    "int8 dynamic per row, int8 static": (ROWS, per_tensor(3)),
    "int8 static, int8 per entry of the batch": (
        per_tensor(3),
        per_tensor(3).with_block((1, None, None)),
    ),
    "int8 static, 4 bits static": (
        per_tensor(3),
        replace(per_tensor(3), quant_min=-8, quant_max=7),
    ),
    "int8 in groups of inputs, int8 static": (GROUPS, per_tensor(3)),
    "float8 static, float8 static": (
        per_tensor(3, torch.float8_e4m3fn),
        per_tensor(3, torch.float8_e4m3fn),
    ),
    "float32, int8 static": (None, per_tensor(3)),
}
"""Products of activations: the specs of the left and of the right operand."""


def product_of(left: QuantSpec | None, right: QuantSpec) -> NormalGraph:
    """Return the source graph of a product of activations."""
    b = GraphBuilder()
    x, k = (
        operand(b, b.arg(name, torch.float32, *MATMUL), spec, name)
        for name, spec in (("x", left), ("k", right))
    )
    return b.done(b.call(aten.bmm.default, x, b.call(aten.transpose.int, k, 1, 2)))


def operand(b: GraphBuilder, x: Node, spec: QuantSpec | None, name: str) -> Node:
    """Quantize and dequantize: static with one scale, otherwise dynamic."""
    if spec is None:
        return x
    if spec.block == (None,) * spec.rank:
        scale: Node = b.const(f"{name}_scale", torch.full([1] * spec.rank, 0.05))
    else:
        scale = b.item(b.call(ops.choose_qparams, x, str(symmetric(spec))), 0)
    q = b.call(ops.quantize, x, scale, None, str(spec))
    return b.call(ops.dequantize, q, scale, None, str(spec))


def program_of(family: Family, scheme: Scheme) -> NormalGraph | None:
    """Return the source graph; ``None`` if the scheme does not exist for the family."""
    if (scheme.rows or scheme.weight is torch.float16) and not family.is_linear:
        return None
    spec = scheme.weight_spec(family)
    if any(b is not None and size % b for b, size in zip(spec.block, family.weight, strict=True)):
        return None
    b = GraphBuilder()
    x = activation(b, family, scheme)
    grid = [int(size) for size in spec.grid(family.weight)]
    if scheme.weight.is_floating_point:
        stored = torch.randn(family.weight).to(scheme.weight)
    else:
        stored = stored_like(spec, *family.weight)
    scale = b.const("w_scale", torch.rand(grid) * 0.01 + 1e-3)
    weight = b.call(ops.dequantize, b.const("w", stored), scale, None, str(spec))
    bias = b.const("bias", torch.randn(CHANNELS).to(scheme.float_dtype))
    return b.done(b.call(family.op, x, weight, bias, *family.settings))  # type: ignore[arg-type]


def activation(b: GraphBuilder, family: Family, scheme: Scheme) -> Node:
    """Add the activation, quantized and dequantized if the scheme says so."""
    x = b.arg("x", scheme.float_dtype, *family.x)
    if scheme.x is None:
        return x
    rank = len(family.x)
    spec = per_token(rank, scheme.x) if scheme.rows else per_tensor(rank, scheme.x)
    if scheme.dynamic:
        chosen = b.call(ops.choose_qparams, x, str(symmetric(spec)))
        scale: Node = b.item(chosen, 0)
    else:
        scale = b.const("x_scale", torch.full([int(g) for g in spec.grid(family.x)], 0.05))
    q = b.call(ops.quantize, x, scale, None, str(spec))
    return b.call(ops.dequantize, q, scale, None, str(spec))


def symmetric(spec: QuantSpec) -> ChooseSpec:
    """Return how the scale is chosen."""
    low, high = spec.quant_min, spec.quant_max
    return ChooseSpec(Formula.AO_SYMMETRIC, spec.dtype, low, high, spec.block, 1e-7)


def kernel_of(program: NormalGraph, isa: str) -> str:
    """Return the kernel of the product on a pinned machine, or the reasons that there is none."""
    cost, registry = CostModel(CostProfile.pinned()), all_kernels(kernels.load())
    # The page is about kernels, whatever is faster at these sizes.
    target, wishes = Target.for_testing(isa=isa), Wishes(floats=QUANTIZED)
    low = lower(optimize(clone(program)), target, cost, registry, None, wishes)
    events = [e for e in low.log.of(Lowered) if " x " in e.what]
    if not events:
        return "float: no fused op"
    (event,) = events
    if event.kernel != "expand":
        return f"`{event.kernel}`"
    own = [why for name, why in event.losers if name.startswith("qfuse.")]
    return f"float: {'; '.join(dict.fromkeys(own))}"


def rows() -> list[str]:
    lines = []
    for name, family in FAMILIES.items():
        for kind, scheme in SCHEMES.items():
            program = program_of(family, scheme)
            if program is not None:
                lines.append(row(name, kind, program))
    lines += [row("matmul", kind, product_of(*specs)) for kind, specs in PRODUCTS.items()]
    return lines


def row(name: str, kind: str, program: NormalGraph) -> str:
    cells = [kernel_of(program, isa) for isa in ISAS]
    text = ", ".join(f"{isa}: {cell}" for isa, cell in zip(ISAS, cells, strict=True))
    return f"| {name} | {kind} | {cells[0] if len(set(cells)) == 1 else text} |"


@pytest.mark.slow
@pytest.mark.own_kernels
def test_the_table_says_what_runs() -> None:
    table = "\n".join(["| op | operands | runs on |", "|---|---|---|", *rows()])
    text = PAGE.read_text(encoding="utf-8")
    written = replace_section(text, "fusions", table)
    if os.environ.get("QFUSE_WRITE_DOCS"):
        PAGE.write_text(written, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == written, (
        "QFUSE_WRITE_DOCS=1 pytest tests/docs/test_fusions.py writes the table; read the diff"
    )
