"""The pipeline: capture, normalize, optimize, lower, compile. Start reading here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from qfuse.backends import Backend, BackendOptions, Runner, compile_claimed, compile_graph
from qfuse.cost.model import CostModel
from qfuse.extensions import Extension
from qfuse.ir.errors import RULE_ERRORS, BackendError, OptionsError
from qfuse.ir.events import Checked, Exactness, Noted, Place, RolledBack
from qfuse.ir.foreign import list_foreign
from qfuse.ir.graph.stage_graph import CapturedGraph, LoweredGraph, OptimizedGraph, StageGraph
from qfuse.ir.graph.text import to_text
from qfuse.ir.quant.spec import dtype_name
from qfuse.ir.signature.run import run_flat, running_examples
from qfuse.ir.signature.strides import with_measured_strides
from qfuse.ir.stages.verify import verify
from qfuse.kernels import KernelLibrary
from qfuse.lower import Wishes, claim_ops, lower
from qfuse.lower.kernels.installed import MakeKernels, installed_kernels
from qfuse.lower.kernels.registry import all_kernels
from qfuse.model_check import ModelCheck, bisect_count
from qfuse.normalize import normalize
from qfuse.optimize import checked_rules, installed_rules, optimize, rewrite_names
from qfuse.options import Check
from qfuse.plans import PlanData, decisions_of, package_versions, record_plan
from qfuse.rewrite.budget import RewriteBudget, rule_of
from qfuse.rewrite.clone import clone
from qfuse.rewrite.compare import Verdict
from qfuse.rewrite.context import RewriteContext
from qfuse.rewrite.scheduled import ScheduledRules
from qfuse.rewrite.site_check import SiteChecker
from qfuse.snapshots import StageRecorder, StageSnapshot
from qfuse.targets.target import Target

_ATTEMPTS = 8
EVERY_REWRITE = "pipeline/every-rewrite"
"""In place of a key: no rewrite at all."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A lowered graph, and how it is compiled and checked.

    Attributes:
        lowered: The graph.
        reference: The outputs of its source, if they were measured.
        backends: The backends of other packages that claimed ops.
        stages: Snapshots of the graph at the four stages.
        data: The decisions, to save, edit, compare and replay.
        text: The graph as text, if it was saved: its nodes have no types then.
    """

    lowered: LoweredGraph
    reference: ModelCheck | None = None
    backends: tuple[Backend, ...] = ()
    stages: tuple[StageSnapshot, ...] = ()
    data: PlanData | None = None
    text: str = ""

    def __str__(self) -> str:
        return self.text or to_text(self.lowered.graph)

    def to_json(self) -> str:
        """Return the decisions as JSON; a model that was loaded from a file has none."""
        return decisions_of(self.data).to_json()

    def save(self, path: str | Path) -> None:
        """Write the decisions to a file, which ``qfuse.compile(..., plan=path)`` replays.

        Raises:
            CompiledModelError: The model was loaded from a file.
            OptionsError: The file cannot be written.
        """
        decisions_of(self.data).save(path)

    def compile(
        self,
        backend: str,
        options: BackendOptions | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> Runner:
        """Compile the graph with the backends that claimed ops, or with a built-in one.

        Raises:
            BackendError: The backend does not work on this machine or for this graph.
        """
        if self.backends:
            return compile_claimed(self.lowered, self.backends)
        return compile_graph(self.lowered, backend=backend, options=options, progress=progress)

    def confirm(self, runner: Runner, inputs: Sequence[torch.Tensor]) -> Runner:
        """Check the compiled code too; if it is wrong, fall back to eager execution of the graph.

        The check runs on copies: it does not write the caller's tensors or the model's state.
        """
        if self.reference is None:
            return runner
        verdict = self._judge(runner, inputs)
        self.lowered.log.add(_checked("compiled", verdict, self._exactness))
        if verdict.wrong is None:
            return runner
        code = f"the code of the {runner.backend} backend fails its check"
        text = f"{code}, so it is not used and the model runs op by op instead: {verdict.wrong}"
        self.lowered.log.add(Noted("backends", text, warn=True))
        return compile_graph(self.lowered, backend="eager")

    def _judge(self, runner: Runner, inputs: Sequence[torch.Tensor]) -> Verdict:
        """Run compiled code on copies; compare its outputs and the tensors that it mutated."""
        assert self.reference is not None, "nothing to judge by"
        copies = [t.clone() for t in inputs]
        fork = runner.fork()
        try:
            outputs = fork.run(copies)
        except RULE_ERRORS as error:
            # Code that a compiler made does not raise; that of another package may.
            if not self.backends:
                raise
            what = f"the backend {runner.backend} fails on the example inputs: {error!r}"
            raise BackendError(what, fix="repair the backend, or choose another one") from error
        return self.reference.judge([*fork.written(copies), *outputs], self._exactness)

    @property
    def _exactness(self) -> Exactness:
        """How far compiled code may differ from the graph."""
        lossy = any(backend.exactness is Exactness.LOSSY for backend in self.backends)
        return Exactness.LOSSY if lossy else Exactness.ROUNDING


@dataclass(frozen=True, slots=True)
class Extensions:
    """What other packages add to the stages, besides dialects, which `normalize` loads.

    Attributes:
        rules: Rules of the optimize stage.
        kernels: Functions that return new kernels for one lowering.
        backends: The backends that claim ops, first choice first; with them there are no kernels.
    """

    rules: tuple[ScheduledRules, ...] = ()
    kernels: tuple[MakeKernels, ...] = ()
    backends: tuple[Backend, ...] = ()

    @classmethod
    def installed(cls, library: KernelLibrary, backends: Sequence[Backend] = ()) -> Extensions:
        """Load what installed packages add; the rules of backends run after those of packages.

        Raises:
            ExtensionError: A package is broken, or two names clash.
        """
        own = [
            Extension(backend.name, scheduled, f"the backend {backend.name!r}")
            for backend in backends
            for scheduled in list_foreign(
                backend.rules,
                what=f"the function `rules` of the backend {backend.name!r}",
                fix="return a list of qfuse.rewrite.scheduled.ScheduledRules",
            )
        ]
        claimed = {op for backend in backends for op in backend.supported_ops}
        rules = checked_rules((*installed_rules(), *own), claimed)
        kernels = installed_kernels(all_kernels(library))
        return cls(rules, kernels, tuple(backends))

    @property
    def rule_names(self) -> frozenset[str]:
        """The names of the rules."""
        return frozenset(rule.name for scheduled in self.rules for rule in scheduled.rules)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Rewrites a captured graph into a lowered one.

    Attributes:
        target: The machine to lower for.
        cost: Predicts the time of ops and kernels.
        kernels: qfuse's own compiled kernels, or the reason why they are not available.
        check: How values are checked.
        float_dtype: Dtype of unquantized ops; ``None`` keeps the source's dtypes.
        progress: Called with a short description when a step begins.
        without: Names of disabled rewrites of the optimize stage.
        extensions: Rules, kernels and backends of other packages.
        banned: Keys of rewrites that a plan switched off.
        wishes: Kernels that a plan chose, when products may run in float, and measured times.
    """

    target: Target
    cost: CostModel
    kernels: KernelLibrary
    check: Check = Check.OFF
    float_dtype: torch.dtype | None = None
    progress: Callable[[str], None] | None = None
    without: tuple[str, ...] = ()
    extensions: Extensions = field(default_factory=Extensions)
    banned: frozenset[str] = frozenset()
    wishes: Wishes = field(default_factory=Wishes)

    def __post_init__(self) -> None:
        known = rewrite_names() | self.extensions.rule_names
        for name in self.without:
            if name not in known:
                raise OptionsError(
                    f"unknown rewrite {name!r} in without",
                    fix=f"the rewrites are {', '.join(sorted(known))}",
                )

    @property
    def _requested(self) -> frozenset[str]:
        return frozenset(f"optimize/{name}" for name in self.without)

    def budget(self, *more: str, fuel: int | None = None) -> RewriteBudget:
        """Return a budget without what options and a plan switched off, and without ``more``."""
        banned = self._requested | self.banned | set(more)
        return RewriteBudget(
            0 if EVERY_REWRITE in banned else fuel,
            banned,
            by_options=self._requested,
            by_plan=self.banned,
        )

    def rewrite(
        self,
        captured: CapturedGraph,
        inputs: Sequence[torch.Tensor] = (),
        budget: RewriteBudget | None = None,
        watch: Callable[[StageGraph], None] | None = None,
    ) -> LoweredGraph:
        """Run normalize, optimize and lower on a copy of ``captured``.

        Args:
            captured: The graph.
            inputs: Example inputs, for checks of single rewrites.
            budget: Which rewrites are permitted.
            watch: Called with the graph of each stage; it must not change it.
        """
        watch = watch or _ignore
        program = clone(captured)
        verify(program)
        watch(program)
        checker = SiteChecker(program, inputs) if self.check is Check.SITE else None
        budget = budget or self.budget()

        def context(stage: str) -> RewriteContext:
            return RewriteContext(stage, self.cost, budget, checker, strict=False)

        normal = normalize(program, context("normalize"))
        watch(normal)
        more = self.extensions
        optimized = optimize(
            normal, context("optimize"), float_dtype=self.float_dtype, added=more.rules
        )
        watch(optimized)
        lowered = self.lower(optimized, context("lower"))
        watch(lowered)
        return lowered

    def lower(self, optimized: OptimizedGraph, context: RewriteContext) -> LoweredGraph:
        """Lower ``optimized``, which is consumed, to kernels or to what backends claim."""
        more = self.extensions
        if more.backends:
            return claim_ops(optimized, more.backends, context)
        added = [kernel for make in more.kernels for kernel in make()]
        kernels = (*all_kernels(self.kernels), *added)
        return lower(optimized, self.target, self.cost, kernels, context, self.wishes)

    def plan(self, captured: CapturedGraph, inputs: Sequence[torch.Tensor]) -> Plan:
        """Rewrite the graph, check the values of the model, and undo rewrites that break them.

        Raises:
            CaptureError: The model does not run on its example inputs.
            CheckError: Values are wrong with every rewrite undone.
        """
        budget = self.budget()
        # First, so that a model that does not run is told apart from a rewrite that does not.
        reference = None if self.check is Check.OFF else self._measure(captured, inputs)
        self._say("rewriting the graph")
        recorder = StageRecorder()
        lowered = self.rewrite(captured, inputs, budget, recorder)
        if reference is None:
            return self._finish(lowered, None, budget, recorder)
        self._say("checking values")
        undone: list[RolledBack] = []
        verdict = _verdict(lowered, reference, inputs)
        while verdict.wrong is not None and budget.allowed and len(undone) < _ATTEMPTS:
            self._say("looking for the rewrite that changed values")
            key = self._find(captured, inputs, reference, budget)
            undone.append(_rolled_back(key, verdict, budget.places[key]))
            budget = self.budget(*budget.banned, key, *_whole_rule(key, undone[:-1]))
            lowered = self.rewrite(captured, inputs, budget, recorder)
            verdict = _verdict(lowered, reference, inputs)
        if verdict.wrong is not None:
            undone.append(_rolled_back(EVERY_REWRITE, verdict))
            budget = self.budget(EVERY_REWRITE)
            lowered = self.rewrite(captured, inputs, budget, recorder)
            verdict = _verdict(lowered, reference, inputs)
        for event in undone:
            lowered.log.add(event)
        lowered.log.add(_checked("model", verdict))
        if verdict.wrong is not None:
            raise reference.unkept(verdict.wrong, captured, inputs)
        signature = with_measured_strides(lowered.signature, reference.outputs)
        lowered = replace(lowered, signature=signature)
        return self._finish(lowered, reference, budget, recorder)

    def _finish(
        self,
        lowered: LoweredGraph,
        reference: ModelCheck | None,
        budget: RewriteBudget,
        recorder: StageRecorder,
    ) -> Plan:
        """Return the plan with its decisions as data."""
        backends = self.extensions.backends
        sites, chosen = record_plan(lowered.log, budget, self._requested, self.banned)
        data = PlanData(
            package_versions(self.target),
            self.target,
            self.cost.profile,
            self.without,
            self.kernels.available,
            None if self.float_dtype is None else dtype_name(self.float_dtype),
            tuple(backend.name for backend in backends),
            sites,
            chosen,
            *self.wishes.floats.recorded,
            self.cost.loops,
            self.wishes.times.used,
        )
        return Plan(lowered, reference, backends, tuple(recorder.stages), data)

    def _measure(self, captured: CapturedGraph, inputs: Sequence[torch.Tensor]) -> ModelCheck:
        with running_examples():
            return ModelCheck.measure(captured, inputs, self.float_dtype)

    def _say(self, step: str) -> None:
        if self.progress is not None:
            self.progress(step)

    def _find(
        self,
        captured: CapturedGraph,
        inputs: Sequence[torch.Tensor],
        reference: ModelCheck,
        budget: RewriteBudget,
    ) -> str:
        """Return the key of the first rewrite after which values are wrong, found by bisection."""

        def holds(fuel: int) -> bool:
            some = self.rewrite(captured, inputs, self.budget(*budget.banned, fuel=fuel))
            return _verdict(some, reference, inputs).wrong is None

        return budget.allowed[bisect_count(len(budget.allowed), holds) - 1]


