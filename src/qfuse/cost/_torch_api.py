"""The measured operators and the ranges of symbolic sizes, which need torch's private API."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from qfuse import kernels
from qfuse.cost.sizes import SizeRange
from qfuse.ir.graph.stage_graph import SymbolRange
from qfuse.kernels.library import is_loaded

# A data-dependent size does not have a traced value; assume a typical one.
_UNKNOWN_HINT = 256
_LEAST_TRACED = 2


@contextlib.contextmanager
def plain_execution() -> Iterator[None]:
    """Run operators eagerly, without fake tensors, autocast or gradients."""
    with _disable_current_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


def int8_linear(rows: int, depth: int, columns: int) -> Callable[[], object]:
    """Return a callable int8 linear in oneDNN, with packed weights and quantized output."""
    # Explicit devices and dtypes: the caller may have set other defaults.
    codes = torch.ones(rows, depth, dtype=torch.uint8, device="cpu")
    plain = torch.ones(columns, depth, dtype=torch.int8, device="cpu")
    packed = torch.ops.onednn.qlinear_prepack(plain, None)
    scales = torch.ones(columns, dtype=torch.float32, device="cpu")
    zeros = torch.zeros(columns, dtype=torch.int64, device="cpu")

    def run() -> object:
        return torch.ops.onednn.qlinear_pointwise(
            codes, 1.0, 0, packed, scales, zeros, None, 1.0, 0, torch.uint8, "none", [], ""
        )

    return run


def own_int8_linear(rows: int, depth: int, columns: int) -> Callable[[], object]:
    """Return a callable int8 linear of qfuse, with packed weights and float output."""
    codes = torch.ones(rows, depth, dtype=torch.int8, device="cpu")
    plain = torch.ones(columns, depth, dtype=torch.int8, device="cpu")
    one = torch.ones((), dtype=torch.float32, device="cpu")
    scales = torch.ones(columns, dtype=torch.float32, device="cpu")
    packed = kernels.pack_weight(plain)
    return lambda: kernels.linear_w8a8(codes, one, None, *packed, scales)


def kernels_in_use() -> str:
    """Return the library of qfuse's kernels and its instruction set; "" if none is loaded."""
    if not is_loaded():
        return ""
    path = kernels.load().path
    # The folder is named after the sources, the file after the compiler. Those of a saved model
    # were not built here.
    library = "saved" if path is None else f"{path.parent.name}/{path.name}"
    return f"{library} {torch.ops.qfuse.chosen_kernels()}"


def int8_matmul(rows: int, depth: int, columns: int) -> Callable[[], object]:
    """Return a callable int8 matmul without scales; needs more than one row."""
    left = torch.ones(rows, depth, dtype=torch.int8, device="cpu")
    right = torch.ones(columns, depth, dtype=torch.int8, device="cpu").t()
    return lambda: torch._int_mm(left, right)


def size_range(
    size: int | torch.SymInt, symbols: Mapping[str, SymbolRange] | None = None
) -> SizeRange:
    """Return the range of a dimension of a traced tensor.

    Tracing assumes that every symbol is at least 2, even if a call may pass 1, so its lower bound
    is not used; that of the signature is.

    Args:
        size: The size. A data-dependent one does not have a hint; a typical one is used.
        symbols: ``Signature.symbols``: the ranges of sizes in a call.
    """
    if not isinstance(size, torch.SymInt) or not size.node.is_symbolic():
        return SizeRange(int(size), int(size), int(size))
    env = size.node.shape_env
    ranges = {
        symbol: _symbol_range((symbols or {}).get(str(symbol)), env.bound_sympy(symbol))
        for symbol in size.node.expr.free_symbols
    }
    bounds = bound_sympy(size.node.expr, ranges)
    # An expression such as `s0 - 2` may have a negative or infinite bound, and no size has.
    low = max(int(bounds.lower), 0) if bounds.lower.is_Integer else 0
    high = int(bounds.upper) if bounds.upper.is_Integer else None
    if not size.node.has_hint():
        middling = _UNKNOWN_HINT if high is None else min(_UNKNOWN_HINT, high)
        return SizeRange(low, max(low, middling), high)
    # The traced size may be outside of the declared range: 2 is traced for 1.
    hint = int(size.node.hint)
    return SizeRange(min(low, hint), hint, None if high is None else max(high, hint))


def hint_of(size: int | torch.SymInt) -> int:
    """Return the traced size of a dimension; a typical one if it depends on data."""
    if not isinstance(size, torch.SymInt) or not size.node.is_symbolic():
        return int(size)
    return int(size.node.hint) if size.node.has_hint() else _UNKNOWN_HINT


def _symbol_range(known: SymbolRange | None, traced: Any) -> Any:
    """Return a symbol's declared range, or the traced one, whose lower bound 2 may mean 0."""
    if known is not None:
        return ValueRanges(known.low, int_oo if known.high is None else known.high)
    return ValueRanges(0, traced.upper) if traced.lower <= _LEAST_TRACED else traced
