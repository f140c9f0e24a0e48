"""Microbenchmarks of products whose weights come from memory, by number of rows.

In a model, other layers run between two uses of a weight. So each product has weights in more
memory than a cache holds, which are used in turn. What else a product reads is in the cache if it
fits. All products share this memory, since its values do not change times, and filling it takes
long.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from qfuse import kernels
from qfuse.cost import _torch_api
from qfuse.cost.probes import timed
from qfuse.cost.rates import ProductRates, RowRate
from qfuse.cost.work import GROUP_PRODUCTS, ProductKind
from qfuse.ir.aten import aten
from qfuse.targets import Target
from qfuse.targets.huge_pages import HugePages

if TYPE_CHECKING:
    from qfuse.cost.probes import Clock

Call = Callable[[torch.Tensor, int], object]
"""Multiplies rows with the weight of a number."""

ROWS = (1, 4, 32, 128, 512, 1536)
"""The numbers of rows that are measured."""

DEPTHS = (1536, 256)
"""Lengths of the sums: the difference between short and long ones is what a column takes."""

INT8_DEPTHS = (4096, 256)
"""Those of products of int8 by int8. Their rates with sums of 4096 do not follow from 1536 and 256:
qfuse's kernel with AMX still gets faster, and ``aten._int_mm`` does not."""

_COLUMNS, _GROUP = 1024, 32
_AREA_BYTES = 72 << 20
"""Bytes of all weights of a product. Between two uses of one are at least 64 MiB of others."""

# The bytes of weights: in floats, 0.01 and no subnormal number, which some processors take longer
# for.
_BYTE = 0x3C

# A sample has as many calls as take this long. What would take longer than `_LONG_SECONDS` with the
# sums of DEPTHS is not measured: more rows are taken to be as fast.
_SAMPLE_SECONDS = 0.3e-3
_LONG_SECONDS = 16e-3
_MOST_CALLS = 32
# What takes longer warms its own caches, and is disturbed less. Besides these rounds it has the
# sample that tells how long it takes.
_WARM_SECONDS = 2e-3
_LONG_ROUNDS = 1
_LEAST_ROUNDS, _ROUNDS = 4, 5
# At most this part of a time is taken for its call.
_MOST_OVERHEAD = 0.75


