"""What all parts of patterns have in common: how they are refined, and how they are matched."""

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
from qfuse.ir.ops.views import dtype_of
from qfuse.ir.quant.spec import dtype_name
from qfuse.rewrite.pattern.search import Frame, Guard, Refusal, Search
from qfuse.rewrite.pattern.writer import Writer


class Part(ABC):
    """A part of a pattern: what a value of a graph has to be.

    Patterns are built once and never change; every method that refines one returns another.
    """

    weight: ClassVar[int] = 1
    """What the part counts in how far a match came."""

    label = ""
    dtypes: tuple[torch.dtype, ...] = ()
    guards: tuple[Guard, ...] = ()
    refusal: tuple[MissCode, str] | None = None
    core_at: int | None = None

    def named(self, name: str) -> Self:
        """Capture the value under ``name``."""
        return self._with(label=name)

    def giving(self, *dtypes: torch.dtype) -> Self:
        """Demand a tensor of one of ``dtypes``."""
        return self._with(dtypes=dtypes)

    def given(self, *guards: Guard) -> Self:
        """Demand ``guards``, which are tested once the part has matched, in order."""
        return self._with(guards=(*self.guards, *guards))

    def otherwise(self, code: MissCode, text: str) -> Self:
        """Say in other words that a value is not of the kind of this part.

        Args:
            code: The code of the miss.
            text: A template of what was captured before, ``{node}`` and ``{found}``.
        """
        return self._with(refusal=(code, text))

    def core(self) -> Self:
        """Mark what makes a graph this rule's business: this part, with the guards it has so far.

        A match that did not come as far is not news: its miss has progress 0 and is not reported.
        Without a core part that is the kind of the root.
        """
        return self._with(core_at=len(self.guards))

    def _with(self, **changes: object) -> Self:
        new = copy.copy(self)
        vars(new).update(changes)
        vars(new).pop("has_core", None)
        return new

    @abstractmethod
    def read(self, value: object) -> object | Refusal:
        """Look at the kind of ``value`` alone; return what the part captures."""

    @property
    def children(self) -> Sequence[Part]:
        """The parts inside."""
        return ()

    def parts(self, value: object, search: Search, frame: Frame) -> Iterator[None]:
        """Match the parts inside; yield once for every way to do so."""
        del value, search, frame
        yield

    @cached_property
    def heads(self) -> frozenset[OpOverload] | None:
        """The ops that a match calls; ``None`` if it may be any value."""
        return None

    @abstractmethod
    def show(self, out: Writer) -> None:
        """Write the part as text."""

    @cached_property
    def size(self) -> int:
        """Number of parts, each counted as often as it stands in the pattern."""
        return 1 + sum(child.size for child in self.children)

    @cached_property
    def has_core(self) -> bool:
        """Whether this part or one inside is marked as the core."""
        return self.core_at is not None or any(child.has_core for child in self.children)

    def walk(self, value: object, search: Search, above: Frame | None) -> Iterator[None]:
        """Match ``value``; yield once for every way to do so, with the captures bound."""
        node = value if isinstance(value, Node) else above.node if above is not None else None
        assert node is not None, f"a match starts at a node, not at {value!r}"
        frame = Frame(above, self, node)
        if not search.spend() or (node is value and search.is_dead(self, node)):
            return
        found = self._kind(value)
        if isinstance(found, Refusal):
            search.fail(frame, found)
            return
        if not self.label:
            yield from self._inside(value, search, frame)
            return
        if not search.agrees(self.label, found):
            fields = {"capture": self.label, "found": describe(value)}
            text = "expected the same value for {capture}, found another {found}"
            search.fail(frame, Refusal(MissCode.PATTERN, text, fields))
            return
        fresh = self.label not in search.bound
        search.bound.setdefault(self.label, found)
        yield from self._inside(value, search, frame)
        if fresh:
            del search.bound[self.label]

    def _kind(self, value: object) -> object | Refusal:
        found = self.read(value)
        if isinstance(found, Refusal):
            text = found.text if self.refusal is None else self.refusal[1]
            code = found.code if self.refusal is None else self.refusal[0]
            return Refusal(code, text, {"found": describe(value), **found.fields})
        if self.dtypes and (not is_tensor(value) or dtype_of(value) not in self.dtypes):
            text = f"expected {{wanted}} for {self.label}" if self.label else "expected {wanted}"
            code, text = self.refusal or (MissCode.DTYPE, text + ", found {found}")
            wanted = " or ".join(map(dtype_name, self.dtypes))
            kind = dtype_name(dtype_of(value)) if is_tensor(value) else describe(value)
            return Refusal(code, text, {"found": kind, "wanted": wanted})
        return found

    def _inside(self, value: object, search: Search, frame: Frame) -> Iterator[None]:
        """Match what is inside, then test the guards."""
        conflicts, outer, matched = search.conflicts, search.closest, False
        search.closest = None
        search.enter(self.weight, core=self.core_at == 0)
        for _ in self.parts(value, search, frame):
            added = search.test(self.guards, frame, self.core_at)
            if added is None:
                continue
            if not matched:
                matched = True
                search.reopen(outer)
            yield
            search.forget(added, core=bool(self.core_at))
        search.leave(self.weight, core=self.core_at == 0)
        if not matched:
            if frame.node is value and search.conflicts == conflicts:
                search.bury(self, frame.node)
            search.reopen(outer)


def is_tensor(value: object) -> TypeGuard[Node]:
    """Whether ``value`` is a node of a tensor."""
    return isinstance(value, Node) and isinstance(value.meta.get("val"), torch.Tensor)


def describe(value: object) -> str:
    """Say what an argument is."""
    return op_name(value) if isinstance(value, Node) else repr(value)
