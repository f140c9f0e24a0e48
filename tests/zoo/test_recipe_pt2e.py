"""What has to be done around X86InductorQuantizer, and that the result is a module like others."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from tests.support.graphs.tiny_models import TwoLinears, sqnr, tiny
from torch import nn

from qfuse.zoo.recipes import quantize

# From torch's own code, when a graph that torch.export made is copied.
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")


class TestPt2e:
    """What has to be done around X86InductorQuantizer."""

    def test_a_dead_pattern_does_not_crash_it(self) -> None:
        class Dead(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                _ = self.b(x) + x  # matches linear + add, and has no user: an IndexError
                out: torch.Tensor = self.a(x)
                return out

        assert quantize(Dead(), "w8a8-static", (torch.randn(4, 8),)).layers == 1

    def test_the_float_weights_are_gone(self) -> None:
        model = quantize(TwoLinears(), "w8a8-static", (torch.randn(4, 64),)).model
        assert [name for name, _ in model.named_parameters()] == ["up.bias"]

    def test_the_result_can_be_copied_and_saved(self) -> None:
        x = torch.randn(4, 64)
        for recipe in ("w8a8-static", "w8a8-static-bf16"):
            model = quantize(TwoLinears(), recipe, (x,)).model
            twin = copy.deepcopy(model)
            with torch.no_grad():
                before = model(x)
                for value in [*model.parameters(), *model.buffers()]:
                    value.zero_()
                assert torch.equal(twin(x), before)
                assert not torch.equal(model(x), before)

    def test_autocast_keeps_the_signature_and_gives_bfloat16(self) -> None:
        model = tiny("bert")
        result = quantize(model.module, "w8a8-static-bf16", (), model.kwargs)
        names = list(inspect.signature(result.model.forward).parameters)
        assert names == ["input_ids", "attention_mask"]
        with torch.no_grad():
            answer = quantize(TwoLinears(), "w8a8-static-bf16", (torch.randn(4, 64),)).model(
                torch.randn(4, 64)
            )
        assert answer.dtype == torch.bfloat16
        assert not torch.is_autocast_enabled("cpu")

    def test_a_model_in_training_mode_is_quantized_in_eval_mode(self) -> None:
        model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 8)).train()
        x = torch.randn(8, 64)
        result = quantize(model, "w8a8-static", (x,))
        assert model.training
        with torch.no_grad():
            answer = result.model(x)
            assert torch.equal(answer, result.model(x))
            assert sqnr(copy.deepcopy(model).eval()(x), answer) > 30
