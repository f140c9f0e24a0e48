"""Try which layers to keep in float: what that gains at the output, and what it costs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule
from torch.nn import Module

from qfuse.analysis.accuracy.closeness import ErrorSums
from qfuse.ir.dtypes import COMPUTE_DTYPES

Batch = tuple[tuple[Any, ...], Mapping[str, Any]]

# The worst layers that are tried in every round, and the gain in dB that is worth a mention.
_TRIES = 4
_LEAST_DB = 0.1


@dataclass(frozen=True, slots=True)
class KeptInFloat:
    """A layer that is kept in float, together with those before it in the list.

    Attributes:
        layer: Its dotted path.
        gain_db: What the SQNR of the output gains by it.
        output_db: The SQNR of the output then.
        cost_us: The predicted microseconds per call that it costs; negative if it saves time.
    """

    layer: str
    gain_db: float
    output_db: float
    cost_us: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; a gain to equal outputs is ``None``."""
        numbers = {"gain_db": self.gain_db, "output_db": self.output_db, "cost_us": self.cost_us}
        known = {name: n if math.isfinite(n) else None for name, n in numbers.items()}
        return {"layer": self.layer, **known}


@dataclass(frozen=True, slots=True)
class Trials:
    """The quantized and the float model, and the batches that they are compared on.

    Attributes:
        quantized: The quantized model.
        reference: The float model.
        batches: Positional and keyword inputs.
        plan_us: Predicts the microseconds per call of a model.
    """

    quantized: Module
    reference: Module
    batches: Sequence[Batch]
    plan_us: Callable[[Module], float]

    def refuse(self, layer: str) -> str | None:
        """Return why a layer cannot be tried in float, or ``None``."""
        if isinstance(self.quantized, GraphModule):
            return (
                "the model is a converted graph without modules, in which no layer can be "
                "exchanged: quantize again without this layer"
            )
        here, there = (_find(model, layer) for model in (self.quantized, self.reference))
        if here is None or there is None:
            return "it is not a module of both models"
        return "it contains other layers" if list(there.children()) else None

    def greedy(self, layers: Sequence[str], most: int) -> Iterator[KeptInFloat]:
        """Yield the layer that gains most of the worst ones, again and again.

        Args:
            layers: The layers to try, worst first.
            most: The greatest number of layers to keep.
        """
        if not layers or not most:
            return
        wanted = [_run(_copied(self.reference), batch) for batch in self.batches]
        left, kept = list(layers), list[str]()
        before = self._db(kept, wanted)
        before_us = self.plan_us(self._with(kept))
        while left and len(kept) < most and before < math.inf:
            tried = {layer: self._db([*kept, layer], wanted) for layer in left[:_TRIES]}
            best = max(tried, key=lambda layer: tried[layer])
            if not tried[best] - before >= _LEAST_DB:
                return
            kept.append(best)
            left.remove(best)
            after_us = self.plan_us(self._with(kept))
            yield KeptInFloat(best, tried[best] - before, tried[best], after_us - before_us)
            before, before_us = tried[best], after_us

    def _with(self, layers: Sequence[str]) -> Module:
        """Return the quantized model with some layers of the float model."""
        model = _copied(self.quantized)
        for layer in layers:
            model.set_submodule(layer, _copied(self.reference.get_submodule(layer)))
        return model

    def _db(self, layers: Sequence[str], wanted: Sequence[list[torch.Tensor]]) -> float:
        model, sums = self._with(layers), ErrorSums()
        for batch, real in zip(self.batches, wanted, strict=True):
            for a, b in zip(real, _run(model, batch), strict=True):
                sums.add(a, b)
        return sums.closeness().sqnr_db


def _copied(model: Module) -> Module:
    """Copy the modules and the buffers, which a run may write; parameters are shared."""
    shared = {id(p): p for p in model.parameters()}
    return copy.deepcopy(model, shared)


def _find(model: Module, path: str) -> Module | None:
    try:
        return model.get_submodule(path) if path else None
    except AttributeError:
        return None


def _run(model: Module, batch: Batch) -> list[torch.Tensor]:
    args, kwargs = batch
    with torch.no_grad():
        return list(_tensors(model(*args, **kwargs)))


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the float tensors of a nested result, in order."""
    if isinstance(value, torch.Tensor):
        if value.dtype in COMPUTE_DTYPES:
            yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
