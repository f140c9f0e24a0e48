"""The other engines: who can take part, and that they compute the same model."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

import pytest
import torch
from torch.utils import _pytree as pytree

from qfuse import zoo
from qfuse.ir.errors import OptionsError
from qfuse_bench.harness._torch_api import float_leaves, has_cpu_kernel
from qfuse_bench.harness.stats import sqnr
from qfuse_bench.peers import torch as engines
from qfuse_bench.peers.contenders import Contender, Engine, FloatType, kernels_lacking, missing
from qfuse_bench.peers.functionalize import function_of

SIZES: Mapping[str, int] = {
    "layers": 1,
    "hidden": 128,
    "heads": 4,
    "kv_heads": 2,
    "intermediate": 256,
    "vocab": 160,
    "seq": 16,
}
PEERS = (Engine.OPENVINO, Engine.ONNX_RUNTIME)


def contender(engine: Engine, model: str, recipe: str | None = None) -> Contender:
    return Contender(
        engine=engine, float_type=FloatType.F32, model=model, sizes=SIZES, recipe=recipe
    )


def test_engines_of_torch_are_always_there() -> None:
    assert [missing(engine) for engine in Engine if engine not in PEERS] == [None] * (
        len(Engine) - len(PEERS)
    )


@pytest.mark.parametrize("engine", PEERS)
def test_one_that_is_not_installed_says_what_to_install(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)

    text = missing(engine)
    assert text is not None
    assert text.startswith("not installed: pip install ")
    assert str(engine) in text


def test_kernels_that_torchao_lacks_are_named() -> None:
    assert has_cpu_kernel("aten::add.Tensor")
    assert not has_cpu_kernel("aten::_weight_int4pack_mm_with_scales_and_zeros")
    lacking = "torchao da8w4" in kernels_lacking()
    assert lacking != has_cpu_kernel("torchao::da8w4_linear_cpu")


def test_a_function_gives_all_results_of_a_model() -> None:
    built = zoo.build("bert", layers=1, hidden=64, heads=4, intermediate=128, vocab=100, seq=8)
    function = function_of(built)
    with torch.no_grad():
        given = function.module(*function.flat(built.args, built.kwargs))
        expected = built.module(*built.args, **built.kwargs)

    assert function.results == 2
    both = (expected.last_hidden_state, expected.pooler_output)
    assert len(given) == 2
    assert all(map(torch.equal, given, both))


@pytest.mark.parametrize("model", ["llama", "llama-decode"])
def test_a_function_gives_what_its_model_gives(model: str) -> None:
    built = zoo.build(model, **SIZES)
    function = function_of(built)
    inputs = function.flat(*built.inputs(3))
    with torch.no_grad():
        given = function.module(*inputs, *function.state)
        expected = built.module(*inputs)

    assert torch.equal(given[0], expected)
    # The module has written its own buffers now; the function has given them, and left its state.
    for new, old, (name, buffer) in zip(
        given[1:],
        function.state,
        [(n, b) for n, b in built.module.named_buffers() if n.startswith(("keys_", "values_"))],
        strict=True,
    ):
        assert torch.equal(new, buffer), name
        assert not torch.equal(old, buffer), name
    assert len(function.state) == (2 if model == "llama-decode" else 0)


def test_inputs_are_taken_in_the_order_of_the_model() -> None:
    built = zoo.build("minilm", batch=2, seq=8)
    function = function_of(built)

    assert function.names == ("input_ids", "attention_mask")
    a, b = torch.zeros(1), torch.ones(1)
    assert function.flat((), {"attention_mask": b, "input_ids": a}) == [a, b]
    assert function.flat((a,), {"attention_mask": b}) == [a, b]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("engine", PEERS)
@pytest.mark.parametrize(
    ("model", "recipe", "least"),
    [
        # NNCF quantizes the products of attention too, which costs a narrow model more.
        ("llama", "w8a8-static", 8.0),
        ("llama-decode", "w8a8-dynamic", 20.0),
    ],
)
def test_an_engine_computes_the_model(
    engine: Engine, model: str, recipe: str, least: float
) -> None:
    if reason := missing(engine):
        pytest.skip(f"needs a peer that is {reason}")
    built = zoo.build(model, **SIZES)
    inputs = built.inputs(0)
    subject = engines.build(contender(engine, model, recipe).to_dict(), inputs)
    args, kwargs = subject.prepare(inputs)
    answers = [float_leaves(subject.call(*args, **kwargs)) for _ in range(2)]
    with torch.no_grad():
        expected = float_leaves(built.module(*args, **kwargs))

    for answer in answers:
        assert least < sqnr(expected, [x.clone() for x in answer])
    assert sqnr(expected, answers[-1]) < 60, "nothing was quantized"


CONVNETS: Mapping[str, dict[str, int]] = {
    "resnet18": {"image": 64, "width": 16, "classes": 10},
    "unet": {"image": 32, "width": 8, "levels": 2},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("engine", PEERS)
@pytest.mark.parametrize("model", CONVNETS)
def test_an_engine_quantizes_a_convnet(engine: Engine, model: str) -> None:
    if reason := missing(engine):
        pytest.skip(f"needs a peer that is {reason}")
    built = zoo.build(model, **CONVNETS[model])
    quantized = Contender(
        engine=engine,
        float_type=FloatType.F32,
        model=model,
        sizes=CONVNETS[model],
        recipe="w8a8-static",
    )
    subject = engines.build(quantized.to_dict(), built.inputs(0))
    (images,), _ = subject.prepare(built.inputs(0))
    with torch.no_grad():
        expected = built.module(images)

    for _ in range(2):
        (answer,) = pytree.tree_leaves(subject.call(images))
        assert 15 < sqnr([expected], [answer.clone()]) < 60


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("engine", PEERS)
def test_a_recipe_that_an_engine_does_not_have_is_refused(engine: Engine) -> None:
    if reason := missing(engine):
        pytest.skip(f"needs a peer that is {reason}")
    example = zoo.build("llama", **SIZES).inputs(0)
    with pytest.raises(OptionsError, match="nothing like fp8"):
        engines.build(contender(engine, "llama", "fp8").to_dict(), example)


def test_onnx_runtime_has_no_bf16() -> None:
    if reason := missing(Engine.ONNX_RUNTIME):
        pytest.skip(f"needs a peer that is {reason}")
    wanted = Contender(engine=Engine.ONNX_RUNTIME, float_type=FloatType.BF16, model="llama")
    with pytest.raises(OptionsError, match="no bf16 on CPUs"):
        engines.build(wanted.to_dict(), zoo.build("llama", **SIZES).inputs(0))


def test_a_narrowed_contender_is_a_float32_model() -> None:
    narrowed = Contender(
        engine=Engine.QFUSE,
        float_type=FloatType.BF16,
        model="llama",
        recipe="w8a8-static",
        narrowed=True,
    )

    assert (narrowed.zoo_recipe, narrowed.casts_weights) == ("w8a8-static", False)
    assert narrowed.name == "qfuse bf16 w8a8-static narrowed"
    assert Contender.from_dict(narrowed.to_dict()) == narrowed
