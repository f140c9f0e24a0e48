"""Valid models with odd corners go the whole way, and give what they gave before."""

from __future__ import annotations

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # the ops of PT2E
import torch.nn.functional as F
from torch import nn

import qfuse
from qfuse.targets import Target


class Odd(nn.Module):
    """A model with the constants that its forward needs."""

    def __init__(self, **constants: torch.Tensor) -> None:
        super().__init__()
        for name, value in constants.items():
            self.register_buffer(name, value)


def compiled(
    model: nn.Module, *args: torch.Tensor, own_kernels: bool = True, **options: object
) -> qfuse.CompiledModel:
    """Compile for a pinned target, without a backend; nothing may have been rolled back."""
    # Products as small as these may be faster in float.
    chosen = {"backend": "eager", "own_kernels": own_kernels, "prefer": "memory"}
    fast = qfuse.compile(
        model.eval(),
        args,
        target=Target.for_testing(),
        options=chosen,
        **options,  # type: ignore[arg-type]
    )
    assert not fast.report.rolled_back, fast.report.rolled_back
    assert not [note.text for note in fast.report.notes if "which is a bug" in note.text]
    return fast


class PlusSize(Odd):
    """Sizes as summands, which the graph has where other sums have tensors."""

    q: torch.Tensor
    s: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.q.to(x.dtype)) * self.s
        summed: torch.Tensor = (y + x.shape[0]) + x.shape[0] ** 0.5 + (x.shape[0] + y)
        return summed


def test_sizes_are_summands_but_no_tensors() -> None:
    model = PlusSize(q=int8(24, 32), s=torch.rand(24) * 0.01)
    rows = torch.export.Dim("rows", min=1, max=64)
    fast = compiled(model, torch.randn(4, 32), dynamic_shapes={"x": {0: rows}})

    assert sum(fast.report.kernels.values()) == 1
    for count in (1, 7):
        x = torch.randn(count, 32)
        torch.testing.assert_close(fast(x), model(x))


def int8(*shape: int) -> torch.Tensor:
    """Random quantized values."""
    return torch.randint(-128, 128, shape, dtype=torch.int8)


class Broadcast(Odd):
    """Contracts an axis of one element with one of several."""

    one: torch.Tensor
    many: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.einsum("bk,nk->bn", x, self.one)
        y += torch.tensordot(x[:, :1], self.many, ([1], [1]))
        return y


class CrossedBounds(Odd):
    """A clamp whose bounds are the wrong way round behind a quantized linear."""

    q: torch.Tensor
    s: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.q.float() * self.s)
        return torch.clamp(y, min=1.0, max=-1.0)


class Rounded(Odd):
    """A linear on stored weights whose unscaled result is stored as float8 for a while."""

    q: torch.Tensor
    s: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.q.float()).to(torch.float8_e4m3fn).float()
        return y * self.s


class Truncated(Odd):
    """Float8 weights of which only the integer part is used."""

    q: torch.Tensor
    s: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.q.to(torch.int32).float() * self.s)


class Pooler(Odd):
    """A weight-only linear on the first token, as BERT's pooler, and one on a weight ``[K, N]``."""

    q: torch.Tensor
    t: torch.Tensor
    s: torch.Tensor

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        y = F.linear(h[:, 0], self.q.float()) * self.s
        return (y @ self.t.float()) * self.s + (y @ self.t.float()) * self.s


class Expanded(Odd):
    """The same quantized row for every entry of the batch."""

    q: torch.Tensor
    s: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = torch.clamp(torch.round(x / 0.05), -128, 127).to(torch.int8).expand(6, -1)
        return F.linear(q.float() * 0.05, self.q.float() * self.s)


def test_slices_and_transposed_weights_reach_the_kernel_in_order() -> None:
    model = Pooler(q=int8(32, 32), t=int8(32, 32), s=torch.rand(32) * 0.01)
    h = torch.randn(2, 5, 32)
    fast = compiled(model, h, own_kernels=False)

    # The two equal products are one.
    assert fast.report.kernels == {"aten._weight_int8pack_mm": 2}
    torch.testing.assert_close(fast(h), model(h))


