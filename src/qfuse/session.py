"""One compilation: the validated request, its steps, and the report about them."""

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
from qfuse.capture.give_up import give_up_weights
from qfuse.capture.training import is_random
from qfuse.cases import keep_cases
from qfuse.cost import (
    CostModel,
    CostProfile,
    kernels_in_use,
    load_or_measure,
)
from qfuse.cost import measure as measure_speeds
from qfuse.cost.times import Times, load_times, save_times
from qfuse.ir.errors import CaptureError, OptionsError
from qfuse.ir.events import EXPAND, HOST, Event, ExpandCause, Lowered, Noted
from qfuse.ir.graph.stage_graph import CLAIM_META, CapturedGraph
from qfuse.ir.quant.spec import dtype_name
from qfuse.ir.signature.caller import Caller
from qfuse.lower import FloatPolicy, Measurer, Wishes
from qfuse.lower.measure.timer import Timer, interleaved_medians
from qfuse.options import BuiltinBackend, Check, Options, Prefer, choice
from qfuse.pipeline import Extensions, Pipeline, Plan
from qfuse.plans import PlanData
from qfuse.profile.memory import live_bytes
from qfuse.replay import replay_plan
from qfuse.report import Report
from qfuse.report.facts import ClaimFacts, Facts, target_facts, utc_now
from qfuse.targets import Target, limited_threads

_MB = 1_000_000

TRACING = threading.RLock()
"""Held while a model is captured and compiled: tracing replaces globals of torch."""


_SETUP = "setup"
_NOTICED_SECONDS = 0.5


@contextmanager
def as_captured() -> Iterator[None]:
    """Disable autocast and autograd: all casts of the graph are explicit nodes."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


@contextmanager
def kept_random_state(captured: CapturedGraph) -> Iterator[None]:
    """Restore the caller's random state: checks of values run a model, which may draw from it."""
    draws = any(map(is_random, captured.graph.nodes))
    with torch.random.fork_rng(devices=[], enabled=draws):
        yield


@dataclass(slots=True)
class Session:
    """One compilation: the request, and the time of each step."""

    target: Target
    check: Check
    options: Options
    float_dtype: torch.dtype | None
    library: kernels.KernelLibrary
    extensions: Extensions
    progress: Callable[[str], None] | None
    measures: bool = False
    times: Times | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    model: str = ""
    notes: list[Noted] = field(default_factory=list)
    """What analyses of the captured model found; reports have them as their last events."""

    @classmethod
    def start(
        cls,
        target: Target | None,
        check: str,
        float_dtype: torch.dtype | None,
        options: Options | Mapping[str, Any] | None,
        progress: Callable[[str], None] | None,
        *,
        measure: bool = False,
    ) -> Session:
        """Validate the request before any slow step."""
        chosen = Options.of(options)
        if not isinstance(measure, bool):
            raise OptionsError(f"measure must be a bool, not {measure!r}")
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
        begin = time.perf_counter()
        library = _library(chosen, backends, progress)
        passed = time.perf_counter() - begin
        extensions = Extensions.installed(library, backends)
        if measure:
            _check_measurable(target, backends)
        with limited_threads(chosen.threads):
            target = target or Target.detect(extensions=False)
        session = cls(target, checked, chosen, float_dtype, library, extensions, progress, measure)
        # Compiled now, or by another process meanwhile; to load the kernels takes no time.
        if passed > _NOTICED_SECONDS:
            session.seconds[_SETUP] = passed
        return session

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Record how long a step takes, without the setup of the machine within it."""
        begin, setup = time.perf_counter(), self.seconds.get(_SETUP, 0.0)
        yield
        passed = time.perf_counter() - begin
        self.seconds[name] = passed - (self.seconds.get(_SETUP, 0.0) - setup)

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
        _refuse_compiled(model)
        self.model = type(model).__name__
        if self.progress is not None:
            self.progress("capturing the model")
        with self.timed("capture"):
            captured = capture(model, args, kwargs, dynamic_shapes=dynamic_shapes)
        _refuse_devices(captured)
        args, kwargs = examples_of(model, args, kwargs)
        caller = Caller(captured.signature)
        return captured, caller.check(caller.bind(args, kwargs))

    def plan(
        self,
        captured: CapturedGraph,
        inputs: Sequence[torch.Tensor],
        wanted: PlanData | None = None,
    ) -> Plan:
        """Rewrite the graph and check its values; replay ``wanted`` if there is such a plan."""
        pipeline = self.pipeline(None if wanted is None else wanted.profile)
        if wanted is None:
            made = pipeline.plan(captured, inputs)
        else:
            made = replay_plan(pipeline, wanted, captured, inputs)
        return keep_cases(self.options.repro, pipeline, captured, inputs, made)

    def pipeline(self, profile: CostProfile | None = None) -> Pipeline:
        """Return the pipeline from the captured to the lowered graph."""
        compiles = self.options.backend != BuiltinBackend.EAGER
        profile = profile or cost_profile(self.target, self._measure_machine)
        cost = CostModel(profile, loops=compiles)
        return Pipeline(
            self.target,
            cost,
            self.library,
            self.check,
            self.float_dtype,
            self.progress,
            self.options.without,
            self.extensions,
            wishes=self._wishes(),
        )

    def _wishes(self) -> Wishes:
        """Return when products run in float, and their measured times."""
        if self.times is None:
            self.times = load_times(self.target, self._kernels)
        measurer = None
        if self.measures:
            timer, budget = product_timer(), self.options.measure_seconds
            measurer = Measurer(budget, timer, say=self.progress)
        return Wishes({}, float_policy(self.options), self.times, measurer)

    def free_source(self, model: Module, captured: CapturedGraph, plan: Plan) -> None:
        """Give up the weights of ``model``; nothing but the plan can be used afterwards."""
        signature, module = plan.lowered.signature, plan.lowered.module
        names = [m.buffer for m in signature.mutations if m.buffer is not None]
        count = give_up_weights(model, captured, [module.get_buffer(name) for name in names])
        text = f"the source model gave up its {count} parameters and buffers, as free_source asks"
        plan.lowered.log.add(Noted("backends", text))

    def keep_times(self) -> None:
        """Store what was measured, for later compilations."""
        if self.measures and self.times is not None and self.times.known:
            save_times(self.times, self.target, self._kernels)

    @property
    def _kernels(self) -> str:
        """What qfuse's own kernels are: the library, and the instruction set that they use."""
        return kernels_in_use() if self.library.available else ""

    def _measure_machine(self, target: Target) -> CostProfile:
        """Measure the speeds of the machine, which happens once for all compilations."""
        if self.progress is not None:
            self.progress("measuring the speeds of this machine (only once)")
        begin = time.perf_counter()
        profile = measure_speeds(target)
        passed = time.perf_counter() - begin
        self.seconds[_SETUP] = self.seconds.get(_SETUP, 0.0) + passed
        return profile

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
            prefer=str(self.options.prefer),
            float_bytes=sum(e.added_bytes for e in plan.lowered.log.of(Lowered)) or None,
            claims=_claims(plan, backend),
            setup_seconds=self.seconds.get(_SETUP),
            capture_seconds=self.seconds.get("capture"),
            plan_seconds=self.seconds.get("plan"),
            compile_seconds=self.seconds.get("compile"),
        )
        events = list(plan.lowered.log)
        if plan.backends and backend == BuiltinBackend.EAGER:
            names = {used.name for used in plan.backends}
            events = [_without_backend(event, names) for event in events]
        if self.options.own_kernels and not plan.backends and not self.library.available:
            # Its first line: what to do is the suggestion of the report.
            why = self.library.reason.partition("\n")[0]
            text = f"qfuse's own kernels are not available: {why}"
            events.append(Noted("lower", text, warn=True))
        return Report((*events, *self.notes), facts, plan.stages, live_bytes(plan.lowered.graph))


