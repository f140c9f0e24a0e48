"""Microbenchmarks of products whose weights come from memory, by number of rows.

In a model, other layers run between two uses of a weight. So each product has weights in more
memory than a cache holds, which are used in turn. Everything else stays in the cache. All products
share this memory, since its values do not change times, and filling it takes long.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from qfuse import kernels
from qfuse.cost import _torch_api
from qfuse.cost.probes import Probe
from qfuse.cost.profile import ProductRates
from qfuse.cost.work import Product
from qfuse.targets import Target
from qfuse.targets.huge_pages import HugePages

if TYPE_CHECKING:
    from qfuse.cost.probes import Clock

Call = Callable[[torch.Tensor, int], object]
"""Multiplies rows with the weight of a number."""

ROWS = (1, 4, 32, 128)
"""The numbers of rows that are measured."""

_DEPTH, _COLUMNS, _GROUP = 2048, 1024, 32
_ROW_OPERATIONS = 2 * _DEPTH * _COLUMNS
_AREA_BYTES = 72 << 20
"""Bytes of all weights of a product. Between two uses of one are at least 64 MiB of others."""

# The bytes of weights: in floats, 0.01 and no subnormal number, which some processors take longer
# for.
_BYTE = 0x3C

# A sample has as many calls as take this long. What would take longer than `_LONG_SECONDS` is not
# measured, since more rows are as fast.
_SAMPLE_SECONDS = 1e-3
_LONG_SECONDS = 20e-3
_MOST_CALLS = 32
_LEAST_SAMPLES, _SAMPLES = 2, 4


@dataclass(frozen=True, slots=True)
class ProductProbe:
    """A product with several weights.

    Attributes:
        dtype: That of the activations.
        call: Multiplies activations with one of the weights.
        weights: Their number.
        rows: The numbers of rows that are measured.
    """

    dtype: torch.dtype
    call: Call
    weights: int
    rows: tuple[int, ...] = ROWS

    def rates(
        self, product: Product, clock: Clock, seconds_per_call: float, deadline: float
    ) -> ProductRates:
        """Measure the rates."""
        numbers = itertools.cycle(range(self.weights))
        rates: list[tuple[int, float]] = []
        for rows in self.rows:
            if rates and rows * _ROW_OPERATIONS / rates[-1][1] > _LONG_SECONDS:
                break
            x = torch.ones(rows, _DEPTH, dtype=self.dtype, device="cpu")
            probe = self._probe(x, numbers, clock)
            for number in range(_SAMPLES):
                if number < _LEAST_SAMPLES or time.perf_counter() < deadline:
                    probe.sample()
            rates.append((rows, probe.rate(seconds_per_call)))
        return ProductRates(product, tuple(rates))

    def _probe(self, x: torch.Tensor, numbers: Iterator[int], clock: Clock) -> Probe:
        def run(calls: int) -> None:
            for _ in range(calls):
                self.call(x, next(numbers))

        run(1)
        begin = clock()
        run(1)
        taken = max(clock() - begin, _SAMPLE_SECONDS / _MOST_CALLS)
        calls = max(1, int(_SAMPLE_SECONDS / taken))
        amount = float(x.shape[0] * _ROW_OPERATIONS * calls)
        return Probe(lambda: run(calls), amount, calls, repeats=1, clock=clock)


def product_rates(
    target: Target,
    clock: Clock,
    seconds_per_call: float,
    library_call: float,
    deadline: float,
) -> list[ProductRates]:
    """Measure the rates of every product that this machine has kernels for.

    Args:
        target: Determines the available kernels.
        clock: The clock to time them with.
        seconds_per_call: Overhead of a call, which the rates exclude.
        library_call: The same for an operator that sets up a oneDNN primitive.
        deadline: ``time.perf_counter`` after which there are fewer samples.
    """
    found, area = [], weight_area()
    for product, build in product_probes(target).items():
        overhead = library_call if product is Product.ATEN_INT8 else seconds_per_call
        found.append(build(area).rates(product, clock, overhead, deadline))
    return found


def product_probes(target: Target) -> Mapping[Product, Callable[[torch.Tensor], ProductProbe]]:
    """Return what makes the probe of every product that this machine has kernels for.

    Each takes the memory of the weights.
    """
    f32, bf16 = torch.float32, torch.bfloat16
    found: dict[Product, Callable[[torch.Tensor], ProductProbe]] = {
        Product.F32: partial(_floats, f32),
        Product.BF16: partial(_floats, bf16),
    }
    if target.has_kernel("aten::_int_mm"):
        found[Product.ATEN_INT8] = _aten_int8
    if target.has_kernel("aten::_weight_int8pack_mm"):
        found[Product.ATEN_F32_INT8] = partial(_aten_weight_only, f32)
        found[Product.ATEN_BF16_INT8] = partial(_aten_weight_only, bf16)
    if _torch_api.kernels_in_use():
        found[Product.INT8] = _int8
        found[Product.INT8_INT4] = _int8_int4
        found[Product.F32_INT8] = partial(_weight_only_int8, f32)
        found[Product.F32_INT4] = partial(_weight_only_int4, f32)
        found[Product.BF16_INT8] = partial(_weight_only_int8, bf16)
        found[Product.BF16_INT4] = partial(_weight_only_int4, bf16)
    return found


def weight_area() -> torch.Tensor:
    """Return the memory of the weights, which lies as that of lowered weights does."""
    filled = torch.full((_AREA_BYTES,), _BYTE, dtype=torch.uint8, device="cpu")
    return HugePages().copy(filled)


def in_area(weight: torch.Tensor, area: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return tensors like a contiguous weight that fill the memory."""
    size = weight.nbytes
    pieces = area[: area.nbytes // size * size].split(size)
    return [piece.view(weight.dtype).view(weight.shape) for piece in pieces]


def _floats(dtype: torch.dtype, area: torch.Tensor) -> ProductProbe:
    weights = in_area(torch.empty(_COLUMNS, _DEPTH, dtype=dtype, device="cpu"), area)
    return ProductProbe(dtype, lambda x, i: functional.linear(x, weights[i]), len(weights))


def _aten_int8(area: torch.Tensor) -> ProductProbe:
    weights = [weight.t() for weight in in_area(_bytes(), area)]
    # It does not compute the result of one row: see qfuse.targets.doctor.
    return ProductProbe(
        torch.int8, lambda x, i: torch._int_mm(x, weights[i]), len(weights), ROWS[1:]
    )


def _aten_weight_only(dtype: torch.dtype, area: torch.Tensor) -> ProductProbe:
    weights, scale = in_area(_bytes(), area), torch.ones(_COLUMNS, dtype=dtype, device="cpu")
    return ProductProbe(
        dtype, lambda x, i: torch._weight_int8pack_mm(x, weights[i], scale), len(weights)
    )


def _int8(area: torch.Tensor) -> ProductProbe:
    packed, sums = kernels.pack_weight(_bytes())
    weights, one, scales = in_area(packed, area), torch.ones((), device="cpu"), _scales(_COLUMNS)

    def call(x: torch.Tensor, number: int) -> object:
        return kernels.linear_w8a8(x, one, None, weights[number], sums, scales)

    return ProductProbe(torch.int8, call, len(weights))


def _int8_int4(area: torch.Tensor) -> ProductProbe:
    groups = kernels.pack_grouped(_nibbles(), _group_scales())
    weights, one = in_area(groups.weight, area), torch.ones((), device="cpu")

    def call(x: torch.Tensor, number: int) -> object:
        return kernels.linear_w4a8(x, one, None, weights[number], *groups[1:], _COLUMNS)

    return ProductProbe(torch.int8, call, len(weights))


def _weight_only_int8(dtype: torch.dtype, area: torch.Tensor) -> ProductProbe:
    weights, scales = in_area(kernels.pack_bytes(_bytes()), area), _scales(_COLUMNS)
    return ProductProbe(
        dtype, lambda x, i: kernels.linear_w8a16(x, weights[i], scales), len(weights)
    )


def _weight_only_int4(dtype: torch.dtype, area: torch.Tensor) -> ProductProbe:
    weights = in_area(kernels.pack_weight4(_nibbles()), area)
    scales = kernels.pack_groups(_group_scales())

    def call(x: torch.Tensor, number: int) -> object:
        return kernels.linear_w4a16(x, weights[number], scales, None, None, _COLUMNS)

    return ProductProbe(dtype, call, len(weights))


def _bytes() -> torch.Tensor:
    return torch.ones(_COLUMNS, _DEPTH, dtype=torch.int8, device="cpu")


def _nibbles() -> torch.Tensor:
    return torch.ones(_COLUMNS, _DEPTH, dtype=torch.uint8, device="cpu")


def _scales(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float32, device="cpu")


def _group_scales() -> torch.Tensor:
    return _scales(_COLUMNS, _DEPTH // _GROUP)
