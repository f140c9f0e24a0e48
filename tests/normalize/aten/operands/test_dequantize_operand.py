from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import (
    assert_same_values,
    aten,
    calls,
    codes,
    finish,
    golden,
    scales,
)
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.ir.ops import library as ops
from qfuse.normalize import normalize
from qfuse.normalize.aten.operands.dequantize_operand import DequantizeOperand
from qfuse.rewrite.driver import apply_rules
from qfuse.rewrite.rule import Miss
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import per_tensor

F32 = torch.float32
Build = Callable[[GraphBuilder, Node], Node]


class Cache:
    """Dequantized queries, and keys that are stored as int8.

    Args:
        scale: The shape of the scale, which is an input.
        stored: The storage of the keys.
        dtype: The float dtype.
        kept: The dtype of the scale, that of everything else by default.
        zero: The shape of the zero point, which is an input.
        points: The dtype of the zero point.
    """

    def __init__(
        self,
        scale: tuple[int, ...] = (2, 3, 5, 1),
        *,
        stored: torch.dtype = torch.int8,
        dtype: torch.dtype = F32,
        kept: torch.dtype | None = None,
        zero: tuple[int, ...] | None = None,
        points: torch.dtype | None = None,
    ) -> None:
        self.b = GraphBuilder()
        q = self.b.arg("q", torch.int8, 2, 3, 4, 8)
        one = self.b.const("one", torch.full((1, 1, 1, 1), 0.05))
        spec = per_tensor(4).with_block((None,) * 4)
        text = str(spec).replace("float32 float32", f"{str(dtype)[6:]} float32", 1)
        self.q = self.b.call(ops.dequantize, q, one, None, text)
        self.k = self.b.arg("k", stored, 2, 3, 5, 8)
        self.s = self.b.arg("s", kept or dtype, *scale)
        self.cast = self.b.call(aten._to_copy.default, self.k, dtype=dtype)
        value = self.cast
        if zero is not None:
            self.zero = self.b.arg("zero", points or stored, *zero)
            value = self.b.call(aten.sub.Tensor, value, self.zero)
        self.keys = self.b.call(aten.mul.Tensor, value, self.s)

    def scores(self, keys: Node | None = None) -> Node:
        """Multiply with transposed keys."""
        turned = self.b.call(aten.transpose.int, keys or self.keys, -1, -2)
        return self.b.call(aten.matmul.default, self.q, turned)

    def done(self, *outs: Node) -> CapturedGraph:
        """Finish the graph."""
        return finish(self.b, *(outs or (self.scores(),)))


def refusal(program: CapturedGraph) -> Miss:
    """Return why the rule, which must refuse once, does not fire."""
    result = apply_rules(program, [DequantizeOperand()])
    assert not result.modified
    (miss,) = [m for _, m in result.misses]
    return miss


def test_golden_a_scale_of_each_token() -> None:
    assert_expected_inline(
        golden(Cache().done(), DequantizeOperand()),
        """\
%q: int8[2, 3, 4, 8]
const %one: float32[1, 1, 1, 1]
%0 = qfuse.dequantize(%q, %one, None, 'int8[-128,127] *x*x*x* float32 float32:reciprocal:round-zp int'): float32[2, 3, 4, 8]
%k: int8[2, 3, 5, 8]
%s: float32[2, 3, 5, 1]
%1 = qfuse.dequantize(%k, %s, None, 'int8[-128,127] 1x1x1x* float32 float32:reciprocal:round-zp int'): float32[2, 3, 5, 8]
%2 = aten.permute(%1, (0, 1, 3, 2)): float32[2, 3, 8, 5]
%3 = aten.matmul(%0, %2): float32[2, 3, 4, 5]
return (%3)
fired: dequantize-operand 1""",
    )


def inputs(case: Cache) -> list[torch.Tensor]:
    """Random inputs; some scales are negative or 0."""
    shape, dtype = case.s.meta["val"].shape, case.s.meta["val"].dtype
    scale = scales(*shape, dtype=dtype)
    if scale.numel() > 1:
        scale.view(-1)[0] = 0
        scale.view(-1)[1] *= -1
    return [codes(2, 3, 4, 8), codes(2, 3, 5, 8, dtype=case.k.meta["val"].dtype), scale]


