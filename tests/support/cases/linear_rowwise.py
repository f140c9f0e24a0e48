"""A quantized linear and an op of rows behind it, for the tests of kernels that run both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from qfuse import kernels
from qfuse.cost import CostModel, CostProfile
from qfuse.ir.graph.stage_graph import LoweredGraph, OptimizedGraph
from qfuse.ir.ops import library as ops
from qfuse.ir.quant.choose import ChooseSpec, Formula
from qfuse.ir.quant.spec import Arithmetic, QuantSpec, ZeroPointDomain
from qfuse.lower import Wishes, lower
from qfuse.lower.floats.policy import QUANTIZED
from qfuse.lower.kernels.registry import all_kernels, linear_kernels
from qfuse.lower.select.kernel import Kernel
from qfuse.rewrite.budget import RewriteBudget
from qfuse.rewrite.clone import clone
from qfuse.rewrite.context import RewriteContext
from qfuse.targets import Target
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import stored_like

F32 = torch.float32
aten = torch.ops.aten

_MATH = Arithmetic(F32, True, False)
_X = QuantSpec(torch.int8, -128, 127, (1, 1, None), F32, _MATH, ZeroPointDomain.INT)
_W = QuantSpec(torch.int8, -128, 127, (1, None), F32, _MATH, ZeroPointDomain.INT)
CODES = replace(_X)
CHOOSE = ChooseSpec(Formula.AO_SYMMETRIC, torch.int8, -128, 127, (1, 1, None), 1e-6)
TRIP = QuantSpec(torch.uint8, 0, 255, (None,) * 3, F32, _MATH, ZeroPointDomain.INT)


@dataclass(frozen=True)
class LinearRowwiseCase:
    """A linear of 8 by 16 rows, ``k`` to ``n`` features, and the op behind it.

    Attributes:
        n: Features of the linear.
        epilogue: Of the op.
        reads: What the op reads: the whole linear, or halves of it, cut in some way.
        extras: Operands of the op: shapes, "up" for the other half, numbers for constants.
        spec: What the result is stored as; ``None`` leaves it float.
        choose: How its parameters are chosen; ``None`` gives them.
        keep: What is kept besides.
        float_dtype: Type of the linear.
        inner: Epilogue of the linear, and whether it reads an operand.
        linear: Changes to the linear.
        other: Who else reads: "linear", "half".
        rows: Sizes of the leading axes.
        weight: How the weight is stored.
        k: Input features.
    """

    n: int = 140
    epilogue: str = "glu(silu,gate-first)"
    reads: str = "whole"
    extras: tuple[Any, ...] = ()
    spec: QuantSpec | None = CODES
    choose: ChooseSpec | None = CHOOSE
    keep: str = ""
    float_dtype: torch.dtype = F32
    inner: str = ""
    linear: dict[str, Any] = field(default_factory=dict)
    other: str = ""
    rows: tuple[int | str, ...] = (8, 16)
    weight: QuantSpec = _W
    k: int = 36

    def program(self) -> OptimizedGraph:
        """The graph of both."""
        b = GraphBuilder()
        linear = self._linear(b)
        # Before the op, which then has to be computed earlier.
        outs = [b.call(aten.neg.default, linear)] if self.other == "linear" else []
        x, up = self._halves(b, linear)
        extras = [self._extra(b, index, e, up) for index, e in enumerate(self.extras)]
        given: list[Any] = [None, None]
        if self.spec is not None and self.choose is None:
            given = [b.const("scale", torch.full((1, 1, 1), 0.031)),
                     b.const("zero", torch.full((1, 1, 1), 3, dtype=torch.int32))]  # fmt: skip
        spec = "" if self.spec is None else str(self.spec)
        choose = "" if self.spec is None or self.choose is None else str(self.choose)
        args = (x, None, None, "", self.epilogue, extras, *given, spec, choose, self.keep)
        node = b.call(ops.activation, *args)
        outs += [b.item(node, index) for index in range(len(node.meta["val"]))]
        if self.other == "half":
            outs.append(b.call(aten.neg.default, x))
        return b.done(*outs, stage=OptimizedGraph)

    def _linear(self, b: GraphBuilder) -> Node:
        x_spec = replace(_X, float_dtype=self.float_dtype)
        q = b.arg("q", torch.int8, *self.rows, self.k)
        scale = b.arg("q_scale", F32, *self.rows, 1)
        w_spec = replace(self.weight, float_dtype=self.float_dtype)
        w = b.const("w", stored_like(w_spec, self.n, self.k))
        grid = [int(size) for size in w_spec.grid((self.n, self.k))]
        w_scale = b.const("w_scale", torch.rand(grid) * 0.01 + 0.003)
        bias = b.const("bias", torch.randn(self.n).to(self.float_dtype))
        extras = [b.arg("inner", self.float_dtype, *self.rows, self.n)] if "0" in self.inner else []
        given = {"out_scale": None, "out_zero": None, "out_spec": "", **self.linear}
        if given["out_spec"]:
            given["out_scale"] = b.const("out_scale", torch.full((1, 1, 1), 0.02))
        return b.call(
            ops.linear, q, scale, None, str(x_spec), w, w_scale, None, str(w_spec), bias,
            given["out_scale"], given["out_zero"], given["out_spec"], self.inner, extras,
        )  # fmt: skip

    def _halves(self, b: GraphBuilder, linear: Node) -> tuple[Node, Node | None]:
        """What the op reads, and the other half if it reads one."""
        if self.reads == "whole":
            return linear, None
        half = self.n // 2
        if self.reads == "split":
            parts = b.call(aten.split_with_sizes.default, linear, [half, self.n - half], -1)
            return b.item(parts, 0), b.item(parts, 1)
        at = {"slices": (0, half, half, self.n), "swapped": (half, self.n, 0, half),
              "off by one": (0, half, half - 1, self.n - 1), "twice": (0, half, 0, half),
              "to the end": (0, half, half, 1 << 40)}[self.reads]  # fmt: skip
        cut = aten.slice.Tensor
        return b.call(cut, linear, 2, *at[:2]), b.call(cut, linear, 2, *at[2:])

    def _extra(self, b: GraphBuilder, index: int, what: Any, up: Node | None) -> Node:
        if isinstance(what, str):
            assert up is not None, "it reads halves"
            return up if what == "up" else b.call(aten._to_copy.default, up, dtype=torch.bfloat16)
        if isinstance(what, tuple):
            return b.arg(f"extra{index}", self.float_dtype, *self.rows[: 3 - len(what)], *what)
        kind = F32 if isinstance(what, float) else torch.int32
        return b.const(f"extra{index}", torch.full((1, 1, 1), what, dtype=kind))


def lowered(
    program: OptimizedGraph,
    library: kernels.KernelLibrary | None = None,
    *,
    registry: Sequence[Kernel[Any]] | None = None,
    banned: str = "",
) -> LoweredGraph:
    """Lower a copy of ``program`` for a pinned machine, by all kernels or by some."""
    library = kernels.load() if library is None else library
    cost = CostModel(CostProfile.pinned())
    everything = all_kernels(library)
    if registry is not None:
        everything = (*registry, *everything[len(linear_kernels(library)) :])
    context = RewriteContext("lower", budget=RewriteBudget(banned=frozenset({banned})))
    # Kernels compete with each other only: products of a few elements are faster in float.
    wishes = Wishes(floats=QUANTIZED)
    return lower(clone(program), Target.for_testing(), cost, everything, context, wishes)
