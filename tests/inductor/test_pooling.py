"""A dequantize sinks below a max pool in Inductor's own spelling."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed
from expecttest import assert_expected_inline
from tests.support.frozen_inductor import freeze
from torch import nn
from torch.nn import functional

import qfuse
from qfuse.ir.events import MissCode

config: Any = importlib.import_module("torch._inductor.config")
dynamo: Any = importlib.import_module("torch._dynamo")

ops = torch.ops.quantized_decomposed
INT8 = (0.05, 3, -128, 127, torch.int8)
NARROW = (0.05, 3, -7, 7, torch.int8)
UINT8 = (0.05, 3, 0, 255, torch.uint8)


class Pooled(nn.Module):
    """Quantized values, the greatest of which are stored again."""

    def __init__(self, params: tuple[Any, ...] = INT8, **pool: Any) -> None:
        super().__init__()
        self.params = params
        self.pool: dict[str, Any] = {"kernel_size": 3, "stride": 2, "padding": 1, **pool}

    def forward(self, x: torch.Tensor) -> Any:
        q = ops.quantize_per_tensor(x * 5, *self.params)
        real = ops.dequantize_per_tensor(q, *self.params)
        return self.after(functional.max_pool2d(real, **self.pool), real)

    def after(self, pooled: torch.Tensor, real: torch.Tensor) -> Any:
        del real
        again = ops.quantize_per_tensor(pooled, *self.params)
        return ops.dequantize_per_tensor(again, *self.params).relu()


def text(found: Any) -> str:
    (graph,) = found.graphs
    calls = [n for n in graph.graph.nodes if n.op == "call_function"]
    return "\n".join(f"{n} = {getattr(n.target, '__name__', n.target)}{n.args}" for n in calls)


def test_golden() -> None:
    found = freeze(Pooled(), torch.randn(2, 3, 9, 9))
    assert found.report.fired == {"sink-dequantize": 1, "cancel-quantize": 1}
    assert_expected_inline(
        text(found),
        """\
mul = mul.Tensor(arg0_1, 5)
quantize_per_tensor = quantize_per_tensor.default(mul, 0.05, 3, -128, 127, torch.int8)
_low_memory_max_pool_with_offsets_default = _low_memory_max_pool_with_offsets.default(quantize_per_tensor, [3, 3], [2, 2], [1, 1], [1, 1], False)
getitem_2 = getitem(_low_memory_max_pool_with_offsets_default, 0)
dequantize_per_tensor_1 = dequantize_per_tensor.default(getitem_2, 0.05, 3, -128, 127, torch.int8)
relu = relu.default(dequantize_per_tensor_1,)""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize("params", [INT8, NARROW, UINT8], ids=["int8", "narrow", "uint8"])
@pytest.mark.parametrize(
    "pool",
    [
        {},
        {"stride": 1, "padding": 0, "dilation": 2},
        {"kernel_size": (2, 3), "stride": (2, 1), "padding": (0, 1)},
        {"kernel_size": 2, "stride": 2, "padding": 0, "ceil_mode": True},
    ],
    ids=["padded", "dilated", "uneven", "ceil"],
)
def test_numeric(params: tuple[Any, ...], pool: dict[str, Any]) -> None:
    x = torch.randn(2, 3, 9, 7)
    x[0, 0] = -100.0  # where padding would win if it were a number
    found = freeze(Pooled(params, **pool), x)
    assert found.report.fired == {"sink-dequantize": 1, "cancel-quantize": 1}
    assert torch.equal(found.plain, found.merged)
    assert found.plain.stride() == found.merged.stride()


@pytest.mark.thorough
@pytest.mark.parametrize("channels_last", [True, False])
def test_down_to_code(*, channels_last: bool) -> None:
    x = torch.randn(2, 3, 9, 9)
    x[0, 0] = -100.0
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    model = Pooled()
    dynamo.reset()
    with torch.no_grad(), config.patch({"cpp.vec_isa_ok": True}):
        found = torch.compile(model, options=qfuse.inductor_options())(x)
    assert qfuse.reports()[-1].fired["sink-dequantize"] == 1
    assert torch.equal(found, model(x))
    assert found.stride() == model(x).stride()


class Offsets(Pooled):
    """Two quantized values may be one real number: which of them was found depends on it."""

    def after(self, pooled: torch.Tensor, real: torch.Tensor) -> Any:
        del pooled
        found, where = functional.max_pool2d(real, **self.pool, return_indices=True)
        return found + 1, where


class Read(Pooled):
    def after(self, pooled: torch.Tensor, real: torch.Tensor) -> Any:
        return pooled + 1, real.sigmoid()


class Half(Pooled):
    def forward(self, x: torch.Tensor) -> Any:
        q = ops.quantize_per_tensor(x, 0.001, 0, -30000, 30000, torch.int16)
        real = ops.dequantize_per_tensor(q, 0.001, 0, -30000, 30000, torch.int16)
        return functional.max_pool2d(real, **self.pool).sin()


@pytest.mark.parametrize(
    ("model", "code", "told"),
    [
        (Offsets(), MissCode.SHARED, "the positions of the elements are used"),
        (Read(), MissCode.SHARED, "its input has other users"),
        (Half(), MissCode.DTYPE, "neither int8 nor uint8"),
        (Pooled((-0.05, *INT8[1:])), MissCode.RANGE, "not monotonic"),
        (Pooled((1e-39, *INT8[1:])), MissCode.RANGE, "not monotonic"),
    ],
    ids=["offsets", "read", "int16", "negative", "tiny"],
)
def test_refusal(model: nn.Module, code: MissCode, told: str) -> None:
    found = freeze(model, torch.randn(2, 3, 9, 9))
    assert not found.report.fired["sink-dequantize"]
    misses = [miss for miss in found.report.closest_misses if miss.rule == "sink-dequantize"]
    assert [miss.code for miss in misses] == [code]
    assert told in misses[0].reason
    plain, merged = found.plain, found.merged
    pairs = zip(plain, merged, strict=True) if isinstance(plain, tuple) else [(plain, merged)]
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_window_of_padding_alone_is_refused() -> None:
    # The last window starts behind the four elements, where dilation steps over what is left.
    model = Pooled(kernel_size=2, stride=1, padding=1, dilation=5)
    found = freeze(model, torch.randn(2, 3, 4, 9))
    assert not found.report.fired["sink-dequantize"]
    (miss,) = [m for m in found.report.closest_misses if m.rule == "sink-dequantize"]
    assert miss.code is MissCode.SHAPE
    assert torch.equal(found.plain, found.merged)
