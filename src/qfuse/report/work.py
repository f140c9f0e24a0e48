"""The share of the work that runs on quantized kernels, and the predicted times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from qfuse.ir.events import FLOAT, NO_KERNELS, Estimated, Event, Lowered
from qfuse.ir.units import seconds_text

# A line of the report.
_PERCENT = 100


@dataclass(frozen=True, slots=True)
class WorkShare:
    """The products of a model (linears, convolutions, matmuls), and where they run.

    Attributes:
        products: Number of products.
        quantized_products: Those on quantized kernels, or claimed by a backend.
        multiply_adds: Multiply-adds per call of all products.
        quantized_multiply_adds: Those of the products on quantized kernels.
        predicted_seconds: Time per call of all products, as they run: predicted, or measured for
            those that were.
        float_seconds: The same of these products in float.
        weight_only_products: Those of the quantized products whose activation is float.
        weight_only_multiply_adds: Their multiply-adds per call.
        how: How both times are known: ``measured`` if all in the two sums are, ``partly measured``
            if some are, or ``predicted``.
    """

    products: int
    quantized_products: int
    multiply_adds: int
    quantized_multiply_adds: int
    predicted_seconds: float
    float_seconds: float
    weight_only_products: int = 0
    weight_only_multiply_adds: int = 0
    how: str = "predicted"

    @property
    def share(self) -> float:
        """The quantized part of the multiply-adds, from 0 to 1; 0 without products."""
        return self.quantized_multiply_adds / self.multiply_adds if self.multiply_adds else 0.0

    def __str__(self) -> str:
        """``24 of 25 products (98 % of MACs) quantized; predicted 1.2 ms, 3.4 ms if in float``.

        Products of float activations are named: ``24 of 25 products (98 % of MACs) weight-only``,
        or ``quantized, 3 of them weight-only``.
        """
        percent = _percent(self.share)
        how, some = "quantized", self.weight_only_products
        if some:
            rest = self.quantized_products - some
            how = f"quantized, {some} of them weight-only" if rest else "weight-only"
        count = f"{self.quantized_products} of {self.products} products ({percent} of MACs) {how}"
        mine, float_ = seconds_text(self.predicted_seconds), seconds_text(self.float_seconds)
        return f"{count}; {self.how} {mine}, {float_} if in float"


def work_share(events: Iterable[Event]) -> WorkShare | None:
    """Return the share of the work, or ``None`` if the events have no product.

    The predicted time of a kernel is its own; that of a product in float is the cost model's. Those
    that were measured take the place of both.
    """
    known = list(events)
    kernels = kernels_of(known)
    products = [e for e in known if isinstance(e, Estimated) and e.int8_seconds is not None]
    if not products:
        return None
    fast = [e for e in products if e.place.node in kernels]
    light = [e for e in fast if kernels[e.place.node].weight_only]
    chosen = {e.place.node: e for e in known if isinstance(e, Lowered) and e.kernel == FLOAT}
    runs = {**chosen, **kernels}
    predicted = sum(seconds_of(e, runs.get(e.place.node)) for e in products)
    return WorkShare(
        len(products),
        len(fast),
        sum(e.multiply_adds for e in products),
        sum(e.multiply_adds for e in fast),
        predicted,
        sum(float_seconds_of(e, runs.get(e.place.node)) for e in products),
        len(light),
        sum(e.multiply_adds for e in light),
        _how(products, runs),
    )


def _how(products: Iterable[Estimated], runs: Mapping[str, Lowered]) -> str:
    """Return how the times of the products are known, as they run and in float."""
    lowered = [runs.get(e.place.node) for e in products]
    known = [
        is_measured
        for one in lowered
        for is_measured in (
            one is not None and one.measured,
            one is not None and one.measured_float is not None,
        )
    ]
    if all(known):
        return "measured"
    return "partly measured" if any(known) else "predicted"


def kernels_of(events: Iterable[Event]) -> dict[str, Lowered]:
    """Return the ops that run on a kernel or in a backend, by the name of their node."""
    lowered = (e for e in events if isinstance(e, Lowered))
    return {e.place.node: e for e in lowered if e.kernel not in NO_KERNELS}


def seconds_of(product: Estimated, lowered: Lowered | None) -> float:
    """Return the predicted seconds of a product as it runs: on a kernel, or in float by choice."""
    if lowered is None:
        return product.float_seconds
    if lowered.predicted is not None:
        return lowered.predicted
    if lowered.kernel == FLOAT:
        return product.float_seconds
    assert product.int8_seconds is not None, "a product has both predictions"
    return product.int8_seconds


def float_seconds_of(product: Estimated, lowered: Lowered | None) -> float:
    """Return the seconds of a product in float: measured if they are known, or else predicted."""
    if lowered is not None and lowered.measured_float is not None:
        return lowered.measured_float
    return product.float_seconds


def _percent(share: float) -> str:
    # 99.96 % is not everything, and 0.04 % is not nothing.
    rounded = round(share * _PERCENT)
    if rounded == _PERCENT and share < 1:
        return ">99 %"
    return "<1 %" if rounded == 0 and share > 0 else f"{rounded} %"
