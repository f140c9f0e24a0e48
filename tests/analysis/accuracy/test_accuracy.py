from __future__ import annotations

import copy
import json
import math
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import qfuse
from qfuse import api
from qfuse.analysis import Accuracy
from qfuse.analysis.accuracy.layers import match_layers
from qfuse.analysis.accuracy.plot import bars_svg
from qfuse.analysis.accuracy.run import Graphs, LayerSums
from qfuse.analysis.predict import predicted_seconds
from qfuse.ir.errors import InputError, OptionsError
from qfuse.targets import Target
from qfuse.zoo import recipes

pytestmark = pytest.mark.export

OPTIONS = {"own_kernels": False}
TARGET = Target.for_testing()


def network(layers: int = 4, width: int = 64) -> nn.Sequential:
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*parts).eval()


def with_bad_layer(model: nn.Sequential, name: str, recipe: str = "w8a8-dynamic") -> nn.Module:
    """Quantize a copy whose one layer has weights of about two bits."""
    bad = copy.deepcopy(model)
    layer = bad.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    step = layer.weight.abs().max()
    layer.weight.data = (layer.weight / step).round() * step
    return recipes.quantize(bad, recipe, (batch(),)).model


def batch(rows: int = 32) -> torch.Tensor:
    return torch.randn(rows, 64)


def compare(quantized: Any, model: Any, *inputs: torch.Tensor, **more: Any) -> Accuracy:
    return qfuse.measure_accuracy(quantized, model, inputs, target=TARGET, options=OPTIONS, **more)


def sqnr(reference: torch.Tensor, value: torch.Tensor) -> float:
    noise = (reference.double() - value.double()).square().sum()
    return float(10 * torch.log10(reference.double().square().sum() / noise))


@pytest.mark.parametrize("bad", ["0", "4", "6"])
def test_a_planted_bad_layer_is_first_and_keeping_it_gives_what_is_said(bad: str) -> None:
    model, x = network(), batch()
    quantized = with_bad_layer(model, bad)
    found = compare(quantized, model, x)

    assert found.layers[0].layer == bad
    assert found.layers[0].own.sqnr_db < 15 < found.layers[1].own.sqnr_db
    assert found.keep[0].layer == bad
    kept = copy.deepcopy(quantized)
    kept.set_submodule(bad, model.get_submodule(bad))
    with torch.no_grad():
        real, before, after = model(x), quantized(x), kept(x)
    assert found.output.sqnr_db == pytest.approx(sqnr(real, before), abs=0.01)
    assert found.keep[0].output_db == pytest.approx(sqnr(real, after), abs=0.01)
    assert found.keep[0].gain_db == pytest.approx(sqnr(real, after) - sqnr(real, before), abs=0.02)
    assert found.keep[0].gain_db > 5


def test_the_price_is_the_difference_of_two_plans() -> None:
    model, x = network(2, 64), batch()
    quantized = with_bad_layer(model, "2")
    found = compare(quantized, model, x, keep=1)
    kept = copy.deepcopy(quantized)
    kept.set_submodule("2", model.get_submodule("2"))

    def planned(some: nn.Module) -> float:
        with api.captured_model(some, (x,), target=TARGET, options=OPTIONS) as captured:
            pipeline = captured.pipeline()
            return predicted_seconds(pipeline.rewrite(captured.graph), pipeline.cost) * 1e6

    assert [step.layer for step in found.keep] == ["2"]
    assert found.keep[0].cost_us == pytest.approx(planned(kept) - planned(quantized))


def test_a_large_layer_in_float_costs_time() -> None:
    model = network(2, 1024)
    x = torch.randn(512, 1024)
    quantized = recipes.quantize(model, "w8a8-dynamic", (x,)).model
    (first, *_) = compare(quantized, model, x, keep=1).keep
    # Two GFLOP at 182 GFLOP/s, less the int8 product.
    assert 3000 < first.cost_us < 6000


def test_layers_behind_a_bad_one_are_good_alone_and_bad_in_total() -> None:
    model, x = network(), batch()
    found = compare(with_bad_layer(model, "0"), model, x, keep=0)
    by_name = {layer.layer: layer for layer in found.layers}
    for name in ("2", "4", "6"):
        assert by_name[name].own.sqnr_db > 30
        assert by_name[name].total.sqnr_db < 20
    assert found.keep == ()
    assert found.untried == ()


@pytest.mark.thorough
def test_greedy_steps_add_up() -> None:
    model, x = network(), batch()
    found = compare(with_bad_layer(model, "4"), model, x, keep=3)
    outputs = [found.output.sqnr_db, *(step.output_db for step in found.keep)]
    assert len(found.keep) == 3
    for before, step, after in zip(outputs, found.keep, outputs[1:], strict=False):
        assert step.gain_db == pytest.approx(after - before, abs=0.02)


