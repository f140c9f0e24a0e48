"""The operators that are measured, and what a symbolic size may be: private names of torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from qfuse.cost.sizes import SizeRange
from qfuse.ir.graph.stage_graph import SymbolRange

T = TypeVar("T")

# A size that depends on data has no traced value; this one is neither a corner nor exotic.
_UNKNOWN_HINT = 256
_LEAST_TRACED = 2


@contextlib.contextmanager
def plain_execution() -> Iterator[None]:
    """Run operators as they are: no fake tensors, no autocast, no gradients."""
    with _disable_current_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


def on_one_thread(run: Callable[[], T]) -> T:
    """Run something in a thread of its own, in which operators use no other thread.

    The number of threads per operator is a setting of each thread, next to a default for threads
    that have none yet. Only the default is shared, and it is back before anything runs.
    """
    threads = torch.get_num_threads()

    def limited() -> T:
        # Asking sets this thread up; it would undo the limit if it came later.
        torch.get_num_threads()
        torch.set_num_threads(1)
        _in_new_thread(lambda: torch.set_num_threads(threads))
        with plain_execution():
            return run()

    return _in_new_thread(limited)


def _in_new_thread(run: Callable[[], T]) -> T:
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(run).result()


def int8_linear(rows: int, depth: int, columns: int) -> Callable[[], object]:
    """An int8 linear in oneDNN, weights packed and output quantized, ready to be called."""
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


def int8_matmul(rows: int, depth: int, columns: int) -> Callable[[], object]:
    """An int8 product without scales. Wants more than one row."""
    left = torch.ones(rows, depth, dtype=torch.int8, device="cpu")
    right = torch.ones(columns, depth, dtype=torch.int8, device="cpu").t()
    return lambda: torch._int_mm(left, right)


def size_range(
    size: int | torch.SymInt, symbols: Mapping[str, SymbolRange] | None = None
) -> SizeRange:
    """The sizes that a dimension of a traced tensor may have.

    Tracing believes that every symbol is two or more, even where a call may bring 1, so what it
    says of the least size is not taken for the truth: the signature's ranges are.

    Args:
        size: The size. One that depends on data has no hint; a middling one is taken.
        symbols: ``Signature.symbols``: the sizes that a call may bring.
    """
    if not isinstance(size, torch.SymInt) or not size.node.is_symbolic():
        return SizeRange(int(size), int(size), int(size))
    env = size.node.shape_env
    ranges = {
        symbol: _symbol_range((symbols or {}).get(str(symbol)), env.bound_sympy(symbol))
        for symbol in size.node.expr.free_symbols
    }
    bounds = bound_sympy(size.node.expr, ranges)
    low = max(int(bounds.lower), 0) if bounds.lower.is_Integer else 0
    high = int(bounds.upper) if bounds.upper.is_Integer else None
    if not size.node.has_hint():
        middling = _UNKNOWN_HINT if high is None else min(_UNKNOWN_HINT, high)
        return SizeRange(low, max(low, middling), high)
    # A size may be traced at another than the declared ones: 2 stands for 1.
    hint = int(size.node.hint)
    return SizeRange(min(low, hint), hint, None if high is None else max(high, hint))


def _symbol_range(known: SymbolRange | None, traced: Any) -> Any:
    """Return what is declared of a symbol, or what tracing says, whose 2 may mean 0."""
    if known is not None:
        return ValueRanges(known.low, int_oo if known.high is None else known.high)
    return ValueRanges(0, traced.upper) if traced.lower <= _LEAST_TRACED else traced
