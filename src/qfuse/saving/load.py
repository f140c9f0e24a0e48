"""Read a compiled model from its file."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from qfuse import kernels
from qfuse._version import __version__
from qfuse.backends import CompiledModule
from qfuse.backends.eager import run_eagerly
from qfuse.backends.runner import Runner
from qfuse.backends.toolchain import isa_runs_here
from qfuse.capture.containers import register_caches
from qfuse.ir.errors import ModelFileError
from qfuse.ir.events import EventLog, Noted
from qfuse.ir.graph.stage_graph import LoweredGraph, Signature
from qfuse.kernels import KernelImage, library_key
from qfuse.kernels.build import BuildEntry
from qfuse.report import Report
from qfuse.saving.code import read_code
from qfuse.saving.codec import BAD_DATA, decoding, from_data
from qfuse.saving.container import Container, open_bytes, open_file
from qfuse.saving.graphs import graph_from_data
from qfuse.saving.model import MODEL, PLAN, REPORT, WEIGHTS, SavedModel, kernel_member
from qfuse.saving.save import machine_name
from qfuse.saving.tensors import TensorReader
from qfuse.saving.trees import TreeReader

_log = logging.getLogger(__name__)
_DIGITS = 12
_AGAIN = "compile and save the model on this machine"


def read_model(path: Path, *, verify: bool = True) -> SavedModel:
    """Read a model; its weights are mapped into memory and not copied.

    Args:
        path: The file.
        verify: Compare the weights with their digest too; everything else always is.

    Raises:
        ModelFileError: There is no such file, it is damaged, or it does not run here.
        BackendError: The code cannot be loaded.
    """
    return _read(open_file(path), verify=verify)


def model_from_bytes(data: bytes) -> SavedModel:
    """Read a model from the content of its file.

    Raises:
        ModelFileError: The data are damaged, or the model does not run here.
        BackendError: The code cannot be loaded.
    """
    return _read(open_bytes(data, "a pickled model"), verify=True)


def _read(file: Container, *, verify: bool) -> SavedModel:
    present = [name for name in file.members if name != WEIGHTS]
    # Before anything of it is used.
    file.verify(None if verify else present)
    with decoding(file.name):
        _check_machine(file)
        _load_kernels(file)
        data = json.loads(file.read(MODEL))
        begin, size = file.place(WEIGHTS)
        tensors = TensorReader(file.block, begin, size, data["tensors"])
        trees = TreeReader()
        signature = _signature(data["signature"], trees)
        missing = _missing_isa(file)
        report = _report(file, trees, missing)
        module = graph_from_data(data["graph"], tensors)
        lowered = LoweredGraph(module, signature, EventLog(report.events))
        eager = run_eagerly(lowered)
        code = None if missing else data["code"]
        runner: Runner = eager if code is None else read_code(file, code, tensors, eager)
        numbers = data["examples"]
        examples = None if numbers is None else tuple(tensors[n] for n in numbers)
        plan = file.read(PLAN).decode()
    return SavedModel(CompiledModule(signature, runner), lowered, report, plan, examples)


def _check_machine(file: Container) -> None:
    """Refuse code for another torch or machine, which would end the process.

    Raises:
        ModelFileError: The code does not run here.
    """
    manifest = file.manifest
    for what, saved, here in (
        ("torch", manifest["torch"], torch.__version__),
        ("a machine of the kind", manifest["machine"], machine_name()),
    ):
        if saved != here:
            raise ModelFileError(
                f"it was saved with {what} {saved}, and this is {here}",
                where=file.name,
                fix=f"{_AGAIN}, or use {what} {saved}",
            )


def _missing_isa(file: Container) -> str:
    """Return the instruction set of the code that this machine lacks; "" if there is none.

    Weights have one layout for all instruction sets, and the kernels choose theirs when they run,
    so the lowered graph runs op by op.
    """
    isa: str = file.manifest["isa"]
    if isa_runs_here(isa):
        return ""
    _log.warning("%s: %s", file.name, _op_by_op(isa))
    return isa


def _op_by_op(isa: str) -> str:
    return (
        f"its compiled code needs the instruction set {isa}, which this machine lacks, so the "
        "model runs op by op: the same kernels, slower between them. For compiled code, save it "
        "here: `qfuse compile MODEL -o FILE`. Code from a machine with fewer instruction sets runs "
        "on both"
    )


def _load_kernels(file: Container) -> None:
    """Load the kernels that the model calls, unless the process has them.

    Raises:
        ModelFileError: They are those of another version, or cannot be loaded.
    """
    needs = file.manifest["kernels"]
    if needs is None:
        return
    if needs["key"] != library_key():
        raise _other_kernels(file, needs["key"])
    images = [
        KernelImage(
            Path(facts["name"]).name,
            BuildEntry(needs["key"], facts["compiler"], facts["sha256"]),
            file.read(kernel_member(number)),
        )
        for number, facts in enumerate(needs["libraries"])
    ]
    try:
        library = kernels.load_images(images)
    except OSError as error:
        raise ModelFileError(
            f"its kernels cannot be loaded: {error}",
            where=file.name,
            fix="check that the folder for temporary files has space and that libraries can be "
            "loaded from it (noexec); TMPDIR sets another one",
        ) from error
    if not library.available:
        raise ModelFileError(f"its kernels do not run here: {library.reason}", where=file.name)


def _other_kernels(file: Container, key: str) -> ModelFileError:
    """Return the error for a file whose kernels are not those of this qfuse."""
    version, digests = file.manifest["qfuse"], f"({key[:_DIGITS]}, here {library_key()[:_DIGITS]})"
    if version == __version__:
        # Installing that version would change nothing: it is the one that is installed.
        return ModelFileError(
            f"it was saved by another build of qfuse {version}, with other kernels {digests}",
            where=file.name,
            fix="save the model again with this build, or load it with the one that saved it",
        )
    return ModelFileError(
        f"it was saved by qfuse {version}, and qfuse {__version__} has other kernels {digests}",
        where=file.name,
        fix=f"save the model again with this version, or install qfuse {version}",
    )


def _signature(data: dict[str, Any], trees: TreeReader) -> Signature:
    # A cache of transformers is known to torch only after this.
    register_caches()
    return Signature(
        in_spec=trees.read(data["in_spec"]),
        inputs=tuple(from_data(data["inputs"])),
        out_spec=trees.read(data["out_spec"]),
        outputs=tuple(from_data(data["outputs"])),
        mutations=from_data(data["mutations"]),
        symbols=from_data(data["symbols"]),
        parameters=from_data(data["parameters"]),
        relations=from_data(data["relations"]),
        defaults={name: value for name, (value,) in from_data(data["defaults"]).items()},
    )


def _report(file: Container, trees: TreeReader, missing_isa: str) -> Report:
    try:
        report: Report = from_data(json.loads(file.read(REPORT)))
    except BAD_DATA:
        # Its events are not those of this version; the model does not need them.
        version = file.manifest["qfuse"]
        text = f"the report was written by qfuse {version}, and this version cannot read it"
        report = Report((Noted("saving", text, warn=True),))
    notes = [Noted("saving", _op_by_op(missing_isa), warn=True)] if missing_isa else []
    for name in dict.fromkeys(trees.replaced):
        module = name.partition(":")[0]
        text = (
            f"{name} is a named tuple with the same attributes, since {module} was not imported "
            f"when the model was loaded; import it before qfuse.load to get the class"
        )
        notes.append(Noted("saving", text))
    return replace(report, events=(*report.events, *notes))
