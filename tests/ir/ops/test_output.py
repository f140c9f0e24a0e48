"""The fused ops of several results: meaning, texts, views, verification and expansion."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from tests.support.values import bits_same
from torch.fx import Node

from qfuse.cost import CostModel, CostProfile
from qfuse.ir.errors import NormalizeError, VerifyError
from qfuse.ir.graph.stage_graph import OptimizedGraph
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.activation import Activation, as_activation
from qfuse.ir.ops.epilogue import Act, Epilogue, Mul
from qfuse.ir.ops.library import stored_spec
from qfuse.ir.ops.norm_spec import NormSpec, Root, Statistic
from qfuse.ir.ops.norms import LayerNorm, RmsNorm, as_fused_norm, as_layer_norm, as_rms_norm
from qfuse.ir.ops.output import ExtraOutput, Output, extra_outputs_text, parse_extra_outputs
from qfuse.ir.ops.value_range import bounds_of
from qfuse.ir.ops.views import QuantParams
from qfuse.ir.quant.choose import ChooseSpec, Formula, choose_qparams
from qfuse.ir.quant.reference import quantize
from qfuse.ir.quant.spec import QuantSpec
from qfuse.ir.stages.verify import verify
from qfuse.lower import lower
from qfuse.rewrite.clone import clone
from qfuse.targets import Target
from qfuse.testing.build import GraphBuilder
from qfuse.testing.run import random_inputs, run

F32, BF16 = torch.float32, torch.bfloat16
PLAIN = NormSpec(1, 1e-6, F32, F32, F32, F32)
STORED = QuantSpec(torch.int8, -128, 127, (1, 1, None))
ASYMMETRIC = ChooseSpec(
    Formula.AO_ASYMMETRIC, torch.int8, -128, 127, (1, 1, None), 1e-5, F32, torch.int8
)
SYMMETRIC = ChooseSpec(
    Formula.AO_SYMMETRIC, torch.int8, -128, 127, (1, 1, None), 1e-5, F32, torch.int8
)
FLOAT = (None, None, "")
KEEPS = [frozenset(k) for n in range(3) for k in itertools.combinations(ExtraOutput, n)]


def build(
    output: str, keep: frozenset[ExtraOutput], *, layer: bool = False
) -> tuple[GraphBuilder, OptimizedGraph]:
    """A graph of one fused norm with residual and weight that gives all that it has."""
    b = GraphBuilder()
    x, r = b.arg("x", F32, 2, "m", 8), b.arg("r", F32, 2, "m", 8)
    weight = b.const("weight", torch.randn(8))
    block: Output
    if output == "static":
        scale = b.const("scale", torch.full((1, 1, 1), 0.03))
        params = QuantParams(STORED.with_block((None, None, None)), scale, None)
        block = Output(params, None, keep)
    elif output == "float":
        block = Output(None, None, keep)
    else:
        block = Output(None, (STORED, ASYMMETRIC if output == "asymmetric" else SYMMETRIC), keep)
    if layer:
        bias = b.const("bias", torch.randn(8))
        args = LayerNorm(x, x, None, r, None, weight, bias, PLAIN, block).call_args()
        node = b.call(ops.layer_norm, *args)
    else:
        node = b.call(ops.rms_norm, *RmsNorm(x, x, None, r, None, weight, PLAIN, block).call_args())
    outs = [b.item(node, index) for index in range(block.count)]
    return b, b.done(*outs, stage=OptimizedGraph)


@pytest.mark.parametrize(
    ("output", "keep"),
    [
        (output, keep)
        for output in ("static", "symmetric", "asymmetric", "float")
        for keep in KEEPS
        if output != "float" or ExtraOutput.FLOAT not in keep
    ],
)
@pytest.mark.parametrize("layer", [False, True])
def test_results_come_in_order_and_expand_to_the_same_bits(
    output: str, keep: frozenset[ExtraOutput], layer: bool
) -> None:
    _, program = build(output, keep, layer=layer)
    verify(program)
    source = clone(program)
    target, cost = Target.for_testing(), CostModel(CostProfile.pinned())
    lowered = lower(program, target, cost, ())
    assert not [n for n in lowered.graph.nodes if "qfuse" in str(n.target)]
    for m in (1, 5):
        x, r = random_inputs(source, m=m)
        total = x + r
        weight = source.module.get_buffer("weight")
        if layer:
            centred = total - total.mean(-1, keepdim=True)
            y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-6)
            y = y * weight + source.module.get_buffer("bias")
        else:
            y = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6) * weight
        want: list[torch.Tensor] = [y]
        if output == "static":
            spec = STORED.with_block((None, None, None))
            want = [quantize(y, source.module.get_buffer("scale"), None, spec)]
        elif output != "float":
            scale, zero = choose_qparams(y, ASYMMETRIC if output == "asymmetric" else SYMMETRIC)
            want = [quantize(y, scale, zero, STORED), scale, zero]
        want += [
            {ExtraOutput.FLOAT: y, ExtraOutput.SUM: total}[k] for k in ExtraOutput if k in keep
        ]
        assert bits_same(run(source, [x, r]), tuple(want))
        assert bits_same(run(lowered, [x, r]), tuple(want))


def test_golden_text() -> None:
    _, program = build("asymmetric", frozenset({ExtraOutput.SUM}))
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[2, s0, 8]
%r: float32[2, s0, 8]
const %weight: float32[8]
%0 = qfuse.rms_norm(%x, None, None, '', %r, None, None, '', %weight, 'axes=1 eps=1e-06 float32:float32:float32:float32 rsqrt squares', None, None, 'int8[-128,127] 1x1x* float32 float32:reciprocal:round-zp int', 'ao-asymmetric int8[-128,127] 1x1x* eps=1e-05 float32 int8', 'sum'): (int8[2, s0, 8], float32[2, s0, 1], int8[2, s0, 1], float32[2, s0, 8])
%1 = getitem(%0, 0): int8[2, s0, 8]
%2 = getitem(%0, 1): float32[2, s0, 1]
%3 = getitem(%0, 2): int8[2, s0, 1]
%4 = getitem(%0, 3): float32[2, s0, 8]
return (%1, %2, %3, %4)""",
    )


