"""Reductions of 8-bit integers are right in compiled code, for axes of any length."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # the ops of PT2E

import qfuse
from qfuse.cost import CostModel, CostProfile
from qfuse.ir.graph.stage_graph import OptimizedGraph
from qfuse.lower import lower
from qfuse.targets import Target
from qfuse.testing.build import GraphBuilder
from qfuse.testing.run import run

aten = torch.ops.aten
I8, U8 = torch.int8, torch.uint8
Function = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]

FUNCTIONS: dict[str, Function] = {
    "amax": lambda x: (x.amax(1), x.amax((0, 2), keepdim=True), x.amax()),
    "amin": lambda x: (x.amin(1), x.amin((0, 2), keepdim=True), x.amin()),
    "any": lambda x: ((x // 30).any(1), (x // 40).any(), (x // 50).any((0, 2), keepdim=True)),
    "aminmax": lambda x: (*x.aminmax(dim=-1, keepdim=True), *x.aminmax()),
    "arg": lambda x: (x.argmax(-1), x.argmin(1, keepdim=True), x.argmax(), x.argmin()),
    "max": lambda x: (x.max(), x.max(-1).values, *x.max(1, keepdim=True)),
    "min": lambda x: (x.min(), x.min(-1).values, *x.min(1, keepdim=True)),
    # Without an overflow.
    "sum": lambda x: ((x // 40).sum(1, dtype=x.dtype), (x // 40).sum(dtype=x.dtype)),
    "prod": lambda x: ((x // 60).prod(1, dtype=x.dtype), (x // 60).prod(dtype=x.dtype)),
}


class Quantized(torch.nn.Module):
    """A function of 8-bit integers that the loops of its reductions compute."""

    def __init__(self, function: Function, dtype: torch.dtype) -> None:
        super().__init__()
        self._function = function
        self._dtype = dtype

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._function((x * 2).to(self._dtype))


def _distinct(dtype: torch.dtype, length: int) -> torch.Tensor:
    """Return ``[2, length, 3]`` values all on one side of 0, without ties in a row."""
    count = 6 * length
    values = (torch.randperm(count) % 60 + 1).view(2, length, 3)
    return values if dtype is U8 else -values


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [I8, U8], ids=str)
@pytest.mark.parametrize(
    "source", [torch.int32, pytest.param(torch.float32, marks=pytest.mark.thorough)], ids=str
)
def test_reductions_are_right_in_compiled_code(dtype: torch.dtype, source: torch.dtype) -> None:
    model = Quantized(lambda x: sum((f(x) for f in FUNCTIONS.values()), ()), dtype).eval()
    x = _distinct(dtype, 10).to(source)

    fast = qfuse.compile(model, (x,))

    assert fast.report.checks[-1].passed
    for position, (new, old) in enumerate(zip(fast(x), model(x), strict=True)):
        assert new.dtype is old.dtype
        assert torch.equal(new, old), position


@pytest.mark.parametrize("dtype", [I8, U8, torch.int16, torch.int32], ids=str)
def test_only_8_bits_are_widened(dtype: torch.dtype) -> None:
    b = GraphBuilder()
    x = b.arg("x", dtype, 4, 5)
    program = b.done(b.call(aten.amin.default, x, [1]), stage=OptimizedGraph)

    low = lower(program, Target.for_testing(), CostModel(CostProfile.pinned()), ())

    (least,) = low.graph.find_nodes(op="call_function", target=aten.amin.default)
    (operand,) = least.all_input_nodes
    assert operand.meta["val"].dtype is (torch.int32 if dtype in (I8, U8) else dtype)
    values = torch.arange(20).view(4, 5).to(dtype) + 3
    (y,) = run(low, [values])
    assert y.dtype is dtype
    assert torch.equal(y, values.amin(1))


@pytest.mark.numeric
@pytest.mark.thorough
@pytest.mark.parametrize(("scale", "zero_point"), [(0.0227, 0), (0.05, 255)])
def test_dequantized_values_have_their_least_one(scale: float, zero_point: int) -> None:
    """The dequantize runs below the ``amin``, which then reads 8-bit integers."""
    qd = torch.ops.quantized_decomposed
    params = (scale, zero_point, 0, 255, U8)

    class Least(torch.nn.Module):
        def forward(self, w: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
            q = qd.quantize_per_tensor(w * a, *params)
            least: torch.Tensor = qd.dequantize_per_tensor(q, *params).amin(0)
            return least

    sign = 1 if zero_point == 0 else -1
    inputs = torch.rand(24, 1) + 0.5, sign * (torch.rand(1, 4) * 2 + 0.5)
    model = Least().eval()

    fast = qfuse.compile(model, inputs)

    assert fast.report.checks[-1].passed
    torch.testing.assert_close(fast(*inputs), model(*inputs), rtol=1e-6, atol=0)
