"""The graphs between stages: one type per stage boundary, and their calling convention.

A graph is a functional ``torch.fx.Graph`` under a plain ``GraphModule``: its placeholders are the
flat tensor inputs, its ``get_attr`` nodes name detached buffers, and its output is one flat tuple
``(*mutated values, *outputs)``. The graph itself never mutates anything: the writes of the source
program are listed in :class:`Signature.mutations` and performed by the runtime.
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
"""Meta key: the node was matched assuming typical values for parameters without data."""
RULE_META = "qfuse_rule"
"""Meta key: name of the rule that made the node."""
CLAIM_META = "qfuse_claim"
"""Meta key: name of the backend that runs the node."""
SITE_META = "qfuse_site"
"""Meta key: name of the optimized node that a lowered node implements."""
WORK_META = "qfuse_work"
"""Meta key: the cost that a kernel was selected by, on all nodes that implement its op."""
REFUSED_META = "qfuse_refused"
"""Meta key: why no dialect translated the node, as the end of a sentence with "which"."""


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One flat leaf of ``(args, kwargs)``, in the order of the flattened tree.

    Attributes:
        name: The name for messages: ``input_ids`` or ``past[0].key``.
        placeholder: Target of the placeholder it feeds; ``None`` for a leaf that is a constant.
        dtype: Tensor dtype; ``None`` for a leaf that is not a tensor.
        shape: Per axis the exact size, or the name of the symbol that it binds.
        device: Tensor device; ``None`` for a leaf that is not a tensor.
        constant: The value that a constant leaf must equal.
        order: Axes from the largest stride to the smallest if the graph was captured with a
            non-contiguous layout; the input is converted to that layout before a run.
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
        index: Position among the graph's user outputs; ``None`` for a leaf outside the graph.
            Leaves that are the same tensor share a position.
        constant: The value of a leaf that is not a tensor (``None``, an int, ...).
        input_index: The flat input that the leaf *is*, when the model returns an input.
        strides: Strides of the captured value if they are static, because a user may rely on them.
        size: An integer leaf that depends on sizes, as an expression over ``Signature.symbols``.
        order: The axes of a captured value with symbolic strides, from the largest stride to the
            smallest; ``None`` if they are static or leave gaps.
    """

    index: int | None
    constant: Any = None
    input_index: int | None = None
    strides: tuple[int, ...] | None = None
    size: str | None = None
    order: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Mutation:
    """A write of the source program: graph output ``output`` goes to a buffer or to an input.

    Attributes:
        output: Position in the graph's output tuple; mutations come first.
        buffer: Name of the buffer that is written, or ``None``.
        input_index: Index of the flat input (in ``Signature.inputs``) that is written, or ``None``.
    """

    output: int
    buffer: str | None = None
    input_index: int | None = None


@dataclass(frozen=True, slots=True)
class SymbolRange:
    """Range of a symbolic dimension: ``low <= size <= high``; ``hint`` is the traced size.

    Attributes:
        multiple_of: A divisor of every valid size, 1 if unconstrained.
        label: The user's name for it, such as that of a ``Dim``; "" if it is unnamed.
    """

    low: int
    hint: int
    high: int | None
    multiple_of: int = 1
    label: str = ""


@dataclass(frozen=True, slots=True)
class Signature:
    """How to call the graph and how to rebuild the model's result.

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
        defaults: Defaults of the optional parameters of ``forward`` that are plain constants:
            passing the default and omitting the argument are the same call.
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
    """Base of the stage graphs. Stages share one module, which passes to the later stage.

    Attributes:
        module: Plain module; its graph is functional, its constants are detached buffers.
        signature: The calling convention.
        log: The events so far.
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
    """Canonical form: one form per computation, all quantization as ``qfuse`` ops."""

    stage: ClassVar[str] = "normal"


@dataclass(frozen=True, slots=True)
class OptimizedGraph(StageGraph):
    """Fused ops with quantized inputs and outputs."""

    stage: ClassVar[str] = "optimized"


@dataclass(frozen=True, slots=True)
class LoweredGraph(StageGraph):
    """Kernel calls and plain ATen only, and the ops that a backend claimed."""

    stage: ClassVar[str] = "lowered"


def constant_of(node: Node) -> torch.Tensor | None:
    """Return the tensor that a ``get_attr`` node names, or ``None`` for any other node.

    A buffer that the program mutates is not a constant, although it is a ``get_attr``: mutated
    buffers carry ``meta["qfuse_mutable"]``, and this returns ``None`` for them too.
    """
    if node.op != "get_attr" or node.meta.get(MUTABLE_META):
        return None
    module = node.graph.owning_module
    assert module is not None, f"the graph of {node} has no owning module"
    value: torch.Tensor = module.get_buffer(str(node.target))
    return value


def op_name(node: Node) -> str:
    """Return the short name of the target of ``node``, such as ``aten.linear``."""
    return str(node.target).removesuffix(".default") if node.op == "call_function" else node.op


def site_of(node: Node) -> str:
    """Return the name of the optimized node that ``node`` implements, or its own name."""
    return str(node.meta.get(SITE_META, node.name))


def place_of(node: Node) -> Place:
    """Return the source location of ``node`` for messages.

    A node that lowering made in place of another, such as a convolution in another memory format,
    has the name of the optimized node, which is the one that the events before it have.
    """
    source = str(node.meta.get(SOURCE_META, ""))
    module = str(node.meta.get(MODULE_META, ""))
    return Place(site_of(node), op_name(node), source, module)
