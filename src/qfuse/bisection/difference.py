"""What a difference is: a tolerance, or a predicate of the user."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from qfuse.ir.errors import USER_CODE_ERRORS, OptionsError
from qfuse.ir.signature._tree_api import tree_leaves

Differs = Callable[[Any, Any], bool]
"""Takes the result of a compiled model and the expected one, in the structure of the model."""


@dataclass(frozen=True, slots=True)
class ResultTolerance:
    """Two results differ if an element is off by more than ``atol + rtol * abs(expected)``."""

    rtol: float
    atol: float

    def __call__(self, got: Any, expected: Any) -> bool:
        """Whether the results differ; NaN equals NaN."""
        one, two = tree_leaves(got), tree_leaves(expected)
        if len(one) != len(two):
            return True
        return any(self._differ(a, b) for a, b in zip(one, two, strict=True))

    def _differ(self, a: object, b: object) -> bool:
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            return a != b
        if a.shape != b.shape or a.dtype != b.dtype:
            return True
        if not a.is_floating_point():
            # Every integer of up to 53 bits, and every truth value.
            a, b = a.double(), b.double()
        return not torch.allclose(a, b, self.rtol, self.atol, equal_nan=True)


def make_differs(differs: Differs | None, rtol: float | None, atol: float | None) -> Differs:
    """Return what decides whether two results differ.

    Raises:
        OptionsError: Neither or both of a predicate and a tolerance are given, or one is invalid.
    """
    if (differs is None) == (rtol is None and atol is None):
        raise OptionsError(
            "give a tolerance or a predicate, which say what a difference is",
            fix="as in atol=1e-3, or differs=lambda got, expected: bool(...)",
        )
    if differs is None:
        return ResultTolerance(_checked("rtol", rtol), _checked("atol", atol))
    if not callable(differs):
        raise OptionsError(f"differs must be a function of two results, not {differs!r}")
    return _Asked(differs)


def check_predicate(differs: Differs | None, got: Any, expected: Any) -> None:
    """Refuse a predicate, which has said that two results differ, if they are equal.

    Raises:
        OptionsError: The results are equal.
    """
    if differs is not None and not ResultTolerance(0.0, 0.0)(got, expected):
        raise OptionsError(
            "the predicate is true for equal results: those of the model and of its captured graph",
            fix="it takes the result and the expected one; return False where they are equal",
        )


def largest(got: Any, expected: Any) -> float | None:
    """Return the largest absolute difference between elements; ``None`` if shapes differ.

    It is infinite where only one of two elements is finite.
    """
    one, two = tree_leaves(got), tree_leaves(expected)
    found = 0.0
    if len(one) != len(two):
        return None
    for a, b in zip(one, two, strict=True):
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            continue
        if a.shape != b.shape:
            return None
        x, y = a.double(), b.double()
        same = (x == y) | (x.isnan() & y.isnan())
        apart = torch.where(same, torch.zeros_like(x), (x - y).abs())
        apart = torch.where(apart.isnan(), torch.full_like(apart, math.inf), apart)
        if apart.numel():
            found = max(found, float(apart.max()))
    return found


@dataclass(frozen=True, slots=True)
class _Asked:
    """A predicate of the user, whose failures name it."""

    differs: Differs

    def __call__(self, got: Any, expected: Any) -> bool:
        """Ask it.

        Raises:
            OptionsError: It fails, or does not answer with a truth value.
        """
        try:
            answer: object = self.differs(got, expected)
            return bool(answer)
        except USER_CODE_ERRORS as error:
            raise OptionsError(
                f"the predicate failed: {type(error).__name__}: {error}",
                fix="it takes the result and the expected one, and returns True if they differ",
            ) from error


def _checked(name: str, value: float | None) -> float:
    given = 0.0 if value is None else float(value)
    if not given >= 0:
        raise OptionsError(f"{name} must not be negative, and is {value!r}")
    return given
