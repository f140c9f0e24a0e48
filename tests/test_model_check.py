"""The noise of a model: perturbed results, and integer products that are exact on any machine."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from qfuse import model_check
from qfuse.capture import capture
from qfuse.model_check import ModelCheck, int_product

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _shaken(float_dtype: torch.dtype | None = None, seed: int = 0) -> model_check._Shaken:
    class Nothing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    return model_check._Shaken(torch.fx.symbolic_trace(Nothing()), False, seed, float_dtype)


def _units(new: torch.Tensor, old: torch.Tensor, unit: float) -> torch.Tensor:
    return (new.double() - old.double()) / old.double() / unit


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_results_are_perturbed_by_the_rounding_of_their_dtype(dtype: torch.dtype) -> None:
    x = torch.randn(300, 300, dtype=torch.float64).to(dtype)
    x = torch.where(x.abs() < 0.01, torch.ones_like(x), x)
    unit = torch.finfo(dtype).eps
    apart = _units(_shaken()._perturb(x), x, unit)
    # Uniform in [-1, 1] has an rms of 0.577; rounding to the dtype adds at most half a unit.
    assert 0.55 < float(apart.square().mean().sqrt()) < 0.70
    assert float(apart.abs().max()) <= 1.6
    assert abs(float(apart.mean())) < 0.02


@pytest.mark.numeric
def test_a_coarser_dtype_for_floats_gives_coarser_noise() -> None:
    x = torch.randn(300, 300) + 3
    apart = _units(_shaken(torch.bfloat16)._perturb(x), x, torch.finfo(torch.bfloat16).eps)
    assert 0.55 < float(apart.square().mean().sqrt()) < 0.60


@pytest.mark.numeric
def test_tensors_of_one_run_and_of_two_runs_are_perturbed_independently() -> None:
    x = torch.randn(200, 200)
    one, other = _shaken(seed=1), _shaken(seed=2)
    draws = [_units(s._perturb(x), x, torch.finfo(x.dtype).eps) for s in (one, one, other)]
    correlation = torch.corrcoef(torch.stack([draw.flatten() for draw in draws]))
    assert float((correlation - torch.eye(3)).abs().max()) < 0.05


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_masks_stay_finite_and_infinities_stay(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    x = torch.tensor([[info.min, info.max, 0.0], [torch.inf, -torch.inf, torch.nan]], dtype=dtype)
    for seed in range(5):
        shaken = _shaken(seed=seed)._perturb(x)
        assert bool(shaken[0].isfinite().all())
        assert shaken[0, 2] == 0
        torch.testing.assert_close(shaken[1], x[1], equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(), (2, 4), (3, 5, 7)])
def test_the_layout_of_a_result_does_not_change(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).permute(tuple(reversed(range(len(shape)))))
    shaken = _shaken()._perturb(x)
    assert shaken.shape == x.shape
    assert shaken.stride() == x.stride()


def test_a_tensor_without_elements_is_perturbed() -> None:
    assert _shaken()._perturb(torch.randn(0, 3)).shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("end", ["min", "max"])
def test_quantized_values_at_an_end_of_their_dtype_move_by_one_step(
    dtype: torch.dtype, end: str
) -> None:
    codes = torch.full((4, 5), getattr(torch.iinfo(dtype), end), dtype=dtype)
    apart = (_shaken()._flip(codes).int() - codes.int()).flatten()
    assert apart.abs().sum() == 1


@pytest.mark.numeric
@pytest.mark.parametrize("depth", [0, 1, 64, 1024, 1025, 3000])
def test_integer_products_are_exact(depth: int) -> None:
    left = torch.randint(-128, 128, (5, depth), dtype=torch.int8)
    right = torch.randint(-128, 128, (7, depth), dtype=torch.int8)
    left[0], right[0] = -128, -128  # the greatest sum
    wanted = (left.long() @ right.t().long()).to(torch.int32)
    assert torch.equal(int_product(left, right.t()), wanted)
    assert torch.equal(int_product(left, right.t().contiguous()), wanted)


class Product(nn.Module):
    """A dynamically quantized product, as torchao writes it."""

    weight: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-128, 128, (32, 24), dtype=torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 127
        codes = (x / scale).round().clamp(-128, 127).to(torch.int8)
        return torch._int_mm(codes, self.weight) * scale


@pytest.mark.numeric
@pytest.mark.parametrize("rows", [1, 20])
def test_a_machine_without_int8_dot_products_has_the_same_reference(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Product().eval(), torch.randn(rows, 32)
    program = capture(model, (x,))
    checks: list[ModelCheck] = []
    for dot in (True, False):
        # A machine is asked once, not in each of the four runs.
        answers = iter([dot])
        monkeypatch.setattr(model_check, "_has_int8_dot", lambda answers=answers: next(answers))
        checks.append(ModelCheck.measure(program, [x]))
    (output,) = checks[0].outputs
    scale = x.abs().amax(-1, keepdim=True) / 127
    codes = (x / scale).round().clamp(-128, 127).to(torch.int8)
    wanted = (codes.long() @ model.weight.long()).to(torch.int32) * scale
    assert torch.equal(output, wanted)
    assert torch.equal(checks[1].outputs[0], output)
    assert torch.equal(checks[0].noise[0], checks[1].noise[0])


def test_an_ambient_autocast_does_not_round_integer_products() -> None:
    x = torch.randn(1, 32)
    program = capture(Product().eval(), (x,))
    plain = ModelCheck.measure(program, [x]).outputs[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(ModelCheck.measure(program, [x]).outputs[0], plain)


def test_sizes_that_depend_on_perturbed_values_tell_no_noise() -> None:
    class Distinct(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            distinct: torch.Tensor = torch.unique(x.round())
            return distinct

    x = torch.randn(8, 32)
    captured = capture(Distinct().eval(), (x,))
    measured = ModelCheck.measure(captured, [x])
    (noise,) = measured.noise
    assert isinstance(noise, torch.Tensor)
    assert noise.shape == measured.outputs[0].shape == torch.unique(x.round()).shape
    assert not noise.any()
    assert measured.judge([torch.unique(x.round())]).wrong is None
    assert measured.judge([torch.unique(x.round()) + 1]).wrong is not None
