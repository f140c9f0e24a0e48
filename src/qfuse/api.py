"""The public entry points: :func:`compile` and :func:`explain`."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.nn import Module

from qfuse import kernels
from qfuse.backends import Backend, BackendOptions, CompiledModule, chosen_backends
from qfuse.capture import capture
from qfuse.cost import CostModel, load_or_measure
from qfuse.ir.errors import OptionsError
from qfuse.ir.events import EXPAND, HOST, Event, ExpandCause, Lowered, Noted
from qfuse.ir.graph.stage_graph import CLAIM_META, CapturedGraph
from qfuse.ir.quant.spec import dtype_name
from qfuse.ir.signature.caller import Caller
from qfuse.options import BuiltinBackend, Check, Options, choice
from qfuse.pipeline import Extensions, Pipeline, Plan
from qfuse.profile import Profile, profile_plan
from qfuse.profile.memory import live_bytes
from qfuse.report import Report
from qfuse.report.facts import ClaimFacts, Facts, target_facts, utc_now
from qfuse.report.strict import require_quantized
from qfuse.targets import Target

# Tracing replaces globals of torch, so one thread of a process compiles at a time.
_TRACING = threading.RLock()


class CompiledModel(CompiledModule):
    """A compiled model, called like the model that it was compiled from.

    Attributes:
        report: What was fused, what was not, and why.
        plan: The lowered graph; ``print(model.plan)`` shows it.
    """

    def __init__(self, module: CompiledModule, plan: Plan, report: Report) -> None:
        super().__init__(module.signature, module.runner)
        self.plan = plan
        self.report = report

    def __repr__(self) -> str:
        report = self.report
        fused, expanded, left = map(len, (report.fused, report.expanded, report.left))
        call = ", ".join(self.signature.parameters)
        ops = f"{fused} quantized ops on kernels, {expanded} expanded"
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
        machine = load_or_measure(Target.detect(extensions=False))
        return profile_plan(self.plan, self.runner, inputs, machine)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModel:
        """Copy the mutable state; code and constants are immutable and shared."""
        copy = CompiledModel(super().__deepcopy__(memo), self.plan, self.report)
        memo[id(self)] = copy
        return copy


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
            the cost model chose float.

    Returns:
        A callable with the model's signature, a ``report`` and a ``plan``.

    Raises:
        CaptureError: The model cannot be exported; the message names the source line and a fix.
        NormalizeError: A quantization op is malformed, or cannot run on this machine.
        OptionsError: An option has an invalid value.
        BackendError: The requested backend does not work on this machine.
        StrictError: ``strict`` is set, and a quantized op runs in float.
        ExtensionError: An installed dialect, rule, kernel or backend is broken, or two of them have
            one name.
    """
    session = _Session.start(target, check, float_dtype, options, progress)
    with _TRACING:
        captured, inputs = session.capture(model, args, kwargs, dynamic_shapes)
        with _as_captured():
            with session.timed("plan"):
                plan = session.pipeline().plan(captured, inputs)
            if strict:
                require_quantized(session.report(plan, None))
            with session.timed("compile"):
                runner = plan.compile(
                    str(session.options.backend), session.backend_options(), session.progress
                )
            runner = plan.confirm(runner, inputs)
    module = CompiledModule(plan.lowered.signature, runner)
    return CompiledModel(module, plan, session.report(plan, runner.backend))


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
    session = _Session.start(target, "off", float_dtype, options, progress)
    with _TRACING:
        captured, inputs = session.capture(model, args, kwargs, dynamic_shapes)
        with _as_captured(), session.timed("plan"):
            plan = session.pipeline().plan(captured, inputs)
    report = session.report(plan, None)
    if strict:
        require_quantized(report)
    return report


