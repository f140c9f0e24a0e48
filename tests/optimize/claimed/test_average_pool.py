"""Averages of quantized values, for backends that claim them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from tests.optimize.claimed.test_elementwise import quantized

from qfuse.ir.errors import NormalizeError
from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.claimed.average_pool import PoolSpec, as_average_pool
from qfuse.optimize import rules_for_claims
from qfuse.optimize.claimed.average_pool import FuseAveragePool
from qfuse.rewrite.clone import clone
from qfuse.rewrite.driver import apply_rules
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import per_tensor
from qfuse.testing.run import random_inputs, run
from qfuse.testing.terms import Term, aten

Form = Callable[[Term], Term]
IMAGE = (2, 3, 8, 7)


def source(form: Form, sizes: tuple[int, ...] = IMAGE, *, out: bool = True) -> NormalGraph:
    """Return a graph that averages dequantized values, and quantizes the result."""
    b = GraphBuilder()
    y = form(quantized(b, "x", *sizes)).node
    if not out:
        return b.done(y)
    rank = len(y.meta["val"].shape)
    scale = b.const("y_scale", torch.full([1] * rank, 0.02))
    return b.done(b.call(ops.quantize, y, scale, None, str(per_tensor(rank))))


def test_golden() -> None:
    program = source(FORMS["windows"][0])
    assert apply_rules(program, [FuseAveragePool()]).fired == {"fuse-average-pool": 1}
    assert_expected_inline(
        to_text(program.graph),
        """\
const %x_scale: float32[1, 1, 1, 1]
const %x_zero: int32[1, 1, 1, 1]
%x: int8[2, 3, 8, 7]
const %y_scale: float32[1, 1, 1, 1]
%0 = qfuse.average_pool(%x, %x_scale, %x_zero, 'int8[-128,127] *x*x*x* float32 float32:reciprocal:round-zp int', %y_scale, None, 'int8[-128,127] *x*x*x* float32 float32:reciprocal:round-zp int', 'windows 3,2 stride=2,1 padding=1,0'): int8[2, 3, 4, 6]
return (%0)""",
    )


POOL = aten.avg_pool2d.default
FORMS: dict[str, tuple[Form, str]] = {
    "windows": (
        lambda x: x.call(POOL, [3, 2], [2, 1], [1, 0]),
        "windows 3,2 stride=2,1 padding=1,0",
    ),
    "one number": (lambda x: x.call(POOL, [2]), "windows 2,2 padding=0,0"),
    "ceil": (
        lambda x: x.call(POOL, [3, 3], [2, 2], [1, 1], True, False),
        "windows 3,3 stride=2,2 padding=1,1 ceil valid",
    ),
    "divisor": (
        lambda x: x.call(POOL, [2, 2], [1, 1], [0, 0], False, True, 7),
        "windows 2,2 stride=1,1 padding=0,0 divisor=7",
    ),
    "adaptive": (lambda x: x.call(aten.adaptive_avg_pool2d.default, [2, 3]), "adaptive 2,3"),
    "mean": (lambda x: x.call(aten.mean.dim, [-1, 2], True), "mean 3,2 keep"),
    "mean of rows": (lambda x: x.call(aten.mean.dim, [1]), "mean 1"),
}
RANKS: dict[str, tuple[Form, tuple[int, ...]]] = {
    "1d": (lambda x: x.call(aten.avg_pool1d.default, [3], [2], [1]), (2, 3, 9)),
    "3d": (lambda x: x.call(aten.avg_pool3d.default, [2, 2, 2], [1, 2, 1]), (1, 2, 5, 6, 4)),
    "adaptive 1d": (lambda x: x.call(aten.adaptive_avg_pool1d.default, [4]), (2, 3, 9)),
    "without a batch": (lambda x: x.call(POOL, [2, 2]), (3, 8, 7)),
}


def check_bits(program: NormalGraph) -> str:
    """Fuse the only average, compare bits, and return what it averages."""
    before = clone(program)
    assert apply_rules(program, [FuseAveragePool()]).fired == {"fuse-average-pool": 1}
    (fused,) = (view for node in program.graph.nodes if (view := as_average_pool(node)))
    inputs = random_inputs(before)
    assert torch.equal(run(program, inputs)[0], run(before, inputs)[0])
    return str(fused.pool)


@pytest.mark.numeric
@pytest.mark.parametrize("out", [True, False])
@pytest.mark.parametrize("form", list(FORMS))
def test_values_have_the_same_bits(form: str, out: bool) -> None:
    pool, text = FORMS[form]
    assert check_bits(source(pool, out=out)) == text
    assert str(PoolSpec.parse(text)) == text


@pytest.mark.numeric
@pytest.mark.parametrize("rank", list(RANKS))
def test_other_ranks_have_the_same_bits(rank: str) -> None:
    check_bits(source(*RANKS[rank]))


@pytest.mark.parametrize(
    ("form", "code"),
    [
        (
            lambda x: Term(x.b, x.b.arg("y", torch.float32, *IMAGE)).call(POOL, [2]),
            MissCode.NOT_QUANTIZED,
        ),
        (
            lambda x: Term(x.b, x.b.call(aten.mean.dim, x.node, [1], dtype=torch.float64)),
            MissCode.DTYPE,
        ),
        (lambda x: x.call(aten.mean.dim, None), MissCode.ARGUMENT),
    ],
)
def test_refuses(form: Form, code: MissCode) -> None:
    program = source(form, out=False)
    before = to_text(program.graph)
    node = next(n for n in reversed(program.graph.nodes) if n.op == "call_function")
    miss = FuseAveragePool().match(node)
    assert not apply_rules(program, [FuseAveragePool()]).modified
    assert to_text(program.graph) == before
    assert miss.code is code  # type: ignore[union-attr]


def test_only_a_backend_that_claims_it_has_it() -> None:
    (scheduled,) = rules_for_claims({ops.average_pool})
    assert scheduled.rules == (FuseAveragePool,)


@pytest.mark.parametrize("text", ["windows", "max 2,2", "mean 1 keep ceil", "windows 2,x"])
def test_other_text_is_an_error(text: str) -> None:
    with pytest.raises(NormalizeError):
        PoolSpec.parse(text)