def test_everything_in_float_is_exact() -> None:
    model, x = network(1), batch()
    found = compare(recipes.quantize(model, "w8a8-dynamic", (x,)).model, model, x)
    assert found.keep[0].output_db == math.inf
    assert "exact outputs" in str(found)
    assert found.to_dict()["keep_in_float"][0]["output_db"] is None


def test_a_model_against_itself_is_exact() -> None:
    model, x = network(2), batch()
    found = compare(model, model, x)
    assert found.layers == ()
    assert found.unchanged == 4
    assert found.output.is_exact
    assert found.compiled_output.is_exact
    assert found.keep == ()


def test_batches_are_summed() -> None:
    model = network(2)
    quantized = recipes.quantize(model, "w8a8-dynamic", (batch(),)).model
    first, second = batch(), batch()
    found = compare(quantized, model, first, batches=[((second,), {})], keep=0)
    with torch.no_grad():
        both = [torch.cat([m(first), m(second)]) for m in (model, quantized)]
    assert found.batches == 2
    assert found.output.sqnr_db == pytest.approx(sqnr(*both), abs=0.01)
    with pytest.raises(InputError):
        compare(quantized, model, first, batches=[((batch(5),), {})], keep=0)


def test_batches_of_other_sizes_with_dynamic_shapes() -> None:
    model = network(2)
    quantized = recipes.quantize(model, "w8a8-dynamic", (batch(),)).model
    rows = torch.export.Dim("rows", min=2, max=64)
    # A module of `nn.Sequential` names its input so.
    shapes = {"input": {0: rows}}
    found = compare(
        quantized, model, batch(), batches=[((batch(5),), {})], keep=1, dynamic_shapes=shapes
    )
    assert found.batches == 2
    assert found.keep[0].gain_db > 0


class Network(nn.Module):
    """Convolutions with batch norms, which PT2E folds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)
        self.second = nn.Conv2d(16, 16, 3)
        assert self.norm.running_mean is not None
        assert self.norm.running_var is not None
        self.norm.running_mean.uniform_(-1, 1)
        self.norm.running_var.uniform_(0.5, 4)
        self.head = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        y: torch.Tensor = self.head(torch.relu(self.second(x)).mean((2, 3)))
        return y


def test_a_convolution_with_a_folded_norm_is_compared_with_the_norm() -> None:
    model, x = Network().eval(), torch.randn(2, 3, 12, 12)
    quantized = recipes.quantize(model, "w8a8-static", (x,)).model
    found = compare(quantized, model, x)

    assert {layer.layer for layer in found.layers} >= {"first", "second", "head"}
    assert all(layer.own.sqnr_db > 25 for layer in found.layers)
    assert found.keep == ()
    assert {name for name, _ in found.untried} == {layer.layer for layer in found.layers}
    assert all("converted graph" in reason for _, reason in found.untried)
    assert "not tried in float" in str(found)


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return y


def test_a_wrapped_model_has_the_paths_of_what_it_wraps() -> None:
    model, x = network(2), batch()
    quantized = recipes.quantize(model, "w8a8-dynamic", (x,)).model
    plain = compare(quantized, model, x, keep=0)
    found = compare(Wrapper(quantized).eval(), Wrapper(model).eval(), x, keep=0)
    assert {a.layer for a in found.layers} == {f"inner.{a.layer}" for a in plain.layers}
    wrapped = compare(Wrapper(quantized).eval(), model, x, keep=1)
    assert [a.layer for a in wrapped.layers] == [a.layer for a in plain.layers]
    assert ("0", "it is not a module of both models") in wrapped.untried


def test_an_exported_program_is_compared_but_not_tried() -> None:
    model, x = network(2), batch()
    quantized = recipes.quantize(model, "w8a8-dynamic", (x,)).model
    program = torch.export.export(quantized, (x,))
    found = compare(program, model, x)
    assert [a.layer for a in found.layers] == [
        a.layer for a in compare(quantized, model, x, keep=0).layers
    ]
    assert {reason for _, reason in found.untried} == {
        "an exported program has no modules to exchange"
    }


class Attention(nn.Module):
    """A layer that contains another one, and is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.shared = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.shared(torch.relu(self.shared(self.inner(x))))
        return y + x


def test_a_layer_that_is_called_twice() -> None:
    model, x = Attention().eval(), batch()
    quantized = recipes.quantize(model, "w8a8-dynamic", (x,)).model
    found = compare(quantized, model, x)
    assert {layer.layer for layer in found.layers} >= {"inner", "shared"}
    assert found.keep[0].layer == "shared"


def test_the_models_are_not_changed() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.register_buffer("calls", torch.zeros(()))
            self.calls: torch.Tensor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            y: torch.Tensor = self.linear(x)
            return y

    model, x = Counting().eval(), batch()
    quantized = recipes.quantize(model, "w8a8-dynamic", (x,)).model
    kinds = {name: type(part) for name, part in quantized.named_modules()}
    weight = quantized.get_submodule("linear").weight
    compare(quantized, model, x)

    for some in (model, quantized):
        assert float(some.get_buffer("calls")) == 0
    assert quantized.get_submodule("linear").weight is weight
    assert {name: type(part) for name, part in quantized.named_modules()} == kinds


