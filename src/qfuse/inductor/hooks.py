"""The two passes for Inductor's slots."""

from __future__ import annotations

import hashlib
import json
import threading
import warnings
from collections.abc import Collection
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.fx import Graph, GraphModule, Node

from qfuse.backends.key import package_digest
from qfuse.capture.provenance import UserFiles, source_line
from qfuse.inductor import _inductor_api as inductor
from qfuse.inductor.constants import Constants
from qfuse.inductor.journal import GraphRecord, PassJournal
from qfuse.inductor.merge import STAGE, combine_products, merge_products
from qfuse.inductor.moving import move_quantization
from qfuse.ir.errors import RULE_ERRORS, QfuseError
from qfuse.ir.events import EventLog, Fired, Noted
from qfuse.ir.graph.stage_graph import MODULE_META, SOURCE_META
from qfuse.rewrite.transaction import apply_to, working_copy

BEFORE_FREEZING = "joint_custom_post_pass"
BEHIND_FREEZING = "post_grad_custom_pre_pass"
SLOTS = (BEFORE_FREEZING, BEHIND_FREEZING)

_FREEZE = (
    "its weight is an input of the graph, since weights are not frozen: set "
    "torch._inductor.config.freezing = True before the first call, and call under torch.no_grad()"
)
_GIVEN = "its weight is an input, or written by the graph, so it is not constant"
_PACKAGED = (
    "the weights of an AOTInductor package can be replaced by its user, frozen or not: "
    "qfuse.compile merges such weights"
)
_TRAINING = "the graph computes gradients: compile under torch.no_grad() for inference"


class _Hook(inductor.CustomGraphPass):
    """A pass in a slot; copying returns the same object, since passes are compared by identity."""

    def __init__(self, hooks: Hooks) -> None:
        self.hooks = hooks

    def uuid(self) -> Any:
        """Return the identifier of the pass for Inductor's cache keys."""
        return self.hooks.key

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return self


class BeforeFreezing(_Hook):
    """Runs after Inductor's joint patterns, and before weights are folded and prepacked."""

    def __call__(self, graph: Graph) -> None:
        """Merge siblings."""
        self.hooks.before_freezing(graph)


class BehindFreezing(_Hook):
    """Runs after freezing, where Inductor stores counters with the compiled graph in its caches."""

    def __call__(self, graph: Graph) -> None:
        """Store the report with the compiled graph."""
        self.hooks.behind_freezing(graph)


def is_ours(value: object) -> bool:
    """Whether the value of a slot is one of these passes."""
    return isinstance(value, _Hook)


class Hooks:
    """The passes of the slots, and the state of the graphs that they compile.

    Args:
        journal: Records the events.
    """

    def __init__(self, journal: PassJournal) -> None:
        self.journal = journal
        self.key = _key()
        self._records: WeakKeyDictionary[GraphModule, GraphRecord] = WeakKeyDictionary()
        self._thread = threading.local()
        self.slots: dict[str, _Hook] = {
            BEFORE_FREEZING: BeforeFreezing(self),
            BEHIND_FREEZING: BehindFreezing(self),
        }

    def before_freezing(self, graph: Graph) -> None:
        """Merge siblings whose weights will be frozen; otherwise leave the graph unchanged."""
        module = _module_of(graph)
        training = inductor.is_training(graph)
        record = GraphRecord({"entry point": "inductor", "frozen": False})
        try:
            record.events += _rewrite(module, record, training=training)
        except (*RULE_ERRORS, QfuseError) as error:
            # An error costs the merge and not the compilation: the rewrite was made on a copy.
            record.events.append(_failed(error))
        self._records[module] = record
        self._thread.last = record if training else None
        self.journal.open(record)
        _warn(record)

    def behind_freezing(self, graph: Graph) -> None:
        """Store the report with the compiled graph."""
        module = _module_of(graph)
        record = self._records.get(module)
        if record is None and inductor.is_training(graph):
            # Training: the joint graph was partitioned into forward and backward.
            record = getattr(self._thread, "last", None)
        if record is not None and not record.stamped:
            self.journal.stamp(record)


def _rewrite(module: GraphModule, record: GraphRecord, *, training: bool) -> EventLog:
    """Rewrite a copy of the graph and swap it in atomically; on error, warn and change nothing.

    A bug of qfuse must not make the user's ``torch.compile`` fail.
    """
    values = inductor.frozen_inputs(module.graph)
    record.facts["frozen"] = bool(values)
    log = EventLog()
    _mark(module.graph)
    twin, twins = working_copy(module)
    known = {twins[node]: value for node, value in values.items()}
    # Inductor calls its passes under a fake mode, in which weights could not be compared or joined.
    with inductor.on_real_tensors():
        if not training:
            move_quantization(twin, known, log)
            combine_products(twin, known, log)
        merge_products(twin, Constants(twin.graph, known), _reason(values, training=training), log)
    # Without a rewrite, the caller's graph stays as it is, node by node.
    if log.of(Fired):
        apply_to(module, twin, twins)
    return log


def _reason(values: Collection[Node], *, training: bool) -> str:
    """Return the reason why a weight is not a constant."""
    if training:
        return _TRAINING
    if inductor.is_packaged():
        return _PACKAGED
    return _GIVEN if values else _FREEZE


def _failed(error: Exception) -> Noted:
    text = (
        "the passes failed and left the graph unchanged, which is a bug of qfuse: please "
        f"report it ({error!r})"
    )
    return Noted(STAGE, text, warn=True)


def _warn(record: GraphRecord) -> None:
    """Warn once all state is consistent, since a warning may raise an error."""
    for event in record.events:
        if isinstance(event, Noted) and event.warn:
            warnings.warn(event.text, UserWarning, stacklevel=2)


def _module_of(graph: Graph) -> GraphModule:
    module = graph.owning_module
    assert module is not None, "Inductor hands over the graph of a module"
    return module


def _mark(graph: Graph) -> None:
    """Set the origin of every node, in the format of reports."""
    files = UserFiles()
    for node in graph.nodes:
        source = source_line(node.meta.get("stack_trace"), files)
        if source is not None:
            node.meta.setdefault(SOURCE_META, source)
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        if stack:
            node.meta.setdefault(MODULE_META, str(stack[-1][0]))


def _key() -> str:
    """Return a digest of everything that determines the behavior of the passes."""
    facts = {
        "package": package_digest(),
        "torch": torch.__version__,
        "isa": torch.backends.cpu.get_cpu_capability(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
