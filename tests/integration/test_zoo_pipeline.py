"""Whole models on the main road: what fuses as a function of depth, what is left, and the values."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from tests.support.sources.zoo_models import SMALL, compiled, grown_constants, kernels_of
from torch.utils import _pytree as pytree

from qfuse import zoo
from qfuse.capture import capture
from qfuse.cost import CostModel, CostProfile
from qfuse.ir.ops.norms import as_fused_norm
from qfuse.ir.ops.qdq import as_quantize
from qfuse.normalize import normalize
from qfuse.optimize import optimize
from qfuse.patterns.norm import A_NORM
from qfuse.rewrite.context import RewriteContext
from qfuse.rewrite.pattern import Match, match
from qfuse.zoo import recipes

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.own_kernels,
]


# Linears per layer, what reads one input being merged, and besides the layers: the head of llama, the
# pooler of bert and vit.
LINEARS = {"llama": (4, 1), "bert": (4, 1), "vit": (4, 1)}
# Norms that feed a quantize: two per layer, and the last one of llama. Of the last one of bert and of
# vit a row is picked first, and only that is quantized.
NORMS = {"llama": (2, 1), "bert": (2, 0), "vit": (2, 0)}
NORM_OPS = {"llama": "qfuse.rms_norm", "bert": "qfuse.layer_norm", "vit": "qfuse.layer_norm"}


@pytest.mark.numeric
@pytest.mark.parametrize("name", list(SMALL))
@pytest.mark.parametrize(
    "recipe",
    ["w8a8-static", "w8a8-dynamic", "w8a8-dynamic-asym", "w4a8", "w8a16", "w4a16"],
)
def test_every_quantized_linear_runs_on_a_kernel(name: str, recipe: str) -> None:
    model, quantized, fast = compiled(name, recipe, 1)
    report = fast.report

    assert report.rolled_back == ()
    assert not [note.text for note in report.notes if "which is a bug" in note.text]
    assert all(check.passed for check in report.checks)
    linears = kernels_of(report, "qfuse.linear")
    assert linears.total() == sum(LINEARS[name])
    assert not linears["expand"]
    if recipe.startswith("w8a8"):
        assert kernels_of(report, NORM_OPS[name]).total() == sum(NORMS[name])
    assert all(left.reason for left in report.left)
    dequantizes = [left for left in report.left if left.place.op == "qfuse.dequantize"]
    assert not [left for left in dequantizes if "linear" in left.reason]
    assert grown_constants(quantized.model, fast) == []
    args, kwargs = model.inputs(seed=1)
    with torch.no_grad():
        want = pytree.tree_leaves(quantized.model(*args, **kwargs))
        got = pytree.tree_leaves(fast(*args, **kwargs))
    for new, old in zip(got, want, strict=True):
        if isinstance(old, torch.Tensor) and old.is_floating_point():
            noise = (new - old).double().square().mean() / old.double().square().mean()
            assert noise < 1e-3, "30 dB: a few flipped codes, not another function"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "recipe"), [("llama", "w8a8-dynamic"), ("llama", "w4a8"), ("bert", "w8a8-static")]
)
def test_what_fires_is_a_function_of_depth(name: str, recipe: str) -> None:
    counts = []
    for layers in (1, 2, 3):
        _, _, fast = compiled(name, recipe, layers)
        linears = kernels_of(fast.report, "qfuse.linear").total()
        counts.append((linears, len(fast.report.left)))
    assert counts[0][0] == sum(LINEARS[name])
    steps = {(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(counts)}
    assert len(steps) == 1, f"every layer adds the same: {counts}"
    ((linears, _),) = steps
    assert linears == LINEARS[name][0]


def test_siblings_share_one_quantize() -> None:
    _, _, fast = compiled("llama", "w8a8-dynamic", 1)
    # One for q, k and v, one for the output, one for gate and up, one for down, one for the head.
    # Three of them are made by their norm, and one by SwiGLU.
    left = [e for e in fast.report.left if e.place.op == "qfuse.quantize"]
    assert (len(left), kernels_of(fast.report, "qfuse.rms_norm").total()) == (1, 3)


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", ["w8a8-static", "w8a8-dynamic", "w8a8-dynamic-asym"])
def test_one_op_multiplies_gate_and_up_and_quantizes(recipe: str, dtype: torch.dtype) -> None:
    _, _, fast = compiled("llama", recipe, 1, dtype)
    report = fast.report
    assert report.rolled_back == ()
    (fused,) = [e for e in report.fused if "silu" in e.what]
    assert fused.place.op == "qfuse.linear"
    stored = "uint8" if recipe == "w8a8-static" else "int8 per-token dynamic"
    assert fused.what.endswith(f" -> {stored}")
    assert not kernels_of(report, "qfuse.activation")
    assert not [e for e in report.left if "mlp" in e.place.module]


@pytest.mark.parametrize("recipe", ["w8a8-static", "w8a8-dynamic"])
def test_a_linear_gives_its_gelu_in_every_layer(recipe: str) -> None:
    # Static parameters show what depth does; dynamic ones, what is chosen.
    layers = 2 if recipe == "w8a8-static" else 1
    _, _, fast = compiled("bert", recipe, layers)
    report = fast.report
    linears = [e for e in report.fused if e.place.op == "qfuse.linear"]
    assert sum("act(gelu)" in e.what for e in linears) == layers
    # It gives quantized values, with given parameters or with those that it chooses.
    stored = "uint8" if recipe == "w8a8-static" else "int8 per-token dynamic"
    assert sum(e.what.endswith(f"act(gelu) -> {stored}") for e in linears) == layers
    assert not kernels_of(report, "qfuse.activation")
    left = [e for e in report.left if e.place.op == "qfuse.quantize"]
    behind = [e for e in left if "output.dense" in e.place.module]
    assert not [e for e in behind if "attention" not in e.place.module]


# Every pair of model, recipe and dtype; a model takes 4 seconds to capture.
@pytest.mark.parametrize(
    ("name", "recipe", "dtype"),
    [
        (name, recipe, (torch.float32, torch.bfloat16)[(row + column) % 2])
        for row, name in enumerate(SMALL)
        for column, recipe in enumerate(["w8a8-static", "w8a8-dynamic", "w8a8-dynamic-asym"])
    ],
    ids=str,
)
def test_every_norm_that_feeds_a_quantize_gives_it(
    name: str, recipe: str, dtype: torch.dtype
) -> None:
    layers = 2 if recipe == "w8a8-static" else 1
    model = zoo.build(name, layers=layers, dtype=dtype, **SMALL[name])
    quantized = recipes.quantize(model.module, recipe, model.args, model.kwargs)
    normal = normalize(capture(quantized.model, model.args, model.kwargs))
    done = optimize(normal, RewriteContext("optimize", CostModel(CostProfile.pinned())))
    norms = [n for n in done.graph.nodes if as_fused_norm(n) is not None]
    assert {str(n.target) for n in norms} == {NORM_OPS[name] + ".default"}
    each, rest = NORMS[name]
    assert len(norms) == layers * each + rest
    fed = [q.x for n in done.graph.nodes if (q := as_quantize(n)) is not None]
    assert [x for x in fed if isinstance(match(A_NORM, x), Match)] == []


@pytest.mark.parametrize(("dtype", "found"), [(torch.int8, []), (torch.float32, ["a_weight_wide"])])
def test_a_constant_that_grew_is_found(dtype: torch.dtype, found: list[str]) -> None:
    source, graph = torch.nn.Module(), torch.nn.Module()
    source.register_buffer("a_weight", torch.ones(8, 4, dtype=torch.int8))
    graph.register_buffer("a_weight_wide", torch.ones(8, 4, dtype=dtype))
    fast = SimpleNamespace(plan=SimpleNamespace(lowered=SimpleNamespace(module=graph)))
    assert grown_constants(source, fast) == found
