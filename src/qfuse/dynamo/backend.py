"""Compile the graphs of Dynamo as :func:`qfuse.compile` does."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from threading import Lock
from typing import Any

import torch
from torch.fx import GraphModule

from qfuse import api
from qfuse.dynamo._dynamo_api import (
    current_compilation,
    input_name,
    outside_tracing,
    spans_of,
    traced_module,
    version_of,
)
from qfuse.dynamo.journal import JOURNAL
from qfuse.dynamo.views import Results
from qfuse.dynamo.weights import BoundGraph, bind_weights
from qfuse.ir.errors import (
    CaptureError,
    InputError,
    NormalizeError,
    OptionsError,
    QfuseError,
    TrainingError,
)
from qfuse.ir.events import Noted
from qfuse.options import Options
from qfuse.report import Report
from qfuse.report.facts import Facts
from qfuse.report.structured import log_report

_OWN = ("check", "float_dtype", "target")
_ENTRY_POINT = "torch.compile"
# As many as Dynamo allows for one function.
_MOST = 8


def backend(
    module: GraphModule,
    example: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one graph: ``torch.compile(model, backend="qfuse", options={...})``.

    A graph that cannot be captured runs eagerly, with a warning that says why.

    Args:
        module: The graph of Dynamo.
        example: Its inputs.
        options: The fields of :class:`qfuse.Options`, and ``check``, ``float_dtype`` and
            ``target`` as in :func:`qfuse.compile`.
        mode: Not supported: modes are those of Inductor.

    Raises:
        OptionsError: An option is unknown or has an invalid value.
        TrainingError: The model is in training mode, or an input requires grad.
    """
    request = _request(options, mode)
    owner = current_compilation()
    _refuse_training(module, example)
    try:
        return _CompiledGraph(module, example, request, owner)
    except TrainingError as error:
        raise TrainingError(error.what, where=error.where, fix="call model.eval() first") from error
    except (CaptureError, InputError, NormalizeError) as error:
        _run_eagerly(f"a graph runs eagerly: {error}", owner)
        return module.forward


def _request(options: Mapping[str, Any] | None, mode: str | None) -> dict[str, Any]:
    """Return the keywords of :func:`qfuse.compile`."""
    if mode not in {None, "default"}:
        raise OptionsError(
            f"mode={mode!r} is a mode of Inductor",
            fix='leave it out; qfuse takes options={"check": "site"} and the like',
        )
    given = dict(options or {})
    known = sorted({*_OWN, *(field.name for field in fields(Options))})
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise OptionsError(
            f"unknown option {unknown[0]!r}", fix=f"the options are {', '.join(known)}"
        )
    own = {name: given.pop(name) for name in _OWN if name in given}
    made = Options.of(given)
    if made.free_source:
        raise OptionsError(
            "torch.compile holds the weights of the model, so they cannot be given up",
            fix="leave free_source out, or use qfuse.compile",
        )
    return {**own, "options": made}


def _refuse_training(module: GraphModule, example: Sequence[Any]) -> None:
    if not torch.is_grad_enabled():
        return
    placeholders = module.graph.find_nodes(op="placeholder")
    for node, value in zip(placeholders, example, strict=True):
        is_input = "tensor_dict" not in node.meta or not isinstance(value, torch.nn.Parameter)
        if isinstance(value, torch.Tensor) and value.requires_grad and is_input:
            raise TrainingError(
                f"the input {input_name(node)} requires grad, and a compiled model has no backward "
                "pass",
                fix="call the model under torch.no_grad(), or detach the input",
            )
    traced = traced_module()
    if traced is not None and traced.training and any(p.requires_grad for p in traced.parameters()):
        raise TrainingError(
            "the model is in training mode, and its parameters require grad",
            fix="call model.eval() first",
        )


def _run_eagerly(text: str, owner: object | None) -> None:
    warnings.warn(text, UserWarning, stacklevel=3)
    facts = Facts(entry_point=_ENTRY_POINT, backend="none (this graph runs eagerly)")
    report = Report((Noted("capture", text, warn=True),), facts)
    log_report(report)
    JOURNAL.add(report, owner)


