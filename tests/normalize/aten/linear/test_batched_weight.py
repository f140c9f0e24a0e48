from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.dialects import fired
from tests.support.sources.library import NOISE, Model, close, compiled

from qfuse.capture import capture
from qfuse.ir.events import MissCode, Missed
from qfuse.ir.graph.text import to_text
from qfuse.normalize import normalize
from qfuse.normalize.aten.linear.batched_weight import ExpandBatchedWeight

E, K, N = 3, 64, 72


def model(
    dtype: torch.dtype = torch.int8,
    *,
    scales: tuple[int, int, int] = (E, 1, N),
    turned: bool = False,
    matmul: bool = False,
    count: int = E,
) -> Model:
    if dtype.is_floating_point:
        weight = torch.randn(count, K, N).to(dtype)
    else:
        weight = torch.randint(-8, 8, (count, K, N)).to(dtype)
    scale = torch.rand(scales) * 0.1 + 0.01
    if turned:
        weight, scale = weight.transpose(1, 2).contiguous(), scale.transpose(1, 2).contiguous()
    op = torch.matmul if matmul else torch.bmm

    def forward(s: Model, x: torch.Tensor) -> torch.Tensor:
        real = s.w.float() * s.s  # type: ignore[operator]
        return op(x, real.transpose(1, 2) if turned else real)

    return Model(forward, w=weight, s=scale)


def test_golden() -> None:
    program = normalize(capture(model(count=2, scales=(2, 1, N)), (torch.randn(2, 4, K),)))
    assert ExpandBatchedWeight.name in fired(program)
    assert_expected_inline(
        to_text(program.graph),
        """\
%args_0: float32[2, 4, 64]
const %w_part_0: int8[72, 64]
const %w_scale_0: float32[72, 1]
%0 = qfuse.dequantize(%w_part_0, %w_scale_0, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[72, 64]
%1 = aten.select.int(%args_0, 0, 0): float32[4, 64]
%2 = aten.linear(%1, %0): float32[4, 72]
const %w_part_1: int8[72, 64]
const %w_scale_1: float32[72, 1]
%3 = qfuse.dequantize(%w_part_1, %w_scale_1, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[72, 64]
%4 = aten.select.int(%args_0, 0, 1): float32[4, 64]
%5 = aten.linear(%4, %3): float32[4, 72]
%6 = aten.stack((%2, %5)): float32[2, 4, 72]
return (%6)""",
    )


