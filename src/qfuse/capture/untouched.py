"""Tracing leaves the user's module as it was, whatever torch.export does to it on the way.

torch.export swaps parameters for fake ones and puts them back. What it does not put back: new
attributes that ``forward`` sets (they are left as fake tensors), and tensors that are no buffers
and that ``forward`` writes in place (they are really written, once per trace).
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["untouched"]

_REGISTRIES = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True, slots=True)
class _Loose:
    """A tensor that is no parameter and no buffer, with a copy to put back."""

    tensor: torch.Tensor
    version: int
    copy: torch.Tensor


@contextmanager
def untouched(model: torch.nn.Module) -> Iterator[None]:
    """Put every module below ``model`` back to its state at entry."""
    modules = list(model.modules())
    attributes = [dict(vars(module)) for module in modules]
    registries = [{name: dict(vars(module)[name]) for name in _REGISTRIES} for module in modules]
    # Nothing can write a tensor of the inference mode while its mode is off.
    loose = [_keep(t) for t in _loose_tensors(attributes) if not t.is_inference()]
    try:
        yield
    finally:
        for module, before, registered in zip(modules, attributes, registries, strict=True):
            _restore(vars(module), before)
            for name, entries in registered.items():
                _restore(vars(module)[name], entries)
        with torch.no_grad():
            for kept in loose:
                if kept.tensor._version != kept.version:  # noqa: SLF001
                    kept.tensor.copy_(kept.copy)


def _restore(now: dict[str, Any], before: dict[str, Any]) -> None:
    """Make ``now`` hold the very objects of ``before``."""
    for name in now.keys() - before.keys():
        del now[name]
    for name, value in before.items():
        if name not in now or now[name] is not value:
            now[name] = value


def _loose_tensors(attributes: list[dict[str, Any]]) -> list[torch.Tensor]:
    """Return the tensors in attributes, and in lists, tuples and dictionaries in attributes."""
    found: dict[int, torch.Tensor] = {}
    stack: list[object] = [
        value for owned in attributes for name, value in owned.items() if name not in _REGISTRIES
    ]
    seen: set[int] = set()
    while stack:
        value = stack.pop()
        if isinstance(value, torch.Tensor):
            found[id(value)] = value
        elif isinstance(value, (list, tuple, dict)) and id(value) not in seen:
            seen.add(id(value))
            stack += value.values() if isinstance(value, dict) else value
    return list(found.values())


def _keep(tensor: torch.Tensor) -> _Loose:
    with torch.no_grad():
        return _Loose(tensor, tensor._version, tensor.detach().clone())  # noqa: SLF001
