"""Parameters that are equal, and those that may only be assumed to be."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from tests.support.graphs.raw_fx import assert_same_bits, bits_of, exported, ops_of
from torch import nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from qfuse.ir.events import Exactness, Fired, MissCode
from qfuse.passes import LiftCombineQuantize, MergeLinears
from qfuse.passes._torch_api import is_fake, mode_of, new_mode

importlib.import_module("torch.ao.quantization.fx._decomposed")
decomposed = torch.ops.quantized_decomposed
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
RANGE = (-128, 127, torch.int8)


class Static(nn.Module):
    """Two linears, each with a scale of its own for the one input.

    Args:
        scales: The scales.
        device: Where parameters are.
    """

    def __init__(self, scales: tuple[float, float] = (0.05, 0.05), device: str = "cpu") -> None:
        super().__init__()
        for index, scale in enumerate(scales):
            weight = torch.randint(-127, 128, (4 + index, 16)).to(torch.int8)
            self._add(f"w{index}", weight, device)
            self._add(f"ws{index}", torch.rand(4 + index) * 0.01 + 1e-3, device)
            self._add(f"wz{index}", torch.zeros(4 + index, dtype=torch.int32), device)
            self._add(f"xs{index}", torch.tensor(scale), device)
            self._add(f"xz{index}", torch.tensor(3, dtype=torch.int32), device)

    def _add(self, name: str, value: torch.Tensor, device: str) -> None:
        self.register_buffer(name, value.to(device))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Quantize, dequantize, multiply."""
        outs = []
        x = torch.sigmoid(x)
        for index in range(2):
            view = x.view(-1, 16)
            edge = self.get_buffer(f"xs{index}"), self.get_buffer(f"xz{index}"), *RANGE
            q = decomposed.quantize_per_tensor.tensor(view, *edge)
            real = decomposed.dequantize_per_tensor.tensor(q, *edge)
            row = self.get_buffer(f"ws{index}"), self.get_buffer(f"wz{index}"), 0, *RANGE
            weight = decomposed.dequantize_per_channel(self.get_buffer(f"w{index}"), *row)
            outs.append(torch.relu(nn.functional.linear(real, weight)))
        return outs


def static(device: str = "cpu", scales: tuple[float, float] = (0.05, 0.05)) -> GraphModule:
    return exported(Static(scales, device), torch.randn(2, 3, 16, device=device))


@pytest.mark.numeric
@pytest.mark.parametrize("equality", ["exact", "assumed"])
def test_values_decide_where_there_are_values(equality: str) -> None:
    x = torch.randn(2, 3, 16)
    module = static()
    before = bits_of(module, [x])
    outcome = MergeLinears(equality=equality)(module)

    assert (outcome.fired["merge-linears"], outcome.assumed) == (1, 0)
    assert_same_bits(before, bits_of(module, [x]))
    other = static(scales=(0.05, 0.06))
    outcome = MergeLinears(equality=equality)(other)
    assert (outcome.modified, outcome.assumed) == (False, 0)


def test_without_values_nothing_is_equal() -> None:
    module = static("meta")
    outcome = MergeLinears()(module)

    assert outcome.modified is False
    assert MissCode.NO_VALUES in {miss.code for miss in outcome.misses}


def test_without_values_equality_may_be_assumed() -> None:
    module = static("meta")
    outcome = MergeLinears(equality="assumed")(module)

    assert outcome.fired["merge-linears"] == 1
    fired = [event for event in outcome.report.events if isinstance(event, Fired)]
    merged = [event.exactness for event in fired if event.rule == "merge-linears"]
    assert merged == [Exactness.ASSUMED]
    assert outcome.assumed == 3  # a quantize, a dequantize, and the linears
    assert "[assumed]" in str(outcome)
    assert all(value.is_meta for value in module.state_dict().values())
    assert {v.device.type for v in _values(module)} == {"meta"}
    assert [tuple(out.shape) for out in module(torch.randn(2, 3, 16, device="meta"))] == [
        (6, 4),
        (6, 5),
    ]
    assert MergeLinears(equality="assumed")(module).modified is False


def test_types_and_shapes_still_decide() -> None:
    module = static("meta")
    module.xs1 = torch.zeros(1, device="meta")
    (scale,) = (n for n in module.graph.find_nodes(op="get_attr") if n.target == "xs1")
    del scale.meta["val"]

    assert MergeLinears(equality="assumed")(module).modified  # one number is one number
    module = static("meta")
    module.xz1 = torch.zeros((), dtype=torch.int64, device="meta")
    assert not MergeLinears(equality="assumed")(module).modified


def test_what_is_lifted_needs_no_values_and_what_is_combined_does() -> None:
    module = static("meta")
    outcome = LiftCombineQuantize()(module)

    assert (outcome.fired["lift-quantize"], outcome.fired["combine"]) == (2, 0)
    assert MissCode.NO_VALUES in {miss.code for miss in outcome.misses}
    module = static("meta")
    outcome = LiftCombineQuantize(equality="assumed")(module)
    assert outcome.fired["combine"] > 0
    assert outcome.assumed == outcome.fired["combine"]
    assert ops_of(module)["qfuse.quantize"] == 1


def test_fake_tensors_have_no_values_either() -> None:
    with new_mode() as mode:
        model = Static()
        module = make_fx(model)(torch.empty(2, 3, 16))
    outcome = MergeLinears(equality="assumed")(module)

    assert (outcome.fired["merge-linears"], outcome.assumed) == (1, 3)
    read = {str(node.target) for node in module.graph.find_nodes(op="get_attr")}
    for name in read:
        value = getattr(module, name)
        assert is_fake(value)
        assert mode_of(value) is mode
        assert value.device.type == "cpu"
    assert {v.device.type for v in _values(module)} == {"cpu"}
    with mode:
        assert [out.shape for out in module(torch.empty(2, 3, 16))] == [(6, 4), (6, 5)]


@pytest.mark.parametrize("bias", [(True, True), (True, False)])
def test_float_linears_merge_without_values(bias: tuple[bool, bool]) -> None:
    linears = nn.ModuleList(nn.Linear(16, 4, bias=b, device="meta") for b in bias)

    def call(x: torch.Tensor) -> Any:
        return [linear(x) for linear in linears]

    module = make_fx(call)(torch.empty(3, 16, device="meta"))
    outcome = MergeLinears()(module)

    assert outcome.fired == {"merge-linears": 1}
    assert outcome.assumed == 0  # nothing had to be equal
    assert [out.shape for out in module(torch.empty(3, 16, device="meta"))] == [(3, 4), (3, 4)]


def test_what_has_values_is_not_joined_with_what_has_none() -> None:
    module = static()
    module.w1 = module.w1.to("meta")

    assert MergeLinears(equality="assumed")(module).fired["merge-linears"] == 0


def _values(module: GraphModule) -> list[torch.Tensor]:
    values = [node.meta.get("val") for node in module.graph.nodes]
    return [value for value in values if isinstance(value, torch.Tensor)]
