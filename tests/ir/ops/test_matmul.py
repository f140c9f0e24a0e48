from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.values import bits_same
from torch.fx.node import map_arg

from qfuse.ir.graph.stage_graph import OptimizedGraph
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.check import problems_of
from qfuse.ir.ops.epilogue import Act, Add, Epilogue
from qfuse.ir.ops.matmul import FusedMatmul, as_fused_matmul, as_matmul
from qfuse.ir.ops.product import as_fused_product, kind_of
from qfuse.ir.ops.views import QuantParams
from qfuse.ir.quant.reference import dequantize, quantize
from qfuse.ir.quant.spec import QuantSpec
from qfuse.lower.expand.expand import Expander
from qfuse.rewrite.context import RewriteContext
from qfuse.rewrite.prelude import Exactness
from qfuse.rewrite.session import RewriteSession
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import per_tensor, per_token, stored_like
from qfuse.testing.run import run

aten = torch.ops.aten
F32 = torch.float32

SHAPES = [
    ((4, 8), (8, 5)),
    ((2, 4, 8), (2, 8, 5)),
    ((2, 3, 4, 8), (2, 3, 8, 5)),
    ((2, 3, 4, 8), (3, 8, 5)),
    ((2, 1, 4, 8), (3, 8, 5)),
    ((2, 4, 8), (8, 5)),
    ((1, 8), (2, 8, 1)),
]
Pair = tuple[tuple[int, ...], tuple[int, ...]]


class Case:
    """A fused product with a summand and a quantized result.

    Args:
        shapes: Of the operands.
        floats: Which operands are float.
    """

    def __init__(self, shapes: Pair, floats: tuple[bool, bool] = (False, False)) -> None:
        self.b = GraphBuilder()
        self.values: dict[Any, torch.Tensor] = {}
        x, x_params = self._operand("x", shapes[0], floats[0], per_token(len(shapes[0])))
        spec = per_tensor(len(shapes[1]), torch.uint8)
        other, other_params = self._operand("other", shapes[1], floats[1], spec)
        y = torch.matmul(torch.zeros(shapes[0]), torch.zeros(shapes[1]))
        out = self._const("out", torch.full([1] * y.dim(), 0.2))
        summand = self._const("summand", torch.randn(y.shape[-2:]))
        self.op = FusedMatmul(
            x, x, x_params, other, other_params,
            QuantParams(per_tensor(y.dim()), out, None),
            Epilogue((Act("relu"), Add(0, 0.5))),
            (summand,),
        )  # fmt: skip

    def _const(self, name: str, value: torch.Tensor) -> Any:
        node = self.b.const(name, value)
        self.values[node] = value
        return node

    def _operand(
        self, name: str, shape: tuple[int, ...], is_float: bool, spec: QuantSpec
    ) -> tuple[Any, QuantParams | None]:
        value = torch.randn(shape) if is_float else stored_like(spec, *shape)
        node = self.b.arg(name, value.dtype, *shape)
        self.values[node] = value
        if is_float:
            return node, None
        scale = self._const(f"{name}_scale", torch.rand(spec.grid(shape)) * 0.1 + 0.01)
        zero = torch.full([int(size) for size in spec.grid(shape)], 7)
        return node, QuantParams(spec, scale, self._const(f"{name}_zero", zero))

    def node(self) -> Any:
        return self.b.call(self.op.overload, *self.op.call_args())

    def call(self) -> Any:
        return self.op.overload(*map_arg(self.op.call_args(), lambda n: self.values[n]))

    def operand(self, name: str) -> torch.Tensor:
        node, params = getattr(self.op, name), getattr(self.op, f"{name}_params")
        if params is None:
            return self.values[node]
        zero = self.values[params.zero_point]
        return dequantize(self.values[node], self.values[params.scale], zero, params.spec)


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("floats", [(False, False), (True, False), (False, True)], ids=str)
def test_the_reference_is_the_float_product(shapes: Pair, floats: tuple[bool, bool]) -> None:
    case = Case(shapes, floats)
    y = torch.matmul(case.operand("x"), case.operand("other"))
    y = torch.add(y.relu(), case.values[case.op.extras[0]], alpha=0.5)
    assert case.op.out_params is not None
    want = quantize(y, case.values[case.op.out_params.scale], None, case.op.out_params.spec)
    assert bits_same((case.call(),), (want,))


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_a_view_and_its_arguments(shapes: Pair) -> None:
    case = Case(shapes)
    node = case.node()
    view = as_fused_matmul(node)
    assert view == replace(case.op, node=node)
    assert view is not None
    assert view.call_args() == node.args
    assert not list(problems_of(view))
    assert (*(view.batch or ()), shapes[0][-2], shapes[1][-1]) == tuple(node.meta["val"].shape)
    assert ops.as_op(node) == as_fused_product(node) == view
    assert kind_of(view) == "matmul"
    assert as_matmul(node) is None


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_the_expansion_returns_the_same_values(shapes: Pair) -> None:
    case = Case(shapes)
    node = case.node()
    program = case.b.done(node, stage=OptimizedGraph)
    inputs = [case.values[case.op.x], case.values[case.op.other]]
    want = run(program, inputs)

    def edit(rw: Any) -> None:
        rw.replace(node, Expander().expand(node, rw))

    session = RewriteSession(program, RewriteContext("lower"))
    session.rewrite_always("expand", node, edit, proof=Exactness.EXACT)
    assert not any(ops.as_op(n) for n in program.graph.nodes)
    assert bits_same(run(program, inputs), want)


