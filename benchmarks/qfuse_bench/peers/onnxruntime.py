"""ONNX Runtime on a model of the zoo: float, or quantized by its own tools.

===============  ===================================================================================
recipe           what ``onnxruntime.quantization`` does
===============  ===================================================================================
none             the float model
w8a8-static      QDQ: int8 weights per channel, uint8 activations, with the calibration inputs of
                 the others; of linears, and in convolutional networks of all that it supports
w8a8-dynamic     int8 weights per channel, activations quantized at run time per tensor
w4a8             int4 weights in groups (``MatMulNBits``), products in int8
w4a16            int4 weights in groups (``MatMulNBits``), products in float
===============  ===================================================================================

ONNX Runtime computes on CPUs in f32 only. A key-value cache is bound to an input and an output at
once, so that nothing is copied.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from qfuse import zoo
from qfuse.ir.errors import OptionsError
from qfuse_bench.harness.worker import Subject
from qfuse_bench.peers.contenders import CALIBRATION_SEEDS, Contender, FloatType
from qfuse_bench.peers.functionalize import Function, function_of

_GROUP = 32
_PRODUCTS = ("MatMul", "Gemm")
# What MatMulNBits computes in: 1 is float32, 4 is int8.
_LEVELS = {"w4a8": 4, "w4a16": 1}


def build(contender: Contender) -> Subject:
    """Return the model in ONNX Runtime, compiled but not yet called.

    Raises:
        OptionsError: Nothing of ONNX Runtime stands for the recipe or the float type.
    """
    import onnxruntime  # noqa: PLC0415

    if contender.float_type is not FloatType.F32:
        raise OptionsError("ONNX Runtime has no bf16 on CPUs", fix="measure it at f32 only")
    model = zoo.build(contender.model, **contender.sizes)
    function = function_of(model)
    with tempfile.TemporaryDirectory(prefix="qfuse-onnx-") as folder:
        path = _quantized(_export(function, Path(folder)), contender, function, model)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.inter_op_num_threads = 1
        session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
    return Subject(_caller(session, function))


def _export(function: Function, folder: Path) -> Path:
    program = torch.onnx.export(function.export(), dynamo=True, verbose=False)
    assert program is not None, "an exported program becomes an ONNX program"
    path = folder / "float.onnx"
    program.save(str(path), external_data=False)
    return path


def _quantized(path: Path, contender: Contender, function: Function, model: zoo.ZooModel) -> Path:
    """Quantize the file; return the path of the outcome."""
    if contender.recipe is None:
        return path
    from onnxruntime import quantization  # noqa: PLC0415

    made = path.with_name("quantized.onnx")
    common = {"per_channel": True, "weight_type": quantization.QuantType.QInt8}
    if contender.is_convnet:
        path = _folded(path)
    match contender.recipe:
        case "w8a8-static":
            quantization.quantize_static(
                str(path),
                str(made),
                _Calibration(function, model),
                quant_format=quantization.QuantFormat.QDQ,
                activation_type=quantization.QuantType.QUInt8,
                op_types_to_quantize=None if contender.is_convnet else list(_PRODUCTS),
                extra_options={"MatMulConstBOnly": True},
                **common,
            )
        case "w8a8-dynamic":
            quantization.quantize_dynamic(
                str(path),
                str(made),
                op_types_to_quantize=list(_PRODUCTS),
                extra_options={"MatMulConstBOnly": True},
                **common,
            )
        case "w4a8" | "w4a16":
            _pack_int4(path, made, contender)
        case _:
            raise OptionsError(
                f"ONNX Runtime has nothing like {contender.recipe}",
                fix="measure it without ONNX Runtime",
            )
    return made


def _folded(path: Path) -> Path:
    """Fold batch norms into convolutions, as ONNX Runtime asks for before it quantizes."""
    from onnxruntime.quantization import shape_inference  # noqa: PLC0415

    made = path.with_name("folded.onnx")
    shape_inference.quant_pre_process(str(path), str(made), skip_symbolic_shape=True)
    return made


def _pack_int4(path: Path, made: Path, contender: Contender) -> None:
    import onnx  # noqa: PLC0415
    from onnxruntime.quantization import matmul_nbits_quantizer  # noqa: PLC0415

    assert contender.recipe is not None, "there is something to quantize"
    quantizer = matmul_nbits_quantizer.MatMulNBitsQuantizer(
        onnx.load(str(path)),
        block_size=contender.group_size or _GROUP,
        is_symmetric=True,
        accuracy_level=_LEVELS[contender.recipe],
    )
    quantizer.process()
    quantizer.model.save_model_to_file(str(made), use_external_data_format=False)


class _Calibration:
    """What ONNX Runtime asks for calibration inputs, one after the other."""

    def __init__(self, function: Function, model: zoo.ZooModel) -> None:
        self._inputs = self._all(function, model)
        self._names = _input_names(function)

    def get_next(self) -> dict[str, Any] | None:
        """Return the next inputs by name, or nothing after the last."""
        values = next(self._inputs, None)
        return None if values is None else dict(zip(self._names, values, strict=True))

    def _all(self, function: Function, model: zoo.ZooModel) -> Iterator[list[Any]]:
        for seed in CALIBRATION_SEEDS:
            inputs = function.flat(*model.inputs(seed))
            yield [x.numpy() for x in (*inputs, *function.state)]


def _input_names(function: Function) -> list[str]:
    return [f"values_{i}" for i in range(len(function.inputs) + len(function.state))]


def _caller(session: Any, function: Function) -> Any:
    from onnxruntime import OrtValue  # noqa: PLC0415

    names = [value.name for value in session.get_inputs()]
    outputs, count = session.get_outputs(), len(function.inputs)
    binding, given = session.io_binding(), outputs[: function.results]
    results = [torch.empty(output.shape) for output in given]
    # An OrtValue on a CPU is the memory that it was made from.
    for output, result in zip(given, results, strict=True):
        binding.bind_ortvalue_output(output.name, OrtValue.ortvalue_from_numpy(result.numpy()))
    new_state = outputs[function.results :]
    for name, output, value in zip(names[count:], new_state, function.state, strict=True):
        shared = OrtValue.ortvalue_from_numpy(value.numpy())
        binding.bind_ortvalue_input(name, shared)
        binding.bind_ortvalue_output(output.name, shared)
    flat = function.flat

    def call(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        for name, value in zip(names[:count], flat(args, kwargs), strict=True):
            binding.bind_cpu_input(name, value.numpy())
        session.run_with_iobinding(binding)
        return results

    return call
