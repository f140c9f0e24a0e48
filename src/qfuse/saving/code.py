"""The compiled code of a model in its file: one package, or the parts of a chain."""

from __future__ import annotations

from typing import Any

import torch

from qfuse.backends import BackendOptions
from qfuse.backends.aoti import AotiRunner, chain_runner, load_runner
from qfuse.backends.blocks.chain import CompiledChain
from qfuse.backends.cache import CompiledCode
from qfuse.backends.eager import EagerRunner
from qfuse.backends.prepare import CallPlan
from qfuse.backends.runner import BlockChoice
from qfuse.ir.errors import ModelFileError
from qfuse.kernels.compilation.scratch import scratch_folder
from qfuse.saving.codec import from_data, to_data
from qfuse.saving.container import Chunks, Container
from qfuse.saving.model import CODE, code_member
from qfuse.saving.tensors import TensorReader, TensorWriter

_PLAN = ("layouts", "written", "late", "returned", "names", "sizes")


def isa_of(runner: AotiRunner) -> str:
    """Return the instruction sets that the code needs."""
    codes = runner.code.codes if isinstance(runner.code, CompiledChain) else (runner.code,)
    return " ".join(dict.fromkeys(name for code in codes for name in code.isa.split()))


def write_code(
    runner: AotiRunner, tensors: TensorWriter
) -> tuple[dict[str, Any], dict[str, Chunks]]:
    """Return the description of compiled code, and its members of the file."""
    code = runner.code
    own = {name: value for name, value in runner.constants.items() if name not in code.extras}
    data: dict[str, Any] = {
        "plan": {name: to_data(getattr(runner.plan, name)) for name in _PLAN},
        "constants": {name: tensors.add(name, value) for name, value in own.items()},
    }
    if isinstance(code, CompiledCode):
        return data | _described(code, tensors), {CODE: [code.package]}
    data["wiring"] = to_data(code.wiring)
    data["conditions"] = list(code.conditions)
    data["parts"] = [{**_described(part, tensors), "isa": part.isa} for part in code.codes]
    return data, {code_member(i): [part.package] for i, part in enumerate(code.codes)}


def read_code(
    file: Container, data: dict[str, Any], tensors: TensorReader, eager: EagerRunner
) -> AotiRunner:
    """Load the compiled code of a file.

    Raises:
        ModelFileError: There is no space to unpack it.
        BackendError: The code cannot be loaded.
    """
    fields = {name: from_data(value) for name, value in data["plan"].items()}
    names = fields["names"][len(fields["layouts"]) :]
    plan = CallPlan(**fields, state=tuple(eager.module.get_buffer(name) for name in names))
    constants = {name: tensors[number] for name, number in data["constants"].items()}
    # How blocks are compiled is decided already.
    runners = BackendOptions(blocks=BlockChoice.OFF).runners
    try:
        if "parts" in data:
            chain = _chain(file, data, tensors)
            return chain_runner(chain, plan, constants, eager, runners)
        code = _code(file.read(CODE), data, file.manifest["isa"], tensors)
        with scratch_folder("qfuse-package-") as folder:
            package = folder / "model.pt2"
            package.write_bytes(code.package)
            # The loader unpacks to its own folder, so the file may be deleted.
            return load_runner(package, code, plan, constants, eager, runners)
    except OSError as error:
        raise ModelFileError(
            f"its code cannot be unpacked: {error}",
            where=file.name,
            fix="free space in the folder for temporary files, or set TMPDIR to another one",
        ) from error


def _described(code: CompiledCode, tensors: TensorWriter) -> dict[str, Any]:
    return {
        "conditions": list(code.conditions),
        "baked": code.baked,
        "extras": {name: tensors.add(name, value) for name, value in code.extras.items()},
    }


def _chain(file: Container, data: dict[str, Any], tensors: TensorReader) -> CompiledChain:
    codes = tuple(
        _code(file.read(code_member(i)), part, part["isa"], tensors)
        for i, part in enumerate(data["parts"])
    )
    return CompiledChain(codes, from_data(data["wiring"]), tuple(data["conditions"]))


def _code(package: bytes, data: dict[str, Any], isa: str, tensors: TensorReader) -> CompiledCode:
    extras: dict[str, torch.Tensor] = {
        name: tensors[number] for name, number in data["extras"].items()
    }
    return CompiledCode(package, extras, isa, data["baked"], tuple(data["conditions"]))
