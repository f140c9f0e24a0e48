"""OpenVINO on a model of the zoo: float, quantized by NNCF, or with weights compressed by NNCF.

===============  ===================================================================================
recipe           what NNCF and OpenVINO do
===============  ===================================================================================
none             the float model
w8a8-static      ``nncf.quantize``, with the calibration inputs of the others; for transformers, or
                 for convolutional networks
w8a8-dynamic     int8 weights per channel; activations quantized at run time in groups of 32
w8a16            int8 weights per channel, float activations
w4a8             int4 weights in groups; activations quantized at run time in groups of 32
w4a16            int4 weights in groups, float activations
===============  ===================================================================================

Sizes are fixed, as for Inductor, and a key-value cache is a state of the model. ``bf16`` is
OpenVINO's hint for the precision of inference.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from qfuse import zoo
from qfuse.ir.errors import OptionsError
from qfuse_bench.harness.worker import Subject
from qfuse_bench.peers.contenders import CALIBRATION_SEEDS, Contender, FloatType
from qfuse_bench.peers.functionalize import Function, function_of

_GROUP = 32
_DYNAMIC_GROUP = 32  # OpenVINO's default on CPU
_RUN_TIME = frozenset({"w8a8-dynamic", "w4a8"})


def build(contender: Contender) -> Subject:
    """Return the model in OpenVINO, compiled but not yet called.

    Raises:
        OptionsError: Nothing of OpenVINO stands for the recipe.
    """
    import openvino  # noqa: PLC0415

    model = zoo.build(contender.model, **contender.sizes)
    function = function_of(model)
    graph = _convert(function)
    graph = _quantized(graph, contender, function, model)
    _keep_state(graph, len(function.state))
    request = openvino.Core().compile_model(graph, "CPU", _settings(contender))
    return Subject(_caller(request.create_infer_request(), function))


def _convert(function: Function) -> Any:
    import openvino  # noqa: PLC0415

    graph = openvino.convert_model(function.export())
    shapes = [list(x.shape) for x in (*function.inputs, *function.state)]
    graph.reshape(dict(zip(graph.inputs, shapes, strict=True)))
    return graph


def _quantized(graph: Any, contender: Contender, function: Function, model: zoo.ZooModel) -> Any:
    """Return the graph quantized by NNCF."""
    if contender.recipe is None:
        return graph
    import nncf  # noqa: PLC0415

    logging.getLogger("nncf").setLevel(logging.WARNING)
    mode, group = nncf.CompressWeightsMode, contender.group_size or _GROUP
    match contender.recipe:
        case "w8a8-static":
            calibration = [function.flat(*model.inputs(seed)) for seed in CALIBRATION_SEEDS]
            data = [[x.numpy() for x in (*inputs, *function.state)] for inputs in calibration]
            settings: dict[str, Any] = {"model_type": nncf.ModelType.TRANSFORMER}
            if contender.is_convnet:
                # Zero points for what is not a relu's, as PT2E has them.
                settings = {"preset": nncf.QuantizationPreset.MIXED}
            return nncf.quantize(graph, nncf.Dataset(data), subset_size=len(data), **settings)
        case "w8a8-dynamic" | "w8a16":
            return nncf.compress_weights(graph, mode=mode.INT8_SYM)
        case "w4a8" | "w4a16":
            return nncf.compress_weights(
                graph, mode=mode.INT4_SYM, group_size=group, ratio=1.0, all_layers=True
            )
        case _:
            raise OptionsError(
                f"OpenVINO has nothing like {contender.recipe}", fix="measure it without OpenVINO"
            )


def _keep_state(graph: Any, count: int) -> None:
    """Turn the last inputs and outputs into state of the model."""
    if not count:
        return
    from openvino._offline_transformations import (  # noqa: PLC0415
        apply_make_stateful_transformation,
    )

    pairs = {}
    for index, (enters, leaves) in enumerate(
        zip(graph.inputs[-count:], graph.outputs[-count:], strict=True)
    ):
        enters.get_tensor().set_names({f"state_{index}"})
        leaves.get_tensor().set_names({f"next_{index}"})
        pairs[f"state_{index}"] = f"next_{index}"
    apply_make_stateful_transformation(graph, pairs)


def _settings(contender: Contender) -> dict[str, Any]:
    return {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "INFERENCE_PRECISION_HINT": "bf16" if contender.float_type is FloatType.BF16 else "f32",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": _DYNAMIC_GROUP if contender.recipe in _RUN_TIME else 0,
    }


def _caller(request: Any, function: Function) -> Any:
    import openvino  # noqa: PLC0415

    for state in request.query_state():
        # Named after the input and the output that it was: state_3next_3.
        index = int(state.name.removeprefix("state_").partition("next_")[0])
        state.state = openvino.Tensor(function.state[index].numpy())
    flat, results = function.flat, range(function.results)

    def call(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        inputs = [x.numpy() for x in flat(args, kwargs)]
        found = request.infer(inputs, share_inputs=True, share_outputs=True)
        return [torch.from_numpy(found[index]) for index in results]

    return call