@pytest.mark.numeric
@pytest.mark.pairs
@pytest.mark.parametrize("stored", [torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "scale", [(), (1,), (2, 3, 5, 1), (3, 1, 1), (1, 3, 1, 1), (5, 1), (2, 1, 1, 8), (8,)], ids=str
)
def test_scales(stored: torch.dtype, dtype: torch.dtype, scale: tuple[int, ...]) -> None:
    case = Cache(scale, stored=stored, dtype=dtype)
    program = case.done()

    assert_same_values(program, inputs(case), DequantizeOperand(), exact=True)
    assert calls(program).count("qfuse.dequantize") == 2


def repeated(b: GraphBuilder, keys: Node) -> Node:
    """Move before the product."""
    part = b.call(aten.slice.Tensor, keys, 2, 1, 4)
    flat = b.call(aten.view.default, b.call(aten.clone.default, part), [6, 3, 8])
    return b.call(aten.unsqueeze.default, flat, 0)


@pytest.mark.numeric
def test_movements_between() -> None:
    case = Cache()
    keys = repeated(case.b, case.keys)
    q = case.b.call(aten.view.default, case.q, [1, 6, 4, 8])
    turned = case.b.call(aten.permute.default, keys, [0, 1, 3, 2])
    program = case.done(case.b.call(aten.matmul.default, q, turned))

    assert_same_values(program, inputs(case), DequantizeOperand(), exact=True)
    assert calls(program).count("qfuse.dequantize") == 2
    assert "aten.mul.Tensor" not in calls(program)


@pytest.mark.numeric
@pytest.mark.parametrize("swapped", [False, True])
def test_both_operands(swapped: bool) -> None:
    case = Cache()
    b = case.b
    v = b.call(aten._to_copy.default, b.arg("v", torch.int8, 2, 3, 5, 6), dtype=F32)
    s = b.arg("t", F32, 1, 3, 1, 1)
    values = b.call(aten.mul.Tensor, *((s, v) if swapped else (v, s)))
    turned = b.call(aten.transpose.int, case.keys, -1, -2)
    program = case.done(b.call(aten.matmul.default, turned, values))
    given = [*inputs(case), codes(2, 3, 5, 6), scales(1, 3, 1, 1)]

    assert_same_values(program, given, DequantizeOperand(), exact=True)
    assert calls(program).count("qfuse.dequantize") == 2 + 1


@pytest.mark.numeric
def test_other_users_keep_the_floats() -> None:
    case = Cache()
    pooled = case.b.call(aten.max_pool2d.default, case.keys, [1, 2])
    program = case.done(case.scores(), pooled)

    assert_same_values(program, inputs(case), DequantizeOperand(), exact=True)
    left = calls(program)
    assert (left.count("qfuse.dequantize"), left.count("aten.mul.Tensor")) == (2, 1)


@pytest.mark.numeric
def test_after_all_other_quantization_is_found() -> None:
    b = GraphBuilder()
    x, k = b.arg("x", F32, 4, 8), b.arg("k", torch.int8, 5, 8)
    s = b.arg("s", F32, 5, 1)
    rounded = b.call(aten.round.default, b.call(aten.div.Tensor, x, 0.03))
    q = b.call(
        aten._to_copy.default, b.call(aten.clamp.default, rounded, -128, 127), dtype=torch.int8
    )
    left = b.call(aten.mul.Tensor, b.call(aten._to_copy.default, q, dtype=F32), 0.03)
    keys = b.call(aten.mul.Tensor, b.call(aten._to_copy.default, k, dtype=F32), s)
    out = b.call(aten.mm.default, left, b.call(aten.t.default, keys))
    program = normalize(finish(b, out))

    assert calls(program).count("qfuse.dequantize") == 2


@pytest.mark.parametrize("scale", [(2, 3, 5, 8)])
def test_refuses_a_scale_of_each_element(scale: tuple[int, ...]) -> None:
    miss = refusal(Cache(scale).done())
    assert miss.code is MissCode.SHAPE


def test_refuses_another_dtype_of_the_scale() -> None:
    case = Cache(kept=torch.bfloat16)

    miss = refusal(case.done())
    assert miss.code is MissCode.DTYPE
    text = "the product of quantized values and their scale torch.bfloat16 is torch.float32"
    assert miss.reason == text


@pytest.mark.parametrize("left", [True, False])
def test_refuses_a_float_operand(left: bool) -> None:
    case = Cache()
    plain = case.b.arg("plain", F32, 2, 3, *((4, 5) if left else (8, 4)))
    operands = (plain, case.keys) if left else (case.keys, plain)
    program = case.done(case.b.call(aten.matmul.default, *operands))

    miss = refusal(program)
    assert (miss.code, miss.at) == (MissCode.NOT_QUANTIZED, plain)
    side = "left" if left else "right"
    assert miss.reason == f"the {side} operand is torch.float32, the other one is quantized"


@pytest.mark.parametrize("kind", ["weight", "constant scale", "wide"])
def test_what_is_not_its_business(kind: str) -> None:
    case = Cache()
    b = case.b
    if kind == "weight":
        cast = b.call(aten._to_copy.default, b.const("w", codes(2, 3, 5, 8)), dtype=F32)
        case.keys = b.call(aten.mul.Tensor, cast, case.s)
    elif kind == "wide":
        cast = b.call(aten._to_copy.default, b.arg("w", torch.int32, 2, 3, 5, 8), dtype=F32)
        case.keys = b.call(aten.mul.Tensor, cast, case.s)
    else:
        case.keys = b.call(aten.mul.Tensor, case.cast, b.const("c", scales(5, 1)))
    result = apply_rules(case.done(), [DequantizeOperand()])

    assert (result.modified, list(result.misses)) == (False, [])


@pytest.mark.numeric
def test_a_movement_whose_tensor_has_a_name() -> None:
    case = Cache()
    turned = case.b.call(aten.transpose.int, case.keys, -1, -2)
    turned.args, turned.kwargs = (), {"self": case.keys, "dim0": -1, "dim1": -2}
    program = case.done(case.b.call(aten.matmul.default, case.q, turned))

    assert_same_values(program, inputs(case), DequantizeOperand(), exact=True)
    assert calls(program).count("qfuse.dequantize") == 2


@pytest.mark.numeric
def test_a_part_of_a_split() -> None:
    case = Cache()
    b = case.b
    parts = b.call(aten.split.Tensor, case.keys, 3, 2)
    turned = b.call(aten.transpose.int, b.item(parts, 0), -1, -2)
    program = case.done(b.call(aten.matmul.default, case.q, turned))

    assert_same_values(program, inputs(case), DequantizeOperand(), exact=True)
    assert calls(program).count("qfuse.dequantize") == 2


ZEROS: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((2, 3, 5, 1), (2, 3, 5, 1)),
    ((5, 1), (5, 1)),
    ((2, 3, 5, 1), ()),
    ((), (2, 3, 5, 1)),
    ((), ()),
]


