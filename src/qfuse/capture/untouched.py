"""Tracing leaves the user's module as it was, whatever torch.export does to it on the way.

torch.export swaps parameters for fake ones and puts them back. What it does not put back: new
attributes that ``forward`` sets (they are left as fake tensors), and tensors that are no buffers
and that ``forward`` writes in place (they are really written, once per trace).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

_REGISTRIES = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True, slots=True)
class _Loose:
    """A tensor that is no parameter and no buffer, with a copy to put back."""

    tensor: torch.Tensor
    version: int
    copy: torch.Tensor


class _Snapshot:
    """What attributes hold, containers in them included, to be put back by identity."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._lists: list[tuple[list[Any], list[Any]]] = []
        self._loose: list[_Loose] = []
        self._seen: set[int] = set()
        for module in model.modules():
            attributes = vars(module)
            self._dicts.append((attributes, dict(attributes)))
            for name, value in attributes.items():
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
                case _:
                    continue
            self._seen.add(id(value))

    def _keep_tensor(self, tensor: torch.Tensor) -> None:
        # Nothing can write a tensor of the inference mode while its mode is off.
        if not tensor.is_inference():
            with torch.no_grad():
                version = tensor._version  # noqa: SLF001
                self._loose.append(_Loose(tensor, version, tensor.detach().clone()))

    def restore(self) -> None:
        """Put everything back that has changed."""
        for now, before in self._dicts:
            _restore(now, before)
        for items, copy in self._lists:
            if len(items) != len(copy) or any(map(operator.is_not, items, copy)):
                items[:] = copy
        with torch.no_grad():
            for kept in self._loose:
                if kept.tensor._version != kept.version:  # noqa: SLF001
                    kept.tensor.copy_(kept.copy)


@contextmanager
def untouched(model: torch.nn.Module) -> Iterator[None]:
    """Put every module below ``model`` back to its state at entry."""
    snapshot = _Snapshot(model)
    try:
        yield
    finally:
        snapshot.restore()


def _restore(now: dict[Any, Any], before: dict[Any, Any]) -> None:
    """Make ``now`` hold the very objects of ``before``."""
    for name in now.keys() - before.keys():
        del now[name]
    for name, value in before.items():
        if name not in now or now[name] is not value:
            now[name] = value
