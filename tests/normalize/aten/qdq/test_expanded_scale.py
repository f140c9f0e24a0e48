from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import (
    assert_same_values,
    aten,
    calls,
    codes,
    finish,
    golden,
    refusal,
    scales,
)
from torch import nn
from torch.fx import Node

import qfuse
from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.normalize.aten.qdq.expanded_scale import ContractScale
from qfuse.targets import Target
from qfuse.testing.build import GraphBuilder

K, N, GROUP = 24, 5, 8


def group_of(kind: str) -> torch.Tensor:
    """Return the group of each of ``K`` input features."""
    groups = torch.arange(K) // GROUP
    match kind:
        case "unsorted":
            return groups[torch.randperm(K)]
        case "uneven":
            return torch.tensor([0] * 3 + [1] * 10 + [2] * 11)
        case _:
            return groups


def program_of(
    kind: str = "index",
    *,
    dtype: torch.dtype = torch.float32,
    zero: bool = True,
    scale: torch.Tensor | None = None,
    rows: bool = False,
    product: bool = True,
) -> CapturedGraph:
    """``x @ ((q - z) * s)`` with one scale and zero point per group of input features."""
    b = GraphBuilder()
    held = scales(K // GROUP, N) if scale is None else scale
    points = torch.randint(3, 12, (K // GROUP, N))
    values = torch.randint(0, 16, (K, N), dtype=torch.uint8)
    if rows:
        held, points, values = (
            held.t().contiguous(),
            points.t().contiguous(),
            values.t().contiguous(),
        )
    s, z, q = b.const("s", held.to(dtype)), b.const("z", points), b.const("q", values)
    axis = 1 if rows else 0

    def spread(node: Node) -> Node:
        if kind == "repeat":
            return b.call(aten.repeat_interleave.self_int, node, GROUP, axis)
        return b.call(aten.index_select.default, node, axis, b.const("groups", group_of(kind)))

    real = b.call(aten._to_copy.default, q, dtype=dtype)
    if zero:
        point = b.call(aten._to_copy.default, spread(z), dtype=dtype)
        real = b.call(aten.sub.Tensor, real, point)
    w = b.call(aten.mul.Tensor, real, spread(s))
    if not product:
        return finish(b, w, b.arg("x", torch.float32, 1))
    x = b.arg("x", dtype, 3, K)
    w = b.call(aten.t.default, w) if rows else w
    return finish(b, b.call(aten.mm.default, x, w))


@pytest.mark.parametrize("kind", ["repeat", "index"])
def test_golden_groups_in_order(kind: str) -> None:
    shown = golden(program_of(kind), ContractScale())
    assert_expected_inline(
        shown,
        """\
const %q_stored: int8[24, 5]
const %q_scale: float32[3, 5]
const %q_zero_point: int32[3, 5]
%0 = qfuse.dequantize(%q_stored, %q_scale, %q_zero_point, 'int8[-128,127] 8x1 float32 float32:reciprocal:round-zp int'): float32[24, 5]
%x: float32[3, 24]
%1 = aten.mm(%x, %0): float32[3, 5]
return (%1)
fired: contract-scale 1""",
    )


def test_golden_groups_out_of_order_are_sorted() -> None:
    shown = golden(program_of("unsorted"), ContractScale())
    assert_expected_inline(
        shown,
        """\
const %q_stored: int8[24, 5]
const %q_scale: float32[3, 5]
const %q_zero_point: int32[3, 5]
%0 = qfuse.dequantize(%q_stored, %q_scale, %q_zero_point, 'int8[-128,127] 8x1 float32 float32:reciprocal:round-zp int'): float32[24, 5]
const %q_order: int64[24]
%1 = aten.index_select(%0, 0, %q_order): float32[24, 5]
%x: float32[3, 24]
%2 = aten.mm(%x, %1): float32[3, 5]
return (%2)
fired: contract-scale 1""",
    )


def test_refuses_scales_without_groups() -> None:
    b = GraphBuilder()
    real = b.call(aten._to_copy.default, b.const("q", codes(K, N)), dtype=torch.float32)
    y = b.call(aten.mul.Tensor, real, b.const("s", torch.rand(K, N)))
    program = finish(b, b.call(aten.mm.default, b.arg("x", torch.float32, 3, K), y))
    assert refusal(program, ContractScale()) == (MissCode.SHAPE, y.name)


def test_refuses_groups_of_several_sizes() -> None:
    assert refusal(program_of("uneven"), ContractScale())[0] is MissCode.SHAPE


def test_refuses_unsorted_groups_of_what_is_no_factor() -> None:
    program = program_of("unsorted", product=False)
    assert refusal(program, ContractScale())[0] is MissCode.SHAPE


@pytest.mark.parametrize("odd", [-0.1, float("inf"), float("nan")])
def test_refuses_factors_that_are_no_scales(odd: float) -> None:
    held = scales(K // GROUP, N)
    held[1, 2] = odd
    assert refusal(program_of(scale=held), ContractScale())[0] is MissCode.RANGE


def test_refuses_integers_beyond_8_bits() -> None:
    b = GraphBuilder()
    real = b.call(
        aten._to_copy.default, b.const("q", torch.randint(0, 999, (K, N))), dtype=torch.float32
    )
    s = b.call(aten.repeat_interleave.self_int, b.const("s", scales(K // GROUP, N)), GROUP, 0)
    program = finish(b, b.call(aten.mul.Tensor, real, s), b.arg("x", torch.float32, 1))
    assert refusal(program, ContractScale())[0] is MissCode.RANGE


def test_refuses_a_scale_that_is_computed_at_run_time() -> None:
    b = GraphBuilder()
    real = b.call(aten._to_copy.default, b.const("q", codes(K, N)), dtype=torch.float32)
    s = b.call(aten.repeat_interleave.self_int, b.arg("s", torch.float32, 3, N), GROUP, 0)
    program = finish(b, b.call(aten.mul.Tensor, real, s))
    assert refusal(program, ContractScale()) == (MissCode.PATTERN, "mul_tensor")


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", ["repeat", "index", "unsorted"])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("rows", [False, True])
def test_bits_are_the_same(kind: str, dtype: torch.dtype, zero: bool, rows: bool) -> None:
    program = program_of(kind, dtype=dtype, zero=zero, rows=rows)
    x = torch.randn(3, K).to(dtype)
    fired = assert_same_values(program, [x], ContractScale(), exact=True).fired

    assert fired == {"contract-scale": 1}
    assert ("aten.index_select" in calls(program)) == (kind == "unsorted")


@pytest.mark.numeric
def test_two_equal_groups_out_of_order_are_split_evenly() -> None:
    held = scales(K // GROUP, N)
    held[1] = held[0]
    program = program_of("unsorted", zero=False, scale=held)
    fired = assert_same_values(program, [torch.randn(3, K)], ContractScale(), exact=True).fired
    assert fired == {"contract-scale": 1}


class _Gptq(nn.Module):
    """A weight as GPTQ stores it: values and zero points in words, and the group of each row."""

    qweight: torch.Tensor
    qzeros: torch.Tensor
    scales: torch.Tensor
    g_idx: torch.Tensor
    shifts: torch.Tensor

    def __init__(self, form: str, bits: int) -> None:
        super().__init__()
        k, n, group, per = 128, 64, 32, 32 // bits
        self.form, self.bits, self.group, self.k, self.n = form, bits, group, k, n
        top = 1 << bits
        values = torch.randint(0, top, (k, n))
        zeros = torch.randint(top // 4, top // 2, (k // group, n))
        groups = torch.arange(k) // group
        shifts = torch.arange(0, 32, bits)
        packed = (values.reshape(k // per, per, n) << shifts[None, :, None]).sum(1)
        self.register_buffer("qweight", packed.to(torch.int32))
        self.register_buffer(
            "qzeros", (zeros.reshape(-1, n // per, per) << shifts).sum(-1).to(torch.int32)
        )
        self.register_buffer("scales", torch.rand(k // group, n) * 0.02 + 0.003)
        self.register_buffer("g_idx", groups[torch.randperm(k)] if "act-order" in form else groups)
        self.register_buffer("shifts", shifts.to(torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask, scale = (1 << self.bits) - 1, self.scales.to(x.dtype)
        w = (self.qweight[:, None, :] >> self.shifts[None, :, None]) & mask
        z = ((self.qzeros[:, :, None] >> self.shifts) & mask).reshape(-1, self.n)
        w = w.reshape(self.k, self.n)
        if "repeat" in self.form:
            z, scale = (p.repeat_interleave(self.group, 0) for p in (z, scale))
        else:
            z, scale = z[self.g_idx], scale[self.g_idx]
        if "floats" in self.form:
            return x @ (scale * (w.to(x.dtype) - z.to(x.dtype)))
        return x @ ((w - z).to(x.dtype) * scale)


@pytest.mark.numeric
@pytest.mark.own_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bits", "kernel"), [(4, "w4a16"), (2, "w4a16"), (8, "w8a16")])
@pytest.mark.parametrize(
    "form", ["g_idx", "repeat", "g_idx floats", "act-order", "act-order floats"]
)
def test_gptq_runs_on_a_weight_only_kernel(
    form: str, bits: int, kernel: str, dtype: torch.dtype
) -> None:
    model, x = _Gptq(form, bits).eval(), torch.randn(5, 128, dtype=dtype)
    target = Target.for_testing(isa="avx512_vnni")
    options: dict[str, Any] = {"backend": "eager"}
    fast = qfuse.compile(model, (x,), options=options, check="site", target=target)

    assert [event.kernel for event in fast.report.fused] == [f"qfuse.linear_{kernel}"]
    assert fast.report.rolled_back == ()
    loose = dtype is torch.bfloat16
    tolerance: dict[str, Any] = (
        {"rtol": 3e-2, "atol": 2e-2 * float(model(x).abs().max())}
        if loose
        else {"rtol": 1e-4, "atol": 1e-4}
    )
    torch.testing.assert_close(fast(x), model(x), **tolerance)


def _spread(b: GraphBuilder, node: Node, how: str) -> Node:
    if how == "repeat":
        return b.call(aten.repeat_interleave.self_int, node, GROUP, 1)
    split = b.call(aten.unsqueeze.default, node, 2)
    split = b.call(aten.expand.default, split, [N, K // GROUP, GROUP])
    return b.call(aten.reshape.default, split, [N, K])


@pytest.mark.numeric
@pytest.mark.parametrize("how", ["repeat", "expand"])
@pytest.mark.parametrize("zero", ["number", "float", "sum", "floats"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_points_that_are_numbers_or_whole_floats(
    how: str, zero: str, dtype: torch.dtype
) -> None:
    b = GraphBuilder()
    q = b.const("q", torch.randint(0, 16, (N, K), dtype=torch.uint8))
    s = _spread(b, b.const("s", scales(N, K // GROUP).to(dtype)), how)
    real = b.call(aten._to_copy.default, q, dtype=dtype)
    if zero == "sum":
        real = b.call(aten.add.Tensor, real, -8)
    else:
        points = b.const("z", torch.randint(3, 12, (N, K // GROUP)).to(dtype))
        other = {"number": 8, "float": 8.0}.get(zero) or _spread(b, points, how)
        real = b.call(aten.sub.Tensor, real, other)
    w = b.call(aten.mul.Tensor, s, real)
    program = finish(b, b.call(aten.linear.default, b.arg("x", dtype, 3, K), w))
    x = torch.randn(3, K).to(dtype)

    fired = assert_same_values(program, [x], ContractScale(), exact=True).fired
    assert fired == {"contract-scale": 1}


def test_refuses_zero_points_that_are_not_finite() -> None:
    b = GraphBuilder()
    q = b.const("q", torch.randint(0, 16, (N, K), dtype=torch.uint8))
    zeros = torch.full((N, K // GROUP), torch.inf)
    real = b.call(aten._to_copy.default, q, dtype=torch.float32)
    real = b.call(aten.sub.Tensor, real, _spread(b, b.const("z", zeros), "repeat"))
    s = _spread(b, b.const("s", scales(N, K // GROUP)), "repeat")
    program = finish(b, b.call(aten.mul.Tensor, real, s), b.arg("x", torch.float32, 1))
    assert refusal(program, ContractScale())[0] is MissCode.ZERO_POINT
