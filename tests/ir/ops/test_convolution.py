from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.values import bits_same
from torch.fx.node import map_arg

from qfuse.ir.graph.stage_graph import OptimizedGraph
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.check import problems_of
from qfuse.ir.ops.convolution import FusedConvolution, as_convolution, as_fused_convolution
from qfuse.ir.ops.epilogue import Act, Add, Epilogue
from qfuse.ir.ops.views import QuantParams
from qfuse.ir.quant.reference import dequantize, quantize
from qfuse.ir.quant.spec import QuantSpec
from qfuse.lower.expand.expand import Expander
from qfuse.rewrite.context import RewriteContext
from qfuse.rewrite.prelude import Exactness
from qfuse.rewrite.session import RewriteSession
from qfuse.testing.build import GraphBuilder
from qfuse.testing.fixed_order import run_fixed_order
from qfuse.testing.quant import per_channel, per_tensor, stored_like
from qfuse.testing.run import run

aten = torch.ops.aten
F32 = torch.float32
DIRECT = (F.conv1d, F.conv2d, F.conv3d)
TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


@dataclass(frozen=True)
class Shape:
    """The shapes and settings of a convolution of ``[2, 4, *sizes]`` to 6 channels."""

    spatial: int = 2
    transposed: bool = False
    groups: int = 1
    batched: bool = True
    stride: int = 2
    dilation: int = 2
    uneven: bool = False

    @property
    def x(self) -> tuple[int, ...]:
        lead = (2,) if self.batched else ()
        return (*lead, 4, *(7, 6, 5)[: self.spatial])

    @property
    def weight(self) -> tuple[int, ...]:
        kernel = (3, 2, 2)[: self.spatial]
        outs = 6 // self.groups if self.transposed else 6
        return (4, outs, *kernel) if self.transposed else (6, 4 // self.groups, *kernel)

    def settings(self) -> dict[str, Any]:
        """The settings of the fused op."""
        after = (0, 2, 1)[: self.spatial] if self.uneven else ()
        late = (1,) if self.transposed else (0,)
        return {
            "stride": (self.stride, 3, 2)[: self.spatial],
            "padding": (*(1, 0, 1)[: self.spatial], *after),
            "dilation": (1, self.dilation, 1)[: self.spatial],
            "transposed": self.transposed,
            "output_padding": late * self.spatial,
            "groups": self.groups,
        }


SHAPES = [
    *(Shape(spatial, batched=batched) for spatial in (1, 2, 3) for batched in (False, True)),
    *(Shape(spatial, transposed=True) for spatial in (1, 2, 3)),
    Shape(groups=2),
    Shape(groups=2, batched=False),
    *(Shape(spatial, uneven=True) for spatial in (1, 2, 3)),
    Shape(transposed=True, groups=2),
    Shape(transposed=True, batched=False),
]


@dataclass
class Case:
    """A fused convolution of constants, with a bias, a residual and a quantized result."""

    b: GraphBuilder
    op: FusedConvolution
    values: dict[Any, torch.Tensor]

    @classmethod
    def of(cls, shape: Shape, *, float_x: bool = False) -> Case:
        b = GraphBuilder()
        values: dict[Any, torch.Tensor] = {}

        def const(name: str, value: torch.Tensor) -> Any:
            node = b.const(name, value)
            values[node] = value
            return node

        rank = len(shape.x)
        spec, w_spec = per_tensor(rank, torch.uint8), _weight_spec(shape)
        value = torch.randn(shape.x) if float_x else stored_like(spec, *shape.x)
        x = b.arg("x", F32 if float_x else torch.uint8, *shape.x)
        values[x] = value
        scale = const("scale", torch.full([1] * rank, 0.03))
        params = QuantParams(spec, scale, const("zero", torch.full([1] * rank, 7)))
        weight = const("weight", stored_like(w_spec, *shape.weight))
        w_scale = const("w_scale", torch.rand(w_spec.grid(shape.weight)) * 0.1 + 0.01)
        y = _float_result(shape)
        out = QuantParams(per_tensor(y.dim()), const("out", torch.full([1] * y.dim(), 0.2)), None)
        op = FusedConvolution(
            x,
            x,
            None if float_x else params,
            weight,
            QuantParams(w_spec, w_scale, None),
            const("bias", torch.randn(6)),
            **shape.settings(),
            out_params=out,
            epilogue=Epilogue((Act("relu"), Add(0, 0.5))),
            extras=(const("residual", torch.randn_like(y)),),
        )
        return cls(b, op, values)

    def node(self) -> Any:
        return self.b.call(self.op.overload, *self.op.call_args())

    def call(self) -> Any:
        return self.op.overload(*map_arg(self.op.call_args(), lambda n: self.values[n]))

    def operand(self, name: str) -> torch.Tensor:
        node, params = getattr(self.op, name), getattr(self.op, f"{name}_params")
        if params is None:
            return self.values[node]
        zero = None if params.zero_point is None else self.values[params.zero_point]
        return dequantize(self.values[node], self.values[params.scale], zero, params.spec)


def _weight_spec(shape: Shape) -> QuantSpec:
    block: list[int | None] = [None] * len(shape.weight)
    block[1 if shape.transposed else 0] = 1
    return per_channel(len(shape.weight)).with_block(tuple(block))


def _float_result(shape: Shape) -> torch.Tensor:
    return _float_convolution(shape, torch.zeros(shape.x), torch.zeros(shape.weight), None)


def _float_convolution(
    shape: Shape, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    s, index = shape.settings(), shape.spatial - 1
    if shape.transposed:
        late = s["output_padding"], s["groups"], s["dilation"]
        return TRANSPOSED[index](x, weight, bias, s["stride"], s["padding"], *late)
    padding = s["padding"]
    if shape.uneven:
        sides = (padding[i + shape.spatial * side] for i in range(index, -1, -1) for side in (0, 1))
        x, padding = torch.nn.functional.pad(x, list(sides)), 0
    return DIRECT[index](x, weight, bias, s["stride"], padding, s["dilation"], s["groups"])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("float_x", [False, True])
def test_the_reference_is_the_float_convolution(shape: Shape, float_x: bool) -> None:
    case = Case.of(shape, float_x=float_x)
    op, values = case.op, case.values
    y = _float_convolution(shape, case.operand("x"), case.operand("weight"), values[op.bias])
    y = torch.add(y.relu(), values[op.extras[0]], alpha=0.5)
    assert op.out_params is not None
    want = quantize(y, values[op.out_params.scale], None, op.out_params.spec)
    assert bits_same((case.call(),), (want,))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_view_and_its_arguments(shape: Shape) -> None:
    case = Case.of(shape)
    node = case.node()
    view = as_fused_convolution(node)
    assert view == replace(case.op, node=node)
    assert view is not None
    assert view.call_args() == node.args
    assert not list(problems_of(view))
    assert (view.spatial, view.axis) == (shape.spatial, int(shape.batched))
    assert view.out_channels == node.meta["val"].shape[view.axis] == 6
    assert ops.as_op(node) == view
    assert as_convolution(node) is None
    assert ops.stored_spec(node) == per_tensor(len(shape.x))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_expansion_returns_the_same_values(shape: Shape) -> None:
    case = Case.of(shape)
    node = case.node()
    program = case.b.done(node, stage=OptimizedGraph)
    inputs = [case.values[case.op.x]]
    want = run(program, inputs)

    def edit(rw: Any) -> None:
        rw.replace(node, Expander().expand(node, rw))

    session = RewriteSession(program, RewriteContext("lower"))
    session.rewrite_always("expand", node, edit, proof=Exactness.EXACT)
    assert all(not is_own(n) for n in program.graph.nodes)
    assert bits_same(run(program, inputs), want)


def is_own(node: Any) -> bool:
    return str(node.target).startswith("qfuse.")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sequential_sums_differ_by_rounding_only(shape: Shape) -> None:
    case = Case.of(shape)
    case.op = replace(case.op, out_params=None)
    program = case.b.done(case.node(), stage=OptimizedGraph)
    inputs = [case.values[case.op.x]]
    (got,), (want,) = run_fixed_order(program, inputs), run(program, inputs)
    assert got.shape == want.shape
    assert torch.equal(got.sign(), want.sign())
    assert (got - want).abs().max() <= 2e-6 * want.abs().max()


def test_the_result_is_channels_last_if_an_operand_is() -> None:
    for name in ("x", "weight", ""):
        case = Case.of(Shape())
        case.op = replace(case.op, extras=(), epilogue=Epilogue())
        node = getattr(case.op, name or "x")
        if name:
            last = case.values[node].contiguous(memory_format=torch.channels_last)
            case.values[node] = last
            node.meta["val"] = node.meta["val"].contiguous(memory_format=torch.channels_last)
        fake, made = case.node().meta["val"], case.call()
        assert fake.stride() == made.stride()
        assert made.is_contiguous(memory_format=torch.channels_last) is bool(name)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"stride": (2,)}, "the stride is (2,) for 2 spatial axes"),
        ({"stride": (2, 0)}, "the stride is (2, 0)"),
        ({"padding": (1, -1)}, "the padding is (1, -1)"),
        ({"padding": (1, 1, 1)}, "the padding is (1, 1, 1)"),
        ({"padding": (1, 1, 1, -1)}, "the padding is (1, 1, 1, -1)"),
        ({"dilation": ()}, "the dilation is ()"),
        ({"output_padding": (0,)}, "the output_padding is (0,)"),
        ({"output_padding": (1, 0)}, "it is not transposed and has an output padding"),
        ({"groups": 0}, "it has 0 groups"),
        ({"groups": 2}, "an input of 4 channels and a weight (6, 4, 3, 2) in 2 groups"),
        ({"transposed": True}, "an input of 4 channels and a weight (6, 4, 3, 2) in 1 groups"),
        ({"bias": "weight"}, "a bias of shape (6, 4, 3, 2) for 6 channels"),
        ({"weight": "bias"}, "quantized values are torch.float32"),
        ({"x_params": None}, "the input is computed in torch.uint8"),
        ({"weight_params": None}, "the input is computed in torch.float32, the weight in"),
    ],
    ids=str,
)
def test_a_call_is_verified(change: dict[str, Any], why: str) -> None:
    case = Case.of(Shape())
    node = case.node()
    for name, value in change.items():
        if isinstance(value, str):
            change = {name: getattr(case.op, value)}
    found = list(problems_of(replace(case.op, node=node, **change)))
    assert any(problem.startswith(why) for problem in found), found