def test_expanded_rows_reach_the_kernel_in_order() -> None:
    model = Expanded(q=int8(24, 32), s=torch.tensor(0.01))
    x = torch.randn(1, 32)
    fast = compiled(model, x, own_kernels=False)

    assert fast.report.kernels == {"aten._int_mm": 1}
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)


class FreeZeroPoint(Odd):
    """An int8 linear per token whose zero point is chosen by hand, and clamped or not."""

    q: torch.Tensor
    sums: torch.Tensor
    s: torch.Tensor
    clamps = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        scale = (high - low).clamp(min=1e-8) / 255
        real = torch.round(-low / scale) - 128
        zero = (real.clamp(-128, 127) if self.clamps else real).to(torch.int32)
        q = torch.clamp(torch.round(x / scale) + zero, -128, 127).to(torch.int8)
        y: torch.Tensor = torch._int_mm(q, self.q.t()) - zero * self.sums
        return y.float() * scale * self.s


class Clamped(FreeZeroPoint):
    """The same, clamped."""

    clamps = True


def free_zero_point(kind: type[FreeZeroPoint]) -> FreeZeroPoint:
    """A model with random weights."""
    q = int8(16, 32)
    return kind(q=q, sums=q.sum(1, dtype=torch.int32), s=torch.rand(16) * 0.01)


def test_a_zero_point_that_is_not_clamped_needs_no_luck_with_the_data() -> None:
    model = free_zero_point(FreeZeroPoint)
    fast = compiled(model, torch.randn(32, 32))

    x = torch.rand(32, 32) + 5
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-3)


@pytest.mark.own_kernels
def test_a_row_of_nan_does_not_cost_the_others() -> None:
    model = free_zero_point(Clamped)
    x = torch.randn(32, 32)
    fast = compiled(model, x)
    assert fast.report.kernels == {"qfuse.linear_w8a8": 1}

    x[3, 4] = torch.nan
    new, old = fast(x), model(x)
    assert bool(new[3].isnan().all())
    torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-4, equal_nan=True)


class PerToken(Odd):
    """A linear on tokens that are quantized by hand, of shape ``[batch, tokens, features]``."""

    q: torch.Tensor
    s: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
        q = torch.clamp(torch.round(x / scale), -127, 127).to(torch.int8)
        y: torch.Tensor = torch._int_mm(q.reshape(-1, 32), self.q.t()).float()
        return y.view(x.shape[0], x.shape[1], -1) * scale * self.s


@pytest.mark.parametrize("own_kernels", [True, False])
@pytest.mark.parametrize("shape", [(1, 20, 32), (2, 20, 32), (20, 1, 32)])
def test_a_batch_of_one_is_as_fast_as_one_of_two(shape: tuple[int, ...], own_kernels: bool) -> None:
    model = PerToken(q=int8(16, 32), s=torch.rand(16) * 0.01)
    x = torch.randn(shape)
    fast = compiled(model, x, own_kernels=own_kernels)

    assert list(fast.report.kernels) != ["expand"]
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)


class Masked(Odd):
    """An attention with a mask as transformers makes it."""

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        mask = torch.where(keep, 0.0, torch.finfo(torch.float32).min)[:, None, None, :]
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def test_rows_that_are_masked_altogether_stay_numbers_in_bfloat16() -> None:
    x, keep = torch.randn(2, 1, 6, 16), torch.tensor([[True] * 6, [False] * 6])
    model = Masked()
    fast = compiled(model, x, keep, float_dtype=torch.bfloat16)

    torch.testing.assert_close(fast(x, keep), model(x, keep), rtol=0.05, atol=0.05)


def test_a_result_that_is_rounded_to_float8_stays_rounded() -> None:
    model = Rounded(q=torch.randint(-3, 4, (8, 16), dtype=torch.int8), s=torch.rand(8) * 0.01)
    x = torch.randn(4, 16)

    assert torch.equal(compiled(model, x)(x), model(x))


