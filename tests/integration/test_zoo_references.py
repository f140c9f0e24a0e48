"""Whole models in formats of few bits with exponents: merged, moved, run on kernels or as references."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from tests.support.sources.zoo_models import SMALL, compiled, kernels_of
from torch.utils import _pytree as pytree

import qfuse
from qfuse import zoo
from qfuse.ir.events import Fired, Lowered
from qfuse.optimize.merge.merge_linears import MergeLinears
from qfuse.targets import Target
from qfuse.zoo._torchao_api import quiet_imports
from qfuse.zoo.mx_formats import MxLinear, mx

with quiet_imports():
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.inference_workflow import MXDynamicActivationMXWeightConfig
    from torchao.quantization import quantize_
    from torchao.quantization.quantize_.common import KernelPreference

pytestmark = [pytest.mark.zoo, pytest.mark.numeric]

# How activations are quantized: not at all; by the norm or the gate that makes them; or always apart,
# since a fused op gives no scales of two levels.
FLOAT, FUSED, APART = "float", "fused", "apart"
RECIPES = {
    "fp8": FLOAT,
    "fp8-dynamic": FUSED,
    "fp8-dynamic-tensor": FUSED,
    "mxfp8": FUSED,
    "mxfp6": FUSED,
    "mxfp4": FUSED,
    "mxfp4-a16": FLOAT,
    "nvfp4": APART,
    "nvfp4-static": APART,
    "nvfp4-a16": FLOAT,
}
# Formats that differ from another one here in a size or a scale.
SIMILAR = ("mxfp6", "mxfp4-a16", "nvfp4-a16", "fp8-dynamic-tensor")
# One scale per output feature or for the weight: a kernel widens the weight in registers.
ON_KERNELS = ("fp8", "fp8-dynamic", "fp8-dynamic-tensor")
# Per layer: q, k and v; the output; gate and up; down. Besides the layers: the head.
LINEARS, HEAD = 4, 1


def quantizes(report: Any) -> tuple[int, int, int]:
    """How many quantizes are ops of their own, and how many norms and gates quantize."""
    left = sum(e.place.op == "qfuse.quantize" for e in report.left)
    made = (kernels_of(report, f"qfuse.{op}").total() for op in ("rms_norm", "activation"))
    return (left, *made)


def results(model: Any, source: Any, fast: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What two models give for fresh inputs."""
    args, kwargs = model.inputs(seed=1)
    with torch.no_grad():
        want = pytree.tree_leaves(source(*args, **kwargs))
        got = pytree.tree_leaves(fast(*args, **kwargs))
    pairs = [p for p in zip(got, want, strict=True) if isinstance(p[0], torch.Tensor)]
    assert pairs
    return pairs


def same_bits(model: Any, source: Any, fast: Any) -> bool:
    """Whether two models give the same bits for fresh inputs."""
    return all(torch.equal(new, old) for new, old in results(model, source, fast))


@pytest.mark.own_kernels
@pytest.mark.parametrize(
    ("recipe", "how"),
    [
        pytest.param(recipe, how, id=recipe, marks=[pytest.mark.thorough] * (recipe in SIMILAR))
        for recipe, how in RECIPES.items()
    ],
)
def test_every_layer_has_four_linears_and_keeps_its_values(recipe: str, how: str) -> None:
    model, quantized, fast = compiled("llama", recipe, 1)
    report = fast.report

    assert report.rolled_back == ()
    assert all(check.passed for check in report.checks)
    kernel = "qfuse.linear_w8a16" if recipe in ON_KERNELS else "expand"
    assert kernels_of(report, "qfuse.linear") == {kernel: LINEARS + HEAD}
    if recipe in ON_KERNELS:
        for new, old in results(model, quantized.model, fast):
            noise = (new - old).double().square().mean() / old.double().square().mean()
            assert noise < 1e-3, "30 dB: a few flipped codes, not another function"
    else:
        # The reference of a wide linear is torch's own product, here small enough not to be blocked
        # otherwise than a narrow one; all else is exact by its class.
        assert same_bits(model, quantized.model, fast)
    fired = [e for e in report.events if isinstance(e, Fired)]
    merged = [e.note for e in fired if e.rule == MergeLinears.name]
    assert Counter(merged) == {"64 + 32 + 32": 1, "160 + 160": 1}
    # What attention gives is quantized by itself. The gate is one op, quantized or not.
    expected = {FLOAT: (0, 0, 1), FUSED: (1, 3, 1), APART: (LINEARS + HEAD, 0, 0)}
    assert quantizes(report) == expected[how]
    assert all(left.reason for left in report.left)
    assert {left.place.op for left in report.left} <= {"qfuse.quantize"}


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", ["nvfp4", "fp8-dynamic"])
def test_what_is_left_is_a_function_of_depth(recipe: str) -> None:
    counts = []
    for layers in (1, 2, 3):
        _, _, fast = compiled("llama", recipe, layers)
        counts.append((kernels_of(fast.report, "qfuse.linear").total(), *quantizes(fast.report)))
    steps = {tuple(b - a for a, b in zip(x, y, strict=True)) for x, y in itertools.pairwise(counts)}
    fused = RECIPES[recipe] == FUSED
    assert steps == {(LINEARS, 1, 2, 1) if fused else (LINEARS, LINEARS, 0, 0)}
    assert counts[0][0] == LINEARS + HEAD


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ("mxfp8", "the weight is scaled in blocks of 1x32"),
        ("nvfp4-a16", "the weight is scaled in blocks of 1x16"),
    ],
)
def test_that_no_kernel_takes_them_is_said(recipe: str, why: str) -> None:
    _, _, fast = compiled("llama", recipe, 1)
    linears = [
        e for e in fast.report.events if isinstance(e, Lowered) and e.place.op == "qfuse.linear"
    ]
    assert len(linears) == LINEARS + HEAD
    for event in linears:
        assert event.kernel == "expand"
        assert event.why.startswith("no kernel accepts it")
        assert why in {reason for _, reason in event.losers}


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["rceil", "floor"])
def test_llama_in_torchaos_own_mx_tensors(mode: str) -> None:
    model = zoo.build("llama", layers=1, dtype=torch.bfloat16, **SMALL["llama"])
    config = MXDynamicActivationMXWeightConfig(
        kernel_preference=KernelPreference.EMULATED, scaling_mode=ScaleCalculationMode(mode)
    )
    quantize_(model.module, config)
    fast = qfuse.compile(
        model.module,
        model.args,
        model.kwargs,
        target=Target.for_testing(),
        check="site",
        options={"backend": "eager"},
    )

    assert same_bits(model, model.module, fast)
    assert kernels_of(fast.report, "qfuse.linear") == {"expand": LINEARS + HEAD}
    assert quantizes(fast.report) == (1, 3, 1)


def test_dynamic_sizes() -> None:
    layer = torch.nn.Sequential(MxLinear(torch.nn.Linear(64, 32), mx())).eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    x = torch.randn(3, 5, 64)
    fast = qfuse.compile(
        layer,
        (x,),
        dynamic_shapes=({0: batch},),
        target=Target.for_testing(),
        options={"backend": "eager"},
    )
    for count in (1, 2, 17):
        given = torch.randn(count, 5, 64)
        assert torch.equal(fast(given), layer(given))
