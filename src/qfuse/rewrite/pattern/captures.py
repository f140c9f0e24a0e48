"""The leaves of patterns: captures, and the kinds of values that they accept."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch.fx import Node
from torch.fx.node import Argument

from qfuse.ir.events import MissCode
from qfuse.ir.ops.constants import constant_value, number_of
from qfuse.ir.ops.views import shape_of
from qfuse.rewrite.pattern.base import is_symbolic_number, is_tensor
from qfuse.rewrite.pattern.parts import Pattern
from qfuse.rewrite.pattern.search import Mismatch
from qfuse.rewrite.pattern.writer import Writer

T = TypeVar("T")


class Capture(Pattern, Generic[T]):
    """A value captured under a name; ``match[capture]`` is a ``T``.

    A name that occurs twice must match one value: one node, one constant, or equal numbers.
    """

    def __init__(self, name: str) -> None:
        self.label = name

    def read(self, value: object) -> object | Mismatch:
        """Accept anything."""
        return value

    def show(self, out: Writer) -> None:
        """Write the name."""
        out.put(self.label or "_")

    def _refuse(self, code: MissCode, wanted: str) -> Mismatch:
        fields = {"capture": self.label, "wanted": wanted}
        return Mismatch(code, "expected {wanted} for {capture}, found {found}", fields)


class Arg(Capture[Argument]):
    """Any argument: a node, a number, ``None``."""


ANY = Arg("")
"""Any argument. It is not captured, so two occurrences may match different values."""


class V(Capture[Node]):
    """A tensor.

    Args:
        name: The name.
        dtypes: The dtype or dtypes that it may have; empty accepts any.
        rank: Number of axes; ``None`` accepts any.
    """

    def __init__(
        self,
        name: str,
        dtypes: torch.dtype | Collection[torch.dtype] = (),
        rank: int | None = None,
    ) -> None:
        super().__init__(name)
        self.dtypes = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
        self.rank = rank

    def read(self, value: object) -> object | Mismatch:
        """Accept tensors."""
        if not isinstance(value, Node) or not is_tensor(value):
            code = MissCode.DTYPE if self.dtypes else MissCode.PATTERN
            return self._refuse(code, "a tensor")
        if self.rank is not None and len(shape_of(value)) != self.rank:
            fields = {"rank": len(shape_of(value)), "wanted": self.rank}
            return Mismatch(MissCode.SHAPE, "expected {wanted} axes, found {rank}", fields)
        return value


class Operand(Capture[Argument]):
    """An operand of arithmetic: a tensor or a number, but not a bool or a symbolic size."""

    def read(self, value: object) -> object | Mismatch:
        """Accept tensors and numbers."""
        if is_tensor(value) or _is_number(value):
            return value
        return self._refuse(MissCode.DTYPE, "a tensor or a number")


class Num(Capture[float]):
    """A literal number, but not a bool."""

    def read(self, value: object) -> object | Mismatch:
        """Accept numbers."""
        if _is_number(value):
            return value
        return self._refuse(MissCode.NOT_CONSTANT, "a number")


class Scalar(Capture[float]):
    """A literal number, or a constant of one element."""

    def read(self, value: object) -> object | Mismatch:
        """Accept values known to be one number."""
        known = number_of(value)
        if known is not None:
            return known
        return self._refuse(MissCode.NOT_CONSTANT, "a known number")


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """A node whose value is known at compile time."""

    node: Node
    value: torch.Tensor

    # Compared by node, because comparing tensors gives a tensor.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Known) and self.node is other.node

    def __hash__(self) -> int:
        return hash(self.node)


class Const(Capture[Known]):
    """A tensor that is computed from constants by simple ops."""

    def read(self, value: object) -> object | Mismatch:
        """Accept constant expressions and evaluate them."""
        known = constant_value(value)
        if known is None or not isinstance(value, Node):
            return self._refuse(MissCode.NOT_CONSTANT, "a constant")
        return Known(value, known)


class Read(Capture[T]):
    """A node seen through a typed view, or through any function that may return ``None``.

    Args:
        name: The name under which the result of ``view`` is captured.
        view: Returns ``None`` if the node does not match. It is not asked about the nodes of
            symbolic numbers, such as sizes, which have neither a dtype nor a shape.
        what: What ``view`` recognizes, for messages.
    """

    def __init__(self, name: str, view: Callable[[Node], T | None], what: str = "") -> None:
        super().__init__(name)
        self.view = view
        self.what = what or view.__name__.strip("_").removeprefix("as_")

    def read(self, value: object) -> object | Mismatch:
        """Apply the view to a node."""
        if isinstance(value, Node) and not is_symbolic_number(value):
            found = self.view(value)
            if found is not None:
                return found
        fields = {"wanted": self.what}
        return Mismatch(MissCode.PATTERN, "expected a {wanted}, found {found}", fields)

    def show(self, out: Writer) -> None:
        """Write what it is."""
        out.put(self.what)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
