"""Shortcuts in torch.export: the tests' only file with private API of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._ops import OpOverload
from torch._subclasses import fake_impls
from torch.export import exported_program

_COLLECT = "_collect_all_valid_cia_ops"
_OVERRIDE = "_override_composite_implicit_decomp"
_KEYS = ("_AUTOGRAD_ALIAS_BACKEND_KEYS_TO_OVERRIDE", "_BACKEND_KEYS_TO_OVERRIDE")
_DEVICES = ("CPU", "CUDA", "Meta")

Override = Callable[[dict[OpOverload, Any]], AbstractContextManager[None]]


def shorten(patch: pytest.MonkeyPatch) -> None:
    """Make a small capture take a third of the time.

    Each export lists all composite ops of torch, and overrides them for a dozen kinds of devices.
    Here the list is made again only when ops were registered, the overrides are for devices that
    tests have, and an op that was overridden once gets the same kernels again.
    """
    collect = getattr(exported_program, _COLLECT)
    known: dict[int, Any] = {}

    def collected() -> Any:
        count = len(torch._C._dispatch_get_all_op_names())
        if count not in known:
            known.clear()
            known[count] = collect()
        return known[count]

    patch.setattr(exported_program, _COLLECT, collected)
    for name in _KEYS:
        keys = [key for key in getattr(exported_program, name) if key.name.endswith(_DEVICES)]
        patch.setattr(exported_program, name, keys)
    patch.setattr(exported_program, _OVERRIDE, _remembered(getattr(exported_program, _OVERRIDE)))


@dataclass(frozen=True)
class _Overridden:
    """What overriding an op changes: its kernels for Python's dispatcher, and its fake rule."""

    callable: Any
    before: dict[Any, Any]
    after: dict[Any, Any]
    rule: Any

    def fits(self, op: OpOverload, wanted: Any) -> bool:
        """Whether overriding ``op`` now would change the same."""
        return self.callable is wanted and self.before == op.py_kernels


def _remembered(override: Override) -> Override:
    rules = fake_impls.op_implementations_dict
    known: dict[OpOverload, _Overridden] = {}

    @contextmanager
    def overridden(callables: dict[OpOverload, Any]) -> Iterator[None]:
        new = {
            op: wanted
            for op, wanted in callables.items()
            if op not in known or not known[op].fits(op, wanted)
        }
        before = {op: dict(op.py_kernels) for op in new}
        for op in new:
            # The first export of a process drops the rules that such ops had.
            rules.pop(op, None)
        with override(new):
            for op, wanted in new.items():
                known[op] = _Overridden(wanted, before[op], dict(op.py_kernels), rules[op])
        used = {op: known[op] for op in callables}
        for op, one in used.items():
            op.py_kernels.update(one.after)
            # Python's dispatcher keeps what it resolved.
            op._dispatch_cache.clear()
            rules[op] = one.rule
        try:
            yield
        finally:
            for op, one in used.items():
                op.py_kernels.clear()
                op.py_kernels.update(one.before)
                op._dispatch_cache.clear()
                rules.pop(op, None)

    return overridden
