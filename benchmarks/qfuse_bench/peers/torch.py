"""Builds a contender inside its worker process."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from qfuse import zoo
from qfuse.api import compile as qfuse_compile
from qfuse.inductor import inductor_options
from qfuse.options import Options
from qfuse.zoo import recipes
from qfuse_bench.harness import _torch_api
from qfuse_bench.harness.worker import Inputs, Subject
from qfuse_bench.peers import onnxruntime as onnx_peer
from qfuse_bench.peers import openvino as openvino_peer
from qfuse_bench.peers.contenders import CALIBRATION_SEEDS, Contender, Engine


def build(arguments: Mapping[str, Any], example: Inputs) -> Subject:
    """Return a contender, built and compiled but not yet called.

    Args:
        arguments: A :class:`qfuse_bench.peers.contenders.Contender` as a dict.
        example: Inputs of the measured sizes, in float32.
    """
    contender = Contender.from_dict(arguments)
    match contender.engine:
        case Engine.EAGER:
            return _eager(contender)
        case Engine.INDUCTOR | Engine.INDUCTOR_TUNED | Engine.INDUCTOR_QFUSE:
            return _inductor(contender)
        case Engine.QFUSE:
            return _qfuse(contender, example)
        case Engine.OPENVINO:
            return openvino_peer.build(contender)
        case Engine.ONNX_RUNTIME:
            return onnx_peer.build(contender)


def _eager(contender: Contender) -> Subject:
    model, facts, _ = _model(contender)
    return Subject(model, _prepare(contender), facts)


def _inductor(contender: Contender) -> Subject:
    _torch_api.register_peer_patterns()
    model, facts, _ = _model(contender)
    tuned = contender.engine is Engine.INDUCTOR_TUNED
    ours = contender.engine is Engine.INDUCTOR_QFUSE
    options = inductor_options() if ours else None
    compiled = _torch_api.compile_frozen(model, max_autotune=tuned, options=options)
    return Subject(compiled, _prepare(contender), facts)


def _qfuse(contender: Contender, example: Inputs) -> Subject:
    model, facts, dynamic_shapes = _model(contender)
    prepare = _prepare(contender)
    args, kwargs = prepare(example)
    options = Options(without=contender.without)
    fast = qfuse_compile(
        model,
        args,
        kwargs,
        dynamic_shapes=dynamic_shapes,
        options=options,
        float_dtype=torch.bfloat16 if contender.narrowed else None,
    )
    return Subject(fast, prepare, facts, fast.report)


def _model(contender: Contender) -> tuple[nn.Module, dict[str, Any], Any]:
    """Return the model, its facts, and its dynamic shapes."""
    dtype = torch.bfloat16 if contender.casts_weights else torch.float32
    built = zoo.build(contender.model, dtype=dtype, **contender.sizes)
    shapes = built.dynamic_shapes if contender.dynamic else None
    recipe = contender.zoo_recipe
    if recipe is None:
        return built.module, {}, shapes
    calibration = [built.inputs(seed) for seed in CALIBRATION_SEEDS]
    quantized = recipes.quantize(
        built.module,
        recipe,
        built.args,
        built.kwargs,
        shapes,
        calibration,
        group_size=contender.group_size,
    )
    notes = [str(note) for note in quantized.notes]
    return quantized.model, {"layers": quantized.layers, "notes": notes}, shapes


def _prepare(contender: Contender) -> partial[Inputs]:
    dtype = torch.bfloat16 if contender.casts_weights else torch.float32
    return partial(_torch_api.map_floats, dtype=dtype)
