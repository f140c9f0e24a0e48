"""Grows random graphs: what is there so far, constants, and quantization of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TypeVar, overload

import torch
from hypothesis import reject
from hypothesis import strategies as st
from tests.support.strategies.mx import mx_tensors
from tests.support.strategies.quant_specs import FLOATS, SEEDS
from torch._ops import OpOverload
from torch.fx import Node
from torch.fx.node import Argument

from qfuse.ir.graph.stage_graph import NormalGraph, StageGraph
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.quant.choose import ChooseSpec, Formula
from qfuse.ir.quant.spec import Arithmetic, Block, QuantSpec, ZeroPointDomain
from qfuse.testing.build import FixedSizeError, GraphBuilder
from qfuse.testing.quant import stored_like

T = TypeVar("T")
G = TypeVar("G", bound=StageGraph)
Size = int | torch.SymInt

MOST_ELEMENTS = 6000
"""What no value exceeds at the sizes of the trace, so that an example takes milliseconds."""

_RANGES = {
    torch.int8: [(-128, 127), (-128, 127), (-127, 127), (-8, 7), (0, 127)],
    torch.uint8: [(0, 255), (0, 255), (0, 127), (3, 200), (0, 15)],
    torch.int16: [(-200, 200)],
    torch.float8_e4m3fn: [(-448, 448)],
}
_USUAL_STORAGE = [torch.int8, torch.uint8, torch.int8]
_STORAGE = [torch.int8, torch.uint8, torch.int16, torch.float8_e4m3fn]
_FORMULAS = [
    Formula.AO_SYMMETRIC,
    Formula.AO_ASYMMETRIC,
    Formula.AO_SYMMETRIC_NO_CLIPPING,
    Formula.DECOMPOSED_AFFINE,
    Formula.DECOMPOSED_SYMMETRIC,
    Formula.TOKEN_ASYMMETRIC,
    Formula.TOKEN_SYMMETRIC,
]


@dataclass(frozen=True)
class Value:
    """A real tensor of the graph.

    Attributes:
        node: Where it is.
        coarse: It has so few significant bits that sums of products with 8-bit numbers are exact.
    """

    node: Node
    coarse: bool = False


@dataclass(frozen=True)
class Params:
    """Quantization of one tensor, as arguments of the ops."""

    spec: QuantSpec
    scale: Node
    zero: Node | None
    outer: Node | None = None

    @property
    def args(self) -> tuple[Argument, ...]:
        """The arguments of quantize and dequantize besides what they read."""
        plain = (self.scale, self.zero, str(self.spec))
        return plain if self.outer is None else (*plain, self.outer)


def hint(size: Size) -> int:
    """The size in the trace."""
    return size if isinstance(size, int) else int(size.node.hint)


def text_of(sizes: Sequence[Size]) -> tuple[str, ...]:
    """Sizes as text: equal texts are equal sizes, and no symbol is guarded by comparing them."""
    return tuple(map(str, sizes))


@dataclass
class Grower:
    """A graph under construction and the hypothesis draws that it is made of.

    Attributes:
        draw: Draws from a strategy.
        exact: Use only numbers with which every sum is exact in float32, in any order.
        symbolic: Some sizes are symbolic.
        b: The builder.
        values: The real tensors so far.
        stored: The quantized ones, with what they were quantized with.
        weights: The weights so far, by their stored constant.
        symbols: Names of symbolic sizes, by their text in fake tensors.
    """

    draw: st.DrawFn
    exact: bool
    symbolic: bool
    b: GraphBuilder = field(default_factory=GraphBuilder)
    values: list[Value] = field(default_factory=list)
    stored: list[tuple[Node, Params]] = field(default_factory=list)
    weights: list[tuple[Node, Params]] = field(default_factory=list)
    symbols: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.draw(SEEDS))
        self._names = 0

    def pick(self, options: Sequence[T]) -> T:
        """Choose one; shrinks towards the first."""
        return options[self.draw(st.integers(0, len(options) - 1))]

    def chance(self, one_in: int) -> bool:
        """Whether to do what is done once in so many times."""
        return self.draw(st.integers(0, one_in - 1)) == one_in - 1

    def draw_bool(self) -> bool:
        """One of two, the first half of the time."""
        return self.draw(st.booleans())

    def usual(self) -> bool:
        """Whether to keep to what models usually have, which fast kernels take."""
        return not self.chance(5)

    def value(self, fits: Callable[[Value], bool] | None = None) -> Value | None:
        """Choose a real tensor that fits, the newest one most of the time; ``None`` if none does.

        Unless told otherwise, those fit that have one of the float types that models compute in.
        """
        fitting = list(filter(fits or self.is_float, self.values))
        if not fitting:
            return None
        return self.pick(fitting[::-1]) if self.chance(3) else fitting[-1]

    def name(self, stem: str) -> str:
        """A name that nothing has."""
        self._names += 1
        return f"{stem}{self._names}"

    def numbers(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Random real numbers; multiples of 1/8 below 16 if sums must be exact."""
        if self.exact:
            return (torch.randint(-127, 128, shape, generator=self.random) / 8).to(dtype)
        return torch.randn(shape, generator=self.random).to(dtype)

    def factors(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Random real numbers to multiply by; powers of two and 0 if sums must be exact.

        Products with other numbers take more bits, and may be rounded before or after a sum.
        """
        if not self.exact:
            return self.numbers(shape, dtype)
        powers = torch.randint(-3, 4, shape, generator=self.random).exp2()
        return (powers * torch.randint(-1, 2, shape, generator=self.random)).to(dtype)

    def add(self, node: Node, *, coarse: bool = False) -> Value:
        """Put a new real tensor into the pool."""
        value = Value(node, coarse)
        self.values.append(value)
        return value

    def made(self, op: OpOverload, *args: Argument, coarse: bool = False, **kw: Argument) -> Value:
        """Add a call whose result joins the pool."""
        return self.add(self.b.call(op, *args, **kw), coarse=coarse)

    @overload
    def done(self, *outs: Node) -> NormalGraph: ...

    @overload
    def done(self, *outs: Node, stage: type[G]) -> G: ...

    def done(self, *outs: Node, stage: type[StageGraph] = NormalGraph) -> StageGraph:
        """Finish the graph; if an op fixed a symbolic size, hypothesis draws another one.

        Such as a convolution of length 1 where the graph was drawn. torch.export refuses it.
        """
        try:
            return self.b.done(*outs, stage=stage)
        except FixedSizeError:
            reject()

    def arg(
        self,
        stem: str,
        dtype: torch.dtype,
        shape: Sequence[int | str],
        order: Sequence[int] | None = None,
    ) -> Node:
        """Add an input that does not join the pool; sizes given as names are symbolic."""
        node = self.b.arg(self.name(stem), dtype, *shape, order=order)
        named = zip(shape_of(node), shape, strict=True)
        self.symbols |= {str(size): name for size, name in named if isinstance(name, str)}
        return node

    def input(self, shape: Sequence[int | str], dtype: torch.dtype) -> Value:
        """Add an input of the graph; sizes given as names are symbolic."""
        return self.add(self.arg("x", dtype, shape), coarse=True)

    def elements(self, node: Node) -> int:
        """The number of elements in the trace."""
        return prod(map(hint, shape_of(node)))

    def real(self, value: Value) -> torch.dtype:
        """The float type of a value."""
        return dtype_of(value.node)

    def shape(self, node: Node) -> list[int | str] | None:
        """The sizes of a tensor as an input takes them; ``None`` if one is an expression."""
        known = [s if isinstance(s, int) else self.symbols.get(str(s)) for s in shape_of(node)]
        return None if None in known else [s for s in known if s is not None]

    def scale(self, grid: Sequence[int], dtype: torch.dtype = torch.float32) -> Node:
        """Add scales; powers of two if sums must be exact."""
        return self.b.const(self.name("scale"), self.scales(grid).to(dtype))

    def scales(self, grid: Sequence[int]) -> torch.Tensor:
        """Random scales; powers of two if sums must be exact."""
        if self.exact:
            return torch.pow(2.0, -torch.randint(2, 5, grid, generator=self.random))
        return torch.rand(grid, generator=self.random) * 0.05 + 1e-3

    def zero(self, grid: Sequence[int], spec: QuantSpec) -> Node | None:
        """Add zero points, or none: within the range most of the time."""
        if spec.domain is ZeroPointDomain.NONE or spec.dtype.is_floating_point:
            return None
        if spec.domain is ZeroPointDomain.FLOAT_OFFSET:
            return self.b.const(self.name("offset"), self.numbers(grid))
        dtypes = [torch.int32, torch.int64, torch.int8]
        dtype = self.pick(dtypes) if self.usual() else torch.float32
        beyond = 40 if dtype is not torch.int8 and self.chance(8) else 0
        low, high = spec.quant_min - beyond, spec.quant_max + beyond
        if dtype is torch.int8:
            low, high = max(low, -128), min(high, 127)
        value = torch.randint(low, high + 1, grid, generator=self.random)
        if self.chance(4):
            value.zero_()
        return self.b.const(self.name("zero"), value.to(dtype))

    def spec(self, block: Block, float_dtype: torch.dtype, *, weight: bool = False) -> QuantSpec:
        """Choose everything about a quantization but its block."""
        dtype = self.pick(_USUAL_STORAGE if self.usual() else _STORAGE)
        low, high = self.pick(_RANGES[dtype])
        arithmetic = Arithmetic()
        if not weight:
            arithmetic = Arithmetic(torch.float32, not self.chance(3), self.chance(3))
        if not self.usual():
            compute = self.pick([torch.float32, float_dtype, torch.float64])
            arithmetic = replace(arithmetic, compute=compute)
        domains = [ZeroPointDomain.INT, ZeroPointDomain.NONE]
        if not self.usual():
            domains.append(ZeroPointDomain.FLOAT_OFFSET)
        domain = self.pick(domains)
        if dtype.is_floating_point:
            domain = ZeroPointDomain.NONE
        return QuantSpec(dtype, low, high, block, float_dtype, arithmetic, domain)

    def block(self, sizes: Sequence[Size], *, dynamic: bool) -> Block:
        """Choose a block; parameters of a constant shape cannot depend on a symbolic size."""
        rank = len(sizes)
        kinds = ["tensor", "token"]
        kind = self.pick(kinds if self.usual() else [*kinds, "channel", "group", "any"])
        fine: list[int | None] = [None] * rank
        match kind:
            case "token":
                fine = [*[1] * (rank - 1), None] if rank else []
            case "channel" if rank:
                fine[self.draw(st.integers(0, rank - 1))] = 1
            case "group" if rank:
                fine = [*[1] * (rank - 1), self.pick([2, 4, 3, 8])]
            case "any":
                fine = [self.pick([None, 1, 2, 3]) for _ in sizes]
            case _:
                pass
        known = [dynamic or isinstance(size, int) for size in sizes]
        symbolic = [not isinstance(size, int) for size in sizes]
        # The grid of a symbolic axis in blocks is not a size that fake tensors can name simply.
        return tuple(
            (b if not s else (1 if b is not None else None)) if k else None
            for b, k, s in zip(fine, known, symbolic, strict=True)
        )

    def static_params(self, sizes: Sequence[Size], float_dtype: torch.dtype) -> Params:
        """Choose parameters that are constants, for a tensor of these sizes."""
        spec = self.spec(self.block(sizes, dynamic=False), float_dtype)
        grid = [int(n) for n in spec.grid(sizes)]
        scale_dtype = self.pick([torch.float32, torch.float32, torch.float64])
        return Params(spec, self.scale(grid, scale_dtype), self.zero(grid, spec))

    def dynamic_params(self, x: Node, sizes: Sequence[Size], float_dtype: torch.dtype) -> Params:
        """Choose parameters that are computed from ``x``."""
        block = self.block(sizes, dynamic=True)
        dtype = self.pick([torch.int8, torch.uint8])
        low, high = self.pick(_RANGES[dtype][:2])
        scale_dtype = self.pick([torch.float32, torch.float32, torch.float64])
        zero_dtype = self.pick([torch.int32, torch.int64]) if self.usual() else torch.float32
        choose = ChooseSpec(
            self.pick(_FORMULAS), dtype, low, high, block, 1e-5, scale_dtype, zero_dtype
        )
        pair = self.b.call(ops.choose_qparams, x, str(choose))
        symmetric = choose.formula in {Formula.AO_SYMMETRIC, Formula.TOKEN_SYMMETRIC}
        without = symmetric and dtype is torch.int8 and self.draw(st.booleans())
        zero = None if without else self.b.item(pair, 1)
        return Params(QuantSpec(dtype, low, high, block, float_dtype), self.b.item(pair, 0), zero)

    def mx_params(self, x: Node, sizes: Sequence[Size], float_dtype: torch.dtype) -> Params:
        """Choose parameters with scales in a format of their own, perhaps of two levels."""
        spec, scale, outer = mx_tensors(self, x, sizes, float_dtype)
        return Params(spec, scale, None, outer)

    def quantize(self, x: Node, params: Params) -> Node:
        """Add a quantize."""
        q = self.b.call(ops.quantize, x, *params.args)
        self.stored.append((q, params))
        return q

    def dequantize(self, q: Node, params: Params) -> Value:
        """Add a dequantize."""
        node = self.b.call(ops.dequantize, q, *params.args)
        integer = not params.spec.dtype.is_floating_point
        whole = params.spec.domain is not ZeroPointDomain.FLOAT_OFFSET
        return self.add(node, coarse=integer and whole)

    def weight_params(self, n: int, k: int, float_dtype: torch.dtype) -> tuple[Node, Params]:
        """Add a stored weight; remember it, so that another linear may share it."""
        blocks: list[Block] = [(1, None), (None, None), (1, k or 1)]
        if not self.usual():
            blocks += [(1, 4), (None, 1), (2, 3)]
        block = self.pick(blocks)
        spec = self.spec(block, float_dtype, weight=True)
        codes = stored_like(spec, n, k, generator=self.random)
        q = self.b.const(self.name("w"), codes)
        grid = [int(size) for size in spec.grid((n, k))]
        made = q, Params(spec, self.scale(grid), self.zero(grid, spec))
        self.weights.append(made)
        return made

    def sizes(self, value: Value) -> tuple[Size, ...]:
        """Sizes of a value."""
        return tuple(shape_of(value.node))

    def is_float(self, value: Value) -> bool:
        """Whether a value has one of the float types that models compute in."""
        return dtype_of(value.node) in FLOATS
