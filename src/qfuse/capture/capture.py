"""Capture a model with an example call as a functional graph with its signature."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from qfuse.capture._export_api import (
    decompose,
    export,
    flatten,
    higher_order_name,
    keyword_names,
    orig_arg_names,
    trace_errors,
)
from qfuse.capture.aliasing import returned_buffers, returned_inputs, written_inputs
from qfuse.capture.constants import (
    check_names,
    check_returned,
    check_written,
    collect_constants,
    writes_shared_buffer,
)
from qfuse.capture.containers import note_cache
from qfuse.capture.diagnose import capture_error, empty_error
from qfuse.capture.example import Leaf, Parameters, fake_error, leaves_of, read_call
from qfuse.capture.grad import without_grad
from qfuse.capture.inner_graphs import restore_origins
from qfuse.capture.module import build_module, renamed_inputs
from qfuse.capture.numbers import KnownNumbers
from qfuse.capture.preparation import check_preparation
from qfuse.capture.provenance import UserFiles, annotate, source_line
from qfuse.capture.signature import note_fixed_sizes, read_interface
from qfuse.capture.size_one import check_size_one
from qfuse.capture.training import check_modules, check_random, eval_mode_fix
from qfuse.capture.untouched import untouched
from qfuse.ir.errors import CaptureError
from qfuse.ir.events import EventLog, Noted
from qfuse.ir.graph.stage_graph import MUTABLE_META, CapturedGraph
from qfuse.ir.ops import library as ops
from qfuse.ir.signature._tree_api import is_fake_tensor, tracing, unflatten
from qfuse.ir.signature.caller import Caller
from qfuse.ir.words import a_kind

_ASSIGNED = "assigned during export"
_ATTRIBUTE = re.compile(r"self\.[^\s,]+")
_FLAT_WEIGHTS = "._flat_weights["
_LOAD_WEIGHTS = (
    "load the weights first, such as those that free_source=True gave up: "
    "model.load_state_dict(weights, assign=True)"
)
_CONTROL_FLOW = {
    "cond": "a branch that depends on the values of tensors",
    "while_loop": "a loop that ends when the values of tensors say so",
    "scan": "a loop over the slices of a tensor",
    "associative_scan": "a loop over the slices of a tensor",
    "map_impl": "a loop over the slices of a tensor",
}


@dataclass(frozen=True, slots=True)
class _Traced:
    """A traced program, and the call that it was traced with.

    Attributes:
        program: The program from torch.export.
        parameters: The parameters of ``forward``.
        call: The example ``(args, kwargs)``; ``None`` if the program has none.
        autocast: Whether an ambient autocast is part of the program.
        eval_mode_fix: How to bring the model into eval mode; ``None`` if it is.
        strict: Whether the bytecode of ``forward`` was traced.
    """

    program: ExportedProgram
    parameters: Parameters
    call: tuple[Any, Any] | None
    autocast: bool
    eval_mode_fix: str | None
    strict: bool = False


def capture(
    model: torch.nn.Module | ExportedProgram,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
) -> CapturedGraph:
    """Capture ``model`` as a functional ATen graph, with its quantization ops intact.

    The graph shares memory with the model's weights and buffers; nothing is copied, and neither
    the model nor the example is changed. The grad mode does not matter.

    Args:
        model: A module in eval mode, quantized or not, an ``ExportedProgram``, or the result of
            ``convert_pt2e``.
        args: Positional arguments of an example call; an exported program has its own.
        kwargs: Keyword arguments of the example call.
        dynamic_shapes: In the format of ``torch.export.export``.

    Raises:
        CaptureError: The model cannot be captured; the message names the source line and a fix.
        InputError: ``model`` is a program, and the example does not match it.
    """
    what = tracing()
    if what:
        raise CaptureError(
            f"the model is compiled inside {what}, where tensors have no values",
            fix="compile it outside of that",
        )
    log = EventLog()
    if isinstance(model, ExportedProgram):
        traced = _given(model, dynamic_shapes)
        captured = _make_functional(traced, None, log)
        if args or kwargs:
            # A program has its own example, so one that is given is only checked.
            caller = Caller(captured.signature)
            caller.check(caller.bind(args, kwargs or {}))
        return captured
    traced = _trace(model, args, kwargs, dynamic_shapes, log)
    captured = _make_functional(traced, dynamic_shapes, log)
    if isinstance(model, torch.fx.GraphModule):
        return captured  # It has no Python code that could branch on sizes.
    return check_size_one(captured, traced.program, _SmallModel(model, traced))


def _given(program: ExportedProgram, dynamic_shapes: Any) -> _Traced:
    if dynamic_shapes is not None:
        raise CaptureError(
            "dynamic_shapes was given with a program, whose sizes were decided at its export",
            fix="pass dynamic_shapes to torch.export.export, or pass the module instead",
        )
    parameters = Parameters(orig_arg_names(program))
    # Whether the program was exported in training mode is not recorded, so it is assumed.
    fix = "export programs from models in eval mode: call model.eval() first"
    return _Traced(program, parameters, program.example_inputs, autocast=False, eval_mode_fix=fix)


def _trace(
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    dynamic_shapes: Any,
    log: EventLog,
) -> _Traced:
    _check_model(model)
    check_preparation(model)
    check_modules(model)
    new_args, new_kwargs, parameters = read_call(model, args, kwargs)
    _check_values(model, leaves_of((new_args, new_kwargs), parameters, dynamic_shapes))
    for name, value in parameters.name(new_args, new_kwargs):
        text = note_cache(name, value)
        if text is not None:
            log.add(Noted("capture", text, warn=True))
    program = _export(model, (new_args, new_kwargs), dynamic_shapes, log)
    strict = writes_shared_buffer(model, program, written_inputs(program))
    if strict:
        program = _export(model, (new_args, new_kwargs), dynamic_shapes, log, strict=True)
    restore_origins(program, model)
    training = any(module.training for module in model.modules())
    fix = eval_mode_fix(model) if training else None
    call = (new_args, new_kwargs)
    return _Traced(program, parameters, call, autocast=True, eval_mode_fix=fix, strict=strict)


def _export(
    model: torch.nn.Module,
    call: tuple[Any, Any],
    dynamic_shapes: Any,
    log: EventLog,
    *,
    strict: bool = False,
) -> ExportedProgram:
    try:
        with untouched(model), _warnings_to(log):
            owns, numbers = UserFiles().owns, KnownNumbers(model)
            if not strict:
                with numbers:
                    program = export(model, *call, dynamic_shapes, owns)
                if not numbers.changes(program):
                    return program
            return export(model, *call, dynamic_shapes, owns, strict=strict)
    except trace_errors() as error:
        empty = [value for value in flatten(call)[0] if _is_empty(value)]
        if empty:
            raise empty_error(error, tuple(empty[0].shape)) from error
        raise capture_error(error, "tracing the model") from error


def _is_empty(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 0


@dataclass(frozen=True, slots=True)
class _SmallModel:
    """Traces the model again, for calls with other sizes than the example's."""

    model: torch.nn.Module
    traced: _Traced

    @property
    def leaves(self) -> list[Any]:
        """The leaves of the example, in the order of the signature."""
        return [leaf.value for leaf in _leaves(self.traced, None)]

    def trace(self, leaves: Sequence[Any]) -> ExportedProgram:
        """Trace a call with these leaves and static sizes."""
        in_spec = self.traced.program.call_spec.in_spec
        assert in_spec is not None, "the program has no in_spec"
        call = unflatten(leaves, in_spec)
        return _export(self.model, call, None, EventLog(), strict=self.traced.strict)

    def capture(self, program: ExportedProgram) -> CapturedGraph:
        """Functionalize such a trace."""
        return _make_functional(replace(self.traced, program=program), None, EventLog())


