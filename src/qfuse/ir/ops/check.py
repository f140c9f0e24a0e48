"""Structural checks of calls of qfuse's ops, derived from their declarations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from qfuse.ir.errors import BlockError
from qfuse.ir.ops.declare import Op
from qfuse.ir.ops.epilogue import Add, Epilogue, Mul, Round
from qfuse.ir.ops.fields import RESULT
from qfuse.ir.ops.output import ExtraOutput, Output
from qfuse.ir.ops.qdq import Dequantize
from qfuse.ir.ops.views import QuantParams, dtype_of, tensor_of
from qfuse.ir.quant.spec import QuantSpec


def problems_of(op: Op) -> Iterator[str]:
    """Yield the problems of a call: storage, blocks, float dtypes and results."""
    for block in op.layout.params:
        stored = op.node if block.of == RESULT else getattr(op, block.of)
        params = getattr(op, block.name)
        if stored is not None:
            yield from _check_params(tensor_of(stored), params)
        elif params is not None:
            yield f"it has parameters of a {block.of}, and no {block.of}"
    yield from _check_epilogue(op)
    for real, spec in (*_rounded(op), *_result(op)):
        if real != spec.float_dtype:
            yield f"float values are {real}, the spec says {spec}"
    yield from op.problems()
    if (output := getattr(op, "output", None)) is not None:
        if ExtraOutput.SUM in output.keep and getattr(op, "residual", None) is None:
            yield "without a residual there is no sum to keep"
        yield from _check_results(op.node.meta["val"], output)


def _result(op: Op) -> Iterator[tuple[torch.dtype, QuantSpec]]:
    """Yield the float dtype of the result with the spec that must agree, if there is one."""
    if op.result_spec is not None:
        yield op.float_types()[-1], op.result_spec
    # It quantizes no result; its float result is described by the spec of its operand.
    elif isinstance(op, Dequantize):
        yield dtype_of(op.node), op.params.spec


def _rounded(op: Op) -> Iterator[tuple[torch.dtype, QuantSpec]]:
    """Yield the float dtype of each value that an epilogue rounds, with the rounding's spec."""
    epilogue: Epilogue = getattr(op, "epilogue", Epilogue())
    # There is one type more than steps: the last one is that of the result.
    for step, real in zip(epilogue.ops, op.float_types(), strict=False):
        if isinstance(step, Round):
            yield real, step.spec
        elif isinstance(step, Mul) and step.rounded is not None:
            yield dtype_of(getattr(op, "extras", ())[step.index]), step.rounded.spec


def _check_epilogue(op: Op) -> Iterator[str]:
    """Check the epilogue operands that are stored quantized."""
    epilogue: Epilogue = getattr(op, "epilogue", Epilogue())
    extras: Sequence[Node] = getattr(op, "extras", ())
    values = [tensor_of(extra) for extra in extras]
    for step in epilogue.ops:
        if isinstance(step, (Add, Mul)) and step.stored is not None:
            scale, zero, spec = step.stored.values(values)
            params = [scale] if zero is None else [scale, zero]
            yield from _check_stored(values[step.index], spec, params)


def _check_params(stored: torch.Tensor, params: QuantParams | None) -> Iterator[str]:
    if params is None:
        return
    zero = [] if params.zero_point is None else [tensor_of(params.zero_point)]
    yield from _check_stored(stored, params.spec, [tensor_of(params.scale), *zero])
    outer = params.outer_scale
    try:
        params.spec.check_outer(stored.shape, None if outer is None else tensor_of(outer).shape)
    except BlockError as error:
        yield error.what


def _check_results(results: Any, output: Output) -> Iterator[str]:
    if not isinstance(results, (list, tuple)) or len(results) != output.count:
        yield f"it gives {results}, its arguments say {output.count} results"
        return
    yield from _check_params(results[0], output.params)
    if output.chosen is None:
        return
    spec, choose = output.chosen
    if spec.dtype != choose.dtype:
        yield f"its parameters are chosen for {choose.dtype}, the spec says {spec}"
    yield from _check_stored(results[0], spec, results[1:3])


def _check_stored(
    stored: torch.Tensor, spec: QuantSpec, params: Sequence[torch.Tensor]
) -> Iterator[str]:
    if stored.dtype != spec.dtype:
        yield f"quantized values are {stored.dtype}, the spec says {spec}"
    if spec.scale_format.dtype not in {None, params[0].dtype}:
        yield f"the scale is {params[0].dtype}, the spec says {spec}"
    try:
        for param in params:
            spec.check(stored.shape, param.shape)
    except BlockError as error:
        yield error.what
