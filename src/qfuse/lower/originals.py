"""The originals of packed weights: each weight is held twice only while few of them are."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Node

from qfuse.rewrite.session import RewriteSession

_PARTS = 16


class Originals:
    """Drops constants that no node reads, when those add up to a 16th of all.

    Merged and unpacked weights are the graph's own; those of the source model stay with it.
    """

    def __init__(self, session: RewriteSession) -> None:
        self._session = session
        self._least = sum(map(_bytes, session.program.module.buffers())) // _PARTS
        self._bytes = 0

    def erased(self, nodes: Iterable[Node]) -> None:
        """Note that nodes were erased, and drop what they leave if that is much."""
        for node in nodes:
            value = node.meta.get("val") if node.op == "get_attr" else None
            if isinstance(value, torch.Tensor):
                self._bytes += _bytes(value)
        if self._bytes > self._least:
            self.drop()

    def drop(self) -> None:
        """Drop the constants that no node reads."""
        # A buffer that the program writes is state of the caller's module, even if nothing reads
        # it.
        mutations = self._session.program.signature.mutations
        self._session.editor.drop_unused([m.buffer for m in mutations if m.buffer is not None])
        self._bytes = 0


def _bytes(value: torch.Tensor) -> int:
    return value.numel() * value.element_size()
