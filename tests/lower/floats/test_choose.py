"""Products that run in float because that is faster, within a bound on memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from qfuse import kernels
from qfuse.cost import CostModel, CostProfile
from qfuse.ir.events import Exactness, ExpandCause, Lowered
from qfuse.ir.graph.stage_graph import LoweredGraph, NormalGraph
from qfuse.ir.ops import library as ops
from qfuse.lower import FloatPolicy, Wishes, lower
from qfuse.lower.kernels.registry import all_kernels
from qfuse.optimize import optimize
from qfuse.rewrite.clone import clone
from qfuse.rewrite.compare import compare
from qfuse.rewrite.tolerance import SITE
from qfuse.targets import Target
from qfuse.testing.build import GraphBuilder
from qfuse.testing.lowering import NO_OWN_KERNELS
from qfuse.testing.quant import QuantizedLinear, per_channel, per_tensor
from qfuse.testing.run import random_inputs, run

pytestmark = pytest.mark.own_kernels

aten = torch.ops.aten
W8A8 = "qfuse.linear_w8a8"
# A machine whose integer kernels are slower than its floats, as without VNNI.
SLOW_INT8 = replace(CostProfile.pinned(), int8_ops=60e9, int8_ops_one_row=6e9)
N, K = 256, 128
FLOAT_BYTES, INT8_BYTES = N * K * 4, N * K + N * 4


def lowered(
    program: NormalGraph,
    profile: CostProfile = SLOW_INT8,
    policy: FloatPolicy | None = None,
    forced: Mapping[str, str] | None = None,
    library: kernels.KernelLibrary | None = None,
) -> LoweredGraph:
    """Optimize and lower a copy for a pinned machine."""
    wishes = Wishes(forced or {}, policy or FloatPolicy())
    registry = all_kernels(library or kernels.load())
    target = Target.for_testing(isa="avx2")
    return lower(optimize(clone(program)), target, CostModel(profile), registry, None, wishes)


def events(low: LoweredGraph) -> list[Lowered]:
    """Return how the products were lowered."""
    return [event for event in low.log.of(Lowered) if " x " in event.what]


def same_values(program: NormalGraph, low: LoweredGraph, **sizes: int) -> None:
    inputs = random_inputs(program, **sizes)
    for new, old in zip(run(low, inputs), run(program, inputs), strict=True):
        assert compare(new, old, None, Exactness.ROUNDING, SITE).wrong is None


def linears(count: int = 1, rows: int | str = 64, *, shared: bool = False) -> NormalGraph:
    """Static int8 linears of one quantized input, with weights of their own or one for all."""
    b = GraphBuilder()
    inputs = [b.arg(f"x{i}", torch.float32, rows, K) for i in range(count)]
    block = QuantizedLinear(b, N, K)
    spec = per_tensor(2)
    weight = block.weight_node("w") if shared else None
    made = []
    for index, x in enumerate(inputs):
        real = block.quantized(x, spec, f"q{index}")
        if weight is None:
            made.append(block.linear(real, f"w{index}"))
        else:
            made.append(b.call(aten.linear.default, real, weight))
    return b.done(*made)


@pytest.mark.numeric
def test_float_wins_with_both_times_and_its_memory() -> None:
    program = linears()
    low = lowered(program)
    (event,) = events(low)

    assert (event.kernel, event.cause, event.failed) == ("float", ExpandCause.PROFIT, False)
    assert event.predicted is not None
    assert event.rival_seconds is not None
    assert event.predicted < event.rival_seconds
    assert event.added_bytes == FLOAT_BYTES - INT8_BYTES
    assert event.why.startswith("runs in float: predicted ")
    assert event.why.endswith("; +97 kB")
    assert dict(event.losers)[W8A8].startswith("predicted ")
    # The activation is still rounded, as in the source, and the weight is a constant.
    weights = {n.target: b for n, b in _constants(low).items() if b.numel() == N * K}
    assert [tensor.dtype for tensor in weights.values()] == [torch.float32]
    assert aten.round.default in {n.target for n in low.graph.nodes}
    same_values(program, low)


def _constants(low: LoweredGraph) -> dict[torch.fx.Node, torch.Tensor]:
    found = low.graph.find_nodes(op="get_attr")
    return {node: low.module.get_buffer(str(node.target)) for node in found}


def test_int8_wins_where_it_is_faster() -> None:
    (event,) = events(lowered(linears(), CostProfile.pinned()))

    assert event.kernel == W8A8
    assert "float" not in dict(event.losers)


def test_memory_is_preferred() -> None:
    (event,) = events(lowered(linears(), policy=FloatPolicy(fastest=False)))

    assert event.kernel == W8A8
    assert dict(event.losers)["float"].endswith(", and prefer is memory")


def test_the_bound_takes_what_gains_most_per_byte() -> None:
    b = GraphBuilder()
    block, made = QuantizedLinear(b, N, K), []
    for index, rows in enumerate((8, 512)):
        x = block.quantized(b.arg(f"x{index}", torch.float32, rows, K), per_tensor(2), f"q{index}")
        made.append(block.linear(x, f"w{index}"))
    program = b.done(*made)
    low = lowered(program, policy=FloatPolicy(memory_bytes=FLOAT_BYTES))
    few, many = events(low)

    assert (few.kernel, many.kernel) == (W8A8, "float")
    assert "float_memory lets the constants grow by 131 kB" in dict(few.losers)["float"]


def test_a_shared_weight_counts_once() -> None:
    program = linears(2, shared=True)
    first, second = events(lowered(program))

    assert (first.kernel, second.kernel) == ("float", "float")
    assert (first.added_bytes, second.added_bytes) == (FLOAT_BYTES - INT8_BYTES, 0)
    low = lowered(program)
    assert sum(tensor.numel() == N * K for tensor in set(_constants(low).values())) == 1


@pytest.mark.numeric
def test_dynamic_sizes_are_predicted_at_the_traced_one() -> None:
    program = linears(rows="m")
    low = lowered(program)

    assert [event.kernel for event in events(low)] == ["float"]
    for m in (1, 2, 33):
        same_values(program, low, m=m)


@pytest.mark.numeric
def test_epilogue_and_quantized_output_follow_in_float() -> None:
    b = GraphBuilder()
    block = QuantizedLinear(b, N, K)
    x = block.quantized(b.arg("x", torch.float32, 64, K), per_tensor(2, torch.uint8))
    y = b.call(
        aten.add.Tensor,
        b.call(aten.gelu.default, block.linear(x)),
        b.arg("r", torch.float32, 64, N),
    )
    program = b.done(block.stored(y, per_tensor(2, torch.uint8), "out")[0])
    low = lowered(program)
    (event,) = events(low)

    assert (event.kernel, event.what.rpartition(" | ")[2]) == (
        "float",
        "act(gelu)|add(0,1.0) -> uint8",
    )
    same_values(program, low)


@pytest.mark.numeric
def test_convolutions_too() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 4, 64, 28, 28)
    block = QuantizedLinear(b, 64, 64)
    spec = per_channel(4)
    q = b.const("w", torch.randint(-127, 128, (64, 64, 3, 3)).to(torch.int8))
    scale = b.const("w_scale", torch.rand(spec.grid((64, 64, 3, 3))) * 0.01 + 1e-3)
    weight = b.call(ops.dequantize, q, scale, None, str(spec))
    real = block.quantized(x, per_tensor(4))
    y = b.call(
        *(aten.convolution.default, real, weight, None, [1, 1], [1, 1], [1, 1]),
        *(False, [0, 0], 1),
    )
    program = b.done(y)
    slow = replace(SLOW_INT8, int8_ops=10e9, int8_ops_one_row=10e9)
    low = lowered(program, slow)

    assert [event.kernel for event in events(low)] == ["float"]
    assert [e.kernel for e in events(lowered(program, CostProfile.pinned()))] == [
        "qfuse.convolution_w8a8"
    ]
    same_values(program, low)


def test_a_weight_only_product_has_to_gain_for_its_memory() -> None:
    b = GraphBuilder()
    block = QuantizedLinear(b, N, K)
    program = b.done(block.linear(b.arg("x", torch.float32, 4096, K)))
    (event,) = events(lowered(program))

    # The same arithmetic on the same floats: nothing is gained.
    assert event.kernel == "qfuse.linear_w8a16"


def test_without_a_kernel_the_weight_is_dequantized_once() -> None:
    program = linears(rows="m")
    (event,) = events(lowered(program, library=NO_OWN_KERNELS))
    assert (event.kernel, event.cause) == ("expand", ExpandCause.NO_KERNEL)
    assert event.failed
    assert event.why == "no kernel accepts it: its weight is dequantized once; +97 kB"

    small = lowered(program, library=NO_OWN_KERNELS, policy=FloatPolicy(memory_bytes=1000))
    assert events(small)[0].added_bytes == 0
    assert {tensor.dtype for tensor in _constants(small).values() if tensor.numel() == N * K} == {
        torch.int8
    }


@pytest.mark.parametrize(("kernel", "dtype"), [("float", torch.float32), ("expand", torch.int8)])
@pytest.mark.numeric
def test_a_plan_forces_either(kernel: str, dtype: torch.dtype) -> None:
    program = linears()
    name = next(n.name for n in optimize(clone(program)).graph.nodes if n.target is ops.linear)
    memory = FloatPolicy(fastest=False, memory_bytes=0)
    low = lowered(program, CostProfile.pinned(), memory, {name: kernel})

    assert events(low)[0].kernel == kernel
    assert {t.dtype for t in _constants(low).values() if t.numel() == N * K} == {dtype}
    same_values(program, low)
    kept = lowered(program, forced={name: W8A8})
    assert events(kept)[0].kernel == W8A8


def test_the_op_behind_is_lowered_alone() -> None:
    b = GraphBuilder()
    block = QuantizedLinear(b, N, K)
    x = block.quantized(b.arg("x", torch.float32, 64, K), per_tensor(2))
    y = b.call(aten.relu.default, block.linear(x))
    program = b.done(block.stored(y, per_tensor(2), "out")[0])
    low = lowered(program)

    assert [event.kernel for event in events(low)] == ["float"]
    same_values(program, low)
