"""Save a captured graph as an exported program, and read it back."""

from __future__ import annotations

import importlib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.export import Dim

from qfuse.capture import capture
from qfuse.cases.case import INPUTS_FILE, MODEL_FILE, Case
from qfuse.ir.errors import CaptureError, CaseError
from qfuse.ir.graph.stage_graph import MUTABLE_META, CapturedGraph, Signature
from qfuse.rewrite.clone import clone

# They define the operators of quantized programs when they are imported.
_LIBRARIES = ("torch.ao.quantization.fx._decomposed", "torchao.quantization")


def save_program(folder: Path, captured: CapturedGraph, inputs: Sequence[torch.Tensor]) -> None:
    """Write the graph and its inputs; constants and sizes that vary are part of it.

    Raises:
        OSError, RuntimeError, ValueError, TypeError, ...: torch cannot export or store them.
    """
    # A copy, since exporting may annotate nodes.
    module = clone(captured).module
    shapes = _dynamic_shapes(captured.signature)
    program = torch.export.export(module, tuple(inputs), dynamic_shapes=shapes)
    # Inputs are stored as plain tensors, and not pickled.
    program._example_inputs = None  # noqa: SLF001 - the property of it has no setter
    torch.export.save(program, folder / MODEL_FILE)
    tensors = {str(i): value.detach().contiguous() for i, value in enumerate(inputs)}
    save_file(tensors, folder / INPUTS_FILE)


def load_program(folder: Path, case: Case) -> tuple[CapturedGraph, list[torch.Tensor]]:
    """Read the graph and its inputs.

    Raises:
        CaseError: A file cannot be read.
    """
    for name in _LIBRARIES:
        importlib.import_module(name)
    try:
        captured = read_graph(folder / MODEL_FILE, case.written)
        tensors = load_file(folder / INPUTS_FILE)
        inputs = [_strided(tensors[str(i)], step) for i, step in enumerate(case.strides)]
    except (
        OSError, RuntimeError, LookupError, TypeError, ValueError,
        AttributeError, SafetensorError, zipfile.BadZipFile, CaptureError,
    ) as error:  # fmt: skip
        raise CaseError(
            f"its files cannot be read: {type(error).__name__}: {error}",
            where=str(folder),
            fix=f"use torch {case.plan.versions.get('torch', '')}, which wrote it, and check that "
            "the directory is complete",
        ) from error
    return captured, inputs


def read_graph(path: Path, written: Sequence[str]) -> CapturedGraph:
    """Read the graph of a program; buffers that the model wrote are marked again."""
    captured = capture(torch.export.load(path))
    for node in captured.graph.find_nodes(op="get_attr"):
        if str(node.target) in written:
            node.meta[MUTABLE_META] = True
    return captured


def _dynamic_shapes(signature: Signature) -> tuple[Any, ...] | None:
    """Return the sizes that vary, per placeholder; relations between them are found anew."""
    if not signature.symbols:
        return None
    return tuple(
        _axes(leaf.shape, signature.symbols)
        for leaf in signature.inputs
        if leaf.placeholder is not None
    )


def _axes(shape: Sequence[int | str], symbols: Mapping[str, Any]) -> dict[int, Any]:
    found = {}
    for axis, size in enumerate(shape):
        if isinstance(size, str):
            known = symbols[size]
            found[axis] = Dim.AUTO(min=known.low, max=known.high)
    return found


def _strided(value: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    if value.stride() == tuple(strides):
        return value
    made = torch.empty_strided(value.shape, tuple(strides), dtype=value.dtype)
    return made.copy_(value)
