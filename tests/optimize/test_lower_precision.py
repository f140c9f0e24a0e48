from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.epilogue import calls

from qfuse.ir.errors import RewriteError
from qfuse.ir.events import MissCode, Missed
from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import NormalGraph, StageGraph
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops.views import tensor_of
from qfuse.optimize.fuse.linear import FuseLinear
from qfuse.optimize.lower_precision import LowerPrecision
from qfuse.optimize.schedule import optimize
from qfuse.rewrite.clone import clone
from qfuse.rewrite.context import RewriteContext
from qfuse.rewrite.driver import apply_rules
from qfuse.rewrite.prelude import Node, OpOverload, Rewriter
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import QuantizedLinear
from qfuse.testing.run import random_inputs, run

aten = torch.ops.aten


@pytest.mark.numeric
def test_golden_a_float_linear_computes_in_bfloat16() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "m", 64)
    w = b.const("w", torch.randn(32, 64))
    program = b.done(b.call(aten.linear.default, x, w))
    source = clone(program)

    assert LowerPrecision().run(program, RewriteContext("optimize")).fired == {"narrow-floats": 1}

    assert calls(program) == ["aten._to_copy", "aten.linear", "aten._to_copy"]
    inputs = random_inputs(program, m=5)
    (new,), (old,) = run(program, inputs), run(source, inputs)
    error = (new - old).square().mean().sqrt() / old.square().mean().sqrt()
    assert 1e-5 < error < 2**-7, "it must round to bfloat16, and no further"
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[s0, 64]
%0 = aten._to_copy(%x, dtype=bfloat16): bfloat16[s0, 64]
const %w_bfloat16: bfloat16[32, 64]
%1 = aten.linear(%0, %w_bfloat16): bfloat16[s0, 32]
%2 = aten._to_copy(%1, dtype=float32): float32[s0, 32]
return (%2)""",
    )


def test_one_cast_serves_an_operand_that_is_read_twice() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 4, 4)
    program = b.done(b.call(aten.mm.default, x, x))

    LowerPrecision().run(program, RewriteContext("optimize"))

    assert calls(program) == ["aten._to_copy", "aten.mm", "aten._to_copy"]


def test_one_constant_and_one_cast_serve_all_products() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 4, 8)
    w = torch.randn(8, 8)
    y = b.call(aten.linear.default, x, b.const("w", w))
    z = b.call(aten.linear.default, x, b.const("w", w))
    program = b.done(y, z)

    LowerPrecision().run(program, RewriteContext("optimize"))

    assert calls(program).count("aten._to_copy") == 3
    assert len([t for t in program.module.buffers() if t.dtype is torch.bfloat16]) == 1


def test_a_product_that_nobody_reads_takes_no_cast_with_it() -> None:
    b = GraphBuilder()
    x, w = b.arg("x", torch.float32, 4, 8), b.const("w", torch.randn(8, 8))
    b.call(aten.linear.default, x, w)
    program = b.done(b.call(aten.linear.default, x, w))

    assert LowerPrecision().run(program, RewriteContext("optimize")).fired == {"narrow-floats": 1}
    program.graph.lint()


LEAST = torch.finfo(torch.float32).min


def attention(mask: torch.Tensor | None) -> tuple[NormalGraph, torch.Tensor]:
    """An attention with a mask, an input unless given, whose second entry masks everything."""
    b = GraphBuilder()
    q = b.arg("q", torch.float32, 2, 1, 6, 16)
    m = b.arg("m", torch.float32, 2, 1, 6, 6) if mask is None else b.const("m", mask)
    value = torch.zeros(2, 1, 6, 6)
    value[0, :, :, 4:] = LEAST
    value[1] = LEAST
    op = aten.scaled_dot_product_attention.default
    return b.done(b.call(op, q, q, q, m)), value


@pytest.mark.numeric
@pytest.mark.parametrize("constant", [True, False])
def test_a_mask_of_an_attention_keeps_its_type(constant: bool) -> None:
    _, mask = attention(None)
    program, _ = attention(mask if constant else None)
    source = clone(program)

    assert LowerPrecision().run(program, RewriteContext("optimize")).fired == {"narrow-floats": 1}

    q = torch.randn(2, 1, 6, 16)
    inputs = [q] if constant else [q, mask]
    (new,), (old,) = run(program, inputs), run(source, inputs)
    error = (new - old).square().mean().sqrt() / old.square().mean().sqrt()
    assert 0 < error < 2**-6


@pytest.mark.parametrize("constant", [True, False])
def test_refuses_a_summand_that_may_be_a_mask(constant: bool) -> None:
    b = GraphBuilder()
    q, k = b.arg("q", torch.float32, 6, 16), b.arg("k", torch.float32, 16, 6)
    m = b.const("m", torch.full((6, 6), LEAST)) if constant else b.arg("m", torch.float32, 6, 6)
    program = b.done(b.call(aten.addmm.default, m, q, k))
    before = calls(program)

    result = LowerPrecision().run(program, RewriteContext("optimize"))

    assert not result.modified
    assert calls(program) == before
    ((_, miss),) = result.misses
    assert (miss.code, miss.at.name) == (MissCode.RANGE, "m")
    (event,) = program.log.of(Missed)
    assert event.reason == miss.reason


@pytest.mark.numeric
def test_infinities_of_a_constant_are_no_reason_to_refuse() -> None:
    b = GraphBuilder()
    q, k = b.arg("q", torch.float32, 6, 16), b.arg("k", torch.float32, 16, 6)
    m = b.const("m", torch.zeros(6, 6).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf))
    program = b.done(b.call(aten.addmm.default, m, q, k))
    source = clone(program)

    assert LowerPrecision().run(program, RewriteContext("optimize")).fired == {"narrow-floats": 1}
    inputs = random_inputs(program)
    (new,), (old,) = run(program, inputs), run(source, inputs)
    assert torch.equal(new.isneginf(), old.isneginf())


def test_refuses_other_types_and_other_ops() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 4, 4)
    wide = b.arg("wide", torch.float64, 4, 4)
    program = b.done(b.call(aten.add.Tensor, x, x), b.call(aten.mm.default, wide, wide))

    assert not LowerPrecision().run(program, RewriteContext("optimize")).modified


def test_quantized_linears_are_left_alone() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 4, 8)
    program = b.done(QuantizedLinear(b, 4, 8).linear(x))
    apply_rules(program, [FuseLinear()])

    assert not LowerPrecision().run(program, RewriteContext("optimize")).modified


def projected(*, copied: bool = False, read: str = "narrowed") -> NormalGraph:
    """Attention of the parts of a quantized linear, which may be read otherwise too."""
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "m", 20, 16)
    qkv = QuantizedLinear(b, 96, 16).linear(x)
    split = b.call(aten.split_with_sizes.default, qkv, [32, 32, 32], 2)
    parts = [b.item(split, i) for i in range(3)]
    heads = []
    for part in parts:
        count = b.call(aten.sym_size.int, part if read == "for its size" else x, 0)
        apart = b.call(aten.view.default, part, [count, 20, 4, 8])
        heads.append(b.call(aten.permute.default, apart, [0, 2, 1, 3]))
        if copied:
            contiguous = torch.contiguous_format
            heads[-1] = b.call(aten.clone.default, heads[-1], memory_format=contiguous)
    outs = [b.call(aten.scaled_dot_product_attention.default, *heads)]
    if read == "by another op":
        outs.append(b.call(aten.relu.default, parts[2]))
    elif read == "by the caller":
        outs.append(heads[2])
    elif read == "by a product that is refused":
        sums = b.call(aten.view.default, parts[2], [-1, 32])
        outs.append(b.call(aten.addmm.default, sums, sums, b.const("v", torch.randn(32, 32))))
    elif read == "by two products":
        outs.append(b.call(aten.scaled_dot_product_attention.default, *heads[::-1]))
    return b.done(*outs)


def count_of(program: StageGraph, op: OpOverload) -> int:
    return sum(is_call(node, op) for node in program.graph.nodes)


def linears(program: StageGraph) -> list[Node]:
    return [n for n in program.graph.nodes if is_call(n, torch.ops.qfuse.linear.default)]


def assert_narrowed(program: StageGraph, source: NormalGraph) -> None:
    program.graph.lint()
    inputs = random_inputs(program, m=3)
    for new, old in zip(run(program, inputs), run(source, inputs), strict=True):
        assert new.stride() == old.stride()
        error = (new - old).square().mean().sqrt() / old.square().mean().sqrt()
        assert error < 2**-6


@pytest.mark.numeric
@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("read", ["narrowed", "by two products"])
def test_a_product_that_is_read_in_bfloat16_writes_it(copied: bool, read: str) -> None:
    program = projected(copied=copied, read=read)
    source = clone(program)

    narrowed = optimize(program, float_dtype=torch.bfloat16)

    (linear,) = linears(narrowed)
    assert tensor_of(linear).dtype is torch.bfloat16
    # Only results of attention are cast, back to float32.
    results = 2 if read == "by two products" else 1
    assert count_of(narrowed, aten._to_copy.default) == results
    assert count_of(narrowed, aten.split_with_sizes.default) == 1
    assert_narrowed(narrowed, source)


OTHERWISE = ["by another op", "by the caller", "by a product that is refused", "for its size"]


@pytest.mark.numeric
@pytest.mark.parametrize("read", OTHERWISE)
def test_a_product_that_is_also_read_in_float32_keeps_it(read: str) -> None:
    program = projected(read=read)
    source = clone(program)

    narrowed = optimize(program, float_dtype=torch.bfloat16)

    (linear,) = linears(narrowed)
    assert tensor_of(linear).dtype is torch.float32
    assert_narrowed(narrowed, source)
    inputs = random_inputs(narrowed, m=3)
    for new, old in zip(run(narrowed, inputs)[1:], run(source, inputs)[1:], strict=True):
        assert torch.equal(new, old)


def test_casts_of_an_edit_that_failed_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 8, 8)
    program = b.done(b.call(aten.mm.default, x, x), b.call(aten.mm.default, x, x))
    failed: list[OpOverload] = []
    call = Rewriter.call

    def fails_once(self: Rewriter, op: OpOverload, *args: Any, **kwargs: Any) -> Node:
        if op is aten.mm.default and not failed:
            failed.append(op)
            self.undo()
            raise RewriteError("rejected", where="here")
        return call(self, op, *args, **kwargs)

    monkeypatch.setattr(Rewriter, "call", fails_once)

    assert LowerPrecision().run(program, RewriteContext("optimize")).fired == {"narrow-floats": 1}
    program.graph.lint()
