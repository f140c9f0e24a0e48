"""Layers written in canonical ops are torchao's tensors, to the last bit."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qfuse.ir.quant.choose import Formula
from qfuse.ir.quant.element import Element
from qfuse.zoo import recipes
from qfuse.zoo._torchao_api import quiet_imports
from qfuse.zoo.mx_formats import MxLinear, float8, mx, nvfp4, peak_scale

with quiet_imports():
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3
    from torchao.prototype.mx_formats.inference_workflow import MXDynamicActivationMXWeightConfig
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
    from torchao.quantization import quantize_
    from torchao.quantization.quant_primitives import (
        _choose_scale_float8,
        _dequantize_affine_float8,
        _quantize_affine_float8,
    )
    from torchao.quantization.quantize_.common import KernelPreference

pytestmark = pytest.mark.numeric

ELEMENTS = {
    Element.WHOLE: torch.float8_e4m3fn,
    Element.E2M3: DTYPE_FP6_E2M3,
    Element.E2M1: torch.float4_e2m1fn_x2,
}


def linear(dtype: torch.dtype = torch.bfloat16, *, bias: bool = True) -> nn.Linear:
    return nn.Linear(96, 40, bias=bias).to(dtype).eval()


@pytest.mark.parametrize("mode", [m.value for m in ScaleCalculationMode])
@pytest.mark.parametrize("element", list(ELEMENTS))
def test_mx_layers_are_those_of_torchao(element: Element, mode: str) -> None:
    source, x = linear(), torch.randn(2, 5, 96).bfloat16()
    theirs = nn.Sequential(copy.deepcopy(source))
    config = MXDynamicActivationMXWeightConfig(
        activation_dtype=ELEMENTS[element],
        weight_dtype=ELEMENTS[element],
        kernel_preference=KernelPreference.EMULATED,
        scaling_mode=ScaleCalculationMode(mode),
    )
    quantize_(theirs, config)
    ours = MxLinear(source, mx(element, Formula(f"mx-{mode}")))

    with torch.no_grad():
        assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("static", [False, True])
def test_nvfp4_layers_multiply_what_torchao_stores(static: bool) -> None:
    source, x = linear(), torch.randn(2, 5, 96).bfloat16()
    peak = x.abs().max() * (0.7 if static else 1.0)
    given = peak_scale(peak.float()) if static else None
    ours = MxLinear(source, nvfp4(), given)

    def stored(value: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
        scale = per_tensor_amax_to_scale(amax)
        real: torch.Tensor = NVFP4Tensor.to_nvfp4(value, per_tensor_scale=scale).dequantize()
        return real

    with torch.no_grad():
        rows, weight = x.reshape(-1, 96), source.weight
        want = F.linear(stored(rows, peak), stored(weight, weight.abs().max()), source.bias)
        assert torch.equal(ours(x), want.reshape(2, 5, 40))


@pytest.mark.parametrize("per_tensor", [False, True])
def test_float8_layers_multiply_what_torchao_stores(per_tensor: bool) -> None:
    source, x = linear(torch.float32, bias=False), torch.randn(7, 96)

    def stored(value: torch.Tensor, block: list[int]) -> torch.Tensor:
        scale = _choose_scale_float8(value, block)
        q = _quantize_affine_float8(value, scale)
        real: torch.Tensor = _dequantize_affine_float8(q, scale)
        return real

    with torch.no_grad():
        rows = stored(x, [7, 96] if per_tensor else [1, 96])
        want = F.linear(rows, stored(source.weight, [1, 96]))
        assert torch.equal(MxLinear(source, float8(per_tensor=per_tensor))(x), want)


def test_weights_only() -> None:
    source, x = linear(torch.float32), torch.randn(3, 96)
    layer = MxLinear(source, nvfp4(), weights_only=True)
    amax = source.weight.abs().max()
    stored = NVFP4Tensor.to_nvfp4(
        source.weight.detach(), per_tensor_scale=per_tensor_amax_to_scale(amax.detach())
    )
    with torch.no_grad():
        assert torch.equal(layer(x), F.linear(x, stored.dequantize(), source.bias))


class Tied(nn.Module):
    """Two layers with one weight, and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(64, 64) for _ in range(3))
        self.second.weight = self.first.weight
        self.again = self.third

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.again(self.third(self.second(self.first(x))))
        return y


def test_what_is_shared_stays_shared() -> None:
    model = Tied()
    made = recipes.quantize(model, "mxfp4", (torch.randn(2, 64),)).model
    first, second = made.get_submodule("first"), made.get_submodule("second")
    assert isinstance(first, MxLinear)
    assert first.weight is second.weight
    assert first.bias is not second.bias
    assert made.get_submodule("third") is made.get_submodule("again")
    assert type(model.first) is nn.Linear, "the source is left alone"


def test_rows_that_blocks_do_not_tile_are_left() -> None:
    model = nn.Sequential(nn.Linear(48, 64), nn.Linear(64, 8))
    result = recipes.quantize(model, "mxfp4", (torch.randn(2, 48),))
    assert result.layers == 1
    (note,) = result.notes
    assert "not a multiple of the group size 32" in note.reason
