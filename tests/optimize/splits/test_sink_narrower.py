"""A split sinks below casts that a merged linear takes into its epilogue."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.cases.propagate import Graph, only_miss, priced
from tests.support.values import bits_same

from qfuse.ir.events import MissCode
from qfuse.optimize.fuse.epilogue_cast import FuseCast
from qfuse.optimize.fuse.linear import FuseLinear
from qfuse.optimize.merge.merge_linears import MergeLinears
from qfuse.optimize.splits.sink_split import SinkSplit
from qfuse.rewrite.clone import clone
from qfuse.rewrite.context import RewriteContext
from qfuse.rewrite.driver import apply_rules
from qfuse.rewrite.rule import Rule
from qfuse.testing.fixed_order import run_fixed_order
from qfuse.testing.quant import QuantizedLinear, per_tensor
from qfuse.testing.run import random_inputs

aten = torch.ops.aten


@pytest.mark.numeric
@pytest.mark.parametrize(("dtype", "pays"), [(torch.bfloat16, True), (torch.float64, False)])
def test_a_merged_linear_is_cast_if_less_is_stored(dtype: torch.dtype, pays: bool) -> None:
    g = Graph("m", 8)
    block = QuantizedLinear(g.b, 4, 8)
    x = block.quantized(g.x, per_tensor(2))
    ys = [g.call(aten._to_copy.default, block.linear(x, name), dtype=dtype) for name in ("a", "b")]
    # What reads the casts computes them on the fly.
    program = g.done(*(g.call(aten.add.Tensor, y, by) for by, y in enumerate(ys, 1)))
    source = clone(program)
    context = priced()

    MergeLinears().run(program, RewriteContext("optimize"))
    assert apply_rules(program, [SinkSplit()], context).fired == ({"sink-split": 1} if pays else {})
    rules: list[Rule[Any]] = [FuseLinear(), FuseCast()]
    assert apply_rules(program, rules, context).fired["fuse-cast"] == int(pays)
    inputs = random_inputs(program, m=5)
    assert bits_same(run_fixed_order(program, inputs), run_fixed_order(source, inputs))


@pytest.mark.parametrize("other", ["also wide", "stored as int8"])
def test_a_merged_linear_that_cannot_take_the_cast_keeps_its_result(other: str) -> None:
    g = Graph("m", 8)
    block = QuantizedLinear(g.b, 4, 8)
    x = block.quantized(g.x, per_tensor(2))
    wide = [block.linear(x, name) for name in ("a", "b")]
    dtype = torch.int8 if other == "stored as int8" else torch.bfloat16
    ys = [g.call(aten._to_copy.default, y, dtype=dtype) for y in wide]
    also = [g.call(aten.neg.default, wide[1])] if other == "also wide" else []
    program = g.done(*(g.call(aten.add.Tensor, y, by) for by, y in enumerate(ys, 1)), *also)

    MergeLinears().run(program, RewriteContext("optimize"))
    miss = only_miss(program, SinkSplit, priced(), m=5)
    assert (miss.code, miss.reason) == (MissCode.PROFIT, "it never pays")
