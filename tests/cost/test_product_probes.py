"""Rates of products with weights in memory: what is run, and what is concluded."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch

from qfuse import kernels
from qfuse.cost import ProductKind, RowRate, _torch_api, product_probes
from qfuse.cost.product_probes import (
    DEPTHS,
    INT8_DEPTHS,
    ROWS,
    ProbedProduct,
    ProductProbe,
    WeightArea,
    product_rates,
)
from qfuse.targets import KernelState, Target

COLUMNS = 1024
WITHOUT_ATEN = {
    "aten::_int_mm": KernelState.ABSENT,
    "aten::_weight_int8pack_mm": KernelState.ABSENT,
}


@dataclass
class Machine:
    """A clock, and a product with times by rows and depth; it remembers the weights it has used."""

    seconds: Callable[[int, int], float]
    weight_bytes: int = 2 << 20
    now: float = 0.0
    rounds: int = 0
    used: list[tuple[int, int]] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def call(self, x: torch.Tensor, number: int) -> None:
        self.used.append((number * self.weight_bytes, self.weight_bytes))
        self.now += self.seconds(*x.shape)

    def rates(
        self,
        monkeypatch: pytest.MonkeyPatch,
        overhead: float = 0.0,
        depths: tuple[int, int] = DEPTHS,
        group: int | None = None,
    ) -> tuple[RowRate, ...]:
        """Measure the product; return its rates."""

        def build(area: WeightArea, depth: int) -> ProductProbe:
            del area
            return ProductProbe(torch.float32, self.call, self.weight_bytes, depth)

        monkeypatch.setattr(product_probes, "_AREA_BYTES", 8 << 20)
        probed = {ProductKind.INT8: ProbedProduct(build, depths=depths, group=group)}

        def counted() -> None:
            self.rounds += 1

        monkeypatch.setattr(product_probes, "probed_products", lambda _: probed)
        (found,) = product_rates(
            Target.for_testing(), self.clock, lambda _: overhead, between=counted, deadline=0.0
        )
        return found.rates


@pytest.mark.parametrize("depths", [DEPTHS, INT8_DEPTHS], ids=str)
def test_rates_are_those_of_the_clock(
    depths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # 1 us for a call, 2 ns for each column, 1 us for every 256 steps of a row.
    machine = Machine(lambda rows, depth: 1e-6 + COLUMNS * 2e-9 + rows * depth / 256 * 1e-6)

    found = machine.rates(monkeypatch, overhead=1e-6, depths=depths)

    # 2048 operations in a step.
    expected = [RowRate(rows, 2 * COLUMNS * 256 / 1e-6, 2e-9) for rows in ROWS]
    assert [one.rows for one in found] == [one.rows for one in expected]
    assert [one.rate for one in found] == pytest.approx([one.rate for one in expected], rel=1e-3)
    assert [one.column_seconds for one in found] == pytest.approx([2e-9] * len(ROWS), rel=1e-2)
    # The deadline is over.
    assert machine.rounds == 4


def test_scales_of_groups_count_as_products(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda rows, depth: COLUMNS * 2e-9 + rows * depth / 256 * 1e-6)

    plain, grouped = machine.rates(monkeypatch), machine.rates(monkeypatch, group=32)

    # The same time for 32 products, and 12 for the scale.
    expected = [one.rate * 44 / 32 for one in plain]
    assert [one.rate for one in grouped] == pytest.approx(expected)
    expected = [one.column_seconds for one in plain]
    assert [one.column_seconds for one in grouped] == pytest.approx(expected, rel=1e-6)


def test_weights_are_read_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda rows, depth: rows * depth * 1e-9)
    machine.rates(monkeypatch)

    pairs = list(zip(machine.used, machine.used[1:], strict=False))
    assert all(second[0] in {first[0] + first[1], 0} for first, second in pairs)
    # It begins again where less than a weight is left.
    assert max(begin for begin, _ in machine.used) == (8 - 2) << 20


def test_the_best_sample_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    # Disturbed in all rounds but the third.
    machine = Machine(lambda rows, depth: rows * depth * 2e-10 * (1 + (machine.rounds != 2)))

    found = machine.rates(monkeypatch)

    assert [one.rate for one in found] == pytest.approx([2 * COLUMNS / 2e-10] * len(ROWS))


@pytest.mark.parametrize("round_number", [0, 1])
def test_a_long_call_has_two_samples(round_number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # 2 ms and more; not disturbed before the first round, or in it.
    def seconds(rows: int, depth: int) -> float:
        return rows * depth * 4e-6 / (1 + (machine.rounds == round_number))

    machine = Machine(seconds)
    # The calls of the constructor are before round 0.
    found = machine.rates(monkeypatch)

    expected = 2 * COLUMNS / (2e-6 if round_number == 0 else 4e-6)
    assert found[0].rate == pytest.approx(expected)


def test_long_calls_are_timed_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    # 2 ms from long sums of four rows on.
    machine = Machine(lambda rows, depth: rows * depth * 5e-7 / (1 + (machine.rounds == 2)))

    found = machine.rates(monkeypatch)

    quiet, disturbed = 2 * COLUMNS / 2.5e-7, 2 * COLUMNS / 5e-7
    assert found[0].rate == pytest.approx(quiet)
    assert found[1].seconds(2.0 * COLUMNS * DEPTHS[0], COLUMNS) == pytest.approx(
        4 * 2 * COLUMNS * DEPTHS[0] / disturbed
    )


@pytest.mark.parametrize(
    ("long", "short"), [(1e-3, 1e-3), (1e-3, 2e-3), (1.536e-3, 0.1e-3)], ids=str
)
def test_what_noise_contradicts_is_the_rate_of_long_sums(
    long: float, short: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(lambda _, depth: long if depth == DEPTHS[0] else short)
    found = machine.rates(monkeypatch)

    assert found[0].rate == pytest.approx(2 * COLUMNS * DEPTHS[0] / long)
    assert found[0].column_seconds == 0.0


def test_a_slow_product_is_measured_with_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda rows, depth: rows * depth * 1e-6)

    found = machine.rates(monkeypatch)

    assert [one.rows for one in found] == [1, 4]


def test_the_overhead_of_a_call_is_never_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda rows, depth: rows * depth * 1e-9)

    found = machine.rates(monkeypatch, overhead=1.0)

    assert found[0].rate == pytest.approx(4 * 2 * COLUMNS / 1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_weights_are_more_than_a_cache_holds(dtype: torch.dtype) -> None:
    depth = INT8_DEPTHS[0] if dtype is torch.uint8 else DEPTHS[0]
    area, weight = WeightArea(), torch.empty(COLUMNS, depth, dtype=dtype)
    made = area.like(weight)

    # Between two uses of one.
    assert sum(one.nbytes for one in made[1:]) >= 64 << 20
    assert len({one.data_ptr() for one in made}) == len(made)
    assert {(one.dtype, one.shape) for one in made} == {(dtype, weight.shape)}
    # No subnormal numbers.
    assert float(made[-1].float().min()) > 1e-3


def test_what_belongs_to_a_weight_is_far_from_it() -> None:
    area, weight, scale = WeightArea(), torch.empty(1 << 20), torch.empty(1 << 16)
    weights, scales = area.like(weight), list(area.far_from(weight, scale, scale))

    assert [len(one) for one in scales] == [len(weights)] * 2
    for weight, *others in zip(weights, *scales, strict=True):
        begins = [one.data_ptr() for one in (weight, *others)]
        assert all(abs(a - b) >= 24 << 20 for a in begins for b in begins if a != b)
        assert len(set(begins)) == 3
        assert {(one.dtype, one.shape) for one in others} == {(scale.dtype, scale.shape)}


def test_only_what_the_machine_has_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch_api, "kernels_in_use", lambda: "")
    floats = {ProductKind.F32, ProductKind.BF16}
    aten = {ProductKind.ATEN_INT8, ProductKind.ATEN_F32_INT8, ProductKind.ATEN_BF16_INT8}

    assert set(product_probes.probed_products(Target.for_testing(kernels=WITHOUT_ATEN))) == floats
    assert set(product_probes.probed_products(Target.for_testing())) == floats | aten


@pytest.mark.own_kernels
def test_every_product_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.load()
    # Small weights: what is tested does not depend on their sizes.
    for name, size in {"_COLUMNS": 64, "_AREA_BYTES": 1 << 20}.items():
        monkeypatch.setattr(product_probes, name, size)
    probed = product_probes.probed_products(Target.for_testing())
    small = {product: replace(one, depths=(128, 64)) for product, one in probed.items()}
    monkeypatch.setattr(product_probes, "probed_products", lambda _: small)
    asked: list[ProbedProduct] = []

    def overhead(probed: ProbedProduct) -> float:
        asked.append(probed)
        return 0.0

    made = product_rates(
        Target.for_testing(), time.perf_counter, overhead, between=lambda: None, deadline=0.0
    )
    found = {one.product: one for one in made}

    assert set(found) == set(ProductKind)
    # torch's product of integers does not compute one row.
    assert found[ProductKind.ATEN_INT8].rates[0].rows == ROWS[1]
    kinds = {
        one.product: (probed.own, probed.library) for one, probed in zip(made, asked, strict=True)
    }
    assert {product for product, (own, _) in kinds.items() if own} == {
        product for product in ProductKind if " x " in product or product is ProductKind.INT8
    }
    assert [product for product, (_, library) in kinds.items() if library] == [
        ProductKind.ATEN_INT8
    ]
    deep = {product for product, one in probed.items() if one.depths == INT8_DEPTHS}
    assert deep == {ProductKind.INT8, ProductKind.ATEN_INT8}
    # Of a very slow machine. What short and long sums of these sizes differ by is less than noise,
    # so there is no bound above.
    assert all(rate.rate > 1e5 for one in made for rate in one.rates)
