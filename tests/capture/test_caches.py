"""Key-value caches of transformers as arguments and results."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from tests.support.graphs.capture_models import assert_same, captured
from torch.export import Dim

import qfuse
from qfuse.capture import capture
from qfuse.ir.errors import CaptureError, InputError
from qfuse.ir.events import Noted
from qfuse.ir.signature.run import run_functional
from qfuse.targets import Target
from qfuse.zoo._extras import cache_argument
from qfuse.zoo._torchao_api import quiet_imports

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.numeric, pytest.mark.zoo]

LENGTH, BATCH, HEADS, WIDTH = 12, 2, 2, 8
CACHE = cache_argument(transformers.LlamaForCausalLM)


@pytest.fixture(scope="module")
def llama() -> Any:
    with quiet_imports():
        config = transformers.LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=HEADS,
            vocab_size=50,
            max_position_embeddings=64,
            # With "sdpa" transformers packs grouped heads in one way when it runs and in another
            # when it is traced, which differ by a rounding.
            attn_implementation="eager",
        )
        return transformers.LlamaForCausalLM(config).eval()


def static_cache(model: Any) -> Any:
    cache = transformers.StaticCache(config=model.config, max_cache_len=LENGTH)
    cache.early_initialization(BATCH, HEADS, WIDTH, torch.float32, torch.device("cpu"))
    return cache


def ids(length: int) -> torch.Tensor:
    return torch.randint(0, 50, (BATCH, length))


def tensors(cache: Any) -> list[torch.Tensor]:
    return [
        getattr(layer, name)
        for layer in cache.layers
        for name in ("keys", "values", "cumulative_length")
        if isinstance(getattr(layer, name, None), torch.Tensor)
    ]


def test_decoding_with_a_static_cache(llama: Any) -> None:
    example = static_cache(llama)
    program = captured(llama, ids(1), use_cache=True, **{CACHE: example})

    assert not any(t.any() for t in tensors(example)), "capture wrote the example"
    names = [i.name for i in program.signature.inputs]
    assert f"{CACHE}.layers[1]['values']" in names
    assert len(program.signature.mutations) == 6

    mine, theirs = static_cache(llama), static_cache(llama)
    prompt = ids(5)
    with torch.no_grad():
        llama(prompt, **{CACHE: mine})
        llama(prompt, **{CACHE: theirs})
        memory = [t.data_ptr() for t in tensors(mine)]
        for _ in range(3):
            token = ids(1)
            _, result = run_functional(program, token, use_cache=True, **{CACHE: mine})
            want = llama(token, use_cache=True, **{CACHE: theirs})
            assert type(result) is type(want)
            assert_same(result.logits, want.logits)
            assert_same(tensors(mine), tensors(theirs))
            returned = tensors(getattr(result, CACHE))
            assert all(map(torch.Tensor.is_set_to, returned, tensors(mine)))
    assert memory == [t.data_ptr() for t in tensors(mine)]


def test_a_dynamic_cache_comes_and_goes(llama: Any) -> None:
    def prompt_cache(length: int) -> Any:
        cache = transformers.DynamicCache(config=llama.config)
        with torch.no_grad():
            llama(ids(length), **{CACHE: cache})
        return cache

    program = captured(llama, ids(1), use_cache=True, **{CACHE: prompt_cache(5)})
    (note,) = program.log.of(Noted)
    assert note.warn
    assert note.text.startswith(f"{CACHE} is a DynamicCache")
    cache, token = prompt_cache(5), ids(1)
    _, result = run_functional(program, token, use_cache=True, **{CACHE: copy.deepcopy(cache)})
    with torch.no_grad():
        want = llama(token, use_cache=True, **{CACHE: cache})

    assert type(getattr(result, CACHE)) is transformers.DynamicCache
    assert_same(result, want)
    with pytest.raises(InputError, match=rf"{CACHE}.layers\[0\]\['keys'\]: expected"):
        run_functional(program, token, use_cache=True, **{CACHE: prompt_cache(6)})


def test_a_prompt_of_any_length_returns_its_cache(llama: Any) -> None:
    shapes = {"input_ids": {0: Dim("batch", min=1, max=4), 1: Dim("length", min=1, max=32)}}
    program = captured(llama, input_ids=ids(7), dynamic_shapes=shapes)
    for shape in ((2, 7), (1, 9), (3, 2)):
        tokens = torch.randint(0, 50, shape)
        with torch.no_grad():
            want = llama(input_ids=tokens)
        _, result = run_functional(program, input_ids=tokens)
        assert_same(result, want)


def test_another_cache_is_refused(llama: Any) -> None:
    program = captured(llama, ids(1), **{CACHE: static_cache(llama)})
    other = transformers.StaticCache(config=llama.config, max_cache_len=2 * LENGTH)
    other.early_initialization(BATCH, HEADS, WIDTH, torch.float32, torch.device("cpu"))
    with pytest.raises(InputError, match=CACHE):
        run_functional(program, ids(1), **{CACHE: other})
    with pytest.raises(
        InputError, match=f"{CACHE}: expected StaticCache, got a tensor or a constant"
    ):
        run_functional(program, ids(1), **{CACHE: None})


def test_a_cache_that_is_not_allocated(llama: Any) -> None:
    cache = transformers.StaticCache(config=llama.config, max_cache_len=LENGTH)
    with pytest.raises(CaptureError, match="not allocated yet") as error:
        capture(llama, (ids(1),), {CACHE: cache})
    assert f"{CACHE}.early_initialization(" in str(error.value.fix)


def test_a_cache_that_counts_in_python(llama: Any) -> None:
    config = copy.deepcopy(llama.config)
    config.sliding_window = 4
    config.layer_types = ["sliding_attention", "full_attention"]
    cache = transformers.StaticCache(config=config, max_cache_len=LENGTH)
    cache.early_initialization(BATCH, HEADS, WIDTH, torch.float32, torch.device("cpu"))
    with pytest.raises(CaptureError, match=r"StaticSlidingWindowLayer.*length in Python"):
        capture(llama, (ids(1),), {CACHE: cache})


def test_decode_steps_of_an_exportable_module_with_a_static_cache() -> None:
    """Its cache holds the buffers in plain objects."""
    with quiet_imports():
        from transformers.integrations.executorch import (  # noqa: PLC0415
            TorchExportableModuleWithStaticCache,
        )

    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    inner = transformers.LlamaForCausalLM(config).eval()
    inner.generation_config.cache_implementation = "static"
    inner.generation_config.cache_config = {"batch_size": 1, "max_cache_len": 16}
    model = TorchExportableModuleWithStaticCache(inner).eval()
    twin = copy.deepcopy(model)

    def step(index: int) -> dict[str, torch.Tensor]:
        ids = torch.tensor([[7 * index % 64]])
        return {"input_ids": ids, "cache_position": torch.tensor([index])}

    fast = qfuse.compile(
        model,
        (),
        step(0),
        options={"backend": "eager"},
        target=Target.for_testing(),
    )
    assert not model.get_buffer("key_cache_0").any(), "capture wrote the cache"
    # Attention has a kernel, which rounds otherwise than torch's.
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
    for index in range(5):
        with torch.no_grad():
            close(fast(**step(index)), twin(**step(index)))
    for (name, mine), (_, theirs) in zip(model.named_buffers(), twin.named_buffers(), strict=True):
        close(mine, theirs, msg=name)
