"""Send quantized values between ranks, and dequantize them where they arrive."""

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

    The same holds for ``all_to_all``. It adds collectives, which all ranks have to call in the
    same order: only a caller who runs the same rewrites on every rank may use this rule, whatever
    their constants are, and whichever rewrites a check undoes.

    Refuses: what ``sink-dequantize`` refuses; blocks that would be cut between ranks; shares of
    unknown or unequal size, if rows share a scale.
    """

    name = "sink-below-collective"
    anchors: ClassVar[tuple[OpOverload, ...]] = WAITS
    across_ranks = True
