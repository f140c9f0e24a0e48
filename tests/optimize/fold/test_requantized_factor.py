"""A factor between a dequantize and a quantize."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import golden
from torch._ops import OpOverload
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.qdq import as_requantize
from qfuse.optimize import optimize
from qfuse.optimize.fold.requantized_factor import FoldRequantizedFactor
from qfuse.rewrite.clone import clone
from qfuse.rewrite.driver import apply_rules
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import per_tensor
from qfuse.testing.rules import assert_same_values
from qfuse.testing.run import run
from qfuse.testing.terms import aten

Form = Callable[[GraphBuilder, Node], Node]
Block = tuple[int | None, int | None]
WHOLE: tuple[Block, Block] = ((None, None), (None, None))


def source(
    form: Form,
    *,
    scale: float = 0.0237,
    dtype: torch.dtype = torch.int8,
    float_dtype: torch.dtype = torch.float32,
    blocks: tuple[Block, Block] = WHOLE,
    to: float | None = 0.031,
) -> NormalGraph:
    """Return a graph that quantizes ``form`` of a dequantize, with a scale of run time for none."""
    b = GraphBuilder()
    spec = per_tensor(2, dtype, float_dtype=float_dtype).with_block(blocks[0])
    grid = [int(n) for n in spec.grid((256, 16))]
    zero = b.const("zero", torch.full(grid, 3, dtype=torch.int32))
    first = b.const("s", torch.linspace(scale, 2 * scale, math.prod(grid)).reshape(grid))
    real = b.call(ops.dequantize, b.arg("q", dtype, 256, 16), first, zero, str(spec))
    y = form(b, real)
    target = per_tensor(2, torch.uint8, float_dtype=y.meta["val"].dtype).with_block(blocks[1])
    grid = [int(n) for n in target.grid((256, 16))]
    middle = b.const("middle", torch.full(grid, 120, dtype=torch.int32))
    second = b.arg("t", torch.float32, 1, 1) if to is None else b.const("t", torch.full(grid, to))
    return b.done(b.call(ops.quantize, y, second, middle, str(target)))


def multiplied(by: float) -> Form:
    return lambda b, real: b.call(aten.mul.Tensor, real, by)


def test_golden() -> None:
    assert_expected_inline(
        golden(source(multiplied(0.5)), FoldRequantizedFactor()),
        """\
