"""Passes on the simulator's graphs: its own ops come out, fewer of them, with the same bits."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.support.graphs.raw_fx import assert_same_bits, bits_of, check_values, exported, ops_of
from tests.support.sources.dialects import codes, scales
from torch import nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from qfuse.ir.events import MissCode
from qfuse.normalize.builtin import BUILTIN
from qfuse.passes import LiftCombineQuantize, MergeLinears

KINDS = {
    "mm": "aten.mm",
    "addmm": "aten.addmm",
    "static": "simulator.static_quant_linear",
    "int4": "simulator.int4_linear",
    "fp8": "simulator.fp8_linear",
    "mxfp4": "simulator.mxfp4_linear",
}
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")


def layers(kind: str, device: str, depth: int) -> GraphModule:
    """Return the graph of several layers of one kind."""
    llama = importlib.import_module("simulator_dialect.llama")
    model = nn.Sequential(*(llama.Layer(kind, device) for _ in range(depth)))
    return exported(model, torch.randn(2, 3, 32, device=device))


def options(simulator: ModuleType, **more: Any) -> dict[str, Any]:
    return {"dialects": (*BUILTIN, simulator.dialect), **more}


@pytest.mark.usefixtures("simulator")
def test_every_kind_is_tested() -> None:
    llama = importlib.import_module("simulator_dialect.llama")

    assert set(llama.KINDS) == set(KINDS)


@pytest.mark.numeric
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_layer_has_four_linears(simulator: ModuleType, kind: str) -> None:
    x, depth = torch.randn(2, 3, 32), 2
    module = layers(kind, "cpu", depth)
    assert ops_of(module)[KINDS[kind]] == 7 * depth
    before = bits_of(module, [x], simulator.dialect)
    outcome = MergeLinears(**options(simulator))(module)

    assert outcome.fired["merge-linears"] == 2 * depth
    assert outcome.assumed == 0
    after = ops_of(module)
    assert after[KINDS[kind]] == 4 * depth
    assert sum(count for name, count in after.items() if "linear" in name or "mm" in name) == (
        6 * depth  # with the two products of attention
    )
    assert not any(name.startswith("qfuse.") for name in after)
    assert_same_bits(before, bits_of(module, [x], simulator.dialect))
    check_values(module, x)
    assert not MergeLinears(**options(simulator))(module).modified


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_of_shapes_alone_has_four_linears(simulator: ModuleType, kind: str) -> None:
    depth = 1
    module = layers(kind, "meta", depth)
    assert ops_of(module)[KINDS[kind]] == 7 * depth
    outcome = MergeLinears(**options(simulator, equality="assumed"))(module)

    assert outcome.fired["merge-linears"] == 2 * depth
    after = ops_of(module)
    assert after[KINDS[kind]] == 4 * depth
    assert not any(name.startswith("qfuse.") for name in after)
    # Only the static kind has parameters of its input that might differ: q, k, v and gate, up.
    assert outcome.assumed == (5 * depth if kind == "static" else 0)
    assert all(value.is_meta for value in module.state_dict().values())
    x = torch.empty(2, 3, 32, device="meta")
    assert module(x).shape == x.shape
    check_values(module, x)


def test_without_values_and_assumption_scales_differ(simulator: ModuleType) -> None:
    module = layers("static", "meta", 1)
    outcome = MergeLinears(**options(simulator))(module)

    assert not outcome.modified
    assert MissCode.NO_VALUES in {miss.code for miss in outcome.misses}


def call_all(ops: ModuleType, x: torch.Tensor, s: torch.Tensor, z: torch.Tensor) -> list[Any]:
    """Quantize one value in every way, twice, behind a view."""
    h, outs = torch.relu(x), []
    for _ in range(2):
        view = h.view(6, 32)
        outs += ops.dynamic_quantize_mxfp4(view, 8)
        outs += ops.dynamic_quantize_symmetric(view, [-1])
        outs += ops.dynamic_quantize_asymmetric(view, [0, 1])
        outs += [ops.quantize(view, s, z, 8), ops.quantize(view, s, z, 4)]
    return [out.float() + 1 for out in outs]


@pytest.mark.numeric
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_quantizes_rise_above_views_and_become_one(simulator: ModuleType, device: str) -> None:
    x = torch.randn(2, 3, 32, device=device) * 3
    inputs = x, torch.tensor(0.05, device=device), torch.tensor(3, dtype=torch.int8, device=device)
    module = make_fx(lambda *given: call_all(simulator.ops, *given))(*inputs)
    expected = module(*inputs)
    outcome = LiftCombineQuantize(**options(simulator))(module)

    own = {name: count for name, count in ops_of(module).items() if name.startswith("simulator.")}
    assert own == {
        "simulator.dynamic_quantize_mxfp4": 1,
        "simulator.dynamic_quantize_symmetric": 1,
        "simulator.dynamic_quantize_asymmetric": 1,
        "simulator.quantize": 2,
    }
    assert not any(name.startswith("qfuse.") for name in ops_of(module))
    (relu,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    assert {str(user.target).partition(".")[0] for user in relu.users} == {"simulator"}
    assert outcome.assumed == 0
    check_values(module, *inputs)
    if device == "cpu":
        assert_same_bits(expected, module(*inputs))


@torch.no_grad()
def test_what_the_simulator_cannot_say_is_not_done(simulator: ModuleType) -> None:
    """Parts with output scales of their own: canonically fine, but there is no op for it."""
    parts = [(codes((4, 16), torch.int8), scales((4,))) for _ in range(2)]
    op = torch.ops.simulator.static_quant_linear

    def call(q: torch.Tensor) -> list[torch.Tensor]:
        given = zip(parts, (0.3, 0.4), strict=True)
        return [op(q, 0.05, 3, w, s, None, scale, 0).float() for (w, s), scale in given]

    def merged(**more: Any) -> tuple[Any, GraphModule]:
        module = make_fx(call)(q)
        return MergeLinears(**options(simulator, **more))(module), module

    q = codes((3, 16), torch.int8)
    outcome, module = merged()
    assert not outcome.modified
    spelled = [miss for miss in outcome.misses if miss.stage == "spell"]
    assert MissCode.GRANULARITY in {miss.code for miss in spelled}
    assert "its parts are not all quantized to int8 with one scale" in str(outcome)
    assert ops_of(module)["simulator.static_quant_linear"] == 2
    outcome, module = merged(spelling="canonical")
    assert outcome.fired["merge-linears"] == 1
    assert module(q)[0].shape == (3, 4)


@pytest.mark.numeric
@torch.no_grad()
def test_one_group_that_cannot_be_said_does_not_keep_others(simulator: ModuleType) -> None:
    op = torch.ops.simulator.static_quant_linear
    parts = [(codes((4, 16), torch.int8), scales((4,))) for _ in range(4)]

    def call(q: torch.Tensor, r: torch.Tensor) -> list[torch.Tensor]:
        given = zip((q, q, r, r), parts, (0.3, 0.4, 0.3, 0.3), strict=True)
        return [op(x, 0.05, 3, w, s, None, out, 0).float() for x, (w, s), out in given]

    inputs = [codes((3, 16), torch.int8), codes((3, 16), torch.int8)]
    module = make_fx(call)(*inputs)
    before = bits_of(module, inputs, simulator.dialect)
    outcome = MergeLinears(**options(simulator))(module)

    assert outcome.fired["merge-linears"] == 1
    assert ops_of(module)["simulator.static_quant_linear"] == 3
    assert {miss.stage for miss in outcome.misses} == {"spell"}
    assert_same_bits(before, bits_of(module, inputs, simulator.dialect))
    canonical = make_fx(call)(*inputs)
    outcome = MergeLinears(**options(simulator, spelling="canonical"))(canonical)
    assert outcome.fired["merge-linears"] == 2
    assert ops_of(canonical)["aten.linear"] == 2
    assert_same_bits(before, bits_of(canonical, inputs, simulator.dialect))
