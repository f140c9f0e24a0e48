"""Run two graphs on the same inputs and compare the results of their layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from qfuse.analysis.accuracy.closeness import ErrorSums
from qfuse.analysis.accuracy.layers import Layer
from qfuse.ir.dtypes import COMPUTE_DTYPES
from qfuse.ir.graph.stage_graph import StageGraph

Sums = defaultdict[str, ErrorSums]
Given = dict[Node, tuple[list[str], torch.Tensor]]
"""Values of nodes, each with the layers that it stands for."""


def _sums() -> Sums:
    return defaultdict(ErrorSums)


@dataclass(slots=True)
class LayerSums:
    """Sums per layer, over any number of batches.

    Attributes:
        own: The error that each layer adds when all layers before it give the float values.
        total: The error at each layer, with that of all layers before it.
        compiled: The difference of the compiled graph to its source at each layer, when all layers
            before it give the values of the source.
        output: The error of the outputs of the quantized source.
        compiled_output: The difference of the compiled outputs to those of the source.
    """

    own: Sums = field(default_factory=_sums)
    total: Sums = field(default_factory=_sums)
    compiled: Sums = field(default_factory=_sums)
    output: ErrorSums = field(default_factory=ErrorSums)
    compiled_output: ErrorSums = field(default_factory=ErrorSums)


@dataclass(frozen=True, slots=True)
class Graphs:
    """The graphs that are compared.

    Attributes:
        reference: The captured float model.
        quantized: The captured quantized model, which is its source run op by op.
        lowered: What the quantized model is compiled to.
        layers: The places that they have in common.
    """

    reference: StageGraph
    quantized: StageGraph
    lowered: StageGraph
    layers: Sequence[Layer]

    def compare(
        self,
        reference_inputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        into: LayerSums,
    ) -> None:
        """Run one batch through all graphs and add what is seen to ``into``."""
        real = _Recorder(self.reference.module, {n.reference for n in self.layers})
        real_out = _outputs(self.reference, real.run(*reference_inputs))
        after = {n.after for n in self.layers if n.after is not None}
        free = _Recorder(self.quantized.module, {n.node for n in self.layers} | after)
        out = _outputs(self.quantized, free.run(*inputs))
        own: Given = {}
        compiled: Given = {}
        for layer in self.layers:
            value = real.values[layer.reference].reshape(free.values[layer.node].shape)
            into.total[layer.path].add(value, free.values[layer.node])
            own[layer.node] = ([layer.path], value)
            if layer.after is not None and layer.lowered is not None:
                paths, _ = compiled.setdefault(layer.lowered, ([], free.values[layer.after]))
                paths.append(layer.path)
        _Forced(self.quantized.module, own, into.own).run(*inputs)
        _Forced(self.lowered.module, compiled, into.compiled).run(*inputs)
        low_out = _outputs(self.lowered, Interpreter(self.lowered.module).run(*inputs))
        _compare_outputs(real_out, out, into.output)
        _compare_outputs(out, low_out, into.compiled_output)


class _Recorder(Interpreter):
    """Keeps the values of some nodes."""

    def __init__(self, module: GraphModule, nodes: set[Node]) -> None:
        super().__init__(module)
        self._nodes = nodes
        self.values: dict[Node, torch.Tensor] = {}

    def run_node(self, n: Node) -> Any:
        """Run a node and keep its value."""
        value = super().run_node(n)
        if n in self._nodes:
            self.values[n] = value
        return value


class _Forced(Interpreter):
    """Compares the values of some nodes with given ones, and goes on with the given ones."""

    def __init__(
        self,
        module: GraphModule,
        given: Given,
        sums: Sums,
    ) -> None:
        super().__init__(module)
        self._given = given
        self._sums = sums

    def run_node(self, n: Node) -> Any:
        """Run a node, compare its value, and return the given one in the same layout."""
        value = super().run_node(n)
        if n not in self._given:
            return value
        paths, real = self._given[n]
        for path in paths:
            self._sums[path].add(real, value)
        # Views of the quantized graph rely on the strides that it was captured with.
        return torch.empty_like(value).copy_(real)


def _outputs(program: StageGraph, values: Sequence[Any]) -> list[Any]:
    """Return the user's outputs, without the mutated values before them."""
    return list(values)[len(program.signature.mutations) :]


def _compare_outputs(reference: Sequence[Any], values: Sequence[Any], into: ErrorSums) -> None:
    for a, b in zip(reference, values, strict=False):
        tensors = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        if tensors and a.dtype in COMPUTE_DTYPES and a.shape == b.shape:
            into.add(a, b)