class WeightArea:
    """Memory for the weights of all products, which is read from its beginning to its end."""

    def __init__(self) -> None:
        # It lies as lowered weights do.
        filled = torch.full((_AREA_BYTES,), _BYTE, dtype=torch.uint8, device="cpu")
        self.memory = HugePages().copy(filled)
        self._position = 0

    def following(self, size: int) -> int:
        """Return which of the pieces of ``size`` bytes has not been read for the longest time."""
        number = -(-self._position // size)
        if (number + 1) * size > self.memory.nbytes:
            number = 0
        self._position = (number + 1) * size
        return number

    def like(self, weight: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return tensors like a contiguous weight that fill the memory."""
        size = weight.nbytes
        pieces = torch.split(self.memory[: self.memory.nbytes // size * size], size)
        return [piece.view(weight.dtype).view(weight.shape) for piece in pieces]

    def far_from(
        self, weight: torch.Tensor, *others: torch.Tensor
    ) -> Iterator[Sequence[torch.Tensor]]:
        """Yield tensors like the small ``others``, one for each that :meth:`like` returns.

        They are far from these weights: where one was read before, it would be in the cache.
        """
        size = weight.nbytes
        count = self.memory.nbytes // size
        for part, other in enumerate(others, 1):
            step = count * part // (1 + len(others))
            begins = [(number + step) % count * size for number in range(count)]
            pieces = [self.memory[begin : begin + other.nbytes] for begin in begins]
            yield [piece.view(other.dtype).view(other.shape) for piece in pieces]


@dataclass(frozen=True, slots=True)
class ProductProbe:
    """A product with several weights.

    Attributes:
        dtype: That of the activations.
        call: Multiplies activations with one of the weights.
        weight_bytes: Bytes of each weight.
        depth: Length of the sums.
    """

    dtype: torch.dtype
    call: Call
    weight_bytes: int
    depth: int

    def with_rows(self, rows: int, area: WeightArea, clock: Clock) -> TimedProduct:
        """Return what times it with a number of rows."""
        x = torch.ones(rows, self.depth, dtype=self.dtype, device="cpu")
        return TimedProduct(self, x, area, clock)


class TimedProduct:
    """Times a product, and keeps the best of several samples.

    Args:
        probe: The product.
        x: Its activations.
        area: Where the weights are.
        clock: The clock.
    """

    def __init__(
        self, probe: ProductProbe, x: torch.Tensor, area: WeightArea, clock: Clock
    ) -> None:
        self._probe, self._x, self._area, self._clock = probe, x, area, clock
        self._calls, self.seconds, self.first_seconds = 1, math.inf, math.inf
        # The first call allocates buffers.
        self.sample()
        self.seconds = math.inf
        self.sample()
        self.first_seconds = self.seconds
        taken = max(self.seconds, _SAMPLE_SECONDS / _MOST_CALLS)
        self._calls = max(1, int(_SAMPLE_SECONDS / taken))
        if self._calls > 1:
            self.seconds = math.inf

    def sample(self) -> None:
        """Time some calls."""
        call, x = self._probe.call, self._x
        if self.first_seconds < _WARM_SECONDS:
            # Other probes have evicted everything that a model keeps in a cache.
            call(x, self._area.following(self._probe.weight_bytes))

        def prepared() -> Callable[[], None]:
            numbers = [self._area.following(self._probe.weight_bytes) for _ in range(self._calls)]

            def run() -> None:
                for number in numbers:
                    call(x, number)

            return run

        self.seconds = min(self.seconds, timed(prepared, self._clock) / self._calls)

    def without_call(self, overhead: float) -> float:
        """Return the best time, without the overhead of a call."""
        return self.seconds - min(overhead, _MOST_OVERHEAD * self.seconds)


Build = Callable[[WeightArea, int], ProductProbe]
"""Makes a probe from the memory of the weights, and the length of the sums."""


@dataclass(frozen=True, slots=True)
class ProbedProduct:
    """What is measured of a product.

    Attributes:
        build: Makes its probes.
        rows: The numbers of rows that are measured.
        depths: Lengths of the sums, a long and a short one.
        own: Whether the kernels are those of qfuse.
        library: Whether each call sets up a oneDNN primitive.
        group: Input features that share a scale, if scales count as products.
    """

    build: Build
    rows: tuple[int, ...] = ROWS
    depths: tuple[int, int] = DEPTHS
    own: bool = False
    library: bool = False
    group: int | None = None

    @property
    def counted_depths(self) -> tuple[float, float]:
        """The products of a long and a short sum, as :data:`GROUP_PRODUCTS` counts them."""
        more = 0.0 if self.group is None else GROUP_PRODUCTS / self.group
        long, short = self.depths
        return long * (1 + more), short * (1 + more)

    def timed(self, area: WeightArea, clock: Clock) -> dict[int, list[TimedProduct]]:
        """Return what times long and short sums, by rows; without rows that take too long."""
        probes = [self.build(area, depth) for depth in self.depths]
        found: dict[int, list[TimedProduct]] = {}
        per_row = 0.0
        for rows in self.rows:
            if rows * per_row > _LONG_SECONDS * self.depths[0] / DEPTHS[0]:
                break
            found[rows] = [probe.with_rows(rows, area, clock) for probe in probes]
            per_row = found[rows][0].first_seconds / rows
        return found


def product_rates(
    target: Target,
    clock: Clock,
    overhead: Callable[[ProbedProduct], float],
    *,
    between: Callable[[], None],
    deadline: float = math.inf,
) -> list[ProductRates]:
    """Measure the rates of every product that this machine has kernels for.

    Args:
        target: Determines the available kernels.
        clock: The clock to time them with.
        overhead: Returns the overhead of a call, which the rates exclude.
        between: Called between rounds.
        deadline: ``time.perf_counter`` after which there are fewer rounds.
    """
    area, probed = WeightArea(), probed_products(target)
    timed = {product: one.timed(area, clock) for product, one in probed.items()}
    listed = [one for by_rows in timed.values() for both in by_rows.values() for one in both]
    # Rounds, so that other load hits all alike.
    for number in range(_ROUNDS):
        if number >= _LEAST_ROUNDS and time.perf_counter() > deadline:
            break
        for one in listed:
            if number < _LONG_ROUNDS or one.seconds < _WARM_SECONDS:
                one.sample()
        between()
    found = []
    for product, by_rows in timed.items():
        depths, taken = probed[product].counted_depths, overhead(probed[product])
        rates = (
            _row_rate(rows, depths, long.without_call(taken), short.without_call(taken))
            for rows, (long, short) in by_rows.items()
        )
        found.append(ProductRates(product, tuple(rates)))
    return found


def _row_rate(rows: int, depths: tuple[float, float], long: float, short: float) -> RowRate:
    """Return the rate, and the time of a column, from the times of long and short sums."""
    deep, shallow = depths
    per_step = (long - short) / (deep - shallow)
    beside = short - shallow * per_step
    # Noise may make short sums slow or long ones fast; the time of the long ones is kept.
    if per_step <= 0 or beside <= 0:
        return RowRate(rows, 2.0 * rows * deep * _COLUMNS / long)
    return RowRate(rows, 2.0 * rows * _COLUMNS / per_step, beside / _COLUMNS)


def probed_products(target: Target) -> Mapping[ProductKind, ProbedProduct]:
    """Return what is measured of every product that this machine has kernels for."""
    f32, bf16 = torch.float32, torch.bfloat16
    found = {
        ProductKind.F32: ProbedProduct(partial(_floats, f32)),
        ProductKind.BF16: ProbedProduct(partial(_floats, bf16)),
    }
    if target.has_kernel("aten::_int_mm"):
        # It does not compute the result of one row: see qfuse.targets.doctor.
        found[ProductKind.ATEN_INT8] = ProbedProduct(
            _aten_int8, ROWS[1:], INT8_DEPTHS, library=True
        )
    if target.has_kernel("aten::_weight_int8pack_mm"):
        found[ProductKind.ATEN_F32_INT8] = ProbedProduct(partial(_aten_weight_only, f32))
        found[ProductKind.ATEN_BF16_INT8] = ProbedProduct(partial(_aten_weight_only, bf16))
    if _torch_api.kernels_in_use():
        found[ProductKind.INT8] = ProbedProduct(_int8, depths=INT8_DEPTHS, own=True)
        found[ProductKind.INT8_INT4] = ProbedProduct(_int8_int4, own=True, group=_GROUP)
        found[ProductKind.F32_INT8] = ProbedProduct(partial(_weight_only_int8, f32), own=True)
        found[ProductKind.F32_INT4] = ProbedProduct(partial(_weight_only_int4, f32), own=True)
        found[ProductKind.BF16_INT8] = ProbedProduct(partial(_weight_only_int8, bf16), own=True)
        found[ProductKind.BF16_INT4] = ProbedProduct(partial(_weight_only_int4, bf16), own=True)
    return found


def _floats(dtype: torch.dtype, area: WeightArea, depth: int) -> ProductProbe:
    weight = torch.empty(_COLUMNS, depth, dtype=dtype, device="cpu")
    weights = area.like(weight)
    return ProductProbe(dtype, lambda x, i: functional.linear(x, weights[i]), weight.nbytes, depth)


def _aten_int8(area: WeightArea, depth: int) -> ProductProbe:
    weight = _ones(depth)
    weights = [one.t() for one in area.like(weight)]
    return ProductProbe(
        torch.int8, lambda x, i: aten._int_mm.default(x, weights[i]), weight.nbytes, depth
    )


def _aten_weight_only(dtype: torch.dtype, area: WeightArea, depth: int) -> ProductProbe:
    weight, scale = _ones(depth), torch.ones(_COLUMNS, dtype=dtype, device="cpu")
    weights = area.like(weight)

    def call(x: torch.Tensor, number: int) -> object:
        return aten._weight_int8pack_mm.default(x, weights[number], scale)

    return ProductProbe(dtype, call, weight.nbytes, depth)


def _int8(area: WeightArea, depth: int) -> ProductProbe:
    weight, sums = kernels.pack_weight(_ones(depth))
    weights, one, scales = area.like(weight), torch.ones((), device="cpu"), _scales(1)

    def call(x: torch.Tensor, number: int) -> object:
        return kernels.linear_w8a8(x, one, None, weights[number], sums, scales)

    return ProductProbe(torch.int8, call, weight.nbytes, depth)


def _int8_int4(area: WeightArea, depth: int) -> ProductProbe:
    groups = kernels.pack_grouped(_ones(depth, torch.uint8), _scales(depth // _GROUP))
    weights, one = area.like(groups.weight), torch.ones((), device="cpu")
    sums, scales = area.far_from(groups.weight, groups.sums, groups.scale)

    def call(x: torch.Tensor, i: int) -> object:
        return kernels.linear_w4a8(x, one, None, weights[i], sums[i], scales[i], None, _COLUMNS)

    return ProductProbe(torch.int8, call, groups.weight.nbytes, depth)


def _weight_only_int8(dtype: torch.dtype, area: WeightArea, depth: int) -> ProductProbe:
    weight, scales = kernels.pack_bytes(_ones(depth)), _scales(1)
    weights = area.like(weight)

    def call(x: torch.Tensor, number: int) -> object:
        return kernels.linear_w8a16(x, weights[number], scales)

    return ProductProbe(dtype, call, weight.nbytes, depth)


def _weight_only_int4(dtype: torch.dtype, area: WeightArea, depth: int) -> ProductProbe:
    weight = kernels.pack_weight4(_ones(depth, torch.uint8))
    weights = area.like(weight)
    (scales,) = area.far_from(weight, kernels.pack_groups(_scales(depth // _GROUP)))

    def call(x: torch.Tensor, i: int) -> object:
        return kernels.linear_w4a16(x, weights[i], scales[i], None, None, _COLUMNS)

    return ProductProbe(dtype, call, weight.nbytes, depth)


def _ones(depth: int, dtype: torch.dtype = torch.int8) -> torch.Tensor:
    return torch.ones(_COLUMNS, depth, dtype=dtype, device="cpu")


def _scales(groups: int) -> torch.Tensor:
    return torch.ones(_COLUMNS, groups, dtype=torch.float32, device="cpu").squeeze(1)