def test_the_integer_part_of_float8_is_not_the_number() -> None:
    q = torch.tensor([0.5, 1.75, -3.5, 2.0]).repeat(8, 4).to(torch.float8_e4m3fn)
    model = Truncated(q=q, s=torch.rand(8, 1) * 0.01)
    x = torch.randn(4, 16)

    torch.testing.assert_close(compiled(model, x)(x), model(x))


def test_an_axis_that_is_spread_is_no_linear() -> None:
    model = Broadcast(one=torch.randn(16, 1), many=torch.randn(16, 8))
    x = torch.randn(2, 8)

    torch.testing.assert_close(compiled(model, x)(x), model(x))


def test_crossed_bounds_are_kept() -> None:
    model = CrossedBounds(q=int8(16, 32), s=torch.tensor(0.01))
    x = torch.randn(3, 32)

    for own_kernels in (True, False):
        assert torch.equal(compiled(model, x, own_kernels=own_kernels)(x), model(x))


class TwoStorages(Odd):
    """Numbers of two storages, joined after they were dequantized."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        d = torch.ops.quantized_decomposed
        signed = (0.05, 0, -128, 127, torch.int8)
        unsigned = (0.05, 9, 0, 255, torch.uint8)
        a = d.dequantize_per_tensor(d.quantize_per_tensor(x, *signed), *signed)
        b = d.dequantize_per_tensor(d.quantize_per_tensor(x, *unsigned), *unsigned)
        return torch.cat([b, a])


def test_joined_numbers_of_two_storages_stay_apart() -> None:
    model = TwoStorages()
    fast = compiled(model, torch.randn(3, 4))

    x = torch.randn(3, 4) * 5
    assert torch.equal(fast(x), model(x))


class OneChannel(Odd):
    """A slice with a step that leaves one channel and its scale."""

    s: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        d = torch.ops.quantized_decomposed
        zeros = torch.zeros(4, dtype=torch.int64)
        params = (self.s, zeros, 1, -128, 127, torch.int8)
        y: torch.Tensor = d.dequantize_per_channel(d.quantize_per_channel(x, *params), *params)
        return y[:, 2:3:2].relu()


def test_the_scale_of_one_channel_is_a_scale() -> None:
    model = OneChannel(s=torch.rand(4) * 0.1 + 0.01)
    fast = compiled(model, torch.randn(3, 4))

    x = torch.randn(3, 4) * 2
    assert torch.equal(fast(x), model(x))


class SplitRows(Odd):
    """Two linears of one input, of which one result is split by rows, and the parts flattened."""

    a: torch.Tensor
    b: torch.Tensor

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = torch.split(F.linear(x, self.a), 2)
        return first.view(-1).relu() + second.view(-1), F.linear(x, self.b).relu()


@pytest.mark.parametrize("check", ["pipeline", "off"])
def test_a_result_that_is_split_by_rows_can_be_flattened(check: str) -> None:
    model = SplitRows(a=torch.randn(16, 32), b=torch.randn(16, 32))
    fast = compiled(model, torch.randn(4, 32), check=check)

    x = torch.randn(4, 32)
    for new, old in zip(fast(x), model(x), strict=True):
        torch.testing.assert_close(new, old)


class ReadsMemory(Odd):
    """Two linears of one input, of which one result is read by its strides."""

    a: torch.Tensor
    b: torch.Tensor

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.as_strided(F.linear(x, self.a), (2, 8), (16, 1))
        return y.relu() + 0, F.linear(x, self.b).relu()


@pytest.mark.parametrize("check", ["pipeline", "off"])
def test_a_result_whose_memory_is_read_stays_where_it_is(check: str) -> None:
    model = ReadsMemory(a=torch.randn(16, 32), b=torch.randn(16, 32))
    fast = compiled(model, torch.randn(3, 32), check=check)

    x = torch.randn(3, 32)
    for new, old in zip(fast(x), model(x), strict=True):
        torch.testing.assert_close(new, old)
