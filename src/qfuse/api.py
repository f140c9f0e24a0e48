"""The public entry points: :func:`compile`, :func:`load` and :func:`explain`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.nn import Module

from qfuse.backends import CompiledModule
from qfuse.capture.give_up import checked_source
from qfuse.ir.errors import ModelFileError
from qfuse.ir.files import path_of
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.ir.out_of_memory import out_of_memory_errors
from qfuse.ir.signature.caller import Caller
from qfuse.options import Options
from qfuse.pipeline import Pipeline, Plan
from qfuse.plans import PlanData, read_plan
from qfuse.profile import Profile, profile_plan
from qfuse.replay import planned_options
from qfuse.report import Report
from qfuse.report.strict import require_quantized
from qfuse.report.structured import log_report
from qfuse.saving import StorableModule, kept_examples, read_model
from qfuse.session import TRACING, Session, as_captured, cost_profile, kept_random_state
from qfuse.targets import Target, checked_threads, limited_threads


class CompiledModel(StorableModule):
    """A compiled model, called like the model that it was compiled from.

    Attributes:
        report: What was fused, what was not, and why.
        plan: The lowered graph; ``print(model.plan)`` shows it.
    """

    def __repr__(self) -> str:
        report = self.report
        fused, expanded, left = map(len, (report.fused, report.expanded, report.left))
        call = ", ".join(self.signature.parameters)
        ops = f"{fused} quantized ops on kernels, {expanded} expanded"
        if report.in_float:
            ops += f", {len(report.in_float)} in float"
        name = type(self).__name__
        return f"<{name}({call}): {ops}, {left} quantize/dequantize left; {self.backend}>"

    def profile(self, *args: object, **kwargs: object) -> Profile:
        """Run the lowered graph op by op with a clock on every op, for about two seconds.

        Takes the inputs of a call. They are not written, and the model's state does not change.
        The result has the measured and predicted time of each op, its share of this machine's
        roofline, and the time of the compiled model as a whole.

        Raises:
            InputError: The arguments do not match the captured signature.
        """
        caller = Caller(self.signature)
        inputs = caller.check(caller.bind(args, kwargs))
        with limited_threads(self.threads):
            machine = cost_profile(Target.detect(extensions=False))
            return profile_plan(self.plan, self.runner, inputs, machine)


def compile(  # noqa: A001, PLR0913 - the field's word; one keyword per option
    model: Module | ExportedProgram,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    target: Target | None = None,
    check: str = "pipeline",
    float_dtype: torch.dtype | None = None,
    options: Options | Mapping[str, Any] | None = None,
    progress: Callable[[str], None] | None = None,
    strict: bool = False,
    measure: bool = False,
    plan: str | Path | Mapping[str, Any] | None = None,
    free_source: bool = False,
) -> CompiledModel:
    """Compile a quantized model for this machine.

    Any number of threads may call this; they take turns, since torch traces in one at a time.

    Args:
        model: An ``nn.Module`` in eval mode (quantized by torchao or by hand), an
            ``ExportedProgram``, or a ``GraphModule`` converted by PT2E. A float model compiles too;
            the report notes that nothing is quantized.
        args: Example inputs. Their values matter: value checks run on them.
        kwargs: Example keyword inputs.
        dynamic_shapes: Which sizes may vary, in the format of ``torch.export.export``.
        target: The machine to compile for; the default is this machine.
        check: ``"site"`` compares values after every rewrite, ``"pipeline"`` those of the whole
            model; both undo rewrites that change values. ``"off"`` checks nothing.
        float_dtype: ``torch.bfloat16`` runs unquantized ops in bf16. This changes values beyond
            the rounding of the source's own dtypes, so it is opt-in.
        options: A :class:`qfuse.Options`, or a mapping of its fields.
        progress: Called with a short description when a step begins.
        strict: Whether a quantized op that does not run on a quantized kernel is an error, unless
            it runs in float because that is faster.
        measure: Whether the kernels of a product that are predicted to be close, and its float
            form, are timed on this machine, which takes up to ``Options.measure_seconds``. Later
            compilations know the times. A plan has its own times, and nothing is measured.
        plan: A saved plan to replay, as a path or as parsed JSON: the same rewrites, kernels
            and options, besides what was edited in it.
        free_source: Whether ``model`` gives up its weights, which halves what the process holds:
            as `Options.free_source`.

    Returns:
        A callable with the model's signature, a ``report`` and a ``plan``.

    Raises:
        CaptureError: The model cannot be exported; the message names the source line and a fix.
        NormalizeError: A quantization op is malformed, or cannot run on this machine.
        OptionsError: An option has an invalid value.
        BackendError: The requested backend does not work on this machine.
        OutOfMemoryError: Memory ran out.
        StrictError: ``strict`` is set, and a quantized op runs in float.
        PlanError: The plan does not fit the model, this machine or these versions.
        ExtensionError: An installed dialect, rule, kernel or backend is broken, or two of them have
            one name.
    """
    if free_source:
        options = replace(Options.of(options), free_source=free_source)
    with captured_model(
        model,
        args,
        kwargs,
        dynamic_shapes=dynamic_shapes,
        target=target,
        check=check,
        float_dtype=float_dtype,
        options=options,
        progress=progress,
        measure=measure,
        plan=plan,
    ) as captured:
        return captured.compile(strict=strict)


def load(
    path: str | os.PathLike[str], *, verify: bool = True, threads: int | None = None
) -> CompiledModel:
    """Read a model that :meth:`CompiledModel.save` wrote.

    The weights are mapped into memory, and nothing is compiled. The file holds code, which runs in
    this process: load only files that you trust. Digests find damage, not malice.

    Args:
        path: The file.
        verify: Compare the weights with their digest, which takes about a second per gigabyte. All
            other parts always are.
        threads: How many threads a call of the model uses; by default
            ``torch.get_num_threads()``, whatever the saved model used.

    Raises:
        OptionsError: ``threads`` is not a positive number.
        ModelFileError: There is no such file, it is damaged, it is of another version of qfuse or
            torch, or its code does not run on this machine.
        BackendError: The code cannot be loaded.
    """
    threads = checked_threads(threads)
    return CompiledModel.restored(read_model(path_of(path, ModelFileError), verify=verify), threads)


def explain(  # noqa: PLR0913 - one keyword per option
    model: Module | ExportedProgram,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    target: Target | None = None,
    float_dtype: torch.dtype | None = None,
    options: Options | Mapping[str, Any] | None = None,
    progress: Callable[[str], None] | None = None,
    strict: bool = False,
) -> Report:
    """Plan as :func:`compile` does and return the report, without compiling or running the model.

    Values are not checked, so no rewrite is rolled back. The first call on a machine builds qfuse's
    own kernels and measures the machine, since the plan depends on both.

    Arguments and errors are those of :func:`compile`.
    """
    with captured_model(
        model,
        args,
        kwargs,
        dynamic_shapes=dynamic_shapes,
        target=target,
        float_dtype=float_dtype,
        options=options,
        progress=progress,
    ) as captured:
        return captured.plan(strict=strict)[1]


@dataclass(frozen=True, slots=True)
class CapturedModel:
    """A captured model: plans, reports, compiled models and analyses are made from one capture.

    Attributes:
        session: The request.
        graph: The captured graph, which is never changed.
        inputs: Its flat example inputs.
        wanted: The saved plan that is replayed, if one is.
        source: The model, if it gives up its weights as soon as it is planned for a compilation,
            after which nothing else can be made from the capture.
    """

    session: Session
    graph: CapturedGraph
    inputs: list[torch.Tensor]
    wanted: PlanData | None = None
    source: Module | None = None

    def plan(self, *, strict: bool = False) -> tuple[Plan, Report]:
        """Plan without compiling.

        Raises:
            StrictError: ``strict`` is set, and a quantized op runs in float.
        """
        with self.session.timed("plan"):
            made = self.session.pipeline().plan(self.graph, self.inputs)
        report = self.session.report(made, None)
        if strict:
            require_quantized(report)
        return made, report

    def compile(self, *, strict: bool = False) -> CompiledModel:
        """Plan and compile; errors are those of :func:`compile`."""
        session = self.session
        with session.timed("plan"):
            made = session.plan(self.graph, self.inputs, self.wanted)
        session.keep_times()
        if strict:
            require_quantized(session.report(made, None))
        if self.source is not None:
            session.free_source(self.source, self.graph, made)
        with session.timed("compile"):
            runner = made.compile(
                str(session.options.backend), session.backend_options(), session.progress
            )
        runner = made.confirm(runner, self.inputs)
        module = CompiledModule(made.lowered.signature, runner, session.options.threads)
        report = session.report(made, runner.backend)
        log_report(report)
        return CompiledModel(module, made, report, kept_examples(self.inputs))

    def pipeline(self) -> Pipeline:
        """Return a pipeline for analyses, which times nothing on this machine."""
        # Times of its own: those of the session are recorded in the plan.
        return replace(self.session, measures=False, times=None).pipeline()

    def say(self, step: str) -> None:
        """Tell the user which step begins."""
        if self.session.progress is not None:
            self.session.progress(step)


@contextmanager
def captured_model(  # noqa: PLR0913 - one keyword per option
    model: Module | ExportedProgram,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    target: Target | None = None,
    check: str = "off",
    float_dtype: torch.dtype | None = None,
    options: Options | Mapping[str, Any] | None = None,
    progress: Callable[[str], None] | None = None,
    measure: bool = False,
    plan: str | Path | Mapping[str, Any] | None = None,
) -> Iterator[CapturedModel]:
    """Capture a model once, for all that the block makes of it.

    Other threads compile when the block is left. Arguments and errors are those of :func:`compile`.
    """
    wanted = None if plan is None else read_plan(plan)
    if wanted is not None:
        options, float_dtype = planned_options(wanted, Options.of(options), float_dtype)
    session = Session.start(target, check, float_dtype, options, progress, measure=measure)
    source = checked_source(model) if session.options.free_source else None
    short = out_of_memory_errors("compiling the model")
    with short, TRACING, limited_threads(session.options.threads):
        graph, inputs = session.capture(model, args, kwargs, dynamic_shapes)
        with as_captured(), kept_random_state(graph):
            yield CapturedModel(session, graph, inputs, wanted, source)