def _check_model(model: object) -> None:
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError(
            "the model is a TorchScript module, whose code torch.export does not see",
            fix="pass the module that it was scripted or traced from",
        )
    if not isinstance(model, torch.nn.Module):
        raise CaptureError(
            f"the model is {a_kind(model)}",
            fix="pass a torch.nn.Module, a torch.export.ExportedProgram, or the result of "
            "convert_pt2e",
        )
    if isinstance(getattr(model, "_orig_mod", None), torch.nn.Module):
        raise CaptureError(
            "the model was compiled with torch.compile already",
            fix="pass the module that was compiled",
        )


def _check_values(model: torch.nn.Module, inputs: Iterable[Leaf]) -> None:
    """Refuse weights that cannot be traced, and a call with some tensors on the meta device."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, value in named.items():
        if is_fake_tensor(value):
            raise fake_error(name)
        if value.is_inference():
            raise CaptureError(
                f"{name} was made in torch.inference_mode, where nothing can be traced",
                fix="make and quantize the model outside of that mode, with torch.no_grad() if "
                "need be, or pass copy.deepcopy(model)",
            )
    given = {leaf.name: leaf.value for leaf in inputs if isinstance(leaf.value, torch.Tensor)}
    if all(value.is_meta for value in (*named.values(), *given.values())):
        return
    for tensors, fix in ((named, _LOAD_WEIGHTS), (given, "pass an example with values")):
        empty = next((name for name, value in tensors.items() if value.is_meta), None)
        if empty is not None:
            raise CaptureError(
                f"{empty} is on the meta device, so it has no values, and other tensors have some",
                fix=fix,
            )


def _check_parts(program: ExportedProgram) -> None:
    """Refuse what a flat graph of plain operators cannot represent."""
    for spec in program.graph_signature.input_specs:
        if spec.kind in {InputKind.CUSTOM_OBJ, InputKind.TOKEN}:
            raise CaptureError(
                f"the model holds {spec.target or spec.arg.name}, which is not a tensor but an "
                f"object of C++ or an effect ({spec.kind.name})",
                fix="keep the part that uses it out of the compiled model",
            )
    files = UserFiles()
    for node in program.graph.nodes:
        name = higher_order_name(node)
        if name is not None:
            what, fix = _what_it_does(name)
            raise CaptureError(
                f"the model calls {name}, {what}",
                where=source_line(node.meta.get("stack_trace"), files),
                fix=fix,
            )
        op = node.target
        if isinstance(op, OpOverload) and op.namespace == "qfuse" and op not in ops.CANONICAL:
            raise CaptureError(
                f"the model calls {op}, an op that qfuse makes: it was optimized or compiled "
                "by qfuse already",
                where=source_line(node.meta.get("stack_trace"), files),
                fix="compile the source model as a whole, or its other parts one by one",
            )


def _what_it_does(name: str) -> tuple[str, str]:
    """Return what a higher-order op is, and what to do about it."""
    apart = "or keep this part out of the compiled model"
    if name.startswith("auto_functionalized"):
        return (
            "which calls an op that writes to its arguments and has no functional form",
            f"use an op that returns its result instead of one that writes it, {apart}",
        )
    if name == "cond":
        return _CONTROL_FLOW[name], f"compute both branches and choose by torch.where, {apart}"
    if name in _CONTROL_FLOW:
        return _CONTROL_FLOW[name], f"write out a fixed number of steps, {apart}"
    return "which contains a subgraph", f"call the ops of the subgraph directly, {apart}"


def _make_functional(traced: _Traced, dynamic_shapes: Any, log: EventLog) -> CapturedGraph:
    check_names(traced.program)
    check_written(traced.program, written_inputs(traced.program))
    check_returned(traced.program)
    try:
        with _warnings_to(log), without_grad(traced.program):
            program = decompose(traced.program, autocast=traced.autocast)
    except trace_errors() as error:
        raise capture_error(error, "making the graph functional") from error
    _check_parts(program)
    return _assemble(traced, program, dynamic_shapes, log)


def _assemble(
    traced: _Traced, program: ExportedProgram, dynamic_shapes: Any, log: EventLog
) -> CapturedGraph:
    constants = collect_constants(traced.program, program)
    leaves = _leaves(traced, dynamic_shapes)
    interface = read_interface(
        program,
        leaves,
        {placeholder: name for placeholder, (name, _) in constants.items()},
        returned_inputs(traced.program),
        returned_buffers(traced.program),
        traced.parameters,
    )
    renamed = renamed_inputs(program)
    module = build_module(
        program, constants, interface.outputs, interface.written, interface.copied, renamed
    )
    annotate(module)
    written = {constants[placeholder][0] for placeholder in interface.written}
    # No rule may fold the value that a written buffer has now.
    for node in module.graph.find_nodes(op="get_attr"):
        if node.target in written:
            node.meta[MUTABLE_META] = True
    # Behind `annotate`, since its errors name the user's line.
    check_random(module, log, eval_mode_fix=traced.eval_mode_fix)
    note_fixed_sizes(interface.signature, leaves, log)
    inputs = tuple(
        replace(spec, placeholder=renamed.get(spec.placeholder or "", spec.placeholder))
        for spec in interface.signature.inputs
    )
    return CapturedGraph(module, replace(interface.signature, inputs=inputs), log)


def _leaves(traced: _Traced, dynamic_shapes: Any) -> list[Leaf]:
    """Return the leaves of the example in the order of the program's in_spec."""
    in_spec = traced.program.call_spec.in_spec
    assert in_spec is not None, "the program has no in_spec"
    # A program without an example still has the structure of the call.
    args, kwargs = traced.call or unflatten(list(range(in_spec.num_leaves)), in_spec)
    # In the order of the structure: a caller may give keywords in any order.
    kwargs = {name: kwargs[name] for name in keyword_names(in_spec)}
    return leaves_of((args, kwargs), traced.parameters, dynamic_shapes)


@contextmanager
def _warnings_to(log: EventLog) -> Iterator[None]:
    """Log torch.export's warnings about the model; re-emit warnings of the model's own code."""
    with warnings.catch_warnings(record=True) as caught:
        # The filters of the process may hide or raise warnings; here all are recorded.
        warnings.simplefilter("always")
        yield
    files = UserFiles()
    for warning in caught:
        text = str(warning.message)
        if _ASSIGNED in text:
            what = text.split(" Such attributes", maxsplit=1)[0]
            # The list in which a recurrent layer of torch keeps its weights: nothing of the user.
            names = _ATTRIBUTE.findall(what)
            if names and all(_FLAT_WEIGHTS in name for name in names):
                continue
            log.add(Noted("capture", f"{what} A compiled model does not assign them.", warn=True))
        elif files.owns(warning.filename):
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
