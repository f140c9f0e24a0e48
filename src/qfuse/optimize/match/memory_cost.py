"""The cost of moving and quantizing elements, for the gain of rules that reorder the two."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.fx import Node

from qfuse.cost import size_range
from qfuse.cost.model import CostModel
from qfuse.cost.work import WorkRange, pointwise_work
from qfuse.ir.dtypes import bit_width
from qfuse.ir.ops.views import shape_of


def passed(node: Node, reads: torch.dtype, writes: torch.dtype) -> WorkRange:
    """The bytes of reading and writing every element of a tensor of ``node``'s shape.

    Calls are not counted: the compiler fuses pointwise kernels in any case.
    """
    count = size_range(math.prod(shape_of(node)))
    work = pointwise_work(count, [bit_width(reads)], [bit_width(writes)])
    low, hint, high = (w.with_calls(0) for w in work.values)
    return type(work)(low, hint, high)


def saved(cost: CostModel, before: Sequence[WorkRange], after: Sequence[WorkRange]) -> float | None:
    """Return the seconds that ``after`` saves; ``None``, which always pays, if they cost the same.

    A rewrite with equal cost pays because it may enable others. One that loses at the smallest, the
    hinted or the largest size does not.
    """
    compared = cost.compare(before, after)
    # The greatest loss, which is negative: the driver reports it as the reason.
    if not compared.loses_nowhere:
        pairs = zip(compared.before.values, compared.after.values, strict=True)
        return min(old - new for old, new in pairs)
    return compared.gain if compared.gain > 0 else None
