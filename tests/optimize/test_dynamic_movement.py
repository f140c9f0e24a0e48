"""Movement in captured models whose batch and sequence are not known."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.propagate import Graph, applied, priced, spec_of, steps
from tests.support.sources.dialects import equal_but_for_nan
from torch.export import Dim

import qfuse
from qfuse.capture import capture
from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.graph.text import to_text
from qfuse.ir.stages.verify import verify
from qfuse.normalize import normalize
from qfuse.optimize.merge.cse import Combine
from qfuse.optimize.propagate.lift_choose import LiftChoose
from qfuse.optimize.propagate.lift_quantize import LiftQuantize
from qfuse.optimize.schedule import move
from qfuse.rewrite.clone import clone
from qfuse.targets import Target
from qfuse.testing.run import run

pytestmark = pytest.mark.numeric

importlib.import_module("torch.ao.quantization.fx._decomposed")
decomposed = torch.ops.quantized_decomposed

FREE = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)


class Module(torch.nn.Module):
    """A function of one tensor."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


def per_tensor(x: torch.Tensor, scale: float = 0.05) -> torch.Tensor:
    """A static quantize and dequantize."""
    args = (scale, 3, -128, 127, torch.int8)
    real: torch.Tensor = decomposed.dequantize_per_tensor(
        decomposed.quantize_per_tensor(x, *args), *args
    )
    return real


def per_token(x: torch.Tensor) -> torch.Tensor:
    """A dynamic quantize and dequantize, with one scale per row."""
    chosen = decomposed._choose_qparams_per_token_asymmetric_impl(x, torch.int8)
    args = (*chosen, -128, 127, torch.int8)
    q = decomposed.quantize_per_token(x, *args)
    real: torch.Tensor = decomposed.dequantize_per_token(q, *args, torch.float32)
    return real


def moved(
    function: Callable[[torch.Tensor], Any], last: int = 16
) -> tuple[NormalGraph, Counter[str], list[str]]:
    """Capture with free sizes, move, and compare bits at several sizes."""
    program = normalize(capture(Module(function), (torch.randn(3, 5, last),), dynamic_shapes=FREE))
    source = clone(program)
    Combine().run(program, priced())
    fired = move(program, priced())
    verify(program)
    for batch, rows in ((3, 5), (2, 7), (4, 2), (1, 1), (1, 6)):
        x = torch.randn(batch, rows, last)
        for new, old in zip(run(program, [x]), run(source, [x]), strict=True):
            assert equal_but_for_nan(new, old)
            assert new.shape == old.shape
    free = [n.meta["val"] for n in program.graph.nodes if n.op == "placeholder"]
    assert not any(isinstance(size, int) for size in free[0].shape[:2]), "a size was fixed"
    return program, fired, [step.partition("[")[0] for step in steps(program)]


def heads(x: torch.Tensor, count: int = 4) -> torch.Tensor:
    """``[B, S, H*D]`` as ``[B, H, S, D]``."""
    return x.view(x.shape[0], x.shape[1], count, -1).transpose(1, 2)