@dataclass(frozen=True, slots=True)
class _Code:
    """The compiled code, and the weights that it was compiled with.

    Attributes:
        run: The code.
        bound: The graph that it was compiled from.
        weights: Position among the inputs of the graph, tensor, and version of each weight; no
            version if the code writes it.
        written: Positions of the other inputs that the code writes.
    """

    run: api.CompiledModel
    bound: BoundGraph
    weights: tuple[tuple[int, torch.Tensor, int | None], ...]
    written: tuple[int, ...]

    @classmethod
    def of(cls, bound: BoundGraph, example: Sequence[Any], request: Mapping[str, Any]) -> _Code:
        with outside_tracing():
            run = api.compile(
                bound.module, bound.inputs, dynamic_shapes=bound.dynamic_shapes, **request
            )
        mutations = run.plan.lowered.signature.mutations
        written = {mutation.buffer for mutation in mutations}
        weights = tuple(
            # The graph writes some of its buffers itself.
            (at, example[at], None if name in written else version_of(example[at]))
            for name, at in bound.held.items()
        )
        indices = (m.input_index for m in mutations if m.input_index is not None)
        return cls(run, bound, weights, tuple(bound.keep[index] for index in indices))

    def changed(self, inputs: Sequence[Any]) -> list[int]:
        """Return the positions of weights that are not the tensors and values that they were."""
        return [
            position
            for position, tensor, version in self.weights
            if inputs[position] is not tensor
            or (version is not None and version_of(tensor) != version)
        ]

    def overlap(self, inputs: Sequence[Any]) -> bool:
        """Whether an input shares memory with a weight, and the code writes one of them."""
        states = _spans(tensor for _, tensor, version in self.weights if version is None)
        if states and _meet(states, _spans(inputs[at] for at in self.bound.keep)):
            return True
        written = _spans(inputs[at] for at in self.written)
        return bool(written) and _meet(written, _spans(w for _, w, _ in self.weights))


def _spans(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    return [span for tensor in tensors for span in spans_of(tensor)]


def _meet(spans: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]) -> bool:
    return any(low < end and start < high for low, high in spans for start, end in others)


class _CompiledGraph:
    """What Dynamo calls; thread-safe."""

    def __init__(
        self,
        source: GraphModule,
        example: Sequence[Any],
        request: Mapping[str, Any],
        owner: object | None,
    ) -> None:
        self._source = source
        self._request = request
        self._owner = owner
        self._compilations = 0
        self._told: set[str] = set()
        self._compiling = Lock()
        self._loose: set[int] = set()
        self._results = Results.of(source.graph)
        self._code: _Code | None = self._compile(example)

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph."""
        code = self._code
        if code is None:
            return self._source.forward(*inputs)
        # Dynamo does not guard on weights, and the code holds them in another layout.
        changed = code.changed(inputs)
        if changed:
            code = self._again(inputs)
            if code is None:
                return self._source.forward(*inputs)
        if code.overlap(inputs):
            return self._eagerly("an input shares memory with a weight, and one is written", inputs)
        try:
            made = code.run(*[inputs[i] for i in code.bound.keep])
        except InputError as error:
            # Nothing was run.
            return self._eagerly(str(error), inputs)
        return made if self._results.is_plain else self._results.after(made, inputs)

    def _eagerly(self, why: str, inputs: Sequence[Any]) -> Any:
        if why not in self._told and len(self._told) < _MOST:
            self._told.add(why)
            _run_eagerly(f"a call runs eagerly: {why}", self._owner)
        return self._source.forward(*inputs)

    def _compile(self, example: Sequence[Any]) -> _Code:
        returned = self._results.returned
        bound = bind_weights(self._source, example, returned, self._loose)
        code = _Code.of(bound, example, self._request)
        self._compilations += 1
        report = code.run.report
        facts = replace(report.facts, entry_point=_ENTRY_POINT)
        JOURNAL.add(replace(report, facts=facts), self._owner)
        return code

    def _again(self, inputs: Sequence[Any]) -> _Code | None:
        """Return code for weights that were changed or replaced; give up after a few times."""
        with self._compiling:
            # Another thread may have compiled for them meanwhile.
            changed = self._code.changed(inputs) if self._code is not None else ()
            if changed:
                self._code = self._recompiled(inputs, changed)
            return self._code

    def _recompiled(self, inputs: Sequence[Any], changed: Sequence[int]) -> _Code | None:
        # A buffer that another graph of the model writes will change again.
        self._loose |= {at for at in changed if not isinstance(inputs[at], torch.nn.Parameter)}
        if self._compilations >= _MOST:
            text = f"its weights were changed {_MOST} times, so a graph runs eagerly"
            _run_eagerly(text, self._owner)
            return None
        try:
            return self._compile(inputs)
        except QfuseError as error:
            _run_eagerly(
                f"a graph runs eagerly after its weights were changed: {error}", self._owner
            )
            return None
