"""The base class of pattern parts: how a part is refined, and how it is matched."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import ClassVar, Self, TypeGuard

import torch
from torch._ops import OpOverload
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import op_name
from qfuse.ir.graph.text import op_text
from qfuse.ir.ops.views import dtype_of
from qfuse.ir.quant.spec import dtype_name
from qfuse.rewrite.pattern.search import Frame, Guard, Mismatch, Search
from qfuse.rewrite.pattern.writer import Writer

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Part(ABC):
    """A part of a pattern, which matches one value of a graph.

    Patterns are immutable; every method that refines one returns a new part.
    """

    weight: ClassVar[int] = 1
    """How much the part adds to the progress of a match."""

    label = ""
    dtypes: tuple[torch.dtype, ...] = ()
    guards: tuple[Guard, ...] = ()
    refusal: tuple[MissCode, str] | None = None
    core_at: int | None = None

    def named(self, name: str) -> Self:
        """Capture the value under ``name``."""
        return self._with(label=name)

    def giving(self, *dtypes: torch.dtype) -> Self:
        """Require a tensor of one of ``dtypes``."""
        return self._with(dtypes=dtypes)

    def given(self, *guards: Guard) -> Self:
        """Require ``guards``, which are tested in order once the part has matched."""
        return self._with(guards=(*self.guards, *guards))

    def otherwise(self, code: MissCode, text: str) -> Self:
        """Replace the message for a value that this part does not match.

        Args:
            code: The code of the miss.
            text: A template over the captures so far, ``{node}`` and ``{found}``.
        """
        return self._with(refusal=(code, text))

    def core(self) -> Self:
        """Mark this part, with the guards it has so far, as the core of the pattern.

        A match that fails before the core has progress 0, and its miss is not reported.
        If no part is marked, the core is the op of the root.
        """
        return self._with(core_at=len(self.guards))

    def _with(self, **changes: object) -> Self:
        new = copy.copy(self)
        vars(new).update(changes)
        # `copy` also copies cached properties; `size` and `heads` do not depend on a refinement.
        vars(new).pop("has_core", None)
        vars(new).pop("least", None)
        return new

    @abstractmethod
    def read(self, value: object) -> object | Mismatch:
        """Match ``value`` without its operands; return what the part captures."""

    @property
    def children(self) -> Sequence[Part]:
        """The parts nested in this one."""
        return ()

    def parts(self, value: object, search: Search, frame: Frame) -> Iterator[None]:
        """Match the nested parts; yield once per way to match them."""
        del value, search, frame
        yield

    @cached_property
    def heads(self) -> frozenset[OpOverload] | None:
        """The ops that a matching value may call; ``None`` if any value may match."""
        return None

    @abstractmethod
    def show(self, out: Writer) -> None:
        """Write the part as text."""

    @cached_property
    def size(self) -> int:
        """Number of parts, each counted once per occurrence in the pattern."""
        return 1 + sum(child.size for child in self.children)

    @cached_property
    def least(self) -> int:
        """The fewest conditions that hold where the part matches: parts and guards."""
        return self.weight + sum(child.least for child in self.children) + len(self.guards)

    def behind(self, child: object) -> int:
        """Return the fewest conditions of the part that are tested after a nested part."""
        numbers = [index for index, each in enumerate(self.children) if each is child]
        later = self.children[numbers[0] + 1 :] if numbers else ()
        return sum(each.least for each in later) + len(self.guards)

    @cached_property
    def has_core(self) -> bool:
        """Whether this part or a nested one is marked as the core."""
        return self.core_at is not None or any(child.has_core for child in self.children)

    def walk(self, value: object, search: Search, above: Frame | None) -> Iterator[None]:
        """Match ``value``; yield once per way to match it, with the captures bound."""
        node = value if isinstance(value, Node) else above.node if above is not None else None
        assert node is not None, f"a match starts at a node, not at {value!r}"
        frame = Frame(above, self, node)
        # A memoized failure belongs to a node; a literal argument has none.
        if not search.spend() or (node is value and search.is_dead(self, node)):
            return
        found = self._kind(value)
        if isinstance(found, Mismatch):
            search.fail(frame, found)
            return
        if not self.label:
            yield from self._inside(value, search, frame)
            return
        if not search.agrees(self.label, found):
            fields = {"capture": self.label, "found": argument_text(value)}
            text = "expected the same value for {capture}, found another {found}"
            search.fail(frame, Mismatch(MissCode.PATTERN, text, fields))
            return
        fresh = self.label not in search.bound
        search.bound.setdefault(self.label, found)
        yield from self._inside(value, search, frame)
        # Resumed: the caller looks for another way to match, which may bind another value.
        if fresh:
            del search.bound[self.label]

    def _kind(self, value: object) -> object | Mismatch:
        found = self.read(value)
        if isinstance(found, Mismatch):
            text = found.text if self.refusal is None else self.refusal[1]
            code = found.code if self.refusal is None else self.refusal[0]
            return Mismatch(code, text, {"found": argument_text(value), **found.fields})
        if self.dtypes and (not is_tensor(value) or dtype_of(value) not in self.dtypes):
            text = f"expected {{wanted}} for {self.label}" if self.label else "expected {wanted}"
            code, text = self.refusal or (MissCode.DTYPE, text + ", found {found}")
            wanted = " or ".join(map(dtype_name, self.dtypes))
            kind = dtype_name(dtype_of(value)) if is_tensor(value) else argument_text(value)
            return Mismatch(code, text, {"found": kind, "wanted": wanted})
        return found

    def _inside(self, value: object, search: Search, frame: Frame) -> Iterator[None]:
        """Match the nested parts, then test the guards."""
        # The failures inside are kept apart, since `bury` memoizes the closest of them for this
        # node.
        conflicts, outer, matched = search.conflicts, search.closest, False
        search.closest = None
        search.enter(self.weight, core=self.core_at == 0)
        before = search.held
        search.held += self.weight
        for _ in self.parts(value, search, frame):
            inside = search.held
            added = search.test(self.guards, frame, self.core_at)
            if added is None:
                continue
            if not matched:
                matched = True
                search.reopen(outer)
            yield
            search.held = inside
            search.forget(added, core=bool(self.core_at))
        search.held = before
        search.leave(self.weight, core=self.core_at == 0)
        if not matched:
            # A failure on which a capture or a guard had an influence may be a match elsewhere.
            if frame.node is value and search.conflicts == conflicts:
                search.bury(self, frame.node)
            search.reopen(outer)


def is_tensor(value: object) -> TypeGuard[Node]:
    """Whether ``value`` is a node of a tensor."""
    return isinstance(value, Node) and isinstance(value.meta.get("val"), torch.Tensor)


def is_symbolic_number(value: object) -> TypeGuard[Node]:
    """Whether ``value`` is a node of a number that is computed at run time, such as a size."""
    return isinstance(value, Node) and isinstance(value.meta.get("val"), _SYMBOLIC)


def argument_text(value: object) -> str:
    """Format an argument for a message."""
    if is_symbolic_number(value):
        return f"{op_text(value)}, a number that is computed at run time"
    return op_name(value) if isinstance(value, Node) else repr(value)