def test_golden_a_head_split_is_crossed() -> None:
    program, fired, made = moved(lambda x: per_tensor(heads(x.relu())).neg())

    # The rectifier is the range of the quantize, which rises above it too and reads the input.
    assert fired["lift-quantize"] == 2
    assert made[made.index("quantize") :][:3] == ["quantize", "reshape", "permute"]
    (q,) = [n for n in program.graph.nodes if "qfuse.quantize" in str(n.target)]
    assert q.args[0].op == "placeholder"
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[s0, s1, 16]
%0 = aten.sym_size.int(%x, 0): SymInt
%1 = aten.sym_size.int(%x, 1): SymInt
const %quantize_per_tensor_scale: float64[1, 1, 1, 1]
const %quantize_per_tensor_zero_point: int64[1, 1, 1, 1]
const %quantize_per_tensor_scale_1: float64[1, 1, 1]
const %quantize_per_tensor_zero_point_1: int64[1, 1, 1]
%2 = qfuse.quantize(%x, %quantize_per_tensor_scale_1, %quantize_per_tensor_zero_point_1, 'int8[3,127] *x*x* float32 float32:reciprocal:round-zp int'): int8[s0, s1, 16]
%3 = aten.reshape(%2, (%0, %1, 4, -1)): int8[s0, s1, 4, 4]
%4 = aten.permute(%3, (0, 2, 1, 3)): int8[s0, 4, s1, 4]
%5 = qfuse.dequantize(%4, %quantize_per_tensor_scale, %quantize_per_tensor_zero_point, 'int8[-128,127] *x*x*x* float32 float32:reciprocal:round-zp int'): float32[s0, 4, s1, 4]
%6 = aten.neg(%5): float32[s0, 4, s1, 4]
return (%6)""",
    )


def test_three_head_splits_share_one_quantize() -> None:
    def split(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(per_tensor(heads(x, n)).neg() for n in (2, 4, 8))

    _, _, made = moved(split)
    assert made.count("quantize") == 1


def test_rows_flattened_by_minus_one() -> None:
    def flat(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return per_token(x.reshape(-1, 16)).neg(), per_token(x).neg()

    _, _, made = moved(flat)
    assert made.count("quantize") == 1


def test_rows_of_heads_keep_their_own_scales() -> None:
    _, fired, _ = moved(lambda x: per_token(heads(x)).neg())

    # The rows of heads are parts of the rows above: blocks in groups of the last axis.
    assert fired["lift-quantize"] == 1
    assert fired["lift-choose"] == 1


def test_scales_of_rows_follow_a_head_split_down() -> None:
    program, fired, _ = moved(lambda x: heads(per_token(x)).neg())

    assert fired["sink-dequantize"] >= 1
    (node,) = [n for n in program.graph.nodes if "qfuse.dequantize" in str(n.target)]
    assert len(node.meta["val"].shape) == 4


def test_heads_are_merged_again() -> None:
    def merged(x: torch.Tensor) -> torch.Tensor:
        y = heads(per_tensor(x)).transpose(1, 2)
        return per_tensor(y.reshape(x.shape[0], x.shape[1], -1)).neg()

    _, fired, made = moved(merged)
    assert fired["cancel-quantize"] == 1
    assert (made.count("quantize"), made.count("dequantize")) == (1, 1)


@pytest.mark.parametrize("mode", ["constant", "replicate", "circular"])
def test_paddings_leave_sizes_open(mode: str) -> None:
    def padded(x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.pad(per_tensor(x), (1, 2), mode=mode)
        return per_tensor(y).neg()

    _, fired, made = moved(padded)
    assert fired["cancel-quantize"] == 1
    assert made.count("quantize") == 1


def test_windows_of_a_free_axis() -> None:
    _, fired, _ = moved(lambda x: per_tensor(x.unfold(2, 4, 2)).neg())

    assert fired["lift-quantize"] <= 1


def test_parts_of_a_free_batch() -> None:
    def parts(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(per_tensor(part).neg() for part in x.chunk(2, dim=-1))

    _, _, made = moved(parts)
    assert made.count("quantize") == 1


def test_a_join_along_a_free_axis() -> None:
    def joined(x: torch.Tensor) -> torch.Tensor:
        return per_tensor(torch.concat([per_tensor(x), x.neg()], dim=1)).neg()

    _, fired, made = moved(joined)
    assert fired["lift-quantize"] == 1
    assert made.count("cat") == 1


def test_pooling_of_a_free_batch() -> None:
    def pooled(x: torch.Tensor) -> torch.Tensor:
        return per_tensor(torch.nn.functional.max_pool1d(per_tensor(x), 2)).neg()

    _, fired, made = moved(pooled)
    assert (fired["sink-dequantize"], fired["cancel-quantize"]) == (1, 1)
    assert made.count("quantize") == 1


def test_explain_sees_movement_of_a_free_batch() -> None:
    report = qfuse.explain(
        Module(lambda x: per_tensor(heads(per_tensor(x))).neg()),
        (torch.randn(3, 5, 16),),
        dynamic_shapes=FREE,
        target=Target.for_testing(),
    )

    assert report.fired["cancel-quantize"] == 1
    assert not report.rolled_back


@pytest.mark.parametrize("m", [1, 3])
def test_groups_of_a_free_number_of_rows(m: int) -> None:
    g = Graph("m", 6, 8)
    flat = g.call(torch.ops.aten.view.default, g.x, [-1, 8])
    params = g.choose(flat, (1, 4))
    spec = spec_of(1, 4)
    q = g.quantize(flat, spec, params)
    program = g.done(g.dequantize(q, spec, params))

    fired = applied(program, LiftChoose, LiftQuantize, m=m).fired
    assert fired == {"lift-choose": 1, "lift-quantize": 1}
