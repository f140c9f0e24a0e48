"""Accuracy of a quantized model against its float model, layer by layer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, ConsoleOptions, RenderResult
from torch.export import ExportedProgram
from torch.nn import Module

from qfuse import api
from qfuse.analysis.accuracy.closeness import CLOSENESS_NAMES, Closeness
from qfuse.analysis.accuracy.keep import Batch, KeptInFloat, Trials
from qfuse.analysis.accuracy.layers import Layer, match_layers
from qfuse.analysis.accuracy.plot import bars_svg
from qfuse.analysis.accuracy.run import Graphs, LayerSums
from qfuse.analysis.accuracy.table import render_accuracy
from qfuse.analysis.predict import predicted_seconds
from qfuse.ir.errors import OptionsError
from qfuse.ir.events import Place
from qfuse.ir.files import write_output
from qfuse.ir.graph.stage_graph import CapturedGraph, place_of
from qfuse.ir.signature.caller import Caller
from qfuse.ir.signature.run import running_examples
from qfuse.options import Options
from qfuse.report.frame import typed_frame
from qfuse.targets import Target

# Below this cosine, results have nothing in common but chance.
_UNRELATED = 0.3
_PARTS = ("own", "total", "compiled")


@dataclass(frozen=True, slots=True)
class LayerAccuracy:
    """One layer that quantization changes.

    Attributes:
        layer: Dotted path of the module in the float model.
        place: Where its result is computed in the quantized model.
        own: The error of this layer alone: its inputs are those of the float model.
        total: The error at this layer, including that of all layers before it.
        compiled: The compiler's part: the difference of the compiled graph to the quantized model
            run op by op, given its values in front. It is measured at this layer, or at the first
            value after it that is not inside of a fused op; ``None`` without such a value.
    """

    layer: str
    place: Place
    own: Closeness
    total: Closeness
    compiled: Closeness | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "layer": self.layer,
            "op": self.place.op,
            "source": self.place.source,
            "own": self.own.to_dict(),
            "total": self.total.to_dict(),
            "compiled": None if self.compiled is None else self.compiled.to_dict(),
        }


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Accuracy of a quantized model against its float model.

    ``print(accuracy)`` shows it as text, :meth:`to_dict` returns data, :meth:`save_plot` draws it.

    Attributes:
        layers: The layers that quantization changes, the worst first by their own SQNR.
        unchanged: How many layers are the same as in float, given the same inputs.
        output: The quantization's part of the error of the outputs.
        compiled_output: The compiler's part: compiled outputs against the quantized model's.
        keep: What keeping layers in float gains and costs, in the order in which to do it.
        untried: The layers that could not be tried in float, each with the reason.
        batches: How many batches were run.
    """

    layers: tuple[LayerAccuracy, ...]
    unchanged: int
    output: Closeness
    compiled_output: Closeness
    keep: tuple[KeptInFloat, ...] = ()
    untried: tuple[tuple[str, str], ...] = ()
    batches: int = 1

    @property
    def is_unrelated(self) -> bool:
        """Whether no layer computes anything like the one of the float model.

        Even two bits per value keep the direction of most results. Other weights do not.
        """
        found = [layer.own.cosine for layer in self.layers]
        return bool(found) and max(found) < _UNRELATED

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; units are part of the names, infinite numbers are ``None``."""
        return {
            "batches": self.batches,
            "output": self.output.to_dict(),
            "compiled_output": self.compiled_output.to_dict(),
            "unchanged_layers": self.unchanged,
            "layers": [layer.to_dict() for layer in self.layers],
            "keep_in_float": [step.to_dict() for step in self.keep],
            "untried": [{"layer": layer, "reason": reason} for layer, reason in self.untried],
        }

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return :meth:`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def to_dataframe(self) -> Any:
        """Return one row per layer as a ``pandas.DataFrame``.

        Raises:
            OptionsError: pandas is not installed.
        """
        columns: dict[str, type] = {"layer": str, "op": str}
        columns |= {f"{part}_{name}": float for part in _PARTS for name in CLOSENESS_NAMES}
        rows = []
        for layer in self.layers:
            data = layer.to_dict()
            row: dict[str, Any] = {"layer": layer.layer, "op": layer.place.op}
            for part in _PARTS:
                numbers = data[part] or dict.fromkeys(CLOSENESS_NAMES)
                row |= {f"{part}_{name}": number for name, number in numbers.items()}
            rows.append(row)
        return typed_frame(rows, columns)

    def to_svg(self) -> str:
        """Return a bar per layer, its own and its total SQNR, as an SVG image."""
        return bars_svg([(a.layer, a.own.sqnr_db, a.total.sqnr_db) for a in self.layers])

    def save_plot(self, path: str | Path) -> None:
        """Write :meth:`to_svg` to a file.

        Raises:
            OptionsError: The file cannot be written.
        """
        write_output(path, self.to_svg())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        del console, options
        yield from render_accuracy(self)

    def __str__(self) -> str:
        console = Console(width=80, no_color=True, highlight=False)
        with console.capture() as capture:
            console.print(self)
        return capture.get()


def measure_accuracy(  # noqa: PLR0913 - one keyword per option
    quantized: Module | ExportedProgram,
    float_model: Module | ExportedProgram,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    batches: Sequence[Batch] = (),
    keep: int = 3,
    dynamic_shapes: Any = None,
    target: Target | None = None,
    options: Options | Mapping[str, Any] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Accuracy:
    """Compare a quantized model with its float model, layer by layer.

    Both are captured, and their results compared wherever they have a module of the same path: of
    the quantized model run op by op against the float model, which is the quantization's part, and
    of the compiled graph against the quantized model, which is the compiler's part. Neither model
    is changed.

    Args:
        quantized: The model that :func:`qfuse.compile` compiles.
        float_model: The model that it was quantized from.
        args: Example inputs, the first batch.
        kwargs: Keyword inputs of the first batch.
        batches: More batches, each as positional and keyword inputs; their sizes must be those of
            the first one, or vary as ``dynamic_shapes`` says.
        keep: How many layers to try in float at most; 0 tries none.
        dynamic_shapes: As for :func:`qfuse.compile`.
        target: As for :func:`qfuse.compile`.
        options: As for :func:`qfuse.compile`.
        progress: Called with a short description when a step begins.

    Raises:
        CaptureError: A model cannot be exported, or does not run on its inputs.
        OptionsError: An option has an invalid value, or the models have no layer in common.
        InputError: A batch does not fit the first one.
    """
    if keep < 0:
        raise OptionsError(f"keep={keep} is negative", fix="give 0 to try no layer")
    say = progress or _silent

    def capture(model: Module | ExportedProgram) -> AbstractContextManager[api.CapturedModel]:
        return api.captured_model(
            model,
            args,
            kwargs,
            dynamic_shapes=dynamic_shapes,
            target=target,
            options=options,
            progress=progress,
        )

    every: list[Batch] = [(args, dict(kwargs or {})), *batches]
    with ExitStack() as stack:
        real = stack.enter_context(capture(float_model))
        made = stack.enter_context(capture(quantized))
        reference, captured = real.graph, made.graph
        real_inputs, inputs = real.inputs, made.inputs
        say("planning the quantized model")
        lowered = made.pipeline().rewrite(captured)
        graphs = Graphs(reference, captured, lowered, match_layers(reference, captured, lowered))
        if not graphs.layers:
            raise OptionsError(
                "the quantized model and the float model have no layer in common",
                fix="give the float model that it was quantized from, with modules of equal paths",
            )
        sums = LayerSums()
        for index, batch in enumerate(every):
            say(f"comparing layers, batch {index + 1} of {len(every)}")
            # The first one may come from an exported program.
            if index:
                real_inputs, inputs = _flat(reference, captured, batch)
            with running_examples():
                graphs.compare(real_inputs, inputs, sums)
    layers = _ranked(graphs.layers, sums)
    measured = Accuracy(
        tuple(layers),
        len(graphs.layers) - len(layers),
        sums.output.closeness(),
        sums.compiled_output.closeness(),
        batches=len(every),
    )
    if not keep or not isinstance(quantized, Module) or not isinstance(float_model, Module):
        why = "an exported program has no modules to exchange"
        untried = [(a.layer, why) for a in layers] if keep else []
        return _with_trials(measured, (), untried)

    def plan_us(model: Module) -> float:
        with capture(model) as captured:
            pipeline = captured.pipeline()
            return predicted_seconds(pipeline.rewrite(captured.graph), pipeline.cost) * 1e6

    trials = Trials(quantized, float_model, every, plan_us)
    reasons = {a.layer: trials.refuse(a.layer) for a in layers}
    say("trying layers in float")
    steps = trials.greedy([name for name, reason in reasons.items() if reason is None], keep)
    untried = [(name, reason) for name, reason in reasons.items() if reason is not None]
    return _with_trials(measured, tuple(steps), untried)


def _silent(step: str) -> None:
    del step


def _flat(
    reference: CapturedGraph, quantized: CapturedGraph, batch: Batch
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the flat inputs of both graphs for one batch."""
    args, kwargs = batch
    callers = (Caller(graph.signature) for graph in (reference, quantized))
    first, second = (caller.check(caller.bind(args, kwargs)) for caller in callers)
    return first, second


def _ranked(layers: Sequence[Layer], sums: LayerSums) -> list[LayerAccuracy]:
    """Return the layers that add an error of their own, worst first."""
    found = []
    for layer in layers:
        own = sums.own[layer.path].closeness()
        if own.is_exact:
            continue
        compiled = sums.compiled[layer.path].closeness() if layer.lowered is not None else None
        total = sums.total[layer.path].closeness()
        found.append(LayerAccuracy(layer.path, place_of(layer.node), own, total, compiled))
    return sorted(found, key=lambda layer: layer.own.sqnr_db)


def _with_trials(
    measured: Accuracy, keep: tuple[KeptInFloat, ...], untried: Sequence[tuple[str, str]]
) -> Accuracy:
    return Accuracy(
        measured.layers,
        measured.unchanged,
        measured.output,
        measured.compiled_output,
        keep,
        tuple(untried),
        measured.batches,
    )
