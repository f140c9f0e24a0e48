"""``qfuse.bisect``: from a difference to the rewrite that causes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.nn import Module

from qfuse.bisection.difference import Differs, check_predicate, largest, make_differs
from qfuse.bisection.result import Bisection, Culprit, Origin
from qfuse.bisection.run import ExampleCall
from qfuse.bisection.search import RewriteSearch
from qfuse.ir.signature.run import running_examples
from qfuse.kernels import KernelLibrary
from qfuse.options import BuiltinBackend, Options
from qfuse.pipeline import Plan
from qfuse.plans.fit import recorded_off
from qfuse.session import TRACING, Session, as_captured, examples_of, kept_random_state
from qfuse.targets import Target


def bisect(  # noqa: PLR0913 - one keyword per option
    model: Module | ExportedProgram,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    differs: Differs | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    dynamic_shapes: Any = None,
    target: Target | None = None,
    check: str = "pipeline",
    float_dtype: torch.dtype | None = None,
    options: Options | Mapping[str, Any] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Bisection:
    """Find what makes a compiled model differ from its source on these inputs.

    The graph is rewritten and run about ``log2(n)`` times for ``n`` rewrites, op by op. What
    :func:`qfuse.compile` rolls back by itself is left out. A call with the options that are
    returned was run, and does not differ.

    Args:
        model: The model, as for :func:`qfuse.compile`.
        args: The inputs that show the difference.
        kwargs: Keyword inputs.
        differs: Takes the result and the expected one, in the structure of the model's result, and
            says whether they differ.
        rtol: Relative tolerance, instead of a predicate; 0 if only ``atol`` is given.
        atol: Absolute tolerance, likewise.
        dynamic_shapes: As for :func:`qfuse.compile`, and so are all that follow.
        target: The machine to compile for.
        check: How values are checked.
        float_dtype: Dtype of unquantized ops.
        options: Further options.
        progress: Called with a short description of every step.

    Raises:
        OptionsError: There is neither a tolerance nor a predicate, or an option is invalid.
        CaptureError, NormalizeError, BackendError, ExtensionError: As :func:`qfuse.compile`.
    """
    judge = make_differs(differs, rtol, atol)
    session = Session.start(target, check, float_dtype, options, progress)
    say = progress or _ignore
    with TRACING:
        captured, inputs = session.capture(model, args, kwargs, dynamic_shapes)
        call = ExampleCall(*examples_of(model, args, kwargs))
        say("running the model")
        with running_examples():
            expected = call.run_source(model, captured)
        with as_captured(), kept_random_state(captured):
            own = call.run_graph(captured)
            if judge(own, expected):
                check_predicate(differs, own, expected)
                return Bisection(Origin.CAPTURE, error=largest(own, expected), note=_CAPTURE)
            pipeline = session.pipeline()
            plan = pipeline.plan(captured, inputs)
            search = RewriteSearch.quiet(
                pipeline,
                captured=captured,
                inputs=inputs,
                call=call,
                expected=expected,
                differs=judge,
                say=say,
            )
            if search.wrong(plan.lowered):
                return _rewrites(search, plan)
            return _backend(session, search, plan)


_CAPTURE = "torch.export or the decomposition changed it; compare with torch.export.export alone"
_STAYS = "this is a bug of qfuse, or values that the model's own rounding decides; please report it"


def _rewrites(search: RewriteSearch, plan: Plan) -> Bisection:
    """Find the rewrites behind a difference, and how to turn them off."""
    assert plan.data is not None, "the pipeline records its decisions"
    error = search.error(plan.lowered)
    before = recorded_off(plan.data)
    culprits, off = search.find(before)
    if not culprits:
        return Bisection(Origin.EXPANSION, error=error, runs=search.runs, note=_STAYS)
    search.say("verifying what turns it off")
    fixed = replace(search.pipeline, banned=off).plan(search.captured, search.inputs)
    result = Bisection(
        culprits[0].origin,
        tuple(culprits),
        error,
        search.error(fixed.lowered),
        _options(search, culprits, before),
        fixed.data,
        verified=not search.wrong(fixed.lowered),
    )
    return replace(result, runs=search.runs)


def _options(
    search: RewriteSearch, culprits: list[Culprit], before: frozenset[str]
) -> dict[str, Any] | None:
    """Return options that turn the culprits off, if a run shows that they do."""
    rules = sorted({one.rule for one in culprits})
    if all(one.key.startswith("optimize/") for one in culprits):
        without = (*search.pipeline.without, *rules)
        other = replace(search.pipeline, without=without)
        found: dict[str, Any] = {"without": list(without)}
    elif all(one.kernel.startswith("qfuse.") for one in culprits):
        other = replace(search.pipeline, kernels=KernelLibrary(False, "disabled by option"))
        found = {"own_kernels": False}
    else:
        return None
    graph = other.rewrite(search.captured, search.inputs, other.budget(*before))
    return None if search.wrong(graph) else found


def _backend(session: Session, search: RewriteSearch, plan: Plan) -> Bisection:
    """Compare the compiled code of a graph that is right when it is run op by op."""
    backend = session.options.backend
    search.say("compiling the graph")
    runner = plan.compile(str(backend), session.backend_options(), None)
    runner = plan.confirm(runner, search.inputs)
    got = search.call.run_compiled(plan.lowered, runner)
    if not search.differs(got, search.expected):
        return Bisection(Origin.NONE, error=largest(got, search.expected), runs=search.runs)
    return Bisection(
        Origin.BACKEND,
        error=largest(got, search.expected),
        error_without=search.error(plan.lowered),
        options={"backend": str(BuiltinBackend.EAGER)},
        verified=True,
        runs=search.runs,
        note=f"the graph is right op by op, and the code of {runner.backend} is not",
    )


def _ignore(step: str) -> None:
    del step
