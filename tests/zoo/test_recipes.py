"""The recipes: what they quantize, what they leave and say, and that they touch nothing else."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from tests.support.graphs.tiny_models import TINY, TINY_CONVNETS, TwoLinears, flat, sqnr, tiny
from torch import nn

from qfuse import zoo
from qfuse.ir.errors import OptionsError, QfuseError
from qfuse.zoo import recipes
from qfuse.zoo.family import Example
from qfuse.zoo.recipes import quantize

# From torch's own code, when a graph that torch.export made is copied.
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")

PT2E = frozenset({"w8a8-static", "w8a8-static-bf16", "pt2e-dynamic"})
INT4 = frozenset({"w4a8", "w4a8-asym", "w4a16", "w4a16-asym", "w4a16-packed"})

# How many layers each model of `tests/support/graphs/tiny_models.py` has: (linear, convolution that PT2E takes).
LAYERS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "llama": (8, 0),  # q, k, v, o, gate, up, down; and the head
        "llama-decode": (8, 0),
        "bert": (7, 0),  # q, k, v, o, up, down; and the pooler
        "vit": (7, 1),  # q, k, v, o, up, down, the classifier; and the patches
        "whisper-encoder": (6, 0),  # its convolutions are 1-d, which PT2E leaves
        "resnet": (1, 9),
        "resnet18": (1, 9),
        "mobilenet": (1, 52),
        "mobilenet-v3": (2, 25),
        "efficientnet": (1, 36),
        "shufflenet": (1, 15),
        "densenet": (1, 10),
        "inception": (1, 15),
        "unet": (0, 11),  # and two transposed convolutions, which PT2E leaves
        "convnext": (5, 4),
        "yolo": (0, 54),
        "minilm": (36, 0),
    }
)

# Layers whose width aten's packed int4 weights do not allow: the classifier.
UNPACKABLE: Mapping[str, int] = MappingProxyType({"vit": 1})

# Least signal to noise in dB. One layer alone gives about 40 with int8 on both sides, 30 with
# float8 and 20 with int4 weights; noise adds up over the layers, and MobileNet has 52. Anything
# wrong (an axis, a scale, a zero point) gives less than 3.
# Floats of 8 and 6 bits on both sides give about 27 in one layer, those of 4 bits 15: in a few random
# layers little is left, so that tests/zoo/test_micro.py looks at every bit of one.
LEAST = MappingProxyType({"int8": 12.0, "int4": 7.0, "float8": 9.0, "float4": 1.5})
FLOAT8 = frozenset({"fp8-dynamic", "fp8-dynamic-tensor", "mxfp8", "mxfp6"})
FLOAT4 = frozenset({"mxfp4", "mxfp4-a16", "nvfp4", "nvfp4-static", "nvfp4-a16"})


def least(recipe: str) -> float:
    for kind, recipes_of in (("int4", INT4), ("float8", FLOAT8), ("float4", FLOAT4)):
        if recipe in recipes_of:
            return LEAST[kind]
    return LEAST["int8"]


def exported_ops(model: nn.Module, *args: torch.Tensor) -> Counter[str]:
    """The operators of the decomposed program, after checking that it computes the same."""
    with torch.no_grad():
        program = torch.export.export(model, args, strict=False).run_decompositions({})
        assert torch.equal(program.module(check_guards=False)(*args), model(*args))
    return Counter(
        str(node.target).removesuffix(".default")
        for node in program.graph.nodes
        if node.op == "call_function" and "getitem" not in str(node.target)
    )


def pairs() -> Iterator[tuple[str, str]]:
    """Every model with every recipe that makes a difference to it."""
    for name in TINY:
        for recipe in recipes.names():
            # The convnets have one linear layer or none; they and the trained encoder have many
            # layers, whose histograms take PT2E seconds.
            convnet = name in TINY_CONVNETS
            linear_only = convnet and recipe not in PT2E
            slow = name in {*TINY_CONVNETS, "minilm"} - {"resnet"} and recipe in PT2E
            slow &= recipe != "w8a8-static"
            one = recipe == "w8a8-dynamic" and LAYERS[name][0] > 0
            if not slow and (not linear_only or one):
                yield name, recipe


@pytest.mark.parametrize(("name", "recipe"), list(pairs()))
def test_every_model_with_every_recipe(name: str, recipe: str) -> None:
    model = tiny(name)
    before = {key: value.clone() for key, value in model.module.state_dict().items()}
    calibration = [(model.args, model.kwargs), model.inputs(1)]

    result = quantize(model.module, recipe, model.args, model.kwargs, None, calibration)

    after = model.module.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    linears, convolutions = LAYERS[name]
    left = UNPACKABLE.get(name, 0) if recipe == "w4a16-packed" else 0
    assert result.layers == linears + (convolutions if recipe in PT2E else 0) - left
    for key, value in result.model.named_buffers():
        if "keys_" in key or "values_" in key:  # calibration wrote to the cache
            assert torch.equal(value, before[key.removeprefix("inner.")])
    with torch.no_grad():
        reference = copy.deepcopy(model.module)(*model.args, **model.kwargs)
        answer = result.model(*model.args, **model.kwargs)
    assert type(answer) is type(reference)
    assert least(recipe) < sqnr(reference, answer) < 60


@pytest.mark.zoo
@pytest.mark.parametrize(
    ("name", "recipe"),
    [("bert", "w8a8-static"), ("llama", "w8a8-static-bf16"), ("vit", "pt2e-dynamic")],
)
def test_exported_graphs_run_with_other_sizes(name: str, recipe: str) -> None:
    model = tiny(name)
    calibration = [model.inputs(seed) for seed in range(4)]
    result = quantize(
        model.module, recipe, model.args, model.kwargs, model.dynamic_shapes, calibration
    )
    text = {"seq": 1} if name != "vit" else {}
    for sizes in ({"batch": 1} | text, {"batch": 3} | dict.fromkeys(text, 7)):
        args, kwargs = model.inputs(9, **sizes)
        with torch.no_grad():
            expected, answer = model.module(*args, **kwargs), result.model(*args, **kwargs)
        assert least(recipe) < sqnr(expected, answer) < 60


class TestGraphs:
    """What each recipe looks like once it is exported: other parts of qfuse recognize this."""

    def ops(self, recipe: str, **options: int) -> Counter[str]:
        x = torch.randn(2, 8, 64)
        model = quantize(TwoLinears(), recipe, (x,), **options).model  # type: ignore[arg-type]
        return exported_ops(model, x)

    def test_w8a8_static(self) -> None:
        ops = self.ops("w8a8-static")
        assert ops == {
            "quantized_decomposed.quantize_per_tensor": 2,
            "quantized_decomposed.dequantize_per_tensor": 2,
            "quantized_decomposed.dequantize_per_channel": 2,
            "aten.linear": 2,
            "aten.relu": 1,
        }

    def test_w8a8_static_bf16(self) -> None:
        ops = self.ops("w8a8-static-bf16")
        assert ops.pop("aten._to_copy") == 5  # two activations, two weights, one bias
        assert ops == self.ops("w8a8-static")

    def test_pt2e_dynamic(self) -> None:
        ops = self.ops("pt2e-dynamic")
        assert ops["quantized_decomposed.choose_qparams.tensor"] == 2
        assert ops["quantized_decomposed.quantize_per_tensor.tensor"] == 2

    @pytest.mark.parametrize(
        "recipe", ["w8a8-dynamic", "w8a8-dynamic-tensor", "w8a8-dynamic-asym", "w8a8-static-ao"]
    )
    def test_int8_products_of_torchao(self, recipe: str) -> None:
        ops = self.ops(recipe)
        assert ops["aten._int_mm"] == 2
        assert ops["torchao.quantize_affine"] == 2
        assert ops["torchao.choose_qparams_affine"] == (0 if recipe == "w8a8-static-ao" else 2)

    def test_int4_weights(self) -> None:
        assert self.ops("w4a16")["torchao.dequantize_affine"] == 2
        ops = self.ops("w4a8")
        assert ops["torchao.dequantize_affine"] == 4
        assert ops["torchao.choose_qparams_affine"] == 2

    @pytest.mark.parametrize("recipe", ["w8a8-group", "w8a8-group-asym", "w4a8-asym"])
    def test_int8_activations_and_weights_in_groups(self, recipe: str) -> None:
        ops = self.ops(recipe)
        assert ops["torchao.dequantize_affine"] == 4
        assert ops["torchao.choose_qparams_affine"] == 2

    @pytest.mark.parametrize("recipe", ["w4a16-asym", "w8a16-asym"])
    def test_weights_with_zero_points(self, recipe: str) -> None:
        assert self.ops(recipe)["torchao.dequantize_affine"] == 2

    def test_packed_int4_weights(self) -> None:
        assert self.ops("w4a16-packed")["aten._weight_int4pack_mm_for_cpu"] == 2

    def test_int8_weights_per_channel_and_per_group(self) -> None:
        assert "torchao.dequantize_affine" not in self.ops("w8a16")
        assert self.ops("w8a16", group_size=32)["torchao.dequantize_affine"] == 2

    def test_float8_weights(self) -> None:
        assert self.ops("fp8")["aten.matmul"] == 2


GROUPED = ("w8a8-group", "w4a8", "w4a8-asym", "w4a16", "w4a16-asym", "w8a16", "w8a16-asym")


@pytest.mark.parametrize("recipe", GROUPED)
@pytest.mark.parametrize("group_size", [32, 64])
def test_groups_have_the_size_that_was_asked_for(recipe: str, group_size: int) -> None:
    x = torch.randn(4, 64)
    model = quantize(TwoLinears(), recipe, (x,), group_size=group_size).model
    scale = model.get_submodule("down").weight.scale  # type: ignore[union-attr]
    assert scale.shape == (32, 128 // group_size)


@pytest.mark.parametrize("recipe", [name for name in GROUPED if name != "w8a16"])
def test_a_whole_channel_is_a_group_too(recipe: str) -> None:
    x = torch.randn(4, 64)
    model = quantize(TwoLinears(), recipe, (x,), group_size=recipes.WHOLE_CHANNEL).model
    weight = model.get_submodule("down").weight
    assert weight.scale.shape == (32, 1)  # type: ignore[union-attr]
    zero_point: torch.Tensor = weight.zero_point  # type: ignore[union-attr, assignment]
    assert bool(zero_point.any()) == recipe.endswith("-asym")


def test_a_packed_layout_has_groups() -> None:
    with pytest.raises(OptionsError, match="packed weights are in groups"):
        quantize(TwoLinears(), "w4a16-packed", (torch.randn(4, 64),), group_size=-1)


def test_groups_of_int4_have_32_weights_unless_told_otherwise() -> None:
    model = quantize(TwoLinears(), "w4a16", (torch.randn(4, 64),)).model
    assert model.get_submodule("up").weight.scale.shape == (128, 2)  # type: ignore[union-attr]


class TestStaticScales:
    """Scales that are measured beforehand come from the calibration inputs alone."""

    def test_torchao_takes_the_greatest_value_of_all_calibration_inputs(self) -> None:
        x = torch.randn(4, 64)
        calibration: list[Example] = [((scale * x,), {}) for scale in (0.5, 3.0, 1.0)]
        model = quantize(TwoLinears(), "w8a8-static-ao", (x,), {}, None, calibration).model
        weight: Any = model.get_submodule("up").weight
        assert torch.equal(weight.act_quant_scale, ((3.0 * x).abs().max() / 127.5).reshape(1, 1))

    def test_torchao_scales_have_the_rank_of_the_activation(self) -> None:
        model = quantize(TwoLinears(), "w8a8-static-ao", (torch.randn(2, 3, 64),)).model
        weight: Any = model.get_submodule("up").weight
        assert weight.act_quant_scale.shape == (1, 1, 1)

    def test_pt2e_scales_grow_with_the_calibration_inputs(self) -> None:
        source, x = TwoLinears(), torch.randn(64, 64)
        found = []
        for factor in (1.0, 4.0):
            model = quantize(source, "w8a8-static", (x,), {}, None, [((factor * x,), {})]).model
            assert isinstance(model, torch.fx.GraphModule)
            op = torch.ops.quantized_decomposed.quantize_per_tensor.default
            found.append(model.graph.find_nodes(op="call_function", target=op)[0].args[1])
        assert found[1] / found[0] == pytest.approx(4.0, rel=0.1)

    def test_a_layer_without_one_scale_is_left_float(self) -> None:
        class Odd(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.seen, self.unseen = nn.Linear(8, 8), nn.Linear(8, 8)
                self.twice = nn.Linear(8, 8)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                out: torch.Tensor = self.seen(self.twice(x) + self.twice(x[0]))
                return out

        result = quantize(Odd(), "w8a8-static-ao", (torch.randn(2, 3, 8),))
        assert result.layers == 1
        assert [str(note) for note in result.notes] == [
            "unseen: calibration never called it",
            "twice: it is called with activations of different ranks",
        ]


def test_nothing_global_is_changed() -> None:
    """In a process of its own, because the side effects are those of the first import."""
    code = """
