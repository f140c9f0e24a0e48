"""What the tests of the built-in dialects share, besides the helpers of ``qfuse.testing``."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch.fx import Interpreter, Node

from qfuse.ir.graph.stage_graph import NormalGraph, StageGraph
from qfuse.normalize.importers.dialect import Dialect
from qfuse.normalize.importers.pt2e.dialect import DECOMPOSED
from qfuse.normalize.importers.torchao.dialect import TORCHAO_AFFINE
from qfuse.rewrite.context import RewriteContext
from qfuse.testing import source as kit
from qfuse.testing.source import (
    Source,
    codes,
    equal_but_for_nan,
    fired,
    hard_numbers,
    only_miss,
    ops_of,
    results,
    scales,
    strides,
)

__all__ = [
    "DIALECTS",
    "FLOATS",
    "INTEGERS",
    "SEEDS",
    "Source",
    "assert_same_bits",
    "codes",
    "difference",
    "equal_but_for_nan",
    "fired",
    "hard_numbers",
    "only_miss",
    "ops_of",
    "results",
    "run",
    "scales",
    "strides",
]

# The ops of the two dialects exist once these are imported; a captured graph implies that.
importlib.import_module("torch.ao.quantization.fx._decomposed")
importlib.import_module("torchao.quantization.quant_primitives")

# Draws the data of an example, so that hypothesis can repeat it.
SEEDS = st.integers(0, 2**32 - 1)
DIALECTS = (DECOMPOSED, TORCHAO_AFFINE)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int8, torch.uint8, torch.int16)

difference = kit.describe_difference


def run(program: StageGraph, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run a graph as it stands."""
    program.module.recompile()
    with torch.no_grad():
        return list(Interpreter(program.module).run(*inputs))


def assert_same_bits(
    source: Source,
    *outs: Node,
    dialects: Sequence[Dialect] = DIALECTS,
    context: RewriteContext | None = None,
) -> NormalGraph:
    """Normalize, with the two dialects by default, and assert that no bit of an output changes."""
    return kit.assert_same_bits(source, *outs, dialects=dialects, context=context)
