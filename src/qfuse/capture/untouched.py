"""Restore the user's module after tracing.

torch.export replaces parameters by fake ones and restores them. It does not restore attributes
that ``forward`` sets, which are left as fake tensors, or tensors that are not buffers and that
``forward`` mutates, which are really written, once per trace.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

# Bounds the search through plain objects, which may lead anywhere.
_MOST = 10_000
_REGISTRIES = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True, slots=True)
class _Loose:
    """A tensor that is neither a parameter nor a buffer, with a copy to restore."""

    tensor: torch.Tensor
    version: int
    copy: torch.Tensor


class _Snapshot:
    """The values of attributes, including nested containers, to restore by identity."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._lists: list[tuple[list[Any], list[Any]]] = []
        self._loose: list[_Loose] = []
        self._seen: set[int] = set()
        for module in model.modules():
            attributes = vars(module)
            self._dicts.append((attributes, dict(attributes)))
            for name, value in attributes.items():
                # Their tensors belong to torch.export, which restores them; only the entries are
                # recorded.
                if name in _REGISTRIES:
                    self._dicts.append((value, dict(value)))
                else:
                    self._keep(value)

    def _keep(self, root: object) -> None:
        stack = [root]
        while stack:
            value = stack.pop()
            if id(value) in self._seen:
                continue
            match value:
                case torch.Tensor():
                    self._keep_tensor(value)
                case dict():
                    self._dicts.append((value, dict(value)))
                    stack += value.values()
                case list():
                    self._lists.append((value, list(value)))
                    stack += value
                case tuple():
                    stack += value
                case torch.nn.Module() | type() | ModuleType():
                    continue
                case _:
                    # A plain object, such as a cache, may hold buffers, which a trace that does not
                    # recognize them would write.
                    attributes = getattr(value, "__dict__", None)
                    if not isinstance(attributes, dict) or len(self._seen) > _MOST:
                        continue
                    stack += attributes.values()
            self._seen.add(id(value))

    def _keep_tensor(self, tensor: torch.Tensor) -> None:
        # Inference tensors cannot be written outside inference mode.
        if not tensor.is_inference():
            with torch.no_grad():
                version = tensor._version  # noqa: SLF001
                self._loose.append(_Loose(tensor, version, tensor.detach().clone()))

    def restore(self) -> None:
        """Restore everything that has changed."""
        for now, before in self._dicts:
            _restore(now, before)
        for items, copy in self._lists:
            # By identity: comparing tensors gives tensors, and equal objects may still be others.
            if len(items) != len(copy) or any(map(operator.is_not, items, copy)):
                items[:] = copy
        with torch.no_grad():
            for kept in self._loose:
                # Only what was written: restoring counts as a write for autograd.
                if kept.tensor._version != kept.version:  # noqa: SLF001
                    kept.tensor.copy_(kept.copy)


@contextmanager
def untouched(model: torch.nn.Module) -> Iterator[None]:
    """Restore ``model`` and its submodules to their state at entry."""
    snapshot = _Snapshot(model)
    try:
        yield
    finally:
        snapshot.restore()


def _restore(now: dict[Any, Any], before: dict[Any, Any]) -> None:
    """Replace the contents of ``now`` by the objects of ``before``."""
    for name in now.keys() - before.keys():
        del now[name]
    for name, value in before.items():
        if name not in now or now[name] is not value:
            now[name] = value