def test_the_gate_of_swiglu_is_an_activation() -> None:
    b = GraphBuilder()
    gate, up = b.arg("gate", F32, "m", 3, 8), b.arg("up", F32, "m", 3, 8)
    steps = Epilogue((Act("silu"), Mul(0)))
    block = Output(None, (STORED, SYMMETRIC), frozenset({ExtraOutput.FLOAT}))
    node = b.call(ops.activation, *Activation(gate, gate, None, steps, (up,), block).call_args())
    program = b.done(*[b.item(node, i) for i in range(4)], stage=OptimizedGraph)
    verify(program)
    g, u = random_inputs(program, m=4)
    y = F.silu(g) * u
    scale, zero = choose_qparams(y, SYMMETRIC)
    want = (quantize(y, scale, None, STORED), scale, zero, y)
    assert bits_same(run(program, [g, u]), want)
    target, cost = Target.for_testing(), CostModel(CostProfile.pinned())
    assert bits_same(run(lower(program, target, cost, ()), [g, u]), want)


def calls(program: OptimizedGraph) -> list[Node]:
    return [n for n in program.graph.nodes if "qfuse" in str(n.target)]


@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("output", ["static", "asymmetric", "float"])
def test_a_view_gives_its_arguments_back(layer: bool, output: str) -> None:
    _, program = build(output, frozenset({ExtraOutput.SUM}), layer=layer)
    (node,) = calls(program)
    view = as_fused_norm(node)
    assert view is not None
    assert view.call_args() == node.args
    assert (as_rms_norm(node) is None) is layer
    assert (as_layer_norm(node) is None) is not layer
    assert as_activation(node) is None


def test_what_is_known_of_the_results() -> None:
    _, program = build("asymmetric", frozenset({ExtraOutput.FLOAT}))
    q, scale, zero, y = program.graph.output_node().all_input_nodes
    assert stored_spec(q) == STORED
    assert [stored_spec(n) for n in (scale, zero, y)] == [None] * 3
    assert bounds_of(q) == (-128, 127)
    assert bounds_of(zero) == (-128, 127)
    assert bounds_of(y) is None
    _, program = build("symmetric", frozenset())
    assert bounds_of(program.graph.output_node().all_input_nodes[2]) == (0, 0)


@given(
    axes=st.integers(1, 3),
    eps=st.floats(0, 1e-2),
    types=st.lists(st.sampled_from([F32, BF16, torch.float16]), min_size=4, max_size=4),
    root=st.sampled_from(Root),
    statistic=st.sampled_from(Statistic),
)
def test_a_norm_is_its_text(
    axes: int, eps: float, types: list[torch.dtype], root: Root, statistic: Statistic
) -> None:
    compute, product, rounded, out = types
    spec = NormSpec(axes, eps, compute, product, rounded, out, root, statistic)
    assert NormSpec.parse(str(spec)) == spec


@pytest.mark.parametrize("text", ["", "axes=1", "axes=0 eps=1e-06 a:b:c:d rsqrt squares"])
def test_other_texts_are_no_norms(text: str) -> None:
    with pytest.raises(NormalizeError):
        NormSpec.parse(text)


@pytest.mark.parametrize("eps", [-1e-6, float("inf"), float("nan")])
def test_eps_is_a_number_that_is_not_negative(eps: float) -> None:
    with pytest.raises(NormalizeError):
        NormSpec(1, eps, F32, F32, F32, F32)


@pytest.mark.parametrize("keep", KEEPS, ids=extra_outputs_text)
def test_what_is_kept_is_its_text(keep: frozenset[ExtraOutput]) -> None:
    assert parse_extra_outputs(extra_outputs_text(keep)) == keep


