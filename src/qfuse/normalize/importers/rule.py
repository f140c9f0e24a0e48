"""The base of rules that view one source op; a refusal is raised from any depth of the view."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch.fx.node import Argument

from qfuse.ir.dtypes import COMPUTE_DTYPES
from qfuse.ir.quant.spec import dtype_name
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, Rule, arguments

S = TypeVar("S")


class RefusedError(Exception):
    """Carries a :class:`Miss` from any depth to the rule, which returns it to the driver."""

    def __init__(self, code: MissCode, at: Node, template: str, *values: object) -> None:
        self.miss = Miss(code, at, template, *values)
        super().__init__(self.miss)


class SourceRule(Rule[S], ABC):
    """A rule whose subclass views a source op, and raises if it has no canonical form.

    All of them are exact: a source whose arithmetic a canonical op cannot reproduce bit for bit is
    refused.
    """

    exactness = Exactness.EXACT

    def match(self, node: Node) -> S | Miss:
        """View ``node``, or return the miss that was raised.

        Raises:
            NormalizeError: The op rejects these arguments at run time.
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
            NormalizeError: The op rejects these arguments at run time.
        """


def known_arguments(node: Node, known: Sequence[str]) -> dict[str, Argument]:
    """Return the arguments of a call by name.

    Raises:
        RefusedError: One of them is unknown: the op has another version.
    """
    given = arguments(node)
    # An argument that is not read here may change the values; torchao's ops differ in their
    # trailing arguments between versions.
    foreign = sorted(set(given) - set(known))
    if foreign:
        text = "this version of the op has an argument that qfuse does not support: {} "
        text += "(the rule knows {})"
        raise RefusedError(MissCode.ARGUMENT, node, text, ", ".join(foreign), ", ".join(known))
    return given


def promoted(at: Node, one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Return the dtype to which torch promotes two tensors that have axes.

    Raises:
        RefusedError: Torch does not promote them; that is so for float8.
    """
    if (one not in COMPUTE_DTYPES and one.is_floating_point) or (
        other not in COMPUTE_DTYPES and other.is_floating_point
    ):
        text = "torch does not promote {} and {} to a common dtype"
        raise RefusedError(MissCode.DTYPE, at, text, dtype_name(one), dtype_name(other))
    return torch.promote_types(one, other)


def dtype_argument(value: Argument, default: torch.dtype | None = None) -> torch.dtype:
    """Return a dtype argument, or ``default`` for ``None``."""
    if value is None and default is not None:
        return default
    assert isinstance(value, torch.dtype), f"not a dtype: {value!r}"
    return value
