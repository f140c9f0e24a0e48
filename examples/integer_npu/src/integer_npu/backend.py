"""The backend: claims what has an instruction, and compiles whole graphs to programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from integer_npu.artifact import NpuRunner, program_of
from integer_npu.claims import SUPPORTED, instruction_of
from integer_npu.instruction import Instruction
from qfuse.backends import Backend, Runner
from qfuse.ir.events import Exactness
from qfuse.ir.graph.stage_graph import LoweredGraph
from qfuse.ir.refusal import Refusal
from qfuse.rewrite.prelude import OpOverload


class IntegerNpu(Backend):
    """An accelerator with 8-bit tensors, 32-bit sums and fixed-point factors."""

    name: ClassVar[str] = "integer-npu"
    supported_ops: ClassVar[frozenset[OpOverload]] = SUPPORTED
    # A fixed-point product rounds at other ties than a float product.
    exactness: ClassVar[Exactness] = Exactness.LOSSY

    def is_legal(self, node: Node) -> Literal[True] | Refusal:
        """Claim a node that has an instruction."""
        found = instruction_of(node)
        return found if isinstance(found, Refusal) else True

    def implement(self, node: Node) -> Callable[..., Any]:
        """Return a function that runs the instruction; used beside other backends."""
        made = instruction_of(node)
        assert isinstance(made, Instruction), "the node was claimed"
        places = _places(node, made.operands)

        def run(*args: Any, **kwargs: Any) -> Any:
            tensors = list(_tensors((args, kwargs)))
            return made.run([tensors[place] for place in places])

        return run

    def compile(self, lowered: LoweredGraph) -> Runner:
        """Compile to a program, or run op by op what a program cannot express."""
        program = program_of(lowered)
        return super().compile(lowered) if isinstance(program, Refusal) else NpuRunner(program)


def _places(node: Node, operands: Sequence[Node]) -> list[int]:
    """Return the position of each operand among all tensors of a call."""
    order: list[Node] = []
    map_arg((node.args, node.kwargs), order.append)
    return [order.index(operand) for operand in operands]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a call, in the order in which ``map_arg`` visits nodes."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


backend = IntegerNpu()
"""The backend of the entry point."""
