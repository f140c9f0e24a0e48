"""Rounds: everybody in every round, in changing orders, until it fails."""

from __future__ import annotations

import pytest

from qfuse_bench.harness.machine import IdleWait
from qfuse_bench.harness.measure import Series, compare, measure
from qfuse_bench.harness.process import WorkerError


class Clock:
    """Contenders that note when they were asked, and give the times that they were given."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def contender(self, name: str, seconds: float, fails_at: int = -1) -> Clock._Contender:
        return Clock._Contender(self, name, seconds, fails_at)

    class _Contender:
        def __init__(self, clock: Clock, name: str, seconds: float, fails_at: int) -> None:
            self.clock, self.name, self.seconds, self.fails_at = clock, name, seconds, fails_at
            self.times = 0

        def time_block(self, calls: int) -> list[float]:
            self.clock.asked.append((self.name, calls))
            if self.times == self.fails_at:
                raise WorkerError("it fell over")
            self.times += 1
            return [self.seconds * (1 + i) for i in range(calls)]


def test_every_round_times_everybody() -> None:
    clock = Clock()
    contenders = {name: clock.contender(name, 1.0) for name in "abc"}
    rounds = []
    series = measure(contenders, 20, after_round=lambda: rounds.append(len(clock.asked)))

    assert rounds == [3 + 3 * n for n in range(1, 21)]
    orders = [tuple(n for n, _ in clock.asked[i : i + 3]) for i in range(3, 63, 3)]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert len(set(orders)) > 3
    assert {len(s.rounds) for s in series.values()} == {20}


def test_equal_seeds_give_equal_orders() -> None:
    first, second = Clock(), Clock()
    for clock in (first, second):
        measure({name: clock.contender(name, 1.0) for name in "abcd"}, 5, seed=7)

    assert first.asked == second.asked


def test_a_block_lasts_as_long_as_asked() -> None:
    clock = Clock()
    # A trial of three calls takes 1, 2 and 3 times the seconds: its median is twice that.
    names = {"quick": 1e-6, "middle": 0.005, "slow": 0.1, "slower": 1.0}
    measure({n: clock.contender(n, s) for n, s in names.items()}, 1, block_seconds=0.1)

    assert dict(clock.asked[4:]) == {"quick": 200, "middle": 10, "slow": 3, "slower": 1}


def test_a_round_is_the_median_of_its_block() -> None:
    clock = Clock()
    series = measure({"a": clock.contender("a", 0.125)}, 2)["a"]

    assert series.rounds == [0.25, 0.25]
    assert series.calls == [0.125, 0.25, 0.375] * 2
    assert series.median == 0.25
    assert series.p10 == pytest.approx(0.125)
    assert series.p90 == pytest.approx(0.375)


@pytest.mark.parametrize("fails_at", [0, 2])
def test_one_that_fails_is_dropped_with_its_reason(fails_at: int) -> None:
    clock = Clock()
    contenders = {
        "good": clock.contender("good", 1.0),
        "bad": clock.contender("bad", 1.0, fails_at),
    }
    series = measure(contenders, 5)

    assert series["bad"] == Series(failed="it fell over")
    assert len(series["good"].rounds) == 5
    assert compare(series["good"], series["bad"]) is None
    assert compare(series["bad"], series["good"]) is None


def test_the_ratio_compares_medians_of_rounds() -> None:
    ratio = compare(Series([1.0, 2.0, 3.0]), Series([4.0, 8.0, 12.0]))

    assert ratio is not None
    assert (ratio.value, ratio.low, ratio.high) == (0.25, 0.25, 0.25)


def test_rounds_wait_for_a_quiet_machine_until_patience_ends() -> None:
    looks = iter([90.0, 50.0, 3.0, 80.0, 80.0, 80.0])
    seen: list[float] = []

    def busy(seconds: float) -> float:
        assert seconds == pytest.approx(0.2)
        seen.append(next(looks))
        return seen[-1]

    patience = IdleWait(1.0, busy)
    patience.wait()
    assert seen == [90.0, 50.0, 3.0]
    patience.wait()
    patience.wait()
    assert seen == [90.0, 50.0, 3.0, 80.0, 80.0]


def test_before_and_after_every_round() -> None:
    clock, order = Clock(), []
    measure(
        {"a": clock.contender("a", 1.0)},
        2,
        before_round=lambda: order.append("before"),
        after_round=lambda: order.append("after"),
    )

    assert order == ["before", "after"] * 2