const %zero: int32[1, 1]
%q: int8[256, 16]
const %s_scaled: float32[1, 1]
%0 = qfuse.dequantize(%q, %s_scaled, %zero, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int'): float32[256, 16]
const %middle: int32[1, 1]
const %t: float32[1, 1]
%1 = qfuse.quantize(%0, %t, %middle, 'uint8[0,255] *x* float32 float32:reciprocal:round-zp int'): uint8[256, 16]
return (%1)
fired: fold-requantized-factor 1""",
    )


def by_tensor(*sizes: int, dtype: torch.dtype = torch.float32, name: str = "c") -> Form:
    """Multiply by a constant tensor of positive numbers."""
    # Without fractions, so that few results are ties.
    values = (torch.linspace(0.5, 2, math.prod(sizes)).sqrt() * 0.6).reshape(sizes).to(dtype)
    return lambda b, real: b.call(aten.mul.Tensor, real, b.const(name, values))


def chained(*calls: tuple[OpOverload, *tuple[float, ...]]) -> Form:
    def form(b: GraphBuilder, real: Node) -> Node:
        for op, *numbers in calls:
            real = b.call(op, real, *numbers)
        return real

    return form


FORMS: dict[str, NormalGraph] = {
    "a half": source(multiplied(0.5)),
    "four": source(multiplied(4)),
    "an eighth": source(chained((aten.div.Tensor, 8.0))),
    "a tensor": source(
        lambda b, real: b.call(aten.mul.Tensor, b.const("c", torch.tensor([0.25])), real)
    ),
    "unsigned": source(multiplied(0.5), dtype=torch.uint8),
    "at run time": source(multiplied(0.5), to=None),
    "0.3": source(multiplied(0.3)),
    "0.3, unsigned": source(multiplied(0.3), dtype=torch.uint8),
    "a third": source(chained((aten.div.Tensor, 3))),
    "no axes": source(by_tensor()),
    "no axes, float64": source(by_tensor(dtype=torch.float64)),
    "columns": source(by_tensor(16)),
    "rows": source(by_tensor(256, 1)),
    "rows of groups": source(multiplied(0.7), blocks=((None, 4), (None, None))),
    "elements": source(by_tensor(256, 16)),
    "each": source(by_tensor(16), blocks=((1, None), (None, None))),
    "columns, scales": source(by_tensor(16), blocks=((None, 1), (None, None))),
    "columns, results": source(by_tensor(16), blocks=((None, None), (None, 1))),
    "groups of results": source(multiplied(0.3), blocks=((None, None), (None, 5))),
    "bfloat16": source(multiplied(0.5), float_dtype=torch.bfloat16),
    "relu": source(chained((aten.mul.Tensor, 0.3), (aten.relu.default,))),
    "clamp": source(chained((aten.mul.Tensor, 0.3), (aten.clamp.default, -1.0, 1.0))),
    "two": source(chained((aten.mul.Tensor, 0.3), (aten.mul.Tensor, 1.7))),
    "three": source(chained((aten.mul.Tensor, 0.3), (aten.div.Tensor, 0.7), (aten.div.Tensor, 3))),
    "two, unsigned": source(
        chained((aten.div.Tensor, 3), (aten.mul.Tensor, 1.7)), dtype=torch.uint8
    ),
    "two at run time": source(chained((aten.mul.Tensor, 0.5), (aten.div.Tensor, 4.0)), to=None),
    "two negative": source(chained((aten.mul.Tensor, -0.3), (aten.div.Tensor, -1.7))),
    "two negative at run time": source(
        chained((aten.mul.Tensor, -0.5), (aten.mul.Tensor, -2.0)), to=None
    ),
    "a column and a number": source(lambda b, real: multiplied(0.7)(b, by_tensor(16)(b, real))),
    "columns and rows": source(
        lambda b, real: by_tensor(16, name="d")(b, by_tensor(256, 1)(b, real))
    ),
    "relu between": source(
        chained((aten.mul.Tensor, 0.3), (aten.relu.default,), (aten.mul.Tensor, 1.7))
    ),
    "relu6 between": source(
        chained((aten.mul.Tensor, 0.3), (aten.relu6.default,), (aten.div.Tensor, 7.1))
    ),
    "clamp between": source(
        chained((aten.mul.Tensor, 0.3), (aten.clamp.default, -0.4, 0.6), (aten.mul.Tensor, 2.3))
    ),
    "clamp of powers": source(
        chained((aten.mul.Tensor, 0.5), (aten.clamp.default, -0.4, 0.6), (aten.mul.Tensor, 2.0))
    ),
    "clamp below negative": source(
        chained((aten.mul.Tensor, -0.3), (aten.clamp_max.default, 0.6), (aten.mul.Tensor, -2.3))
    ),
    "clamp before": source(chained((aten.relu6.default,), (aten.mul.Tensor, 0.3)), scale=0.11),
    "clamp to one value": source(
        chained((aten.mul.Tensor, 0.3), (aten.clamp.default, 0.5, 0.5), (aten.mul.Tensor, 1.7))
    ),
}


@pytest.mark.numeric
@pytest.mark.parametrize("name", list(FORMS))
def test_it_is_one_requantize_with_the_same_bits(name: str) -> None:
    program = clone(FORMS[name])
    before = clone(program)
    done = optimize(program)
    calls = [node for node in done.graph.nodes if node.op == "call_function"]
    assert len(calls) == 1
    made = as_requantize(calls[0])
    assert made is not None
    info = torch.iinfo(made.params.spec.dtype)
    every = torch.arange(info.min, info.max + 1).to(made.params.spec.dtype)
    inputs = [every[:, None].expand(256, 16), torch.tensor([[0.04]])][: len(done.signature.inputs)]
    assert torch.equal(run(done, inputs)[0], run(before, inputs)[0])
    # Others are a range of the quantize first.
    if name not in ("relu", "clamp"):
        assert_same_values(before, inputs, FoldRequantizedFactor(), exact=True)


def test_a_folded_factor_of_three_would_change_a_tie() -> None:
    """Why results are looked up: the product is rounded before, or after."""
    q, s, c = torch.arange(-128, 128).float(), torch.rand(4096, 1) * 0.05, torch.tensor(0.3)
    assert not torch.equal(q * s * c, q * (s * c))


@pytest.mark.parametrize(
    ("program", "code"),
    [
        (source(multiplied(-0.5)), MissCode.ARGUMENT),
        (source(multiplied(0.0)), MissCode.ARGUMENT),
        (source(multiplied(float("inf"))), MissCode.ARGUMENT),
        # Half of the results are ties: 0.1 * 0.3 is 1.5 times 0.02.
        (source(multiplied(0.3), scale=0.1, to=0.02), MissCode.ARGUMENT),
        (source(multiplied(0.3), float_dtype=torch.bfloat16), MissCode.ARGUMENT),
        (source(multiplied(0.3), to=None), MissCode.NOT_CONSTANT),
        (source(multiplied(0.5), scale=1e-30), MissCode.RANGE),
        (source(multiplied(2.0**-80)), MissCode.RANGE),
        (source(by_tensor(16), blocks=((None, 4), (None, None))), MissCode.GRANULARITY),
        (source(by_tensor(256, 1), dtype=torch.int16), MissCode.GRANULARITY),
        (source(by_tensor(1, dtype=torch.float64)), MissCode.DTYPE),
        (source(multiplied(0.5), dtype=torch.int32), MissCode.DTYPE),
        (source(multiplied(0.5), dtype=torch.float8_e4m3fn), MissCode.DTYPE),
        (source(multiplied(0.5), scale=math.nan), MissCode.RANGE),
    ],
)
def test_refuses(program: NormalGraph, code: MissCode) -> None:
    before = to_text(program.graph)
    result = apply_rules(program, [FoldRequantizedFactor()])
    assert not result.modified
    assert to_text(program.graph) == before
    ((_, miss),) = result.misses
    assert miss.code is code


def test_says_which_value_would_change() -> None:
    program = source(multiplied(0.3), scale=0.1, to=0.02)
    ((_, miss),) = apply_rules(program, [FoldRequantizedFactor()]).misses
    assert_expected_inline(
        miss.reason,
        """the factor is not a power of two: in the scale it would be rounded otherwise, and the quantized value -64 would become 20 instead of 19""",
    )


TWO: dict[str, tuple[NormalGraph, MissCode]] = {
    "one negative": (
        source(chained((aten.mul.Tensor, -0.5), (aten.mul.Tensor, 0.5))),
        MissCode.ARGUMENT,
    ),
    "zero": (source(chained((aten.mul.Tensor, 0.0), (aten.mul.Tensor, 0.5))), MissCode.ARGUMENT),
    "by zero": (source(chained((aten.div.Tensor, 0), (aten.mul.Tensor, 0.5))), MissCode.ARGUMENT),
    "zero by zero": (
        source(chained((aten.mul.Tensor, 0.0), (aten.div.Tensor, 0.0))),
        MissCode.ARGUMENT,
    ),
    # The product of both is four, but what is between them is zero or infinite.
    "underflow": (
        source(chained((aten.mul.Tensor, 2.0**-120), (aten.mul.Tensor, 2.0**122))),
        MissCode.RANGE,
    ),
    "overflow": (
        source(chained((aten.mul.Tensor, 2.0**127), (aten.mul.Tensor, 2.0**-125))),
        MissCode.RANGE,
    ),
    "ties": (
        source(chained((aten.mul.Tensor, 0.6), (aten.mul.Tensor, 0.5)), scale=0.1, to=0.02),
        MissCode.ARGUMENT,
    ),
    "clamp at run time": (
        source(
            chained((aten.mul.Tensor, 0.5), (aten.relu.default,), (aten.mul.Tensor, 0.5)), to=None
        ),
        MissCode.NOT_CONSTANT,
    ),
    "bfloat16": (
        source(chained((aten.mul.Tensor, 0.3), (aten.mul.Tensor, 1.7)), float_dtype=torch.bfloat16),
        MissCode.ARGUMENT,
    ),
    "clamp in several units": (
        source(
            lambda b, real: by_tensor(16)(
                b, b.call(aten.clamp.default, multiplied(0.3)(b, real), -0.4, 0.6)
            )
        ),
        MissCode.ARGUMENT,
    ),
    "varies in a block": (
        source(
            lambda b, real: multiplied(0.5)(b, by_tensor(16)(b, real)),
            blocks=((None, 4), (None, None)),
        ),
        MissCode.GRANULARITY,
    ),
}


@pytest.mark.parametrize("name", list(TWO))
def test_refuses_several(name: str) -> None:
    program, code = clone(TWO[name][0]), TWO[name][1]
    before = to_text(program.graph)
    result = apply_rules(program, [FoldRequantizedFactor()])
    assert not result.modified
    assert to_text(program.graph) == before
    (miss,) = [miss for _, miss in result.misses if miss.progress]
    assert miss.code is code


def test_refuses_a_clamp_before_float8() -> None:
    b = GraphBuilder()
    stored = b.arg("q", torch.int8, 4, 4), b.const("s", torch.tensor([[0.1]])), None
    real = b.call(ops.dequantize, *stored, str(per_tensor(2)))
    half = b.call(aten.mul.Tensor, b.call(aten.relu6.default, real), 0.5)
    to = b.const("t", torch.tensor([[0.031]])), None, str(per_tensor(2, torch.float8_e4m3fn))
    program = b.done(b.call(ops.quantize, half, *to))
    ((_, miss),) = apply_rules(program, [FoldRequantizedFactor()]).misses
    assert miss.code is MissCode.DTYPE


def test_says_what_a_clamp_between_factors_would_change() -> None:
    program = clone(TWO["clamp in several units"][0])
    misses = [miss for _, miss in apply_rules(program, [FoldRequantizedFactor()]).misses]
    (miss,) = [miss for miss in misses if miss.progress]
    assert_expected_inline(
        miss.reason,
        """a clamp between the factors does not become a range, and the quantized value -128 would become 109 instead of 115""",
    )


def test_stops_at_a_factor_of_run_time() -> None:
    b = GraphBuilder()
    stored = b.arg("q", torch.int8, 4, 4), b.const("s", torch.tensor([[0.1]])), None
    real = b.call(ops.dequantize, *stored, str(per_tensor(2)))
    y = b.call(aten.mul.Tensor, real, b.arg("c", torch.float32, 4))
    half = b.call(aten.mul.Tensor, y, 0.5)
    to = b.const("t", torch.tensor([[0.031]])), None, str(per_tensor(2))
    program = b.done(b.call(ops.quantize, half, *to))
    assert not apply_rules(program, [FoldRequantizedFactor()]).modified


@pytest.mark.numeric
def test_a_product_between_factors_stays_for_its_other_users() -> None:
    b = GraphBuilder()
    stored = b.arg("q", torch.int8, 256, 1), b.const("s", torch.tensor([[0.0237]])), None
    real = b.call(ops.dequantize, *stored, str(per_tensor(2)))
    y = multiplied(0.3)(b, real)
    to = b.const("t", torch.tensor([[0.031]])), None, str(per_tensor(2))
    program = b.done(
        b.call(ops.quantize, y, *to),
        b.call(ops.quantize, multiplied(1.7)(b, y), *to),
        b.call(ops.quantize, multiplied(2.3)(b, b.call(aten.relu.default, y)), *to),
        y,
    )
    before = clone(program)
    assert apply_rules(program, [FoldRequantizedFactor()]).fired == {"fold-requantized-factor": 2}
    q = torch.arange(-128, 128).to(torch.int8)[:, None]
    for got, want in zip(run(program, [q]), run(before, [q]), strict=True):
        assert torch.equal(got, want)


def shared(*targets: tuple[float, torch.dtype]) -> NormalGraph:
    """Quantize one product several times."""
    b = GraphBuilder()
    scale = b.const("s", torch.tensor([[0.1]]))
    real = b.call(ops.dequantize, b.arg("q", torch.int8, 256, 1), scale, None, str(per_tensor(2)))
    y = b.call(aten.mul.Tensor, real, 0.3)
    made = []
    for index, (to, dtype) in enumerate(targets):
        number = b.const(f"t{index}", torch.tensor([[to]]))
        made.append(b.call(ops.quantize, y, number, None, str(per_tensor(2, dtype))))
    return b.done(*made)


@pytest.mark.numeric
def test_all_quantizes_behind_a_factor_decide() -> None:
    good, other = (0.031, torch.float8_e4m3fn), (0.037, torch.int8)
    program = shared(good, other)
    before = clone(program)
    assert apply_rules(program, [FoldRequantizedFactor()]).modified
    q = torch.arange(-128, 128).to(torch.int8)[:, None]
    for got, want in zip(run(program, [q]), run(before, [q]), strict=True):
        assert torch.equal(got.double(), want.double())

    # Every other result is a tie.
    ((_, miss),) = apply_rules(shared(good, (0.02, torch.int8)), [FoldRequantizedFactor()]).misses
    assert miss.code is MissCode.ARGUMENT


def test_leaves_a_factor_that_is_a_scale() -> None:
    b = GraphBuilder()
    stored = b.arg("q", torch.uint8, 1, 1), b.const("s", torch.tensor([[0.01]])), None
    real = b.call(ops.dequantize, *stored, str(per_tensor(2, torch.uint8)))
    scale = b.call(aten.mul.Tensor, real, 0.5)
    x, spec = b.arg("x", torch.float32, 1, 1), str(per_tensor(2))
    program = b.done(
        b.call(ops.quantize, x, scale, None, spec), b.call(ops.quantize, scale, scale, None, spec)
    )
    assert not apply_rules(program, [FoldRequantizedFactor()]).modified


def test_leaves_a_factor_with_other_users() -> None:
    b = GraphBuilder()
    spec = per_tensor(2)
    scale = b.const("s", torch.tensor([[0.02]]))
    real = b.call(ops.dequantize, b.arg("q", torch.int8, 4, 4), scale, None, str(spec))
    half = b.call(aten.mul.Tensor, real, 0.5)
    program = b.done(b.call(ops.quantize, half, scale, None, str(spec)), half)
    assert not apply_rules(program, [FoldRequantizedFactor()]).modified