def test_the_compilers_part_is_apart() -> None:
    """A static model without ties: what is compiled gives the values of its source."""
    model, x = network(2), batch()
    quantized = recipes.quantize(model, "w8a8-static", (x,)).model
    found = compare(quantized, model, x)
    assert found.output.sqnr_db < 60
    assert found.compiled_output.sqnr_db > found.output.sqnr_db + 5
    seen = [layer.compiled for layer in found.layers if layer.compiled is not None]
    assert seen
    assert all(part.is_exact for part in seen)


def test_a_wrong_compilation_is_the_compilers_part() -> None:
    """The bias of the second layer is changed in the lowered graph only."""
    model, x = network(3), batch()
    quantized = recipes.quantize(model, "w8a8-static", (x,)).model
    sums = []
    for wrong in (False, True):
        with (
            api.captured_model(model, (x,), target=TARGET) as real,
            api.captured_model(quantized, (x,), target=TARGET, options=OPTIONS) as made,
        ):
            reference, inputs, captured = real.graph, real.inputs, made.graph
            lowered = made.pipeline().rewrite(captured)
            layers = match_layers(reference, captured, lowered)
            if wrong:
                names = [name for name, _ in lowered.module.named_buffers()]
                (name,) = (n for n in names if n.replace(".", "_").startswith("2_bias"))
                parent, _, leaf = name.rpartition(".")
                value = lowered.module.get_buffer(name) + 0.5
                lowered.module.get_submodule(parent).register_buffer(leaf, value)
            sums.append(LayerSums())
            Graphs(reference, captured, lowered, layers).compare(inputs, inputs, sums[-1])
    good, bad = sums
    for path in ("0", "2", "4"):
        assert good.compiled[path].closeness().is_exact
        assert bad.own[path].closeness() == good.own[path].closeness()
    assert bad.compiled["0"].closeness().is_exact
    assert not bad.compiled["2"].closeness().is_exact
    assert bad.compiled["4"].closeness().is_exact
    assert good.compiled_output.closeness().is_exact
    assert bad.compiled_output.closeness().sqnr_db < 40


def test_models_without_a_layer_in_common_are_refused() -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(64, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.other(x)
            return y

    with pytest.raises(OptionsError, match="no layer in common"):
        compare(network(2), Other().eval(), batch())
    with pytest.raises(OptionsError, match="negative"):
        compare(network(2), network(2), batch(), keep=-1)


def test_another_float_model_is_asked_for() -> None:
    model, x = network(2), batch()
    other = compare(with_bad_layer(model, "2"), network(2), x, keep=0)
    same = compare(with_bad_layer(model, "2"), model, x, keep=0)

    assert other.is_unrelated
    assert "is this float model the one that was quantized?" in str(other)
    assert not same.is_unrelated
    assert "is this float model" not in str(same)


def test_text_data_and_plot() -> None:
    model, x = network(2), batch()
    found = compare(with_bad_layer(model, "2"), model, x)

    assert max(map(len, str(found).splitlines())) <= 80
    assert "keep 2 in float: +" in str(found)
    data = json.loads(found.to_json())
    assert data["layers"][0]["layer"] == "2"
    assert data["layers"][0]["own"]["sqnr_db"] == pytest.approx(found.layers[0].own.sqnr_db)
    assert {"gain_db", "cost_us", "output_db", "layer"} == set(data["keep_in_float"][0])
    root = ElementTree.fromstring(found.to_svg())
    texts = [node.text for node in root.iter() if node.tag.endswith("text")]
    assert texts.index("2") < texts.index("0")


def test_a_plot_of_odd_values() -> None:
    svg = bars_svg([("a<b&c", -math.inf, -3.0), ("x" * 99, math.inf, 200.0)])
    root = ElementTree.fromstring(svg)
    widths = [int(n.attrib["width"]) for n in root.iter() if n.attrib.get("fill", "")[:1] == "#"]
    assert min(widths) >= 0
    assert max(widths) <= 420
    assert ElementTree.fromstring(bars_svg([])) is not None


def test_a_data_frame_has_a_row_per_layer() -> None:
    pytest.importorskip("pandas", reason="needs pandas")
    model, x = network(2), batch()
    frame = compare(with_bad_layer(model, "2"), model, x, keep=0).to_dataframe()
    assert list(frame["layer"]) == ["2", "0"]
    assert frame["own_sqnr_db"].is_monotonic_increasing
    # Of float models no layer is there; the columns are.
    none = compare(model, model, x, keep=0).to_dataframe()
    assert len(none) == 0
    assert list(none.columns) == list(frame.columns)
    assert dict(none.dtypes) == dict(frame.dtypes)
