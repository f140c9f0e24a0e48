"""Networks that quantization-aware training gave: PT2E folds their batch norms when it converts."""

from __future__ import annotations

import pytest
import torch
from tests.support.graphs.tiny_models import sqnr
from tests.support.sources.dialects import strides
from torch import nn

import qfuse
from qfuse.targets import Target

pytestmark = [
    pytest.mark.slow,
    pytest.mark.numeric,
    pytest.mark.own_kernels,
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),
]


class Block(nn.Sequential):
    """A convolution and its batch norm."""

    def __init__(self, channels: int, out: int, size: int = 3, **options: int | bool) -> None:
        convolution = nn.Conv2d(channels, out, size, padding=size // 2, **options)  # type: ignore[arg-type]
        super().__init__(convolution, nn.BatchNorm2d(out))


class Network(nn.Module):
    """A strided, a depthwise, a residual and a 1x1 convolution, each with a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block(3, 16, stride=2, bias=False)
        self.depthwise = Block(16, 16, groups=16, bias=False)
        self.residual = Block(16, 16)
        self.pointwise = Block(16, 24, 1)
        self.head = nn.Linear(24, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        y = nn.functional.hardtanh(self.depthwise(x), 0.0, 6.0)
        x = torch.relu(self.residual(y) + x)
        logits: torch.Tensor = self.head(torch.relu(self.pointwise(x)).mean((2, 3)))
        return logits


def trained(example: torch.Tensor) -> nn.Module:
    """Train a few steps with fake quantization, and convert."""
    from torchao.quantization.pt2e import move_exported_model_to_eval  # noqa: PLC0415
    from torchao.quantization.pt2e.quantize_pt2e import (  # noqa: PLC0415
        convert_pt2e,
        prepare_qat_pt2e,
    )
    from torchao.quantization.pt2e.quantizer import (  # noqa: PLC0415
        x86_inductor_quantizer as x86,
    )

    exported = torch.export.export(Network().train(), (example,)).module()
    config = x86.get_default_x86_inductor_quantization_config(is_qat=True)
    prepared = prepare_qat_pt2e(exported, x86.X86InductorQuantizer().set_global(config))
    weights = [p for p in prepared.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(weights, lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        prepared(torch.randn_like(example)).square().mean().backward()
        optimizer.step()
    converted = convert_pt2e(prepared)
    model: nn.Module = move_exported_model_to_eval(converted)
    return model


@pytest.mark.thorough
def test_every_convolution_of_a_trained_network_has_an_int8_kernel() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 32, 32)
    source = trained(x)
    fast = qfuse.compile(
        source,
        (x,),
        target=Target.for_testing(),
        check="site",
        options={"backend": "eager"},
    )
    assert fast.report.kernels == {
        "qfuse.convolution_w8a8": 3,
        "qfuse.convolution_depthwise_w8a8": 1,
        "qfuse.linear_w8a8": 1,
    }
    with torch.no_grad():
        for _ in range(2):
            x = torch.randn(2, 3, 32, 32)
            expected = source(x)
            answer = fast(x)
            assert strides(answer) == strides(expected)
            assert sqnr(expected, answer) > 60
