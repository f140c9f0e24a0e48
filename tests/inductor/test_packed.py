"""Packed weights: joined in layouts where that is exact, and in no other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.support.frozen_inductor import freeze
from torch import nn
from torch.fx import Graph, GraphModule

from qfuse.inductor._inductor_api import has_kernel
from qfuse.inductor.constants import Constants
from qfuse.inductor.merge import merge_products
from qfuse.ir.events import EventLog, Fired, MissCode, Missed
from qfuse.passes._torch_api import new_mode

aten = torch.ops.aten
BLOCK = 32


@pytest.fixture
def da8w4() -> Iterator[Any]:
    """torchao's op, with a reference kernel where the wheel has none."""
    import torchao.ops  # noqa: F401, PLC0415 - defines the op

    op = torch.ops.torchao.da8w4_linear_cpu.default
    if has_kernel(op, "CPU"):
        yield op
        return
    library: Any = torch.library.Library("torchao", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("da8w4_linear_cpu", reference, "CPU")
    yield op
    library._destroy()


def reference(  # noqa: PLR0913, PLR0917 - as the op has them
    x: torch.Tensor,
    x_scale: torch.Tensor,
    x_zero: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    compensation: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Multiply block by block, so that nothing depends on how many blocks there are."""
    parts = []
    for packed, s, z, c in zip(weight, scale, zero, compensation, strict=True):
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(0, 1).flatten(1)
        groups = s.shape[0]
        sums = torch.zeros(x.shape[0], codes.shape[1], dtype=torch.float64)
        for g, (xs, ws) in enumerate(
            zip(x.double().chunk(groups, 1), codes.double().chunk(groups, 0), strict=True)
        ):
            sums += (xs @ (ws - z[g])) * s[g]
        parts.append((sums - 0 * c.sum()) * x_scale[:, None])
    out = torch.cat(parts, 1)
    assert x_zero is not None
    return (out if bias is None else out + bias).to(dtype)


class Packed(nn.Module):
    def __init__(self, widths: list[int], *, padded: bool = False) -> None:
        super().__init__()
        self.count = len(widths)
        for i, n in enumerate(widths):
            blocks = n // BLOCK + padded
            weight = torch.randint(0, 255, (blocks, 2, 16, BLOCK // 2), dtype=torch.uint8)
            self.register_buffer(f"weight{i}", weight)
            self.register_buffer(f"scale{i}", torch.rand(blocks, 2, BLOCK))
            self.register_buffer(
                f"zero{i}", torch.randint(0, 15, (blocks, 2, BLOCK)).to(torch.int8)
            )
            self.register_buffer(f"comp{i}", torch.zeros(blocks, 2, BLOCK, dtype=torch.int32))
            self.register_buffer(f"bias{i}", torch.randn(n) if i != 1 else None)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        scale = x.abs().amax(1) / 127
        codes = (x / scale[:, None]).round().to(torch.int8)
        zero = torch.zeros_like(scale, dtype=torch.int32)
        outs = []
        for i in range(self.count):
            own = [getattr(self, f"{name}{i}") for name in ("weight", "scale", "zero", "comp")]
            bias = getattr(self, f"bias{i}")
            out = torch.ops.torchao.da8w4_linear_cpu(codes, scale, zero, *own, bias, torch.float32)
            outs.append(out.relu())
        return outs


def test_da8w4_is_joined_in_blocks(da8w4: Any) -> None:
    found = freeze(Packed([64, 32, 96]).eval(), torch.randn(3, 32))
    assert found.report.fired == {"merge-linears": 1}
    assert found.calls(da8w4) == 1
    for plain, merged in zip(found.plain, found.merged, strict=True):
        assert torch.equal(plain, merged)


@pytest.mark.parametrize("name", ["scale", "comp"])
def test_other_layouts_are_refused(da8w4: Any, name: str) -> None:
    meta = {"weight": (2, 2, 16, 16), "scale": (2, 2, BLOCK), "zero": (2, 2, BLOCK)}
    meta |= {"comp": (2, 2, BLOCK)}
    x = torch.zeros(3, 32, dtype=torch.int8)
    calls = []
    for odd in (False, True):
        shapes = {**meta, name: (0,) if name == "comp" else (1, 2, 2 * BLOCK)} if odd else meta
        weights = [torch.zeros(shape) for shape in shapes.values()]
        calls.append([torch.ones(3), torch.zeros(3), *weights, None, torch.float32])
    module, known = graph_of(da8w4, x, calls)
    log = EventLog()
    assert merge_products(module, known, "", log) == 0
    (miss,) = log.of(Missed)
    assert miss.code is MissCode.SHAPE
    assert "not known how to join" in miss.reason


def graph_of(op: Any, x: torch.Tensor, calls: list[list[Any]]) -> tuple[GraphModule, Constants]:
    """A graph of calls of one op on one input, whose weights are attributes."""
    root, graph, mode = nn.Module(), Graph(), new_mode()
    node_of_x = graph.placeholder("x")
    values: dict[Any, torch.Tensor] = {}
    outs = []
    with mode:
        node_of_x.meta["val"] = torch.empty(x.shape, dtype=x.dtype)
        for i, call in enumerate(calls):
            args: list[Any] = [node_of_x]
            for j, value in enumerate(call):
                if isinstance(value, torch.Tensor):
                    setattr(root, f"c{i}_{j}", value)
                    node = graph.get_attr(f"c{i}_{j}")
                    node.meta["val"] = torch.empty(tuple(value.shape), dtype=value.dtype)
                    values[node] = value
                    args.append(node)
                else:
                    args.append(value)
            out = graph.call_function(op, tuple(args))
            fakes = [a.meta["val"] if isinstance(a, torch.fx.Node) else a for a in args]
            out.meta["val"] = op(*fakes)
            relu = graph.call_function(aten.relu.default, (out,))
            relu.meta["val"] = out.meta["val"].relu()
            outs.append(relu)
    graph.output(tuple(outs))
    module = GraphModule(root, graph)
    named = {n.name: n for n in module.graph.nodes}
    return module, Constants(module.graph, {named[n.name]: v for n, v in values.items()})


def test_weights_packed_by_onednn_are_packed_together() -> None:
    x = torch.randint(0, 255, (5, 32), dtype=torch.uint8)
    ops = []
    for n in (48, 16, 7):
        packed = torch.ops.onednn.qlinear_prepack(
            torch.randint(-127, 127, (n, 32), dtype=torch.int8), None
        )
        scale, zero = torch.rand(n) / 100, torch.zeros(n, dtype=torch.int32)
        bias = torch.randn(n) if n != 16 else None
        tail: tuple[Any, ...] = (bias, 1.0, 0, torch.float32, "none", [], "")
        ops.append([0.02, 100, packed, scale, zero, *tail])
    op = torch.ops.onednn.qlinear_pointwise.default
    module, known = graph_of(op, x, ops)
    expected, log = module(x), EventLog()
    assert merge_products(module, known, "", log) == 1
    module.recompile()
    assert [len(e.places) for e in log.of(Fired)] == [3]
    products = [n for n in module.graph.nodes if n.target is op]
    assert len(products) == 1
    for a, b in zip(expected, module(x), strict=True):
        # With AMX, oneDNN takes another kernel for 71 features than for 48, which multiplies by the
        # scales, and adds the bias, in another order: three roundings.
        torch.testing.assert_close(b, a, rtol=0, atol=3 * 2.0**-24 * (a.abs().max().item() + 5))


@pytest.mark.parametrize(("widths", "merged"), [((64, 128), True), ((64, 32, 16), False)])
def test_int4_is_joined_in_whole_blocks(widths: tuple[int, ...], *, merged: bool) -> None:
    x, ops = torch.randn(4, 64, dtype=torch.bfloat16), []
    for n in widths:
        codes = torch.randint(0, 16, (n, 64), dtype=torch.int32)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        scales = torch.rand(2, n, 2, dtype=torch.bfloat16)
        ops.append([packed, 32, scales])
    module, known = graph_of(aten._weight_int4pack_mm_for_cpu.default, x, ops)
    expected, log = module(x), EventLog()
    assert merge_products(module, known, "", log) == merged
    module.recompile()
    for a, b in zip(expected, module(x), strict=True):
        assert torch.equal(a, b)
    misses = log.of(Missed)
    assert bool(misses) is not merged
    assert all(m.code is MissCode.SHAPE and "blocks of 64" in m.reason for m in misses)