import logging, warnings
import torch, torch._inductor.config as inductor
def state():
    loggers = ["torchao", "torch.utils._pytree"]
    return {
        **inductor.get_config_copy(),
        "filters": [list(logging.getLogger(name).filters) for name in loggers],
        "grad": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "precision": torch.get_float32_matmul_precision(),
        "generator": torch.random.get_rng_state().tolist(),
    }
from qfuse.zoo import recipes
x = torch.randn(4, 64)
model = torch.nn.Linear(64, 64)
before = state()
assert before["pre_grad_custom_pass"] is None
for name in recipes.names():
    recipes.quantize(model, name, (x,))
after = state()
print({key for key in before if before[key] != after[key]})
"""
    output = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, check=False, text=True
    )
    assert output.stderr == ""  # no warning, and no log line of what was imported
    assert output.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("recipe", "options", "words"),
    [
        ("w8a8-dynam", {}, "did you mean w8a8-dynamic or w8a8-dynamic-tensor or"),
        ("w4_a16", {}, "did you mean w4a16"),
        ("zzz", {}, "there are w8a8-static, "),
        ("w8a8-dynamic", {"group_size": 32}, "w8a8-dynamic has no groups"),
        ("w4a8", {"group_size": 0}, "give 32, 64 or 128"),
        ("w8a8-static", {"calibration": []}, "calibration holds no inputs"),
    ],
)
def test_wrong_options_are_refused(recipe: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionsError, match=words) as caught:
        quantize(TwoLinears(), recipe, (torch.randn(2, 64),), **options)
    assert caught.value.fix


@pytest.mark.parametrize("recipe", ["w8a8-dynamic", "w8a8-static"])
def test_a_model_with_nothing_to_quantize_is_refused(recipe: str) -> None:
    with pytest.raises(QfuseError, match="found nothing to quantize"):
        quantize(nn.ReLU(), recipe, (torch.randn(2, 64),))


@pytest.mark.parametrize(
    ("group_size", "fix"), [(7, "give a group size that divides"), (-1, "choose another recipe")]
)
def test_a_group_size_that_fits_nowhere_is_refused(group_size: int, fix: str) -> None:
    model = TwoLinears() if group_size > 0 else nn.ReLU()

    with pytest.raises(QfuseError, match="found nothing to quantize") as caught:
        quantize(model, "w4a8", (torch.randn(2, 64),), group_size=group_size)

    assert caught.value.fix is not None
    assert caught.value.fix.startswith(fix)


def test_an_exported_program_is_refused() -> None:
    program: Any = torch.export.export(TwoLinears(), (torch.randn(2, 64),), strict=False)
    with pytest.raises(OptionsError, match="not ExportedProgram"):
        quantize(program, "w8a8-dynamic")


def test_every_recipe_is_described() -> None:
    assert all(len(recipes.describe(name)) > 20 for name in recipes.names())
    assert set(recipes.names()) > PT2E


def test_bfloat16_models_are_quantized_too() -> None:
    model = zoo.build("llama", **TINY["llama"], dtype=torch.bfloat16)
    with torch.no_grad():
        reference = model.module(*model.args)
        for recipe in recipes.names():
            answer = quantize(model.module, recipe, model.args).model(*model.args)
            assert answer.dtype == torch.bfloat16
            assert flat(answer).isfinite().all()
            assert sqnr(reference, answer) > least(recipe)
