"""Models that somebody quantized: plain tensors inside, operators of their dialect intact."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.graphs.capture_models import Stack, assert_same_run, captured
from torch import nn
from torch.export import Dim

from qfuse.capture import capture
from qfuse.ir.errors import CaptureError
from qfuse.zoo import _torchao_api as torchao_api

pytestmark = pytest.mark.numeric

SHAPES = {"x": {0: Dim("tokens", min=1, max=64)}}
LINEARS = frozenset(f"blocks.{i}.{name}" for i in (0, 1) for name in ("up", "down"))


def by_torchao(config: Any) -> Any:
    model = Stack().eval()
    with torchao_api.loaded():
        torchao_api.quantize_linears(model, LINEARS, config())
    return model


def by_pt2e(*, dynamic: bool) -> Any:
    model = Stack().eval()
    x = torch.randn(4, 32)
    with torchao_api.loaded():
        program = torch.export.export(model, (x,), dynamic_shapes=SHAPES)
        prepared = torchao_api.prepare_model(program, dynamic=dynamic)
        prepared(x)
        return torchao_api.convert(prepared)


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "float": (lambda: Stack().eval(), "aten.linear"),
    "int8-weight-only": (lambda: by_torchao(lambda: torchao_api.int8_weights(None)), "aten.mm"),
    "int8-weight-only-groups": (
        lambda: by_torchao(lambda: torchao_api.int8_weights(16)),
        "torchao.dequantize_affine",
    ),
    "int8-dynamic": (lambda: by_torchao(torchao_api.int8_dynamic), "aten._int_mm"),
    "int8-dynamic-asymmetric": (
        lambda: by_torchao(lambda: torchao_api.int8_dynamic(asymmetric=True)),
        "torchao.choose_qparams_affine",
    ),
    "int8-static": (
        lambda: by_torchao(lambda: torchao_api.int8_static(torch.full((1, 1), 0.05))),
        "torchao.quantize_affine",
    ),
    "8da4w": (
        lambda: by_torchao(lambda: torchao_api.int8_dynamic_int_weights(4, 16)),
        "torchao.dequantize_affine",
    ),
    "pt2e-static": (
        lambda: by_pt2e(dynamic=False),
        "quantized_decomposed.dequantize_per_channel",
    ),
    "pt2e-dynamic": (
        lambda: by_pt2e(dynamic=True),
        "quantized_decomposed.choose_qparams.tensor",
    ),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_bit_for_bit(name: str, dynamic: bool) -> None:
    make, operator = CASES[name]
    model = make()
    program = captured(model, torch.randn(4, 32), dynamic_shapes=SHAPES if dynamic else None)

    for tokens in (1, 4, 17) if dynamic else (4,):
        assert_same_run(program, model, torch.randn(tokens, 32))
    calls = Counter(
        str(n.target).removesuffix(".default")
        for n in program.graph.nodes
        if n.op == "call_function"
    )
    assert calls[operator] in {4, 8}, calls
    assert not any("assert" in call for call in calls), calls
    assert not program.log.events
    modules = {n.meta["qfuse_module"] for n in program.graph.nodes if n.op == "call_function"}
    assert modules >= LINEARS
    sources = {n.meta["qfuse_source"] for n in program.graph.nodes if n.op == "call_function"}
    assert {s.split(": ", maxsplit=1)[1] for s in sources} >= {
        "h = torch.relu(self.up(x))",
        "y: torch.Tensor = x + self.down(h)",
    }


@pytest.mark.parametrize("name", ["int8-weight-only", "8da4w"])
def test_the_tensors_inside_a_quantized_weight(name: str) -> None:
    model = CASES[name][0]()
    program = captured(model, torch.randn(4, 32))
    held = dict(program.module.named_buffers())

    weight = model.blocks[0].up.weight
    for part in ("qdata", "scale"):
        inside = getattr(weight, part)
        assert held[f"blocks.0.up.weight.{part}"].data_ptr() == inside.data_ptr()
    assert all(type(value) is torch.Tensor for value in held.values())


def test_float_weights_of_a_converted_model_are_left_out() -> None:
    program = captured(by_pt2e(dynamic=False), torch.randn(4, 32))
    held = {n: t for n, t in program.module.named_buffers() if t.ndim == 2}

    assert len(held) == 4
    assert all(value.dtype == torch.int8 for value in held.values())


def test_a_quantized_weight_is_not_a_result() -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = by_torchao(torchao_api.int8_dynamic)

        def forward(self, x: torch.Tensor) -> Any:
            return self.stack(x), self.stack.blocks[0].up.weight

    with pytest.raises(
        CaptureError, match=r"^the model returns stack\.blocks\.0\.up\.weight"
    ) as error:
        capture(Returns().eval(), (torch.randn(4, 32),))
    assert "an Int8Tensor" in error.value.what
    assert "dequantize()" in str(error.value.fix)
