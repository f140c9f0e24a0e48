"""The entry point of the lint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.export import ExportedProgram
from torch.nn import Module

from qfuse import api
from qfuse.analysis.placement.check import LintCheck
from qfuse.analysis.placement.checks.clipped_range import ClippedRange, RangeAsRelu
from qfuse.analysis.placement.checks.double_rounding import DoubleRounding
from qfuse.analysis.placement.checks.dynamic_quantization import DynamicQuantization
from qfuse.analysis.placement.checks.float_residual import FloatResidual
from qfuse.analysis.placement.checks.never_computed import NeverComputed
from qfuse.analysis.placement.checks.per_channel_activation import PerChannelActivation
from qfuse.analysis.placement.checks.shared_parameters import CatScales, PoolScales, SharedEdge
from qfuse.analysis.placement.checks.small_layer import SmallLayer
from qfuse.analysis.placement.checks.weight_axis import WeightAxis
from qfuse.analysis.placement.checks.wide_range import WideRange
from qfuse.analysis.placement.finding import LintFinding, Severity, by_importance
from qfuse.analysis.placement.graph import LintGraph
from qfuse.options import Options
from qfuse.targets import Target

CHECKS: tuple[LintCheck, ...] = (
    FloatResidual(),
    DoubleRounding(),
    CatScales(),
    PoolScales(),
    SharedEdge(),
    PerChannelActivation(),
    ClippedRange(),
    RangeAsRelu(),
    WideRange(),
    WeightAxis(),
    NeverComputed(),
    SmallLayer(),
    DynamicQuantization(),
)
"""All checks, in the order of the documentation."""


def lint(  # noqa: PLR0913 - one keyword per option
    model: Module | ExportedProgram,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    target: Target | None = None,
    options: Options | Mapping[str, Any] | None = None,
    progress: Callable[[str], None] | None = None,
) -> list[LintFinding]:
    """Look for quantization that is misplaced or has unsuitable parameters.

    The model is captured and planned as by :func:`qfuse.explain`, and run once on the example
    inputs, op by op: their values matter, since ranges are judged by them.

    Arguments and errors are those of :func:`qfuse.compile`.

    Returns:
        The findings, warnings first, then by predicted microseconds.
    """
    with api.captured_model(
        model,
        args,
        kwargs,
        dynamic_shapes=dynamic_shapes,
        target=target,
        options=options,
        progress=progress,
    ) as captured:
        return lint_captured(captured)


def lint_captured(captured: api.CapturedModel) -> list[LintFinding]:
    """Return what :func:`lint` finds in a model that is captured already."""
    captured.say("looking at the quantization")
    return findings_in(LintGraph.of(captured.graph, captured.inputs, captured.pipeline()))


def note_warnings(captured: api.CapturedModel) -> None:
    """Add the warnings of the lint to the reports that are made of a captured model."""
    found = lint_captured(captured)
    captured.session.notes += [f.note() for f in found if f.severity is Severity.WARNING]


def findings_in(graph: LintGraph) -> list[LintFinding]:
    """Run all checks on the graphs of a model."""
    found = [finding for check in CHECKS for finding in check.find(graph)]
    return sorted(found, key=by_importance)
