from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.norm import (
    Spelling,
    Writer,
    assert_lowered_alike,
    fused,
    refused,
    the_norm,
)
from tests.support.cases.propagate import applied
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.norm_spec import Root, Statistic
from qfuse.ir.ops.norms import LayerNorm, RmsNorm
from qfuse.ir.ops.output import ExtraOutput
from qfuse.ir.quant.choose import ChooseSpec, Formula
from qfuse.ir.quant.spec import QuantSpec
from qfuse.optimize.fuse.norm import FuseNormQuantize
from qfuse.rewrite.clone import clone
from qfuse.rewrite.driver import apply_rules

aten = torch.ops.aten
F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64

LLAMA = Spelling(wide=F32, rounded=BF16, weight_dtype=BF16)


@pytest.mark.numeric
def test_golden_llama_in_bfloat16_with_its_residual() -> None:
    w = Writer(2, "m", 8, dtype=BF16)
    total = w.call(aten.add.Tensor, w.x, w.arg("r"))
    program = w.done(w.dynamic(w.spelled(LLAMA, total)), w.call(aten.neg.default, total))

    fused(program, m=3)
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: bfloat16[2, s0, 8]
%r: bfloat16[2, s0, 8]
const %weight1: bfloat16[8]
%0 = qfuse.rms_norm(%x, None, None, '', %r, None, None, '', %weight1, 'axes=1 eps=1e-05 float32:float32:bfloat16:bfloat16 rsqrt squares', None, None, 'int8[-128,127] 1x1x* bfloat16 float32:reciprocal:round-zp int', 'ao-symmetric int8[-128,127] 1x1x* eps=1e-06 float32 int32', 'sum'): (int8[2, s0, 8], float32[2, s0, 1], int32[2, s0, 1], bfloat16[2, s0, 8])
%1 = getitem(%0, 0): int8[2, s0, 8]
%2 = getitem(%0, 3): bfloat16[2, s0, 8]
%3 = aten.neg(%2): bfloat16[2, s0, 8]
return (%1, %3)""",
    )


SPELLINGS = [
    *(Spelling(square=square) for square in ("pow", "square", "mul")),
    *(Spelling(root=root) for root in ("reciprocal", "one-over", "divided-one", "power", "divide")),
    *(Spelling(eps=eps) for eps in ("tensor", "tensor-first")),
    *(Spelling(weight=w) for w in ("none", "one-plus", "rows", "full", "scalar")),
    Spelling(swapped=True, weight="one-plus"),
    Spelling(centre="once"),
    Spelling(centre="twice", bias=True, swapped=True),
    Spelling(centre="once", variance="var.dim", bias=True, weight="none"),
    Spelling(centre="once", variance="var.correction", bias=True, root="divide"),
]
NARROW = [
    LLAMA,
    Spelling(),
    Spelling(wide=F32, rounded=BF16),
    Spelling(wide=F32, rounded=BF16, scale_input=True, weight_dtype=BF16),
    Spelling(wide=F32, out=BF16, weight="one-plus"),
    Spelling(wide=F32, narrow_factor=True, scale_input=True, weight_dtype=BF16),
    Spelling(wide=F32, weight="none", rounded=BF16, out=F32),
    Spelling(wide=F64, rounded=BF16, out=F32),
    Spelling(wide=F32, centre="twice", scale_input=True, rounded=BF16, bias=True, out=BF16),
    Spelling(centre="once", variance="var.dim", weight_dtype=BF16, bias=True),
]


@pytest.mark.numeric
@pytest.mark.filterwarnings("ignore:var:UserWarning")
@pytest.mark.parametrize("spelling", SPELLINGS, ids=str)
@pytest.mark.parametrize("shape", [("m", 33), (1, "m", 1), (3, 0), ("m", 2, 7)])
def test_every_spelling_gives_its_bits(spelling: Spelling, shape: tuple[int | str, ...]) -> None:
    w = Writer(*shape)
    y = w.spelled(spelling)
    # Every shape lowers to the same calls, and those over several axes are lowered below.
    norm = fused(w.done(w.dynamic(y), w.static(y)), m=5, lowered=len(shape) == 2)
    assert isinstance(norm, LayerNorm if spelling.centre != "none" else RmsNorm)


@pytest.mark.numeric
@pytest.mark.parametrize("spelling", NARROW, ids=str)
def test_every_rounding_stays_where_it_is(spelling: Spelling) -> None:
    w = Writer("m", 65, dtype=BF16)
    norm = fused(w.done(w.dynamic(w.spelled(spelling), Formula.AO_ASYMMETRIC)), m=7)
    assert isinstance(norm, LayerNorm if spelling.centre != "none" else RmsNorm)


@pytest.mark.numeric
@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("centre", ["none", "once"])
def test_norms_over_several_axes(axes: int, centre: str) -> None:
    w = Writer(2, 3, 5, dtype=F32) if axes == 3 else Writer("m", 3, 5, dtype=F32)
    norm = fused(w.done(w.static(w.spelled(Spelling(axes=axes, centre=centre)))), m=4)
    assert norm.norm.axes == axes


QUANTIZES: dict[str, Callable[[Writer, Node], Node]] = {
    "int8": lambda w, y: w.static(y),
    "uint8": lambda w, y: w.static(y, torch.uint8),
    "float8": lambda w, y: w.static(y, torch.float8_e4m3fn),
    "per feature": lambda w, y: w.static(y, block=(None, None, 1)),
    "in groups": lambda w, y: w.static(y, block=(None, None, 4)),
    "token": lambda w, y: w.dynamic(y),
    "token asymmetric": lambda w, y: w.dynamic(y, Formula.AO_ASYMMETRIC),
    "token float8": lambda w, y: w.dynamic(y, Formula.AO_FLOAT8),
    "tensor": lambda w, y: w.dynamic(y, block=(None, None, None)),
    "groups": lambda w, y: w.dynamic(y, Formula.AO_ASYMMETRIC, (1, 1, 4)),
}


@pytest.mark.numeric
@pytest.mark.pairs
@pytest.mark.parametrize("kind", QUANTIZES)
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("m", [1, 6])
def test_every_granularity_gives_its_bits(kind: str, dtype: torch.dtype, m: int) -> None:
    w = Writer(2, "m", 10, dtype=dtype)
    y = w.spelled(Spelling(wide=F32, rounded=dtype, weight_dtype=dtype))
    norm = fused(w.done(QUANTIZES[kind](w, y)), m=m)
    assert (norm.output.choose is not None) is kind.startswith(("token", "tensor", "groups"))


@pytest.mark.numeric
@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "name", ["rms_norm", "rms_norm default", "layer_norm", "native_layer_norm"]
)
def test_the_ops_of_torch(name: str, dtype: torch.dtype, weighted: bool) -> None:
    w = Writer("m", 3, 17, dtype=dtype)
    shape = [3, 17]
    weight = w.const(torch.randn(shape).to(dtype)) if weighted else None
    bias = w.const(torch.randn(shape).to(dtype)) if weighted else None
    if name.startswith("rms_norm"):
        y = w.call(aten.rms_norm.default, w.x, shape, weight, None if "default" in name else 1e-5)
    elif name == "layer_norm":
        y = w.call(aten.layer_norm.default, w.x, shape, weight, bias, 1e-5, False)
    else:
        y = w.b.item(w.call(aten.native_layer_norm.default, w.x, shape, weight, bias, 1e-5), 0)
    norm = fused(w.done(w.static(y)), m=5)
    assert norm.norm.axes == 2
    assert norm.x is w.x or norm.x.name == "x"


@pytest.mark.numeric
def test_a_cast_around_a_whole_norm_is_part_of_it() -> None:
    w = Writer("m", 9, dtype=BF16)
    wide = w.cast(w.x, F32)
    y = w.call(aten.layer_norm.default, wide, [9], w.const(torch.randn(9)), None, 1e-5, False)
    norm = fused(w.done(w.dynamic(w.cast(y, BF16))), m=4)
    assert norm.x.name == "x"
    assert (norm.norm.compute, norm.norm.out) == (F32, BF16)
    assert norm.norm.statistic is Statistic.WHOLE


@pytest.mark.numeric
def test_type_as_is_a_cast() -> None:
    w = Writer("m", 8, dtype=BF16)
    y = w.spelled(Spelling(wide=F32, weight="one-plus"))
    y = w.call(aten.type_as.default, y, w.x)
    assert fused(w.done(w.dynamic(y)), m=3).norm.out is BF16


READERS: dict[str, Callable[[Writer, Node], Node]] = {
    "caller": lambda _, y: y,
    "view": lambda w, y: w.call(aten.view.default, y, [-1]),
    "pointwise": lambda w, y: w.call(aten.neg.default, y),
    "quantize": lambda w, y: w.static(y, torch.uint8),
    "dynamic": lambda w, y: w.dynamic(y, Formula.AO_ASYMMETRIC),
}


@pytest.mark.numeric
@pytest.mark.pairs
@pytest.mark.parametrize("who", READERS)
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("what", ["result", "sum", "both"])
def test_what_others_read_too_is_kept(who: str, first: bool, what: str) -> None:
    w = Writer(2, 3, 8)
    total = w.call(aten.add.Tensor, w.x, w.arg("r"))
    early = [READERS[who](w, total)] if first and what != "result" else []
    y = w.spelled(Spelling(), total)
    early += [READERS[who](w, y)] if first and what != "sum" else []
    q = w.dynamic(y)
    late = [READERS[who](w, total)] if not first and what != "result" else []
    late += [READERS[who](w, y)] if not first and what != "sum" else []
    program = w.done(*early, q, *late)
    source = clone(program)

    applied(program, FuseNormQuantize)
    norm = the_norm(program)
    # Of two quantizes of one result the first takes the norm in.
    want = {
        "result": {ExtraOutput.FLOAT},
        "sum": {ExtraOutput.SUM},
        "both": {ExtraOutput.FLOAT, ExtraOutput.SUM},
    }[what]
    assert norm.output.keep == want
    assert norm.residual is not None
    assert_lowered_alike(program, source)
    assert not [n for n in program.graph.nodes if "rsqrt" in str(n.target)]


@pytest.mark.numeric
def test_a_scale_that_others_read_is_that_of_the_op() -> None:
    w = Writer(4, 8)
    y = w.spelled(Spelling())
    q = w.dynamic(y, Formula.AO_ASYMMETRIC)
    choice = q.args[1]
    early = w.call(aten.neg.default, choice)
    more = w.call(ops.quantize, y, choice, q.args[2], str(q.args[3]).replace("-128,127", "-8,7"))
    program = w.done(q, early, more, q.args[2])  # type: ignore[arg-type]
    norm = fused(program)
    assert norm.output.keep == {ExtraOutput.FLOAT}


@pytest.mark.numeric
def test_a_cast_that_others_read_stays_for_them() -> None:
    w = Writer("m", 8, dtype=BF16)
    total = w.call(aten.add.Tensor, w.x, w.arg("r"))
    wide = w.cast(total, F32)
    y = rms_of(w, wide)
    norm = fused(w.done(w.static(y), w.call(aten.neg.default, wide)), m=3)
    assert norm.residual is not None
    assert norm.output.keep == {ExtraOutput.SUM}


def rms_of(w: Writer, x: Node) -> Node:
    v = w.call(aten.mean.dim, w.mul(x, x), [-1], True)
    v = w.call(aten.add.Tensor, v, 1e-6)
    return w.mul(x, w.call(aten.rsqrt.default, v))


@pytest.mark.numeric
@pytest.mark.parametrize("whole", [False, True])
def test_the_normalized_axis_may_vary(whole: bool) -> None:
    w = Writer(3, "n")
    size = w.call(aten.sym_size.int, w.x, 1)
    y = rms_of(w, w.x)
    if whole:
        y = w.call(aten.layer_norm.default, w.x, [size], None, None, 1e-5, False)
    norm = fused(w.done(w.static(y)), n=7)
    assert norm.norm.axes == 1


@pytest.mark.numeric
def test_a_constant_that_comes_late_is_read_anew() -> None:
    w = Writer("m", 8)
    y = w.spelled(Spelling())
    early = w.call(aten.neg.default, y)
    program = w.done(early, w.static(y))
    assert fused(program, m=3).output.keep == {ExtraOutput.FLOAT}


@pytest.mark.numeric
def test_a_scale_from_elsewhere_is_given() -> None:
    w = Writer(4, 8)
    scale = w.call(aten.abs.default, w.arg("scale"))
    scale = w.call(aten.amax.default, scale, [1], True)
    spec = QuantSpec(torch.int8, -128, 127, (1, None))
    q = w.call(ops.quantize, w.spelled(Spelling()), scale, None, str(spec))
    norm = fused(w.done(q))
    assert norm.output.params is not None
    assert norm.output.params.scale.name == scale.name


@pytest.mark.numeric
def test_the_norm_of_a_norm_is_two() -> None:
    w = Writer(3, 8)
    inner = w.spelled(Spelling(weight="none"))
    outer = w.spelled(Spelling(weight="none"), inner)
    norm = fused(w.done(w.static(outer)))
    assert norm.x.target is aten.mul.Tensor
    assert norm.weight is None


@pytest.mark.numeric
def test_strided_inputs_keep_their_strides() -> None:
    w = Writer(8, 3, 5)
    x = w.call(aten.permute.default, w.x, [1, 2, 0])
    y = w.spelled(Spelling(), x)
    program = w.done(w.static(y), y)
    source = clone(program)
    applied(program, FuseNormQuantize)
    assert the_norm(program).output.keep == {ExtraOutput.FLOAT}
    assert_lowered_alike(program, source)


@pytest.mark.parametrize("spelling", [Spelling(), Spelling(centre="once", bias=True)], ids=str)
def test_the_result_is_at_rest(spelling: Spelling) -> None:
    w = Writer("m", 8)
    y = w.spelled(spelling)
    program = w.done(w.static(y), w.dynamic(y), y)
    assert applied(program, FuseNormQuantize, m=3).fired == {"fuse-norm-quantize": 1}
    assert not apply_rules(program, [FuseNormQuantize()]).modified


def test_roots_are_told_apart() -> None:
    roots = set()
    for root in ("rsqrt", "one-over", "power", "divide"):
        w = Writer("m", 8)
        roots.add(fused(w.done(w.static(w.spelled(Spelling(root=root)))), m=2).norm.root)
    assert roots == set(Root)


def test_refuses_what_is_no_norm_without_a_word() -> None:
    w = Writer("m", 8)
    program = w.done(w.static(w.call(aten.neg.default, w.x)))
    result = applied(program, FuseNormQuantize, m=3)
    assert not result.modified
    assert result.misses == []


@pytest.mark.parametrize("op", [aten.rsqrt.default, aten.mean.dim, aten.pow.Tensor_Scalar])
def test_refuses_a_norm_of_which_others_read_a_part(op: Any) -> None:
    w = Writer("m", 8)
    y = w.spelled(Spelling())
    (part,) = [n for n in w.b.graph.nodes if n.target is op]
    assert refused(w.done(w.static(y), w.call(aten.neg.default, part)), m=3) is MissCode.SHARED


def test_refuses_a_product_before_the_weight_that_leaves_the_graph() -> None:
    w = Writer("m", 8)
    plain = w.spelled(Spelling(weight="none"))
    y = w.mul(plain, w.const(torch.randn(8)))
    assert refused(w.done(w.static(y), plain), m=3) is MissCode.SHARED


@pytest.mark.parametrize("index", [1, 2])
def test_refuses_a_layer_norm_whose_statistics_are_read(index: int) -> None:
    w = Writer("m", 8)
    norm = w.call(aten.native_layer_norm.default, w.x, [8], None, None, 1e-5)
    y, other = w.b.item(norm, 0), w.b.item(norm, index)
    assert refused(w.done(w.static(y), other), m=3) is MissCode.SHARED


def chosen(w: Writer, y: Node, choose: ChooseSpec) -> tuple[Node, Node]:
    pair = w.call(ops.choose_qparams, y, str(choose))
    return w.b.item(pair, 0), w.b.item(pair, 1)


CHOICE = ChooseSpec(Formula.AO_ASYMMETRIC, torch.int8, -128, 127, (3, None), 1e-6)


def test_refuses_parameters_that_are_chosen_for_other_blocks() -> None:
    w = Writer(4, 8)
    y = w.spelled(Spelling())
    spec = QuantSpec(torch.int8, -128, 127, (2, None))
    q = w.call(ops.quantize, y, *chosen(w, y, CHOICE), str(spec))
    assert refused(w.done(q)) is MissCode.GRANULARITY


def test_refuses_parameters_that_are_chosen_for_another_storage() -> None:
    w = Writer(4, 8)
    y = w.spelled(Spelling())
    spec = QuantSpec(torch.uint8, 0, 255, (3, None))
    q = w.call(ops.quantize, y, *chosen(w, y, CHOICE), str(spec))
    assert refused(w.done(q)) is MissCode.DTYPE


def test_refuses_to_forget_a_zero_point() -> None:
    w = Writer(4, 8)
    y = w.spelled(Spelling())
    spec = QuantSpec(torch.int8, -128, 127, (3, None))
    q = w.call(ops.quantize, y, chosen(w, y, CHOICE)[0], None, str(spec))
    assert refused(w.done(q)) is MissCode.ZERO_POINT


def test_refuses_a_scale_that_is_computed_from_the_norm() -> None:
    w = Writer(4, 8)
    y = w.spelled(Spelling())
    most = w.call(aten.amax.default, w.call(aten.abs.default, y), [-1], True)
    scale = w.call(aten.div.Tensor, most, 127.0)
    spec = QuantSpec(torch.int8, -128, 127, (1, None))
    assert refused(w.done(w.call(ops.quantize, y, scale, None, str(spec)))) is MissCode.ORDER


def test_refuses_strides_that_would_change() -> None:
    w = Writer(4, 6)
    gate = w.call(aten.t.default, w.b.arg("gate", F32, 6, 4))
    y = w.mul(gate, w.spelled(Spelling(weight="none")))
    assert refused(w.done(w.static(y), y)) is MissCode.SHAPE