@pytest.mark.parametrize("text", ["sum|float", "float|float", "mean", "float|"])
def test_other_texts_keep_nothing(text: str) -> None:
    with pytest.raises(NormalizeError):
        parse_extra_outputs(text)


@pytest.mark.parametrize("root", Root)
@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16])
def test_every_root_is_the_op_that_it_names(root: Root, dtype: torch.dtype) -> None:
    x = torch.randn(5, 33).to(dtype)
    variance = x.float().square().mean(-1, keepdim=True) + 1e-5
    h = x.float()
    want = {
        Root.RSQRT: h * torch.rsqrt(variance),
        Root.RECIPROCAL: h * (1 / torch.sqrt(variance)),
        Root.DIVIDE: h / torch.sqrt(variance),
        Root.POWER: h * torch.pow(variance, -0.5),
    }[root]
    spec = NormSpec(1, 1e-5, F32, F32, F32, dtype, root)
    args = (x, *FLOAT, None, *FLOAT, None, str(spec), *FLOAT, "", "")
    (got,) = torch.ops.qfuse.rms_norm(*args)
    assert bits_same((got,), (want.to(dtype),))


@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16])
@pytest.mark.parametrize("shape", [(4, 8), (2, 3, 5), (1, 1), (0, 4)])
def test_a_whole_layer_norm_is_the_op_of_torch(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).to(dtype)
    weight, bias = torch.randn(2, shape[-1]).to(dtype)
    spec = NormSpec(1, 1e-5, dtype, dtype, dtype, dtype, statistic=Statistic.WHOLE)
    args = (x, *FLOAT, None, *FLOAT, weight, bias, str(spec), *FLOAT, "", "")
    (got,) = torch.ops.qfuse.layer_norm(*args)
    assert bits_same((got,), (F.layer_norm(x, shape[-1:], weight, bias, 1e-5),))


@pytest.mark.parametrize(
    ("index", "value", "word"),
    [
        (4, None, "sum"),
        (12, "int8[-128,127] 1x*x* float32 float32:reciprocal:round-zp int", "scale of shape"),
        (12, "uint8[0,255] 1x1x* float32 float32:reciprocal:round-zp int", "chosen for"),
        (14, "", "results"),
    ],
)
def test_refuses_arguments_that_do_not_fit(index: int, value: str | None, word: str) -> None:
    _, program = build("symmetric", frozenset({ExtraOutput.SUM}))
    (node,) = calls(program)
    node.args = tuple(value if i == index else a for i, a in enumerate(node.args))
    with pytest.raises(VerifyError, match=word):
        verify(program)


def test_there_are_no_parameters_without_a_residual() -> None:
    b = GraphBuilder()
    x, scale = b.arg("x", F32, 2, 8), b.const("scale", torch.full((1, 1), 0.02))
    params = QuantParams(QuantSpec(torch.int8, -128, 127, (None, None)), scale, None)
    node = b.call(ops.rms_norm, *RmsNorm(x, x, None, None, None, None, PLAIN, Output()).call_args())
    node.args = RmsNorm(x, x, None, None, params, None, PLAIN, Output()).call_args()
    program = b.done(b.item(node, 0), stage=OptimizedGraph)
    with pytest.raises(VerifyError, match="parameters of a residual"):
        verify(program)


@pytest.mark.parametrize(
    "steps", ["round(1,-,{})", "mul(0,1,-,{})", "add(0,1.0)", "cast(bfloat16)"]
)
def test_refuses_to_round_numbers_of_another_type(steps: str) -> None:
    """As if they were bfloat16, or to store what is bfloat16 as if it were float32."""
    for real in (F32, BF16):
        b = GraphBuilder()
        x, scale = b.arg("x", F32, 2, 8), b.const("scale", torch.full((1, 1), 0.02))
        spec = QuantSpec(torch.int8, -128, 127, (None, None), real)
        block = Output(QuantParams(spec, scale, None))
        epilogue = Epilogue.parse(steps.format(spec))
        op = Activation(x, x, None, epilogue, (x, scale), block)
        program = b.done(b.item(b.call(ops.activation, *op.call_args()), 0), stage=OptimizedGraph)
        if (real is BF16) == (steps == "cast(bfloat16)"):
            verify(program)
        else:
            with pytest.raises(VerifyError, match="float values are"):
                verify(program)


def test_the_types_that_steps_give() -> None:
    """They are torch's own, whatever axes the operands have."""
    operands = torch.randn(3, dtype=torch.bfloat16), torch.tensor(2.0), torch.tensor([3])
    epilogue = Epilogue.parse("mul(1)|add(0,2.0)|act(silu)|mul(2)|cast(float16)|mul(0)|mul(1)")
    y, want = torch.randn(3, dtype=torch.bfloat16), [BF16]
    for step in epilogue.ops:
        y = Epilogue((step,)).apply(y, operands)
        want.append(y.dtype)
    assert epilogue.float_types(BF16, operands) == tuple(want)