def _ignore(_program: StageGraph) -> None:
    """Ignore the graphs of the stages."""


def _verdict(
    lowered: LoweredGraph, reference: ModelCheck, inputs: Sequence[torch.Tensor]
) -> Verdict:
    """Run a lowered graph and compare its outputs; one that cannot run is wrong too."""
    try:
        outputs = run_flat(lowered.module, inputs)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        what, _, _ = str(error).partition("\n\nWhile executing")
        return Verdict(f"the rewritten graph does not run: {what.strip()}")
    return reference.judge(outputs)


def _whole_rule(key: str, undone: Sequence[RolledBack]) -> set[str]:
    """Return the rule of ``key`` if it broke values before: then disable all its rewrites."""
    rule = rule_of(key)
    return {rule} if any(rule_of(event.key) == rule for event in undone) else set()


def _rolled_back(key: str, verdict: Verdict, *places: Place) -> RolledBack:
    stage, _, rest = key.partition("/")
    rule = rest.partition("@")[0]
    return RolledBack(
        stage, rule, key, places, verdict.wrong or "", error=verdict.error, allowed=verdict.allowed
    )


def _checked(what: str, verdict: Verdict, exactness: Exactness = Exactness.ROUNDING) -> Checked:
    note = verdict.wrong or ""
    passed = verdict.wrong is None
    error, allowed = verdict.error, verdict.allowed
    return Checked("check", what, passed, exactness, error, allowed, note)
