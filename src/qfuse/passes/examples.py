"""Example inputs of a graph: matched to its placeholders and checked against their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from qfuse.ir.errors import GraphError
from qfuse.ir.quant.spec import dtype_name
from qfuse.ir.words import a_kind
from qfuse.passes.refuse import refused

Examples = Sequence[Any] | Mapping[str, Any]

_KINDS = (torch.Tensor, int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)
_ORDER = "give one for each placeholder: a list in their order, or a dict by their names"


def in_order(examples: Examples, inputs: Sequence[Node]) -> list[Any]:
    """Return one example for each placeholder.

    Raises:
        GraphError: Their number or names differ, or they are not a collection.
    """
    names = [node.name for node in inputs]
    if isinstance(examples, Mapping):
        if set(examples) != set(names):
            raise GraphError(
                f"example inputs were given for {sorted(map(str, examples))}, "
                f"but the placeholders are {names}",
                fix=_ORDER,
            )
        return [examples[name] for name in names]
    # A string is a sequence too.
    if isinstance(examples, (str, bytes)) or not isinstance(examples, Sequence):
        raise GraphError(f"the example inputs are {a_kind(examples)}", fix=_ORDER)
    if len(examples) != len(inputs):
        raise GraphError(
            f"{len(examples)} example inputs were passed to a graph with {len(inputs)} inputs",
            fix=_ORDER,
        )
    return list(examples)


def known_kind(node: Node, example: Any) -> Any:
    """Return ``example`` if it can be a graph input.

    Raises:
        GraphError: It is neither a tensor nor a number.
    """
    if not isinstance(example, _KINDS):
        raise refused(node, f"its example input is {a_kind(example)}", _ORDER)
    return example


def check_example(node: Node, example: Any) -> None:
    """Check an example against the fake value of a placeholder; symbolic sizes match any.

    Raises:
        GraphError: It does not match.
    """
    known = node.meta["val"]
    if not isinstance(known, torch.Tensor):
        return
    expected = _told(known)
    if not isinstance(example, torch.Tensor):
        what = f"its example input is {a_kind(example)}, expected {expected}"
    elif _fits(known, example):
        return
    else:
        what = f"its example input is {_told(example)}, expected {expected}"
    raise refused(node, what, 'omit the example inputs: the graph has meta["val"]')


def _fits(known: torch.Tensor, example: torch.Tensor) -> bool:
    if known.dtype != example.dtype or known.ndim != example.ndim:
        return False
    sizes: Sequence[tuple[object, object]] = list(zip(known.shape, example.shape, strict=True))
    return all(old == new for old, new in sizes if isinstance(old, int) and isinstance(new, int))


def _told(tensor: torch.Tensor) -> str:
    return f"{dtype_name(tensor.dtype)}[{', '.join(map(str, tensor.shape))}]"
