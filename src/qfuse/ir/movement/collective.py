"""Functional collectives that move rows between ranks, as movements of their first axis.

A collective starts, and ``wait_tensor`` returns its result: the two are one movement and must be
adjacent. Every rank runs the same graph on its own data, constants included, so a tensor's value on
one rank is not known on another. Parameters therefore propagate forward with their rows, never
backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

from qfuse.ir.aten import aten
from qfuse.ir.graph.schema import arguments, overload_of
from qfuse.ir.movement.base import Moved, Movement, Mover, with_axis
from qfuse.ir.ops.views import tensor_of
from qfuse.ir.quant.block import covers
from qfuse.ir.quant.spec import Block
from qfuse.ir.refusal import Refusal
from qfuse.ir.sizes import exact_quotient, is_row_major

_NAMESPACE = "_c10d_functional"


def _registered(name: str) -> tuple[OpOverload, ...]:
    """Return a collective's ops; empty if torch was built without distributed."""
    packet = getattr(getattr(torch.ops, _NAMESPACE), name, None)
    return () if packet is None else (packet.default,)


WAITS = _registered("wait_tensor")
"""The op that returns the result of a collective."""

_GATHERS = _registered("all_gather_into_tensor")
_EXCHANGES = _registered("all_to_all_single")


@dataclass(frozen=True, slots=True)
class Collective(Movement):
    """A movement of rows between ranks.

    Attributes:
        start: The op that starts it; ``node`` waits for it.
    """

    start: Node

    def backward(self, block: Block) -> Refusal:
        """Refuse: the local parameters are not those of the ranks that send the rows."""
        del block
        return Refusal(
            "every rank would quantize with parameters of its own, and that they are equal on all "
            "ranks is not known from one graph"
        )

    def _sent(self, mover: Mover, value: Any, *rest: Any) -> Any:
        """Send a value that differs between ranks, even if it is a constant here."""
        # Not folded: other ranks have another value under the same name.
        value = mover.at_run_time(value)
        shown = tensor_of(value) if isinstance(value, Node) else value
        if not is_row_major(shown):
            value = mover.call(aten.clone.default, value, memory_format=torch.contiguous_format)
        started = mover.call(overload_of(self.start), value, *rest)
        return mover.call(overload_of(self.node), started)

    def _rows(self, block: Block) -> int | Refusal:
        """Return how many of the rows that are sent together share a scale."""
        b = block[0]
        count = self._together()
        # A scale per row travels with its row, however many rows go to each rank.
        if b == 1:
            return 1
        if count is None or count < 1:
            return Refusal("how many rows travel together is not known")
        # One scale for all rows here becomes one per rank on the other side.
        if covers(b, self.before[0]):
            return count
        assert b is not None, "no block is the whole axis"
        if exact_quotient(count, b) is None:
            return Refusal(f"blocks of {b} rows would be cut between ranks")
        return b

    def _together(self) -> int | None:
        """Return how many rows go to each rank, if it is the same number for all."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class AllGather(Collective):
    """``all_gather_into_tensor``: the rows of all ranks, concatenated."""

    def forward(self, block: Block) -> Moved | Refusal:
        """Gather the grid; a per-tensor scale becomes one per rank."""
        rows = self._rows(block)
        return rows if isinstance(rows, Refusal) else Moved(with_axis(block, 0, rows), self.apply)

    def apply(self, mover: Mover, value: Any) -> Any:
        """Gather another value."""
        a = arguments(self.start)
        return self._sent(mover, value, a["group_size"], a["group_name"])

    def _together(self) -> int | None:
        size = self.before[0]
        return size if isinstance(size, int) else None


@dataclass(frozen=True, slots=True)
class AllToAll(Collective):
    """``all_to_all_single``: every rank sends some of its rows to every rank.

    Attributes:
        came: Rows that come from each rank.
        went: Rows that go to each rank.
    """

    came: tuple[int, ...]
    went: tuple[int, ...]

    def forward(self, block: Block) -> Moved | Refusal:
        """Exchange the grid; a per-tensor scale becomes one per rank."""
        rows = self._rows(block)
        if isinstance(rows, Refusal):
            return rows
        whole = block[0] != 1 and covers(block[0], self.before[0])

        def apply(mover: Mover, value: Any) -> Any:
            # The exchange sends entries to ranks, so the one entry is repeated for each of them.
            if whole:
                sizes = [len(self.went), *[-1] * (len(block) - 1)]
                value = mover.call(aten.expand.default, mover.at_run_time(value), sizes)
            # No division is rounded: `rows` is 1, or a divisor of the share that all ranks have.
            came, went = ([size // rows for size in sizes] for sizes in (self.came, self.went))
            return self._exchanged(mover, value, came, went)

        return Moved(with_axis(block, 0, rows), apply)

    def apply(self, mover: Mover, value: Any) -> Any:
        """Exchange another value."""
        return self._exchanged(mover, value, self.came, self.went)

    def _exchanged(self, mover: Mover, value: Any, came: Sequence[int], went: Sequence[int]) -> Any:
        group = arguments(self.start)["group_name"]
        return self._sent(mover, value, list(came), list(went), group)

    def _together(self) -> int | None:
        # With unequal shares, one scale per rank would need blocks of different sizes.
        sizes = {*self.came, *self.went}
        return sizes.pop() if len(sizes) == 1 else None


def collective_of(node: Node, start: object) -> Movement | None:
    """Return the movement that ``node`` waits for, if it is the only one to wait."""
    if not isinstance(start, Node) or overload_of(start) not in (*_GATHERS, *_EXCHANGES):
        return None
    # The start and its wait are one movement only if nothing else uses the start.
    if len(start.users) != 1 or not start.meta["val"].ndim:
        return None
    a = arguments(start)
    source = a["input"]
    assert isinstance(source, Node), f"a collective of no tensor: {start.format_node()}"
    if overload_of(start) in _GATHERS:
        return AllGather(node, source, start) if source.meta["val"].ndim else None
    came, went = a["output_split_sizes"], a["input_split_sizes"]
    assert isinstance(came, (list, tuple)), f"not a list of sizes: {start.format_node()}"
    assert isinstance(went, (list, tuple)), f"not a list of sizes: {start.format_node()}"
    if not all(isinstance(size, int) for size in (*came, *went)):
        return None
    return AllToAll(node, source, start, tuple(came), tuple(went))  # type: ignore[arg-type]


def is_waited_for(node: Node) -> bool:
    """Whether ``node`` starts a collective that :func:`collective_of` supports."""
    return any(
        overload_of(user) in WAITS and collective_of(user, node) is not None for user in node.users
    )
