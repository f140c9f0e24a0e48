"""Binds a call's arguments to the flat leaves of a signature, in the order of its inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch.utils._pytree import TreeSpec

from qfuse.ir.errors import InputError
from qfuse.ir.graph.stage_graph import Signature
from qfuse.ir.signature._tree_api import (
    difference,
    flatten_like,
    keyword_children,
    positional_children,
    structure,
)

Key: TypeAlias = str | int
"""A parameter's name, or the position of an unnamed argument (``*args``)."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """One argument of the captured call: its key and structure, ``None`` for a single leaf."""

    key: Key
    tree: TreeSpec | None


class Binder:
    """Finds each argument of the captured call among the arguments of a new one.

    A new call may pass by keyword what was captured by position and vice versa, pass keywords in
    any order, and omit or pass explicitly parameters that have their default value.
    """

    def __init__(self, signature: Signature) -> None:
        self._parameters = signature.parameters
        self._defaults = signature.defaults
        positional = positional_children(signature.in_spec)
        keywords = keyword_children(signature.in_spec)
        slots = [_Slot(self._key(i), _tree(child)) for i, child in enumerate(positional)]
        slots += [_Slot(name, _tree(child)) for name, child in keywords.items()]
        self._slots = tuple(slots)
        self._n_positional = len(positional)
        self._keywords = tuple(keywords)
        self._keyword_set = keywords.keys()
        self._flat = all(slot.tree is None for slot in slots)

    def bind(self, args: Sequence[object], kwargs: Mapping[str, object]) -> list[Any]:
        """Return the leaves of a call.

        Raises:
            InputError: An argument is missing, unexpected, given twice, or nested differently.
        """
        # Most calls are made as the captured one was, and need no sorting.
        if len(args) == self._n_positional and kwargs.keys() == self._keyword_set:
            values = [*args, *[kwargs[name] for name in self._keywords]]
        else:
            values = self._sort(args, kwargs)
        if self._flat:
            return values
        leaves: list[Any] = []
        for slot, value in zip(self._slots, values, strict=True):
            if slot.tree is None:
                leaves.append(value)
            else:
                leaves += _flatten(slot, slot.tree, value)
        return leaves

    def _key(self, position: int) -> Key:
        return self._parameters[position] if position < len(self._parameters) else position

    def _sort(self, args: Sequence[object], kwargs: Mapping[str, object]) -> list[Any]:
        given: dict[Key, object] = {self._key(i): value for i, value in enumerate(args)}
        for name, value in kwargs.items():
            if name in given:
                raise InputError(
                    f"{name} was given twice, by position and by keyword",
                    fix="give it once",
                )
            given[name] = value
        # First, since a misspelled name is also the reason why another argument is missing.
        known = {slot.key for slot in self._slots}
        for key in [key for key in given if key not in known]:
            self._accept_default(key, given.pop(key))
        return [self._take(slot, given) for slot in self._slots]

    def _take(self, slot: _Slot, given: dict[Key, object]) -> object:
        if slot.key in given:
            return given.pop(slot.key)
        # Defaults are kept for plain constants only, not for containers.
        if slot.tree is None and slot.key in self._defaults:
            return self._defaults[str(slot.key)]
        raise InputError(
            f"{_name(slot.key)} is missing: the model was captured with it",
            fix=f"pass it; the captured call was ({self._call()})",
        )

    def _accept_default(self, key: Key, value: object) -> None:
        """Allow an argument that was not captured if it equals the parameter's default."""
        if key in self._defaults and same_constant(value, self._defaults[str(key)]):
            return
        raise InputError(
            f"{_name(key)} is unexpected: the model was captured without it",
            fix=f"leave it out, or compile again with it; the captured call was ({self._call()})",
        )

    def _call(self) -> str:
        """Format the captured call."""
        positional = [str(slot.key) for slot in self._slots[: self._n_positional]]
        return ", ".join([*positional, *(f"{name}=..." for name in self._keywords)])


def same_constant(value: object, constant: object) -> bool:
    """Return whether a leaf that is not a tensor is the captured one: same type, same value."""
    # `True == 1`, but a model may branch on the type.
    if type(value) is not type(constant):
        return False
    return bool(value == constant) or (value != value and constant != constant)  # noqa: PLR0124


def _tree(spec: TreeSpec) -> TreeSpec | None:
    return None if spec.is_leaf() else spec


def _name(key: Key) -> str:
    return key if isinstance(key, str) else f"argument {key}"


def _flatten(slot: _Slot, want: TreeSpec, value: object) -> list[Any]:
    try:
        return flatten_like(want, value)
    except ValueError as error:
        # Only for the message.
        where, expected, came = difference(_name(slot.key), want, structure(value))
        raise InputError(
            f"{where}: expected {expected}, got {came}",
            fix="nest the inputs as they were when the model was captured",
        ) from error
