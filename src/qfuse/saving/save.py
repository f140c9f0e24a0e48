"""Write a compiled model to one file."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph

from qfuse import kernels
from qfuse._version import __version__
from qfuse.backends.aoti import AotiRunner
from qfuse.backends.blocks.chain import CompiledChain
from qfuse.backends.eager import EagerRunner
from qfuse.backends.runner import Runner
from qfuse.ir.errors import CacheError, ModelFileError
from qfuse.ir.graph.stage_graph import Signature
from qfuse.report import Report
from qfuse.saving.code import isa_of, write_code
from qfuse.saving.codec import UnknownValueError, to_data
from qfuse.saving.container import Chunks, write_bytes, write_file
from qfuse.saving.graphs import graph_to_data
from qfuse.saving.model import MODEL, PLAN, REPORT, WEIGHTS, SavedModel, kernel_member
from qfuse.saving.tensors import TensorWriter
from qfuse.saving.trees import tree_to_data


def save_model(path: Path, model: SavedModel) -> None:
    """Write ``model`` to a file, which replaces an existing one in one piece.

    Raises:
        ModelFileError: It cannot be saved, or the file cannot be written.
    """
    write_file(path, *_parts(model))


def model_to_bytes(model: SavedModel) -> bytes:
    """Return the content of the file of ``model``.

    Raises:
        ModelFileError: It cannot be saved.
    """
    return write_bytes(*_parts(model))


def machine_name() -> str:
    """Return the system and the architecture, which code depends on."""
    return f"{sys.platform} {platform.machine()}"


def uses_own_kernels(graph: Graph) -> bool:
    """Whether a lowered graph calls qfuse's own kernels."""
    return any(
        isinstance(node.target, OpOverload) and node.target.namespace == "qfuse"
        for node in graph.nodes
    )


def _parts(model: SavedModel) -> tuple[dict[str, Any], dict[str, Chunks]]:
    """Return the manifest and the members of a file."""
    runner = model.module.runner
    eager = _eager_part(runner)
    tensors = TensorWriter()
    data: dict[str, Any] = {
        "signature": _signature(model.module.signature),
        "graph": graph_to_data(eager.module, tensors, _state_names(eager, runner)),
        "examples": None,
        "code": None,
    }
    if model.examples is not None:
        data["examples"] = [tensors.add("an example input", value) for value in model.examples]
    members: dict[str, Chunks] = {}
    facts = {"qfuse": __version__, "torch": torch.__version__, "machine": machine_name()}
    manifest: dict[str, Any] = {**facts, "backend": runner.backend, "isa": "", "kernels": None}
    if isinstance(runner, AotiRunner):
        manifest["isa"] = isa_of(runner)
        data["code"], packages = write_code(runner, tensors)
        members |= packages
    # A chain of packages is run by them.
    chain = isinstance(runner, AotiRunner) and isinstance(runner.code, CompiledChain)
    if chain or uses_own_kernels(eager.module.graph):
        manifest["kernels"], libraries = _kernels()
        members |= libraries
    data["tensors"] = tensors.table()
    members[MODEL] = [_json(data)]
    members[REPORT] = [_json(_report(model.report))]
    members[PLAN] = [model.plan.encode()]
    # The last one: a file that is cut off loses weights, and is still recognized.
    members[WEIGHTS] = list(tensors.chunks())
    return manifest, members


def _eager_part(runner: Runner) -> EagerRunner:
    if isinstance(runner, AotiRunner):
        return runner.otherwise
    if isinstance(runner, EagerRunner):
        return runner
    raise ModelFileError(
        f"the model runs on the backend {runner.backend!r}, whose code qfuse cannot save",
        fix="use what the backend offers, or compile with backend='auto'",
    )


def _state_names(eager: EagerRunner, runner: Runner) -> Collection[str]:
    names = [m.buffer for m in eager.mutations if m.buffer is not None]
    if isinstance(runner, AotiRunner):
        names += runner.plan.names[len(runner.plan.layouts) :]
    return list(dict.fromkeys(names))


def _signature(signature: Signature) -> dict[str, Any]:
    plain = ("mutations", "symbols", "parameters", "relations")
    data = {name: to_data(getattr(signature, name)) for name in plain}
    trees = {name: tree_to_data(getattr(signature, name)) for name in ("in_spec", "out_spec")}
    inputs = [_leaf(spec, f"the input {spec.name}") for spec in signature.inputs]
    outputs = [_leaf(spec, "a result of the model") for spec in signature.outputs]
    defaults = {name: _default(value) for name, value in signature.defaults.items()}
    known = {name: value for name, value in defaults.items() if value is not None}
    return {**data, **trees, "inputs": inputs, "outputs": outputs, "defaults": known}


def _leaf(spec: Any, what: str) -> Any:
    try:
        return to_data(spec)
    except UnknownValueError as error:
        raise ModelFileError(
            f"{what} is {error}, which cannot be saved",
            fix="compile with tensors, numbers and strings",
        ) from error


def _default(value: Any) -> list[Any] | None:
    """Return a default in a list; ``None`` if it cannot be saved, and has to be passed then."""
    try:
        return [to_data(value)]
    except UnknownValueError:
        return None


def _kernels() -> tuple[dict[str, Any], dict[str, Chunks]]:
    """Return what describes the libraries of every path, and the libraries."""
    try:
        images = kernels.load().images()
    except CacheError as error:
        raise ModelFileError(
            f"the kernels that the model calls cannot be saved: {error.what}",
            fix="save in a process that compiled the model with qfuse.compile",
        ) from error
    facts = [
        {"name": image.name, "compiler": image.entry.compiler, "sha256": image.entry.sha256}
        for image in images
    ]
    members: dict[str, Chunks] = {
        kernel_member(number): [image.data] for number, image in enumerate(images)
    }
    return {"key": images[0].entry.key, "libraries": facts}, members


def _report(report: Report) -> Any:
    try:
        return to_data(report)
    except UnknownValueError as error:
        raise ModelFileError(f"the report holds {error}, which cannot be saved") from error


def _json(data: Any) -> bytes:
    return json.dumps(data, separators=(",", ":"), allow_nan=False).encode()