@pytest.mark.parametrize(
    ("op", "x", "other"),
    [
        (aten.mm.default, (4, 8), (8, 5)),
        (aten.bmm.default, (2, 4, 8), (2, 8, 5)),
        (aten.matmul.default, (2, 4, 8), (8,)),
    ],
    ids=str,
)
def test_products_of_aten(op: Any, x: tuple[int, ...], other: tuple[int, ...]) -> None:
    b = GraphBuilder()
    left, right = b.arg("x", F32, *x), b.arg("other", F32, *other)
    product = as_matmul(b.call(op, left, right))
    assert product is not None
    assert (product.x, product.other) == (left, right)
    assert as_matmul(left) is None
    assert as_matmul(b.call(aten.add.Tensor, left, left)) is None


def changed(case: Case, **changes: Any) -> list[str]:
    """Return the problems of the op with other fields."""
    fake = case.node()
    return list(replace(case.op, node=fake, **changes).problems())


def test_problems() -> None:
    case = Case(((2, 4, 8), (2, 8, 5)))
    vector, wide = case.b.arg("v", torch.uint8, 8), case.b.arg("w", torch.uint8, 2, 9, 5)
    three = case.b.arg("t", torch.uint8, 3, 8, 5)
    half = case.b.arg("h", torch.bfloat16, 2, 8, 5)

    assert changed(case) == []
    assert changed(case, other=vector) == ["operands of rank 3 and 1"]
    assert changed(case, other=wide) == ["a product of (2, 4, 8) and (2, 9, 5)"]
    assert changed(case, other=three) == ["a product of (2, 4, 8) and (3, 8, 5)"]
    assert changed(case, other=half, other_params=None) == [
        "the left operand is computed in torch.float32, the right one in torch.bfloat16"
    ]


def test_symbolic_sizes() -> None:
    b = GraphBuilder()
    x, other = b.arg("x", F32, "b", "s", 8), b.arg("other", F32, 1, 8, "t")
    node = b.call(ops.matmul, x, None, None, "", other, None, None, "", None, None, "", "", [])
    view = as_fused_matmul(node)
    assert view is not None
    assert not list(problems_of(view))
    assert view.batch is not None
    assert list(map(str, view.batch)) == [str(x.meta["val"].shape[0])]
