"""What a lowering is asked for besides the cheapest kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from qfuse.cost.times import Times
from qfuse.lower.floats.policy import FloatPolicy
from qfuse.lower.measure.measure import Measurer


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a lowering is asked for besides the cheapest kernels.

    Attributes:
        forced: Kernels to use whatever they cost, by the name of the op's node.
        floats: When a product may run in float although a kernel takes it.
        times: Measured times of products; a measurer adds to them.
        measurer: Measures the products without times; ``None`` predicts these.
    """

    forced: Mapping[str, str] = field(default_factory=dict)
    floats: FloatPolicy = field(default_factory=FloatPolicy)
    times: Times = field(default_factory=Times)
    measurer: Measurer | None = None