@pytest.mark.numeric
@pytest.mark.pairs
@pytest.mark.parametrize("stored", [torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("scale", "zero"), ZEROS, ids=str)
def test_zero_points(
    stored: torch.dtype, dtype: torch.dtype, scale: tuple[int, ...], zero: tuple[int, ...]
) -> None:
    case = Cache(scale, stored=stored, dtype=dtype, zero=zero)
    program = case.done()

    given = [*inputs(case)[:2], codes(*zero, dtype=stored), inputs(case)[2]]
    order = [node.name for node in program.graph.nodes if node.op == "placeholder"]
    named = dict(zip(["q", "k", "zero", "s"], given, strict=True))
    assert_same_values(program, [named[name] for name in order], DequantizeOperand(), exact=True)
    assert calls(program).count("qfuse.dequantize") == 2


@pytest.mark.numeric
def test_the_difference_of_wide_integers() -> None:
    case = Cache()
    b, zero = case.b, case.b.arg("zero", torch.int8, 2, 3, 5, 1)
    wide = [b.call(aten._to_copy.default, part, dtype=torch.int32) for part in (case.k, zero)]
    cast = b.call(aten._to_copy.default, b.call(aten.sub.Tensor, *wide), dtype=F32)
    program = case.done(case.scores(b.call(aten.mul.Tensor, cast, case.s)))

    given = [*inputs(case), codes(2, 3, 5, 1)]
    assert_same_values(program, given, DequantizeOperand(), exact=True)
    assert calls(program).count("qfuse.dequantize") == 2


@pytest.mark.numeric
@pytest.mark.parametrize("known", [True, False])
def test_a_factor_behind_the_scale(known: bool) -> None:
    case = Cache()
    b = case.b
    factor = 0.3 if known else b.arg("factor", F32, 3, 1, 1)
    program = case.done(case.scores(b.call(aten.mul.Tensor, case.keys, factor)))

    given = [*inputs(case), *([] if known else [scales(3, 1, 1)])]
    assert_same_values(program, given, DequantizeOperand(), exact=True)
    assert calls(program).count("qfuse.dequantize") == 2


@pytest.mark.parametrize(
    ("zero", "points", "code"),
    [
        ((2, 3, 5, 1), F32, MissCode.NOT_CONSTANT),
        ((3, 1, 1), None, MissCode.SHAPE),
    ],
)
def test_refuses_other_zero_points(
    zero: tuple[int, ...], points: torch.dtype | None, code: MissCode
) -> None:
    assert refusal(Cache(zero=zero, points=points).done()).code is code
