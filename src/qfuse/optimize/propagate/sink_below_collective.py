"""Sink dequantize below collectives, so that ranks exchange quantized values."""

from __future__ import annotations

from typing import ClassVar

from qfuse.ir.movement.collective import WAITS
from qfuse.optimize.propagate.sink_dequantize import SinkDequantize
from qfuse.rewrite.prelude import OpOverload


class SinkBelowCollective(SinkDequantize):
    """``all_gather(dequantize(q, s))`` becomes ``dequantize(all_gather(q), all_gather(s))``.

    Before::

        q -> dequantize(s) -> all_gather -> wait -> ...

    After::

        q -> all_gather -> wait --.
        s -> all_gather -> wait --+-> dequantize -> ...

    The same holds for ``all_to_all``. The rule adds collectives, and all ranks have to call
    collectives in the same order. Use it only if every rank runs the same rewrites, whatever its
    constants are and whichever rewrites a check undoes.

    Refuses: what ``sink-dequantize`` refuses; blocks that would be split between ranks; shards of
    unknown or unequal size, if rows share a scale.
    """

    name = "sink-below-collective"
    anchors: ClassVar[tuple[OpOverload, ...]] = WAITS
    across_ranks = True
