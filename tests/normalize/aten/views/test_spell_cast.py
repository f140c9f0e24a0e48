from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from tests.support.graphs.raw_fx import ops_of
from tests.support.sources.aten_spellings import (
    assert_same_values,
    aten,
    calls,
    finish,
    golden,
    refusal,
)
from torch import nn
from torch.fx import Node

import qfuse
from qfuse.ir.events import MissCode
from qfuse.normalize.aten.views.spell_cast import SpellCast
from qfuse.passes import FuseLinears, MergeLinears
from qfuse.targets import Target
from qfuse.testing.build import GraphBuilder


def cast_of(b: GraphBuilder, x: Node, kind: str, dtype: torch.dtype) -> Node:
    match kind:
        case "dtype":
            return b.call(aten.to.dtype, x, dtype)
        case "layout":
            return b.call(aten.to.dtype_layout, x, dtype=dtype)
        case "device":
            return b.call(aten.to.device, x, torch.device("cpu"), dtype)
        case "other":
            return b.call(aten.to.other, x, b.arg("y", dtype, 2))
        case _:
            return b.call(aten.type_as.default, x, b.arg("y", dtype, 2))


KINDS = ["dtype", "layout", "device", "other", "type_as"]


def test_golden_a_cast_is_a_copy() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.int8, "m", 4)
    assert_expected_inline(
        golden(finish(b, cast_of(b, x, "dtype", torch.float32)), SpellCast()),
        """\
%x: int8[s0, 4]
%0 = aten._to_copy(%x, dtype=float32): float32[s0, 4]
return (%0)
fired: spell-cast 1""",
    )


def test_a_copy_that_names_its_own_device_is_a_cast() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.int8, 3, 4)
    cpu = torch.device("cpu")
    y = b.call(aten._to_copy.default, x, dtype=torch.float32, device=cpu, layout=torch.strided)
    program = finish(b, y)
    assert golden(program, SpellCast()).endswith("fired: spell-cast 1")
    (copy,) = program.graph.find_nodes(op="call_function", target=aten._to_copy.default)
    assert copy.kwargs == {"dtype": torch.float32}


@pytest.mark.own_kernels
@pytest.mark.export
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool], ids=str)
def test_integers_that_become_the_type_of_the_activation_are_a_weight(dtype: torch.dtype) -> None:
    class Unpacked(nn.Module):
        w: torch.Tensor
        s: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("w", torch.randint(0, 2, (12, 16)).to(dtype))
            self.register_buffer("s", torch.rand(12, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.w.to(x) * self.s)

    model, x = Unpacked().eval(), torch.randn(5, 16)
    fast = qfuse.compile(
        model, (x,), options={"backend": "eager"}, check="site", target=Target.for_testing()
    )
    assert [e.kernel for e in fast.report.fused] == ["qfuse.linear_w4a16"]
    torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_refuses_to_copy_what_stays(kind: str) -> None:
    b = GraphBuilder()
    y = cast_of(b, b.arg("x", torch.float32, 3, 4), kind, torch.float32)
    assert refusal(finish(b, y), SpellCast()) == (MissCode.DTYPE, y.name)


@pytest.mark.parametrize(
    "changes", [{"memory_format": torch.channels_last}, {"device": torch.device("meta")}]
)
def test_refuses_other_changes(changes: dict[str, Any]) -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 1, 2, 3, 4)
    y = b.call(aten.to.dtype_layout, x, dtype=torch.bfloat16, **changes)
    assert refusal(finish(b, y), SpellCast()) == (MissCode.ARGUMENT, y.name)


@pytest.mark.numeric
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.bool])
@pytest.mark.parametrize("size", [3, 1, 0])
def test_values_are_the_same_bits(kind: str, dtype: torch.dtype, size: int) -> None:
    b = GraphBuilder()
    y = cast_of(b, b.arg("x", torch.bfloat16, size, 4, order=(1, 0)), kind, dtype)
    inputs = [torch.randn(4, size).bfloat16().t()]
    inputs += [torch.ones(2).to(dtype)] if kind in {"other", "type_as"} else []
    program = finish(b, y)
    assert assert_same_values(program, inputs, SpellCast(), exact=True).fired
    assert calls(program) == ["aten._to_copy"]


class _Undecomposed(nn.Module):
    """Two weight-only linears with casts, no-op copies and dropout."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("a", "b"):
            self.register_buffer(name, torch.randint(-127, 128, (16, 32), dtype=torch.int8))
            self.register_buffer(f"{name}_scale", torch.rand(16, 1) * 0.01 + 0.001)

    def weight(self, name: str, like: torch.Tensor) -> torch.Tensor:
        return self.get_buffer(name).to(like.dtype) * self.get_buffer(f"{name}_scale").type_as(like)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.dropout(x, 0.1, self.training).detach().contiguous()
        a = F.linear(h.to(torch.float32), self.weight("a", x))
        b = F.linear(h, self.weight("b", x).contiguous())
        return F.dropout(a, 0.1, self.training).relu() * b


@pytest.mark.parametrize("work", [MergeLinears(spelling="canonical"), FuseLinears()])
def test_passes_read_graphs_before_decompositions(work: MergeLinears | FuseLinears) -> None:
    model, x = _Undecomposed().eval(), torch.randn(5, 32)
    module = torch.export.export(model, (x,)).module(check_guards=False)
    assert isinstance(module, torch.fx.GraphModule)
    assert {"aten.to.dtype", "aten.dropout"} <= ops_of(module).keys()
    want = module(x)

    done = work(module)

    assert done.modified
    made = ops_of(module)
    assert made["aten.linear"] + made["qfuse.linear"] == (
        1 if isinstance(work, MergeLinears) else 2
    )
    torch.testing.assert_close(module(x), want, rtol=1e-5, atol=1e-5)
