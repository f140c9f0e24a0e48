"""Rates of products with weights in memory: what is run, and what is concluded."""

from __future__ import annotations

import math
import time

import pytest
import torch

from qfuse import kernels
from qfuse.cost import Product, _torch_api, product_probes
from qfuse.cost.product_probes import ROWS, ProductProbe, in_area, product_rates, weight_area
from qfuse.targets import KernelState, Target

OPERATIONS = 2 * 2048 * 1024
WITHOUT_ATEN = {
    "aten::_int_mm": KernelState.ABSENT,
    "aten::_weight_int8pack_mm": KernelState.ABSENT,
}


class Machine:
    """A clock, and products that take a fixed time and one more per row."""

    def __init__(self, fixed: float, per_row: float) -> None:
        self.now, self.fixed, self.per_row = 0.0, fixed, per_row
        self.used: list[int] = []

    def clock(self) -> float:
        return self.now

    def call(self, x: torch.Tensor, number: int) -> None:
        self.used.append(number)
        self.now += self.fixed + self.per_row * x.shape[0]


def test_rates_are_those_of_the_clock() -> None:
    machine = Machine(fixed=3e-6, per_row=1e-6)
    probe = ProductProbe(torch.float32, machine.call, weights=5)

    found = probe.rates(Product.INT8, machine.clock, 1e-6, math.inf)

    # A call of 1 us is no part of the product.
    expected = [(rows, rows * OPERATIONS / (2e-6 + rows * 1e-6)) for rows in ROWS]
    assert [rows for rows, _ in found.rates] == [rows for rows, _ in expected]
    assert [r for _, r in found.rates] == pytest.approx([r for _, r in expected], rel=1e-3)
    # One copy after the other, so that the next one is in memory.
    assert machine.used == [number % 5 for number in range(len(machine.used))]


def test_a_slow_product_is_measured_with_few_rows() -> None:
    machine = Machine(fixed=0.0, per_row=1e-3)
    probe = ProductProbe(torch.float32, machine.call, weights=2)

    found = probe.rates(Product.F32, machine.clock, 0.0, math.inf)

    assert [rows for rows, _ in found.rates] == [1, 4]


def test_weights_are_more_than_a_cache_holds() -> None:
    area = weight_area()
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        made = in_area(torch.empty(1024, 2048, dtype=dtype), area)
        places = {one.data_ptr() for one in made}

        # Between two uses of one.
        assert sum(one.nbytes for one in made[1:]) >= 64 << 20
        assert len(places) == len(made)
        assert {(one.dtype, one.shape) for one in made} == {(dtype, (1024, 2048))}
        # No subnormal numbers.
        assert float(made[-1].float().min()) > 1e-3


def test_only_what_the_machine_has_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch_api, "kernels_in_use", lambda: "")
    floats = {Product.F32, Product.BF16}
    aten = {Product.ATEN_INT8, Product.ATEN_F32_INT8, Product.ATEN_BF16_INT8}

    assert set(product_probes.product_probes(Target.for_testing(kernels=WITHOUT_ATEN))) == floats
    assert set(product_probes.product_probes(Target.for_testing())) == floats | aten


@pytest.mark.own_kernels
def test_every_product_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.load()
    # Small weights: what is tested does not depend on their sizes.
    for name, size in {"_DEPTH": 128, "_COLUMNS": 64, "_AREA_BYTES": 1 << 20}.items():
        monkeypatch.setattr(product_probes, name, size)
    made = product_rates(Target.for_testing(), time.perf_counter, 0.0, 0.0, 0.0)
    found = {one.product: one for one in made}

    assert set(found) == set(Product)
    # torch's product of integers does not compute one row.
    assert found[Product.ATEN_INT8].rates[0][0] == ROWS[1]
    # From a very slow to a very fast machine.
    assert all(1e5 < rate < 1e14 for one in made for _, rate in one.rates)
