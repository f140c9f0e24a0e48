"""Sink a dequantize below a max pool, in the form that reaches Inductor.

Decompositions turn a max pool into ``prims._low_memory_max_pool_with_offsets``. It returns the
elements and their positions in the windows.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from qfuse.inductor._inductor_api import LOW_MEMORY_POOL
from qfuse.inductor.pt2e import DEQUANTIZE, is_quantization
from qfuse.ir.dtypes import BYTES
from qfuse.ir.events import EventLog, Fired, Missed
from qfuse.ir.graph.schema import is_call, overload_of
from qfuse.ir.graph.stage_graph import place_of
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, arguments
from qfuse.rewrite.rewriter import GraphEditor

_NAME = "sink-dequantize"
_ROOM = "inductor"


def sink_below_pools(module: GraphModule, log: EventLog) -> None:
    """Pool the quantized values, and dequantize the result.

    Before::

        q -> dequantize(s) -> max_pool -> [0] -> ...

    After::

        q -> max_pool -> [0] -> dequantize(s) -> ...

    Exact, since dequantization is monotonic. Refuses windows with only padding, whose maximum is
    infinite, and pools whose positions are used: different quantized values may dequantize to
    the same value, of which the first position is returned.

    Args:
        module: The module; its graph is changed in place.
        log: Receives the events.
    """
    editor = GraphEditor(module)
    for node in [n for n in module.graph.nodes if is_call(n, LOW_MEMORY_POOL)]:
        real = node.args[0]
        if not isinstance(real, Node) or not is_quantization(real, DEQUANTIZE):
            continue
        place = place_of(node)
        miss = _refuse(node, real) or _sink(node, real, editor)
        if miss is None:
            key = f"{_ROOM}/{_NAME}@{place.node}"
            log.add(Fired(_ROOM, _NAME, key, Exactness.EXACT, (place,)))
        else:
            at = place_of(miss.at)
            log.add(Missed(_ROOM, _NAME, miss.code, miss.reason, place, at, miss.progress))


def pooled(node: Node) -> Node | None:
    """Return the input of a max pool if ``node`` is its first result."""
    if node.target is not operator.getitem or node.args[1] != 0:
        return None
    pool = node.args[0]
    if not isinstance(pool, Node) or not is_call(pool, LOW_MEMORY_POOL):
        return None
    source = pool.args[0]
    return source if isinstance(source, Node) and _never_empty(pool) else None


def _refuse(node: Node, real: Node) -> Miss | None:
    shared = _refuse_users(node, real)
    if shared is not None:
        return shared
    stored = real.args[0]
    if not isinstance(stored, Node) or dtype_of(stored) not in BYTES:
        text = "its quantized values are neither int8 nor uint8"
        return Miss(MissCode.DTYPE, real, text, progress=2)
    if not _keeps_order(arguments(real)["scale"]):
        text = "its dequantization is not monotonic"
        return Miss(MissCode.RANGE, real, text, progress=2)
    if not _never_empty(node):
        text = "a window may contain only padding"
        return Miss(MissCode.SHAPE, node, text, progress=3)
    return None


def _refuse_users(node: Node, real: Node) -> Miss | None:
    if any(item.target is not operator.getitem or item.args[1] != 0 for item in node.users):
        text = "the positions of the elements are used"
        return Miss(MissCode.SHARED, node, text, progress=2)
    if len(node.users) != 1:
        return Miss(MissCode.SHARED, node, "its result has several users", progress=2)
    if len(real.users) != 1:
        text = "its input has other users"
        return Miss(MissCode.SHARED, real, text, progress=2)
    return None


def _keeps_order(scale: object) -> bool:
    """Whether a scale is positive, and neither underflows nor overflows any value."""
    if not isinstance(scale, (int, float)):
        return False
    # The op multiplies in float32: a smaller scale may map neighbours
    # to one subnormal number or 0, a larger one to infinity.
    single = float(torch.tensor(scale, dtype=torch.float32))
    return math.isfinite(single * 2**16) and single >= torch.finfo(torch.float32).tiny


def _never_empty(node: Node) -> bool:
    """Whether every window holds an element of the source."""
    a: dict[str, Any] = dict(arguments(node))
    # With `ceil_mode` the last window may begin behind the end.
    if not any(a["padding"]) and not a["ceil_mode"]:
        return True
    before = shape_of(node.args[0])  # type: ignore[arg-type]
    after = node.meta["val"][0].shape
    fields = [a[name] for name in ("kernel_size", "stride", "padding", "dilation")]
    rank = len(fields[0])
    rows = zip(before[-rank:], after[-rank:], *fields, strict=True)
    return all(_all_hold_elements(row) for row in rows)


def _all_hold_elements(row: Sequence[object]) -> bool:
    numbers = [n for n in row if isinstance(n, int)]
    if len(numbers) != len(row):
        return False  # dynamic sizes
    before, after, size, stride, pad, dilation = numbers
    starts = range(-pad, -pad + after * stride, stride)
    inside = range(0, size * dilation, dilation)
    return all(any(0 <= start + i < before for i in inside) for start in starts)


def _sink(node: Node, real: Node, editor: GraphEditor) -> Miss | None:
    (item,) = node.users
    rw = editor.rewriter(_NAME, node)
    stored = real.args[0]
    chosen = rw.item(rw.call(LOW_MEMORY_POOL, stored, *node.args[1:], **node.kwargs), 0)
    op = overload_of(real)
    assert op is not None, "it is a call of a dequantize"
    new = rw.call(op, chosen, *real.args[1:], **real.kwargs)
    # Users may rely on the captured strides.
    if new.meta["val"].stride() != item.meta["val"].stride():
        rw.undo()
        text = "its result would have another memory format"
        return Miss(MissCode.ORDER, node, text, progress=3)
    rw.replace(item, new)
    rw.commit()
    return None
