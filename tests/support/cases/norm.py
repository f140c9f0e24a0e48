"""Norms spelled in plain ATen, for the tests of the rule that fuses them with their quantize."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from tests.support.cases.propagate import applied, only_miss
from tests.support.sources.dialects import difference, equal_but_for_nan
from torch.fx import Node

from qfuse.cost import CostModel, CostProfile
from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import OptimizedGraph
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.norms import FusedNorm, as_fused_norm
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.quant.choose import ChooseSpec, Formula
from qfuse.ir.quant.spec import Block, QuantSpec, dtype_range
from qfuse.lower import lower
from qfuse.optimize.fuse.norm import FuseNormQuantize
from qfuse.rewrite.clone import clone
from qfuse.targets import Target
from qfuse.testing.build import GraphBuilder
from qfuse.testing.run import random_inputs, run

aten = torch.ops.aten
F32, BF16 = torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Spelling:
    """One way to write a norm; the default is llama's in float32.

    Attributes:
        wide: Type that the input is cast to for the statistics, if any.
        square: ``pow``, ``square`` or ``mul``.
        axes: How many axes are normalized over.
        eps: How it is added: ``number``, ``tensor`` or ``tensor-first``.
        root: ``rsqrt``, ``reciprocal``, ``one-over``, ``divided-one``, ``power``, ``divide``.
        narrow_factor: Whether the factor is cast back to the type of the input.
        scale_input: Whether the input is scaled as it is, not the cast one.
        swapped: Whether the operands of products stand the other way round.
        rounded: Type that the product is cast to before the weight, if any.
        weight: ``none``, ``plain``, ``one-plus``, ``rows``, ``full``, or ``scalar``.
        weight_dtype: Its type.
        out: Type of the final cast, if any.
        centre: ``none``, ``once`` or ``twice``: whether the mean is subtracted, in one node or two.
        variance: ``squares``, ``var.dim`` or ``var.correction``.
        bias: Whether there is a bias.
    """

    wide: torch.dtype | None = None
    square: str = "pow"
    axes: int = 1
    eps: str = "number"
    root: str = "rsqrt"
    narrow_factor: bool = False
    scale_input: bool = False
    swapped: bool = False
    rounded: torch.dtype | None = None
    weight: str = "plain"
    weight_dtype: torch.dtype = F32
    out: torch.dtype | None = None
    centre: str = "none"
    variance: str = "squares"
    bias: bool = False

    def __str__(self) -> str:
        told = [f for f in fields(self) if getattr(self, f.name) != f.default]
        return ",".join(f"{f.name}={getattr(self, f.name)}" for f in told) or "plain"


class Writer:
    """A builder that writes norms of ``x``."""

    def __init__(self, *shape: int | str, dtype: torch.dtype = F32) -> None:
        self.b = GraphBuilder()
        self.shape = shape
        self.x = self.b.arg("x", dtype, *shape)
        self._count = 0

    def arg(self, name: str, dtype: torch.dtype | None = None) -> Node:
        """Another input of the shape of ``x``."""
        return self.b.arg(name, dtype or dtype_of(self.x), *self.shape)

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Node:
        """Add a call."""
        return self.b.call(op, *args, **kwargs)

    def const(self, value: torch.Tensor, name: str = "c") -> Node:
        """Add a constant."""
        self._count += 1
        return self.b.const(f"{name}{self._count}", value)

    def cast(self, x: Node, dtype: torch.dtype | None) -> Node:
        """Add a cast, unless there is none or it changes nothing."""
        if dtype is None or dtype == dtype_of(x):
            return x
        return self.call(aten._to_copy.default, x, dtype=dtype)

    def mul(self, a: Node, b: Node, swapped: bool = False) -> Node:
        """Add a product."""
        return self.call(aten.mul.Tensor, b, a) if swapped else self.call(aten.mul.Tensor, a, b)

    def spelled(self, s: Spelling, x: Node | None = None) -> Node:
        """Add a norm of ``x``."""
        x = self.x if x is None else x
        h = self.cast(x, s.wide)
        dims = list(range(-s.axes, 0))
        scaled = x if s.scale_input else h
        source = h
        if s.centre != "none":
            source = self._centred(h, h, dims)
            scaled = source if s.centre == "once" else self._centred(scaled, h, dims)
        v = self._with_eps(self._variance(s, h, source, dims), s)
        y = self._divided(s, scaled, v, dtype_of(x))
        y = self.cast(y, s.rounded)
        if s.weight != "none":
            y = self.mul(y, self._weight(s, x), s.swapped)
        if s.bias:
            bias = self.const(torch.randn(self._last(x, s.axes)).to(s.weight_dtype), "bias")
            y = self.call(aten.add.Tensor, *((bias, y) if s.swapped else (y, bias)))
        return self.cast(y, s.out)

    def _centred(self, x: Node, h: Node, dims: list[int]) -> Node:
        return self.call(aten.sub.Tensor, x, self.call(aten.mean.dim, h, dims, True))

    def _variance(self, s: Spelling, h: Node, source: Node, dims: list[int]) -> Node:
        if s.variance == "var.dim":
            return self.call(aten.var.dim, h, dims, False, True)
        if s.variance == "var.correction":
            return self.call(aten.var.correction, h, dims, correction=0, keepdim=True)
        square = {
            "pow": lambda: self.call(aten.pow.Tensor_Scalar, source, 2),
            "square": lambda: self.call(aten.square.default, source),
            "mul": lambda: self.mul(source, source),
        }[s.square]()
        return self.call(aten.mean.dim, square, dims, True)

    def _with_eps(self, v: Node, s: Spelling) -> Node:
        if s.eps == "number":
            return self.call(aten.add.Tensor, v, 1e-5)
        eps = self.const(torch.tensor(2.0**-14), "eps")
        return self.call(aten.add.Tensor, *((v, eps) if s.eps == "tensor" else (eps, v)))

    def _divided(self, s: Spelling, x: Node, v: Node, own: torch.dtype) -> Node:
        if s.root == "rsqrt":
            factor = self.call(aten.rsqrt.default, v)
        elif s.root == "power":
            factor = self.call(aten.pow.Tensor_Scalar, v, -0.5)
        else:
            factor = self.call(aten.sqrt.default, v)
        if s.root in {"reciprocal", "one-over"}:
            factor = self.call(aten.reciprocal.default, factor)
        if s.root == "one-over":
            factor = self.call(aten.mul.Tensor, factor, 1.0)
        if s.root == "divided-one":
            factor = self.call(aten.div.Tensor, 1.0, factor)
        if s.narrow_factor:
            factor = self.cast(factor, own)
        if s.root == "divide":
            return self.call(aten.div.Tensor, x, factor)
        return self.mul(x, factor, s.swapped)

    def _last(self, x: Node, axes: int) -> list[int]:
        return [int(size) for size in shape_of(x)[-axes:]]

    def _weight(self, s: Spelling, x: Node) -> Node:
        shape = self._last(x, s.axes)
        if s.weight == "scalar":
            return self.const(torch.tensor(1.7, dtype=s.weight_dtype), "weight")
        if s.weight == "rows":
            shape = [1] * (len(shape_of(x)) - s.axes) + shape
        if s.weight == "full":
            return self.arg("gate", s.weight_dtype)
        plain = self.const(torch.randn(shape).to(s.weight_dtype), "weight")
        return self.call(aten.add.Tensor, plain, 1.0) if s.weight == "one-plus" else plain

    def static(self, y: Node, dtype: torch.dtype = torch.int8, block: Block | None = None) -> Node:
        """Quantize with given parameters, for the whole tensor if no block is given."""
        block = block or (None,) * len(shape_of(y))
        low, high = dtype_range(dtype)
        spec = QuantSpec(dtype, low, high, block, dtype_of(y))
        grid = [int(size) for size in spec.grid(shape_of(y))]
        scale = self.const(torch.rand(grid) * 0.05 + 1e-2, "scale")
        zero = None
        if not dtype.is_floating_point:
            zero = self.const(torch.randint(0, 20, grid, dtype=torch.int32), "zero")
        return self.call(ops.quantize, y, scale, zero, str(spec))

    def dynamic(
        self, y: Node, formula: Formula = Formula.AO_SYMMETRIC, block: Block | None = None
    ) -> Node:
        """Choose parameters and quantize with them, per token if no block is given."""
        block = block or (*(1,) * (len(shape_of(y)) - 1), None)
        dtype = torch.float8_e4m3fn if formula is Formula.AO_FLOAT8 else torch.int8
        low, high = dtype_range(dtype)
        choose = ChooseSpec(formula, dtype, low, high, block, 1e-6, F32, torch.int32)
        pair = self.call(ops.choose_qparams, y, str(choose))
        zero = self.b.item(pair, 1) if formula is Formula.AO_ASYMMETRIC else None
        spec = QuantSpec(dtype, low, high, block, dtype_of(y))
        return self.call(ops.quantize, y, self.b.item(pair, 0), zero, str(spec))

    def done(self, *outs: Node) -> OptimizedGraph:
        """Finish the graph."""
        return self.b.done(*outs, stage=OptimizedGraph)


def fused(program: OptimizedGraph, *, lowered: bool = True, **sizes: int) -> FusedNorm:
    """Fuse the only norm: outputs keep their bits and strides, also when it is then lowered."""
    source = clone(program)
    assert applied(program, FuseNormQuantize, context=None, **sizes).fired == {
        "fuse-norm-quantize": 1
    }
    norm = the_norm(program)
    if lowered:
        assert_lowered_alike(program, source, **sizes)
    return norm


def assert_lowered_alike(program: OptimizedGraph, source: OptimizedGraph, **sizes: int) -> None:
    """Assert that a graph gives the bits of its source when nothing but ATen is left of it."""
    cost = CostModel(CostProfile.pinned())
    low = lower(clone(program), Target.for_testing(), cost, ())
    inputs = random_inputs(program, **sizes)
    for new, old in zip(run(low, inputs), run(source, inputs), strict=True):
        assert new.dtype == old.dtype
        assert equal_but_for_nan(old, new), difference(old, new)


def the_norm(program: OptimizedGraph) -> FusedNorm:
    """Return the only fused norm."""
    (norm,) = [v for v in map(as_fused_norm, program.graph.nodes) if v is not None]
    return norm


def refused(program: OptimizedGraph, **sizes: int) -> MissCode:
    """Assert that the rule refuses once and changes nothing; return why."""
    return only_miss(program, FuseNormQuantize, context=None, **sizes).code
