"""Results belong to the caller: nothing that is written to one shows anywhere else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import qfuse
from qfuse.ir.errors import OptionsError

EAGER = {"backend": "eager"}


class Function(nn.Module):
    """A function as a module, with a buffer."""

    weight: torch.Tensor

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self._function = function
        self.register_buffer("weight", torch.randn(6, 6))

    def forward(self, x: torch.Tensor) -> object:
        return self._function(x, self.weight)


APART: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "copied transpose": lambda x, w: (x.t().clone().t(), x + w),
    "copied weight": lambda x, w: (w.t().clone().t(), x + w),
    "two copies": lambda x, w: (x.clone(), x.clone(), w + x),
    "views of two casts": lambda x, w: (x.half().t(), x.half()[0], w + x),
    "views of two sums": lambda x, w: ((x + w).t(), (x + w)[0]),
    "views of two views": lambda x, w: ((x * w).view(36).clone(), (x * w).view(4, 9)),
}


def all_of_them(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """All results at once: compiling C++ takes seconds."""
    return tuple(result for function in APART.values() for result in function(x, w))


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("function", "backend"),
    [*((function, "eager") for function in APART.values()), (all_of_them, "auto")],
    ids=[*APART, "all of them, compiled"],
)
def test_writing_to_a_result_changes_nothing_else(
    function: Callable[..., object], backend: str
) -> None:
    model = Function(function).eval()
    x = torch.randn(6, 6)
    fast = qfuse.compile(model, (x,), options={"backend": backend})
    given = x.clone()
    want = [t.clone() for t in model(x)]
    for index in range(len(want)):
        results = list(fast(x))
        results[index].fill_(7)
        for other, expected in zip(
            results[:index] + results[index + 1 :], want[:index] + want[index + 1 :], strict=True
        ):
            torch.testing.assert_close(other, expected)
        assert torch.equal(x, given)
    for result, expected in zip(fast(x), want, strict=True):
        torch.testing.assert_close(result, expected)


class Island(nn.Module):
    """A model that turns autocast off around a product."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.linear(x)  # type: ignore[no-any-return]


def test_autocast_around_the_compilation_stays_outside() -> None:
    model, x = Island().eval(), torch.randn(4, 16)
    with torch.autocast("cpu", torch.bfloat16):
        fast = qfuse.compile(model, (x,), options=EAGER)
    assert all(check.passed for check in fast.report.checks)
    assert fast(x).dtype is torch.float32
    torch.testing.assert_close(fast(x), model(x))


def test_what_is_not_on_the_cpu_is_refused() -> None:
    model = nn.Linear(4, 4, device="meta").eval()
    with pytest.raises(OptionsError, match=r"model\.cpu\(\)"):
        qfuse.compile(model, (torch.randn(2, 4, device="meta"),), options=EAGER)


def test_strides_of_results_follow_the_sizes_of_the_call() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> object:
        return (w @ x.t()), (w @ x.t()).t(), (x[:, None] * w).transpose(0, 2), x.nonzero()

    rows = torch.export.Dim("rows", min=2, max=64)
    source = Function(function)
    fast = qfuse.compile(
        source, (torch.randn(4, 6),), dynamic_shapes={"x": {0: rows}}, options=EAGER
    )
    for count in (4, 17):
        x = torch.randn(count, 6)
        for new, old in zip(fast(x), source(x), strict=True):
            assert new.stride() == old.stride()
            torch.testing.assert_close(new, old)


@pytest.mark.parametrize("scaled", [False, True])
def test_strides_of_an_integer_product_with_the_weight_on_the_left(scaled: bool) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> object:
        y = torch._int_mm(w.to(torch.int8), x.t())
        return y * w[:, :1] if scaled else y

    source = Function(function)
    source.weight = torch.randint(-128, 128, (16, 32)).float()
    rows = torch.export.Dim("rows", min=2, max=64)
    x = torch.randint(-128, 128, (4, 32), dtype=torch.int8)
    fast = qfuse.compile(source, (x,), dynamic_shapes={"x": {0: rows}}, options=EAGER)
    for count in (4, 17):
        x = torch.randint(-128, 128, (count, 32), dtype=torch.int8)
        assert fast(x).stride() == source(x).stride() == (count, 1)
        torch.testing.assert_close(fast(x), source(x))


def _image(channels: int) -> torch.Tensor:
    """A channels-last image; with one channel its strides are not those of a contiguous one."""
    steps = (16 * channels, 1, 4 * channels, channels)
    return torch.empty_strided((2, channels, 4, 4), steps).normal_()


def _quantized(x: torch.Tensor) -> torch.Tensor:
    return ((x * 50).round().clamp(-128, 127).to(torch.int8).float()) * 0.02


ONE_CHANNEL: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "cat of relus": lambda x, y: torch.cat([x.relu(), y.relu()], 1),
    "cat of sums": lambda x, y: (torch.cat([x + x, y + y], 1), x + x),
    "cat of quantized images": lambda x, y: torch.cat([_quantized(x), _quantized(y)], 1),
    "one of one channel": lambda x, _: (torch.cat([x.relu()], 1), x.relu(), x * 2),
    "both are the caller's": lambda x, y: torch.cat([x, y], 1),
}


@pytest.mark.parametrize("check", ["pipeline", "site"])
@pytest.mark.parametrize("case", ONE_CHANNEL)
def test_strides_are_those_of_ops_that_run_and_not_of_fake_tensors(case: str, check: str) -> None:
    source = Function(lambda x, _: ONE_CHANNEL[case](x[0], x[1]))
    args = ((_image(1), _image(2)),)
    fast = qfuse.compile(source, args, options=EAGER, check=check)

    results = fast(*args), source(*args)

    new, old = ([r] if isinstance(r, torch.Tensor) else list(r) for r in results)
    assert [v.stride() for v in new] == [v.stride() for v in old]
    for a, b in zip(new, old, strict=True):
        torch.testing.assert_close(a, b)