@contextmanager
def planning(  # noqa: PLR0913 - one keyword per option
    model: Module | ExportedProgram,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    target: Target | None = None,
    options: Options | Mapping[str, Any] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Iterator[tuple[Pipeline, CapturedGraph, list[torch.Tensor]]]:
    """Capture a model, for analyses; other threads compile when the block is left.

    Arguments and errors are those of :func:`compile`.

    Yields:
        The pipeline that compiles the model, the captured graph, and its flat example inputs.
    """
    session = _Session.start(target, "off", None, options, progress)
    with _TRACING:
        captured, inputs = session.capture(model, args, kwargs, dynamic_shapes)
        with _as_captured():
            yield session.pipeline(), captured, inputs


@contextmanager
def _as_captured() -> Iterator[None]:
    """Disable autocast and autograd: all casts of the graph are explicit nodes."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


@dataclass(slots=True)
class _Session:
    """One compilation: the request, and the time of each step."""

    target: Target
    check: Check
    options: Options
    float_dtype: torch.dtype | None
    library: kernels.KernelLibrary
    extensions: Extensions
    progress: Callable[[str], None] | None
    seconds: dict[str, float] = field(default_factory=dict)
    model: str = ""

    @classmethod
    def start(
        cls,
        target: Target | None,
        check: str,
        float_dtype: torch.dtype | None,
        options: Options | Mapping[str, Any] | None,
        progress: Callable[[str], None] | None,
    ) -> _Session:
        """Validate the request before any slow step."""
        chosen = Options.of(options)
        backends = chosen_backends(chosen.backend)
        checked = choice(Check, check, "check")
        if float_dtype not in {None, torch.float32, torch.bfloat16}:
            raise OptionsError(
                f"float_dtype={float_dtype} is not supported",
                fix="use torch.bfloat16, or None to keep the model's own types",
            )
        if float_dtype is torch.float32:
            float_dtype = None  # Unquantized ops keep the model's own dtypes anyway.
        if target is not None and not isinstance(target, Target):
            raise OptionsError(
                f"target must be a qfuse.Target, not {type(target).__name__}",
                fix="use qfuse.Target.detect(), or None for this machine",
            )
        if progress is not None and not callable(progress):
            raise OptionsError(f"progress must be a function of a text, not {progress!r}")
        if progress is not None:
            progress("detecting the machine")
        library = _library(chosen, backends)
        extensions = Extensions.installed(library, backends)
        target = target or Target.detect(extensions=False)
        return cls(target, checked, chosen, float_dtype, library, extensions, progress)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Record how long a step takes."""
        begin = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - begin

    def capture(
        self,
        model: Module | ExportedProgram,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
        dynamic_shapes: Any,
    ) -> tuple[CapturedGraph, list[torch.Tensor]]:
        """Capture ``model``; return the graph and its flat example inputs."""
        if not isinstance(dynamic_shapes, (Mapping, tuple, list, type(None))):
            raise OptionsError(
                f"dynamic_shapes must be a dict, a tuple or a list, not {dynamic_shapes!r}",
                fix='as in dynamic_shapes={"x": {0: torch.export.Dim("batch", min=1, max=64)}}',
            )
        self.model = type(model).__name__
        if self.progress is not None:
            self.progress("capturing the model")
        with self.timed("capture"):
            captured = capture(model, args, kwargs, dynamic_shapes=dynamic_shapes)
        _refuse_devices(captured)
        args, kwargs = _examples(model, args, kwargs)
        caller = Caller(captured.signature)
        return captured, caller.check(caller.bind(args, kwargs))

    def pipeline(self) -> Pipeline:
        """Return the pipeline from the captured to the lowered graph."""
        cost = CostModel(load_or_measure(self.target))
        return Pipeline(
            self.target,
            cost,
            self.library,
            self.check,
            self.float_dtype,
            self.progress,
            self.options.without,
            self.extensions,
        )

    def backend_options(self) -> BackendOptions:
        """Return the options that the lowered graph is compiled with."""
        return BackendOptions(
            cache=self.options.cache,
            fingerprint=self.target.fingerprint(),
            kernels=self.library.path.name if self.library.path else "",
        )

    def report(self, plan: Plan, backend: str | None) -> Report:
        """Combine the logged events with the facts about the whole compilation."""
        facts = Facts(
            torch_version=self.target.torch_version,
            created=utc_now(),
            model=self.model,
            target=target_facts(self.target),
            backend=backend,
            check=self.check.value,
            float_dtype=None if self.float_dtype is None else dtype_name(self.float_dtype),
            constant_bytes=_constant_bytes(plan),
            claims=_claims(plan, backend),
            capture_seconds=self.seconds.get("capture"),
            plan_seconds=self.seconds.get("plan"),
            compile_seconds=self.seconds.get("compile"),
        )
        events = list(plan.lowered.log)
        if plan.backends and backend == BuiltinBackend.EAGER:
            names = {used.name for used in plan.backends}
            events = [_without_backend(event, names) for event in events]
        if self.options.own_kernels and not plan.backends and not self.library.available:
            events.append(
                Noted(
                    "lower",
                    f"qfuse's own kernels are not available: {self.library.reason}",
                    warn=True,
                )
            )
        return Report(tuple(events), facts, plan.stages, live_bytes(plan.lowered.graph))


def _claims(plan: Plan, backend: str | None) -> tuple[ClaimFacts, ...]:
    nodes = Counter(node.meta.get(CLAIM_META) for node in plan.lowered.graph.nodes)
    # A compiled graph that fails its check runs op by op, by the references.
    used = backend != BuiltinBackend.EAGER
    return tuple(ClaimFacts(b.name, nodes[b.name], b.exactness, used) for b in plan.backends)


def _without_backend(event: Event, names: Collection[str]) -> Event:
    """Return the event of an op that runs by its reference, and not by the backend's code."""
    if not isinstance(event, Lowered) or event.kernel not in names:
        return event
    kernel = EXPAND if event.place.op.startswith("qfuse.") else HOST
    reason = event.kernel, "its code fails the check"
    cause = ExpandCause.NO_KERNEL if kernel == EXPAND else None
    return replace(event, kernel=kernel, losers=(*event.losers, reason), cause=cause)


def _library(options: Options, backends: Sequence[Backend]) -> kernels.KernelLibrary:
    """Return qfuse's own kernels, if they are wanted."""
    if not options.own_kernels:
        return kernels.KernelLibrary(False, "disabled by option")
    if backends:
        return kernels.KernelLibrary(False, "the backend runs the model")
    return kernels.load()


def _examples(
    model: Module | ExportedProgram, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the example inputs; by default, those stored in an exported program."""
    own = getattr(model, "example_inputs", None)
    if not args and not kwargs and isinstance(model, torch.export.ExportedProgram) and own:
        return own[0], dict(own[1])
    return args, dict(kwargs or {})


def _refuse_devices(captured: CapturedGraph) -> None:
    """Refuse tensors on other devices, before a CPU kernel dereferences their addresses."""
    places = [(spec.name, spec.device) for spec in captured.signature.inputs if spec.device]
    places += [(name, value.device) for name, value in captured.module.named_buffers()]
    for name, device in places:
        if device.type != "cpu":
            raise OptionsError(
                f"{name} is on {device}, and qfuse compiles for CPUs",
                fix="move the model and its example inputs to the CPU: model.cpu()",
            )


def _constant_bytes(plan: Plan) -> int:
    # A weight that a library packed has no storage to ask.
    buffers = [b for b in plan.lowered.module.buffers() if b.layout is torch.strided]
    return sum(
        {b.untyped_storage().data_ptr(): b.untyped_storage().nbytes() for b in buffers}.values()
    )