@pytest.mark.numeric
@pytest.mark.own_kernels
@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("matmul", [False, True])
@pytest.mark.parametrize("scales", [(1, 1, 1), (E, 1, 1), (E, 1, N), (1, 1, N)])
def test_weights_stay_quantized(
    dtype: torch.dtype, turned: bool, matmul: bool, scales: tuple[int, int, int]
) -> None:
    source = model(dtype, scales=scales, turned=turned, matmul=matmul)
    x = torch.randn(E, 5, K)
    done = compiled(source, x)
    assert done.report.fired[ExpandBatchedWeight.name] == 1
    assert len(done.report.fused) == E
    held = [b for b in done.plan.lowered.module.buffers() if b.numel() >= K * N // 2]
    assert {b.dtype.itemsize for b in held} == {1}
    close(done(x), source(x), NOISE[torch.float32])


@pytest.mark.own_kernels
def test_quantized_activations() -> None:
    def forward(s: Model, x: torch.Tensor) -> torch.Tensor:
        q = (x / 0.05).round().clamp(-128, 127).to(torch.int8)
        return torch.bmm(q.float() * 0.05, s.w.float() * s.s)  # type: ignore[operator]

    weight = torch.randint(-128, 128, (E, K, N), dtype=torch.int8)
    source, x = Model(forward, w=weight, s=torch.rand(E, 1, N)), torch.randn(E, 5, K)
    done = compiled(source, x)
    assert done.report.kernels["qfuse.linear_w8a8"] == E
    close(done(x), source(x), NOISE[torch.float32])


View = Callable[[torch.Tensor], torch.Tensor]
VIEWS: dict[str, tuple[tuple[int, ...], tuple[int, ...], View]] = {
    "scales of rows": ((E * N, K), (E * N, 1), lambda w: w.view(E, N, K).mT),
    "scales of columns": ((E * K, N), (1, N), lambda w: w.view(E, K, N)),
    "scales of groups": ((E * K, N), (E * K, 1), lambda w: w.view(E, K, N)),
    "one scale": ((E * K, N), (1, 1), lambda w: w.view(E, K, N)),
    "split columns": ((K, E * N), (1, E * N), lambda w: w.view(K, E, N).permute(1, 0, 2)),
}


@pytest.mark.numeric
@pytest.mark.parametrize("name", VIEWS)
def test_a_batch_that_is_a_view_of_a_dequantized_matrix(name: str) -> None:
    stored, grid, view = VIEWS[name]

    def forward(s: Model, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x, view(s.get_buffer("w").float() * s.get_buffer("s")))

    weight = torch.randint(-128, 128, stored, dtype=torch.int8)
    source, x = Model(forward, w=weight, s=torch.rand(grid)), torch.randn(E, 5, K)
    program = normalize(capture(source, (x,)))

    assert [str(n.target) for n in program.graph.nodes].count("aten.linear.default") == E
    close(compiled(source, x)(x), source(x), NOISE[torch.float32])


@pytest.mark.numeric
def test_a_batch_that_is_a_view_before_its_dequantize() -> None:
    def forward(s: Model, x: torch.Tensor) -> torch.Tensor:
        w, scale = s.get_buffer("w").view(E, N, K), s.get_buffer("s").repeat(E, 1, 1)
        return torch.bmm(x, (w.float() * scale).mT)

    weight = torch.randint(-128, 128, (E * N, K), dtype=torch.int8)
    source, x = Model(forward, w=weight, s=torch.rand(1, N, 1)), torch.randn(E, 5, K)
    program = normalize(capture(source, (x,)))

    assert [str(n.target) for n in program.graph.nodes].count("aten.linear.default") == E
    close(compiled(source, x)(x), source(x), NOISE[torch.float32])


def test_refuses_scales_that_a_view_moves_off_the_grid() -> None:
    def forward(s: Model, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x, (s.get_buffer("w").float() * s.get_buffer("s")).view(E, K, N))

    weight = torch.randint(-128, 128, (E * K * N // 24, 24), dtype=torch.int8)
    found = miss(Model(forward, w=weight, s=torch.rand(1, 24)), torch.randn(E, 5, K))
    assert found.code is MissCode.GRANULARITY
    assert "moved after they are scaled" in found.reason


def miss(source: Model, *args: torch.Tensor) -> Missed:
    program = normalize(capture(source, args))
    (found,) = (m for m in program.log.of(Missed) if m.rule == ExpandBatchedWeight.name)
    return found


@pytest.mark.numeric
@pytest.mark.own_kernels
@pytest.mark.parametrize("shape", [(K,), (5, K), (1, 5, K), (2, 1, 5, K), (2, E, 5, K), (0, K)])
def test_a_matmul_that_broadcasts_the_activation(shape: tuple[int, ...]) -> None:
    source, x = model(matmul=True), torch.randn(shape)
    done = compiled(source, x)
    assert done.report.fired[ExpandBatchedWeight.name] == 1
    assert done(x).stride() == source(x).stride()
    close(done(x), source(x), NOISE[torch.float32])


@pytest.mark.numeric
@pytest.mark.own_kernels
@pytest.mark.parametrize("shape", [(K,), (5, K), (1, 5, K), (4, 5, K), (2, 4, 5, K)])
def test_one_weight_multiplies_any_batch(shape: tuple[int, ...]) -> None:
    source, x = model(matmul=True, count=1, scales=(1, 1, N)), torch.randn(shape)
    done = compiled(source, x)
    assert done.report.fired[ExpandBatchedWeight.name] == 1
    assert len(done.report.fused) == 1
    close(done(x), source(x), NOISE[torch.float32])


@pytest.mark.numeric
@pytest.mark.own_kernels
@pytest.mark.parametrize("shape", [(E, 5, N), (E, 1, N), (N,), (1, 5, 1)])
@pytest.mark.parametrize("factors", [{}, {"alpha": 0.5, "beta": -2}])
def test_a_baddbmm(shape: tuple[int, ...], factors: dict[str, Any]) -> None:
    def forward(m: Model, x: torch.Tensor) -> torch.Tensor:
        weights = m.get_buffer("w").float() * m.get_buffer("s")
        return torch.baddbmm(m.get_buffer("b"), x, weights, **factors)

    weight = torch.randint(-128, 128, (E, K, N), dtype=torch.int8)
    grid = torch.rand(E, 1, N) * 0.1 + 0.01
    source, x = Model(forward, w=weight, s=grid, b=torch.randn(shape)), torch.randn(E, 5, K)
    done = compiled(source, x)
    assert {fused.kernel for fused in done.report.fused} == {"qfuse.linear_w8a16"}
    close(done(x), source(x), NOISE[torch.float32])


@pytest.mark.numeric
@pytest.mark.own_kernels
@pytest.mark.parametrize("equation", [None, "tk,enk->ten", "ebk,enk->ebn"])
def test_experts_that_are_stacked_after_their_scales(equation: str | None) -> None:
    def forward(m: Model, x: torch.Tensor) -> torch.Tensor:
        parts = [m.get_buffer(f"w{e}").float() * m.get_buffer(f"s{e}") for e in range(E)]
        weights = torch.stack(parts)
        if equation is None:
            return torch.bmm(x, weights.mT)
        return torch.einsum(equation, x, weights)

    stored = {f"w{e}": torch.randint(-128, 128, (N, K), dtype=torch.int8) for e in range(E)}
    grids = {f"s{e}": torch.rand(N, 1) * 0.1 + 0.01 for e in range(E)}
    shape = (5, K) if equation == "tk,enk->ten" else (E, 5, K)
    source, x = Model(forward, **stored, **grids), torch.randn(shape)
    done = compiled(source, x)

    held = [b for b in done.plan.lowered.module.buffers() if b.numel() >= K * N // 2]
    assert {b.dtype.itemsize for b in held} == {1}
    assert {fused.kernel for fused in done.report.fused} == {"qfuse.linear_w8a16"}
    close(done(x), source(x), NOISE[torch.float32])


def test_refuses_small_weights() -> None:
    source = Model(
        lambda s, x: torch.bmm(x, s.w.float() * s.s),
        w=torch.randint(-8, 8, (2, 8, 8), dtype=torch.int8),
        s=torch.rand(2, 1, 8),
    )
    found = miss(source, torch.randn(2, 4, 8))
    assert found.code is MissCode.PROFIT
    assert found.reason == "2 weights of 64 elements are not worth a call of a kernel each"


@pytest.mark.parametrize("looked_up", [False, True])
def test_refuses_weights_that_are_not_scaled(looked_up: bool) -> None:
    def forward(s: Model, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        w, scale = s.get_buffer("w"), s.get_buffer("s")
        return torch.bmm(x, (w[ids] if looked_up else w).float()) * scale[ids]

    weight = torch.randint(-128, 128, (E, K, N), dtype=torch.int8)
    source = Model(forward, w=weight, s=torch.rand(E, 1, N))
    found = miss(source, torch.randn(E, 5, K), torch.tensor([2, 0, 2]))
    assert found.code is MissCode.NOT_QUANTIZED
    assert (
        found.reason == "its weights are stored as torch.int8 and are not scaled before the product"
    )


def test_does_not_report_products_of_activations() -> None:
    def forward(_: Model, x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x, q.float())

    program = normalize(
        capture(Model(forward), (torch.randn(E, 5, K), torch.ones(E, K, N, dtype=torch.int8)))
    )
    assert not [m for m in program.log.of(Missed) if m.rule == ExpandBatchedWeight.name]


@pytest.mark.own_kernels
def test_a_scale_after_the_product_is_one_of_the_weights() -> None:
    def forward(s: Model, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x, s.get_buffer("w").float()) * s.get_buffer("s")

    weight = torch.randint(-128, 128, (E, K, N), dtype=torch.int8)
    source, x = Model(forward, w=weight, s=torch.rand(E, 1, N)), torch.randn(E, 5, K)
    done = compiled(source, x)
    assert done.report.kernels["qfuse.linear_w8a16"] == E
    close(done(x), source(x), NOISE[torch.float32])