def cost_profile(
    target: Target, measure: Callable[[Target], CostProfile] = measure_speeds
) -> CostProfile:
    """Return the measured speeds of a target; the first call on a machine measures them."""
    return load_or_measure(target, measure=measure)


def product_timer() -> Timer:
    """Return what times the alternatives for a product."""
    return interleaved_medians


def _check_measurable(target: Target | None, backends: Sequence[Backend]) -> None:
    """Refuse to measure what another machine or a backend runs."""
    if backends:
        raise OptionsError(
            "measure=True times qfuse's kernels, and a backend of another package runs the model",
            fix="leave out measure or backend",
        )
    here = Target.detect(extensions=False)
    if target is not None and target.machine_fingerprint() != here.machine_fingerprint():
        raise OptionsError(
            "measure=True times kernels on this machine, and target is another one",
            fix="leave out measure, or compile on that machine",
        )


def float_policy(options: Options) -> FloatPolicy:
    """Return when a product may run in float, by the options."""
    return FloatPolicy(options.prefer is Prefer.SPEED, options.float_memory * _MB)


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


def _library(
    options: Options, backends: Sequence[Backend], say: Callable[[str], None] | None
) -> kernels.KernelLibrary:
    """Return qfuse's own kernels, if they are wanted."""
    if not options.own_kernels:
        return kernels.KernelLibrary(False, "disabled by option")
    if backends:
        return kernels.KernelLibrary(False, "the backend runs the model")
    return kernels.load(say)


def examples_of(
    model: Module | ExportedProgram, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the example inputs; by default, those stored in an exported program."""
    own = getattr(model, "example_inputs", None)
    if not args and not kwargs and isinstance(model, torch.export.ExportedProgram) and own:
        return own[0], dict(own[1])
    return args, dict(kwargs or {})


def _refuse_compiled(model: object) -> None:
    """Refuse a model that is compiled, or that a compiled one is a part of."""
    parts = model.named_modules() if isinstance(model, Module) else ()
    for name, part in parts:
        if isinstance(part, CompiledModule):
            raise CaptureError(
                f"{name or 'the model'} was compiled by qfuse already",
                fix="compile the source model as a whole, or its other parts one by one",
            )


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
