"""``float_dtype=bfloat16`` narrows what is not quantized, and leaves the quantized part as it is."""

from __future__ import annotations

import pytest
import torch
from tests.support.graphs.tiny_models import sqnr, tiny

import qfuse
from qfuse.ir.events import Fired
from qfuse.targets import Target
from qfuse.zoo.recipes import quantize

pytestmark = [pytest.mark.zoo, pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")]


@pytest.mark.numeric
@pytest.mark.parametrize("recipe", ["w8a8-static", "w8a8-dynamic", "w4a8", "w4a16"])
def test_narrowing_costs_less_than_quantizing(recipe: str) -> None:
    model = tiny("llama-decode")
    calibration = [model.inputs(seed) for seed in (1, 2)]
    quantized = quantize(model.module, recipe, model.args, model.kwargs, None, calibration).model
    with torch.no_grad():
        reference = model.module(*model.args, **model.kwargs)
        eager = quantized(*model.args, **model.kwargs).clone()
        fast = qfuse.compile(
            quantized,
            model.args,
            model.kwargs,
            target=Target.for_testing(),
            float_dtype=torch.bfloat16,
            options={"backend": "eager"},
        )
        answer = fast(*model.args, **model.kwargs)

    assert answer.dtype is torch.float32
    fired = {event.rule for event in fast.report.events if isinstance(event, Fired)}
    assert "narrow-floats" in fired
    assert sqnr(reference, answer) > sqnr(reference, eager) - 1.0
    assert 20.0 < sqnr(eager, answer) < 80.0
