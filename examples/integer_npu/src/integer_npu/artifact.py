"""Programs: what a graph becomes ahead of time, as a file without code and without the model.

A program is a list of steps. Claimed nodes are instructions of the accelerator; every other call is
an op of torch, by name. The file is in the safetensors format: constants as tensors, the steps as
JSON in its header. Nothing in it is executed when it is loaded.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.fx import GraphModule, Node

from integer_npu.claims import instruction_of
from integer_npu.encoding import decode, encode, function_of, name_of
from integer_npu.instruction import Instruction, run_instruction
from qfuse.ir.errors import BackendError
from qfuse.ir.graph.stage_graph import CLAIM_META, LoweredGraph, constant_of
from qfuse.ir.refusal import Refusal

VERSION = 1


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled graph.

    Attributes:
        steps: Plain data, one per node in order: ``{"kind": ...}`` and what that kind needs.
        constants: The constants of both parts, by name.
        inputs: Name, dtype and sizes of each input; a size that varies is text.
        outputs: The steps that compute the outputs.
    """

    steps: tuple[dict[str, Any], ...]
    constants: Mapping[str, torch.Tensor]
    inputs: tuple[dict[str, Any], ...]
    outputs: tuple[int, ...]

    def run(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        """Run all steps; return the outputs."""
        values: list[Any] = []
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for step in self.steps:
                values.append(self._step(step, values, inputs))
        return [values[index] for index in self.outputs]

    def _step(
        self, step: Mapping[str, Any], values: list[Any], inputs: Sequence[torch.Tensor]
    ) -> Any:
        match step["kind"]:
            case "input":
                return inputs[step["index"]]
            case "constant":
                return self.constants[step["name"]]
            case "npu":
                constants = {n: self.constants[t].numpy() for n, t in step["constants"].items()}
                operands = [values[index].contiguous().numpy() for index in step["operands"]]
                return run_instruction(step["name"], constants, operands, listed=step["listed"])
            case _:
                args, kwargs = decode(step["args"], values), decode(step["kwargs"], values)
                return function_of(step["name"])(*args, **kwargs)


class NpuRunner:
    """Runs a program; thread-safe, since programs have no state."""

    backend = "integer-npu"

    def __init__(self, program: Program) -> None:
        self.program = program

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run the program on the tensors of the signature.

        Raises:
            BackendError: An input has another dtype or shape than the program.
        """
        for spec, value in zip(self.program.inputs, inputs, strict=True):
            _check_input(spec, value)
        return self.program.run(inputs)

    def written(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return nothing: programs write no tensors."""
        del inputs
        return []

    def fork(self) -> NpuRunner:
        """Return itself, since there is no state to copy."""
        return self


def program_of(lowered: LoweredGraph) -> Program | Refusal:
    """Compile a graph, or say what a program cannot express."""
    if lowered.signature.mutations:
        return Refusal("it writes tensors, and programs have no state")
    builder = _Builder(lowered)
    for node in lowered.graph.nodes:
        refused = builder.add(node)
        if refused is not None:
            return refused
    return Program(tuple(builder.steps), builder.constants, builder.inputs, tuple(builder.outputs))


class _Builder:
    """State of one call of :func:`program_of`."""

    def __init__(self, lowered: LoweredGraph) -> None:
        self.steps: list[dict[str, Any]] = []
        self.constants: dict[str, torch.Tensor] = {}
        self.outputs: list[int] = []
        fed = [leaf for leaf in lowered.signature.inputs if leaf.placeholder is not None]
        self.inputs = tuple(
            {"name": leaf.name, "dtype": str(leaf.dtype), "shape": list(leaf.shape)} for leaf in fed
        )
        self._feeds = [leaf.placeholder for leaf in fed]
        self._module: GraphModule = lowered.module
        self._index: dict[Node, int] = {}

    def add(self, node: Node) -> Refusal | None:
        """Append the step of a node."""
        if node.op == "output":
            (values,) = node.args
            self.outputs = [self._index[value] for value in values]  # type: ignore[union-attr,index]
            return None
        step = self._step(node)
        if isinstance(step, Refusal):
            return step
        self._index[node] = len(self.steps)
        self.steps.append(step)
        return None

    def _step(self, node: Node) -> dict[str, Any] | Refusal:  # noqa: PLR0911 - one per kind
        if node.op == "placeholder":
            return {"kind": "input", "index": self._feeds.index(str(node.target))}
        if node.op == "get_attr":
            value = constant_of(node)
            if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
                return Refusal(f"{node.target} is not a constant tensor")
            return {"kind": "constant", "name": self._constant(str(node.target), value)}
        if CLAIM_META in node.meta and node.target is not operator.getitem:
            return self._instruction(node)
        name = name_of(node.target)
        if name is None:
            return Refusal(f"{node.target} has no name in a file")
        args, kwargs = (encode(part, self._index) for part in (node.args, node.kwargs))
        if isinstance(args, Refusal) or isinstance(kwargs, Refusal):
            return Refusal(f"an argument of {node.target} has no form in a file")
        return {"kind": "torch", "name": name, "args": args, "kwargs": kwargs}

    def _instruction(self, node: Node) -> dict[str, Any] | Refusal:
        made = instruction_of(node)
        if not isinstance(made, Instruction):
            return made
        constants = {
            name: self._constant(f"{node.name}|{name}", torch.from_numpy(value))
            for name, value in made.constants.items()
        }
        operands = [self._index[operand] for operand in made.operands]
        named = {"kind": "npu", "name": made.name, "listed": made.listed}
        return {**named, "constants": constants, "operands": operands}

    def _constant(self, name: str, value: torch.Tensor) -> str:
        self.constants[name] = value.detach()
        return name


def save(runner: NpuRunner, path: str | Path) -> None:
    """Write the program of a compiled model to a file.

    Args:
        runner: ``model.runner`` of a model that was compiled for this backend.
        path: The file.

    Raises:
        BackendError: The model did not become a program; it runs op by op.
    """
    if not isinstance(runner, NpuRunner):
        raise BackendError(f"{type(runner).__name__} runs op by op: there is no program to save")
    program = runner.program
    text = {"steps": program.steps, "inputs": program.inputs, "outputs": program.outputs}
    # Aliases are stored once each: the format has no shared memory.
    tensors = {name: value.clone().contiguous() for name, value in program.constants.items()}
    tensors["."] = torch.tensor(VERSION)
    save_file(tensors, path, {"program": json.dumps(text)})


def load(path: str | Path) -> NpuRunner:
    """Read a program.

    Raises:
        BackendError: The file is of another version.
    """
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        text = json.loads(file.metadata()["program"])
    version = int(tensors.pop(".", torch.tensor(0)))
    if version != VERSION:
        raise BackendError(
            f"{path} is a program of version {version}, not {VERSION}", fix="compile the model anew"
        )
    return NpuRunner(
        Program(tuple(text["steps"]), tensors, tuple(text["inputs"]), tuple(text["outputs"]))
    )


def _check_input(spec: Mapping[str, Any], value: torch.Tensor) -> None:
    sizes = zip(spec["shape"], value.shape, strict=False)
    fits = len(spec["shape"]) == value.dim() and all(w == h for w, h in sizes if isinstance(w, int))
    if str(value.dtype) != spec["dtype"] or not fits:
        raise BackendError(
            f"the input {spec['name']} is {value.dtype}{list(value.shape)}",
            fix=f"give {spec['dtype']}{spec['shape']}",
        )
