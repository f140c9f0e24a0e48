"""Blocks whose convolution is read by a global pool, quantized, and by a product, as floats."""

from __future__ import annotations

import pytest
from tests.support.graphs.tiny_models import tiny

from qfuse.capture import capture
from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import OptimizedGraph
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.activation import as_activation
from qfuse.ir.ops.convolution import as_fused_convolution
from qfuse.ir.ops.epilogue import Act
from qfuse.normalize import normalize
from qfuse.optimize import optimize
from qfuse.patterns.activations import ACTIVATION_OPS
from qfuse.rewrite.prelude import aten
from qfuse.zoo import recipes

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]


def optimized(name: str) -> OptimizedGraph:
    """Quantize a small network and optimize it."""
    model = tiny(name)
    calibration = [(model.args, model.kwargs), model.inputs(1)]
    source = recipes.quantize(model.module, "w8a8-static", model.args, {}, None, calibration).model
    return optimize(normalize(capture(source, model.args)))


@pytest.mark.parametrize("name", ["mobilenet-v3", "efficientnet"])
def test_the_activation_stays_in_the_convolution(name: str) -> None:
    nodes = list(optimized(name).graph.nodes)
    shared = [
        fused
        for node in nodes
        if (fused := as_fused_convolution(node)) is not None
        and any(as_activation(user) is not None for user in node.users)
        and any(is_call(user, ops.quantize) for user in node.users)
    ]

    assert not [node for node in nodes if is_call(node, *ACTIVATION_OPS)]
    assert shared
    for fused in shared:
        assert [type(step) for step in fused.epilogue.ops] == [Act]


@pytest.mark.parametrize("name", ["mobilenet-v3", "efficientnet"])
def test_the_product_with_the_gate_is_one_op_with_its_quantize(name: str) -> None:
    nodes = list(optimized(name).graph.nodes)

    assert not [node for node in nodes if is_call(node, aten.mul.Tensor)]
    assert [node for node in nodes if as_activation(node) is not None]
