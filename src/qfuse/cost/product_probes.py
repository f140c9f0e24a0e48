"""Microbenchmarks of products whose weights come from memory, by number of rows.

In a model, other layers run between two uses of a weight. So each product has several copies of
its weight, which are used in turn: more than a cache holds. Everything else stays in the cache.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
_OTHER_BYTES = 64 << 20
"""Bytes of the other copies, between two uses of one."""

# A sample has as many calls as take this long. What would take longer than `_LONG_SECONDS` is not
# measured, since more rows are as fast.
_SAMPLE_SECONDS = 1e-3
_LONG_SECONDS = 20e-3
_MOST_CALLS = 32
_LEAST_SAMPLES, _SAMPLES = 2, 4


@dataclass(frozen=True, slots=True)
class ProductProbe:
    """A product with several copies of a weight.

    Attributes:
        dtype: That of the activations.
        call: Multiplies activations with a copy.
        copies: The number of copies.
        rows: The numbers of rows that are measured.
    """

    dtype: torch.dtype
    call: Call
    copies: int
    rows: tuple[int, ...] = ROWS

    def rates(
        self, product: Product, clock: Clock, seconds_per_call: float, deadline: float
    ) -> ProductRates:
        """Measure the rates."""
        numbers = itertools.cycle(range(self.copies))
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
        begin = time.perf_counter()
        run(1)
        taken = max(time.perf_counter() - begin, _SAMPLE_SECONDS / _MOST_CALLS)
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
    found = []
    for product, build in product_probes(target).items():
        overhead = library_call if product is Product.ATEN_INT8 else seconds_per_call
        found.append(build().rates(product, clock, overhead, deadline))
    return found


def product_probes(target: Target) -> Mapping[Product, Callable[[], ProductProbe]]:
    """Return what makes the probe of every product that this machine has kernels for."""
    f32, bf16 = torch.float32, torch.bfloat16
    found: dict[Product, Callable[[], ProductProbe]] = {
        Product.F32: lambda: _floats(f32),
        Product.BF16: lambda: _floats(bf16),
    }
    if target.has_kernel("aten::_int_mm"):
        found[Product.ATEN_INT8] = _aten_int8
    if target.has_kernel("aten::_weight_int8pack_mm"):
        found[Product.ATEN_F32_INT8] = lambda: _aten_weight_only(f32)
        found[Product.ATEN_BF16_INT8] = lambda: _aten_weight_only(bf16)
    if _torch_api.kernels_in_use():
        found[Product.INT8] = _int8
        found[Product.INT8_INT4] = _int8_int4
        found[Product.F32_INT8] = lambda: _weight_only_int8(f32)
        found[Product.F32_INT4] = lambda: _weight_only_int4(f32)
        found[Product.BF16_INT8] = lambda: _weight_only_int8(bf16)
        found[Product.BF16_INT4] = lambda: _weight_only_int4(bf16)
    return found


def _floats(dtype: torch.dtype) -> ProductProbe:
    weights = copies(torch.ones(_COLUMNS, _DEPTH, dtype=dtype, device="cpu"))
    return ProductProbe(dtype, lambda x, i: functional.linear(x, weights[i]), len(weights))


def _aten_int8() -> ProductProbe:
    weights = [weight.t() for weight in copies(_bytes())]
    # It does not compute the result of one row: see qfuse.targets.doctor.
    return ProductProbe(
        torch.int8, lambda x, i: torch._int_mm(x, weights[i]), len(weights), ROWS[1:]
    )


def _aten_weight_only(dtype: torch.dtype) -> ProductProbe:
    weights, scale = copies(_bytes()), torch.ones(_COLUMNS, dtype=dtype, device="cpu")
    return ProductProbe(
        dtype, lambda x, i: torch._weight_int8pack_mm(x, weights[i], scale), len(weights)
    )


def _int8() -> ProductProbe:
    packed, sums = kernels.pack_weight(_bytes())
    weights, one, scales = copies(packed), torch.ones((), device="cpu"), _scales(_COLUMNS)

    def call(x: torch.Tensor, number: int) -> object:
        return kernels.linear_w8a8(x, one, None, weights[number], sums, scales)

    return ProductProbe(torch.int8, call, len(weights))


def _int8_int4() -> ProductProbe:
    groups = kernels.pack_grouped(_nibbles(), _group_scales())
    weights, one = copies(groups.weight), torch.ones((), device="cpu")

    def call(x: torch.Tensor, number: int) -> object:
        return kernels.linear_w4a8(x, one, None, weights[number], *groups[1:], _COLUMNS)

    return ProductProbe(torch.int8, call, len(weights))


def _weight_only_int8(dtype: torch.dtype) -> ProductProbe:
    weights, scales = copies(kernels.pack_bytes(_bytes())), _scales(_COLUMNS)
    return ProductProbe(
        dtype, lambda x, i: kernels.linear_w8a16(x, weights[i], scales), len(weights)
    )


def _weight_only_int4(dtype: torch.dtype) -> ProductProbe:
    weights = copies(kernels.pack_weight4(_nibbles()))
    scales = kernels.pack_groups(_group_scales())

    def call(x: torch.Tensor, number: int) -> object:
        return kernels.linear_w4a16(x, weights[number], scales, None, None, _COLUMNS)

    return ProductProbe(dtype, call, len(weights))


def copies(weight: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return copies of a weight that a cache does not hold, in memory as lowering uses it."""
    pages, count = HugePages(), 1 + -(-_OTHER_BYTES // weight.nbytes)
    return [pages.copy(weight) for _ in range(count)]


def _bytes() -> torch.Tensor:
    return torch.ones(_COLUMNS, _DEPTH, dtype=torch.int8, device="cpu")


def _nibbles() -> torch.Tensor:
    return torch.ones(_COLUMNS, _DEPTH, dtype=torch.uint8, device="cpu")


def _scales(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float32, device="cpu")


def _group_scales() -> torch.Tensor:
    return _scales(_COLUMNS, _DEPTH // _GROUP)
