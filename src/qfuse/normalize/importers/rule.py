"""Base of the rules that read one op of a source: refusals come out of the depth of the reading."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import TypeVar

import torch
from torch.fx.node import Argument

from qfuse.ir.dtypes import REALS
from qfuse.ir.quant.spec import dtype_name
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, Rule, arguments

S = TypeVar("S")
T = TypeVar("T")


class RefusedError(Exception):
    """Carries a :class:`Miss` from where it is found to the rule, which gives it to the driver."""

    def __init__(self, code: MissCode, at: Node, template: str, *values: object) -> None:
        self.miss = Miss(code, at, template, *values)
        super().__init__(self.miss)


def accepted(found: T | Miss) -> T:
    """Return what was found.

    Raises:
        RefusedError: It is a miss.
    """
    if isinstance(found, Miss):
        raise RefusedError(found.code, found.at, "{}", found.reason)
    return found


class SourceRule(Rule[S], ABC):
    """A rule whose subclass reads a source op, and raises where it has no canonical form.

    All of them are exact: a source whose arithmetic the canonical language cannot say bit for bit
    is refused.
    """

    exactness = Exactness.EXACT

    def match(self, node: Node) -> S | Miss:
        """Read ``node``.

        Raises:
            NormalizeError: The op rejects these arguments when it runs.
        """
        try:
            return self.read(node)
        except RefusedError as refused:
            return refused.miss

    @abstractmethod
    def read(self, node: Node) -> S:
        """Return the site of ``node``.

        Raises:
            RefusedError: It has no canonical form.
            NormalizeError: The op rejects these arguments when it runs.
        """


def known_arguments(node: Node, known: Collection[str]) -> dict[str, Argument]:
    """Return the arguments of a call by name.

    Raises:
        RefusedError: One of them is unknown: it is another version of the op.
    """
    given = arguments(node)
    foreign = sorted(set(given) - set(known))
    if foreign:
        text = "this version of the op has an argument that qfuse does not know: {}"
        raise RefusedError(MissCode.ARGUMENT, node, text, ", ".join(foreign))
    return given


def promoted(at: Node, one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Return the type in which torch computes with two tensors that have axes.

    Raises:
        RefusedError: It does not; that is so for float8.
    """
    if (one not in REALS and one.is_floating_point) or (
        other not in REALS and other.is_floating_point
    ):
        text = "torch computes with {} and {} in no common type"
        raise RefusedError(MissCode.DTYPE, at, text, dtype_name(one), dtype_name(other))
    return torch.promote_types(one, other)


def dtype_argument(value: Argument, default: torch.dtype | None = None) -> torch.dtype:
    """Return a dtype argument, ``default`` where it is ``None``."""
    if value is None and default is not None:
        return default
    assert isinstance(value, torch.dtype), f"not a dtype: {value!r}"
    return value