def test_operands_of_other_ranks_are_a_problem() -> None:
    case = Case.of(Shape())
    assert case.op.bias is not None
    op = replace(case.op, node=case.node(), x=case.op.bias, x_params=None)
    assert "an input of rank 1 and a weight of rank 4" in list(problems_of(op))


def test_groups_that_do_not_divide_the_channels_are_a_problem() -> None:
    b = GraphBuilder()
    x, weight = b.arg("x", F32, 1, 4, 5), b.const("w", torch.randn(5, 2, 3))
    same = b.arg("y", F32, 1, 5, 3)
    settings: dict[str, Any] = Shape(1, groups=2).settings()
    end: dict[str, Any] = {"out_params": None, "epilogue": Epilogue(), "extras": ()}
    op = FusedConvolution(same, x, None, weight, None, None, **settings, **end)
    assert list(problems_of(op)) == [
        "an input of 4 channels and a weight (5, 2, 3) in 2 groups",
    ]


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_transposed_call_of_aten_is_viewed(rank: int) -> None:
    b = GraphBuilder()
    x = b.arg("x", F32, 2, 4, *(5,) * rank)
    weight = b.const("w", torch.randn(4, 3, *(2,) * rank))
    op = (
        aten.conv_transpose1d.default,
        aten.conv_transpose2d.input,
        aten.conv_transpose3d.input,
    )[rank - 1]
    conv = as_convolution(b.call(op, x, weight, None, [2], [1], [1], 1, [1]))
    assert conv is not None
    assert conv.transposed
    assert conv.per_axis("output_padding") == (1,) * rank == conv.padding
