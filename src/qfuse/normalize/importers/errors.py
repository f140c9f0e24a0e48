"""Errors about a source graph, with the location in the user's source."""

from __future__ import annotations

from typing import TypeVar

from torch.fx import Node

from qfuse.ir.errors import NormalizeError
from qfuse.ir.graph.stage_graph import place_of

E = TypeVar("E", bound=NormalizeError)

_FIX = "repeat the quantization of this layer; if a tool made this call, report it to that tool"


def cannot_run(
    node: Node,
    what: str,
    fix: str = _FIX,
    *,
    kind: type[E] = NormalizeError,  # type: ignore[assignment]
) -> E:
    """Return the error for a call that its own op would reject at run time."""
    return kind(what, where=location_of(node), fix=fix)


def location_of(node: Node) -> str:
    """Return the location of ``node``: its op, its module, and the line of user code."""
    place = place_of(node)
    known = [part for part in (place.module, place.source) if part]
    return f"{place.op} %{place.node}" + (f" in {', '.join(known)}" if known else "")
