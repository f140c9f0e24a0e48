"""The graphs that travel between rooms: one type per doorway, and how they are called.

A graph is a functional ``torch.fx.Graph`` under a plain ``GraphModule``: its placeholders are the
flat tensor inputs, its ``get_attr`` nodes name detached buffers, and its output is one flat tuple
``(*mutated values, *outputs)``. Nothing in it writes to anything: what the source program writes
is listed in :class:`Signature.mutations` and written by whoever runs the graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import TreeSpec

from qfuse.ir.events import EventLog, Place

SOURCE_META = "qfuse_source"
MODULE_META = "qfuse_module"
MUTABLE_META = "qfuse_mutable"
ASSUMED_META = "qfuse_assumed"
"""Meta key: the node is read as if parameters without values were what they usually are."""


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One flat leaf of ``(args, kwargs)``, in the order of the flattened tree.

    Attributes:
        name: How the user would call it: ``input_ids`` or ``past[0].key``.
        placeholder: Target of the placeholder it feeds; ``None`` for a leaf that is a constant.
        dtype: Tensor dtype; ``None`` for a leaf that is not a tensor.
        shape: Per axis the exact size, or the name of the symbol that it binds.
        device: Tensor device; ``None`` for a leaf that is not a tensor.
        constant: The value that a constant leaf must equal.
        order: Axes from the largest stride to the smallest, where the graph was captured on a
            layout that is not the contiguous one; the input is brought to it before a run.
    """

    name: str
    placeholder: str | None
    dtype: torch.dtype | None = None
    shape: tuple[int | str, ...] = ()
    device: torch.device | None = None
    constant: Any = None
    order: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """One flat leaf of the model's result.

    Attributes:
        index: Position among the graph's user outputs; ``None`` for a leaf outside the graph. Two
            leaves that are one tensor have one position.
        constant: The value of a leaf that is not a tensor (``None``, an int, ...).
        input_index: The flat input that the leaf *is*, when the model returns an input.
        strides: Strides of the captured value where they are static, which a user may rely on.
        size: An integer leaf that depends on sizes, as an expression over ``Signature.symbols``.
    """

    index: int | None
    constant: Any = None
    input_index: int | None = None
    strides: tuple[int, ...] | None = None
    size: str | None = None


@dataclass(frozen=True, slots=True)
class Mutation:
    """A write of the source program: graph output ``output`` goes to a buffer or to an input.

    Attributes:
        output: Position in the graph's output tuple; mutations come first.
        buffer: Name of the constant that is written, or ``None``.
        input_index: Index of the flat input (in ``Signature.inputs``) that is written, or ``None``.
    """

    output: int
    buffer: str | None = None
    input_index: int | None = None


@dataclass(frozen=True, slots=True)
class SymbolRange:
    """Sizes that a symbolic dimension may take: ``low <= size <= high``; ``hint`` was traced.

    Attributes:
        multiple_of: A divisor that every size must have, 1 if there is none.
        label: What the user calls it, such as the name of a ``Dim``; "" if it has no name.
    """

    low: int
    hint: int
    high: int | None
    multiple_of: int = 1
    label: str = ""


@dataclass(frozen=True, slots=True)
class Signature:
    """How to call the graph and how to give its result back.

    Attributes:
        in_spec: Tree of ``(args, kwargs)``.
        inputs: Its leaves.
        out_spec: Tree of the model's result.
        outputs: Its leaves.
        mutations: The writes of the source program.
        symbols: Ranges of the symbolic sizes named in ``InputSpec.shape``.
        parameters: Names of the positional-or-keyword parameters of ``forward``, for binding.
        relations: Conditions on symbols that the capture relied on, as text that
            ``qfuse.ir.signature.size_expr`` evaluates, e.g. ``"s1 == 2*s0"``.
        defaults: Values of the parameters that ``forward`` may be called without, as far as they
            are plain constants: giving one and leaving it out is the same call.
    """

    in_spec: TreeSpec
    inputs: tuple[InputSpec, ...]
    out_spec: TreeSpec
    outputs: tuple[OutputSpec, ...]
    mutations: tuple[Mutation, ...] = ()
    symbols: dict[str, SymbolRange] = field(default_factory=dict)
    parameters: tuple[str, ...] = ()
    relations: tuple[str, ...] = ()
    defaults: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StageGraph:
    """Base of the doorway types. Stages share one module: a later stage owns an earlier one's.

    Attributes:
        module: Plain module; its graph is functional, its constants are detached buffers.
        signature: How it is called.
        log: What happened so far.
    """

    stage: ClassVar[str] = "any"
    module: GraphModule
    signature: Signature
    log: EventLog

    @property
    def graph(self) -> Graph:
        """The FX graph."""
        return self.module.graph


@dataclass(frozen=True, slots=True)
class CapturedGraph(StageGraph):
    """Functional ATen plus source dialects, constants lifted, ``meta["val"]`` everywhere."""

    stage: ClassVar[str] = "captured"


@dataclass(frozen=True, slots=True)
class NormalGraph(StageGraph):
    """One spelling of everything; all quantization as ``qfuse`` ops."""

    stage: ClassVar[str] = "normal"


@dataclass(frozen=True, slots=True)
class OptimizedGraph(StageGraph):
    """Fused ops with quantization at their edges."""

    stage: ClassVar[str] = "optimized"


@dataclass(frozen=True, slots=True)
class LoweredGraph(StageGraph):
    """Kernel calls and plain ATen only."""

    stage: ClassVar[str] = "lowered"


def constant_of(node: Node) -> torch.Tensor | None:
    """Return the tensor that a ``get_attr`` node names, or ``None`` for any other node.

    A buffer that the program writes is not a constant, although it is a ``get_attr``: mutated
    buffers carry ``meta["qfuse_mutable"]`` and give ``None`` too.
    """
    if node.op != "get_attr" or node.meta.get(MUTABLE_META):
        return None
    module = node.graph.owning_module
    assert module is not None, f"the graph of {node} has no owning module"
    value: torch.Tensor = module.get_buffer(str(node.target))
    return value


def op_name(node: Node) -> str:
    """Return the short name of what ``node`` calls, such as ``aten.linear``."""
    return str(node.target).removesuffix(".default") if node.op == "call_function" else node.op


def place_of(node: Node) -> Place:
    """Say where ``node`` comes from, for people."""
    source = str(node.meta.get(SOURCE_META, ""))
    module = str(node.meta.get(MODULE_META, ""))
    return Place(node.name, op_name(node), source, module)
