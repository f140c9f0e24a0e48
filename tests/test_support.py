"""What the suite says about itself: what a machine could not test, how much was drawn, which ISA."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qfuse.kernels import KernelLibrary
from qfuse.targets import Target
from tests.support import machine, pairs, summary


def skipped(reason: str) -> Any:
    """A report of a skipped test."""
    return SimpleNamespace(longrepr=("test_it.py", 3, f"Skipped: {reason}"))


def test_what_a_machine_lacks_is_counted_by_reason() -> None:
    reports = [
        *[skipped("needs brgemm")] * 3,
        skipped("needs a C++ compiler: none was found"),
        skipped("it is done to the axis of the parts"),
        SimpleNamespace(longrepr=None),
    ]

    counts = summary.not_tested(reports)

    assert counts == {"needs brgemm": 3, "needs a C++ compiler": 1}


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ({}, "not tested on this machine: nothing"),
        ({"needs brgemm": 1}, "not tested on this machine: 1 test needs brgemm"),
        (
            {"needs brgemm": 312, "needs an accelerator": 12, "needs vnni": 1},
            "not tested on this machine: 312 tests need brgemm, 12 need an accelerator, 1 needs vnni",
        ),
    ],
)
def test_the_last_line_says_what_was_not_tested(counts: dict[str, int], text: str) -> None:
    assert summary.not_tested_text(Counter(counts)) == text


def test_the_files_that_took_longest_come_first() -> None:
    taken = {"a.py::test_it": 1.0, "b.py::test_it": 3.6, "a.py::test_it[1]": 4.4, "c.py::x": 0.5}
    reports = [SimpleNamespace(nodeid=name, duration=time) for name, time in taken.items()]

    assert summary.longest_text(reports) == "longest: a.py 5 s, b.py 4 s"
    assert summary.longest_text(reports, 1) == "longest: a.py 5 s"
    assert summary.longest_text([]) == "longest: nothing took a second"


@pytest.mark.property
@given(st.integers())
def test_examples_are_counted(number: int) -> None:
    assert isinstance(number, int)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("    - 100 passing, 0 failing, and 7 invalid test cases", 100),
        ("- 90 passing examples, 2 failing examples, 1 invalid examples\n" * 2, 184),
        ("  - Stopped because nothing left to do", 0),
    ],
)
def test_counts_come_from_hypothesis_statistics(text: str, count: int) -> None:
    assert summary.examples_of(text) == count


def test_counts_of_all_reports_are_added() -> None:
    reports = [
        SimpleNamespace(user_properties=[(summary.EXAMPLES, 100)]),
        SimpleNamespace(user_properties=[]),
        SimpleNamespace(user_properties=[("other", 3), (summary.EXAMPLES, 1900)]),
    ]

    assert summary.drawn(reports) == (2, 2000)
    assert summary.drawn_text(2, 2000) == "drawn: 2,000 examples by 2 property tests"


class TestLimit:
    @pytest.fixture(autouse=True)
    def _no_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(machine.ISA_VARIABLE, raising=False)

    def test_nothing_is_limited_unless_asked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = torch.cpu.get_capabilities

        machine.limit(monkeypatch)

        assert torch.cpu.get_capabilities is before

    @pytest.mark.parametrize("isa", ["amx", "AVX2", "sse"])
    def test_an_unknown_isa_is_refused(self, monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
        monkeypatch.setenv(machine.ISA_VARIABLE, isa)

        with pytest.raises(pytest.UsageError, match="is not one of portable, avx2, avx_vnni"):
            machine.limit(monkeypatch)

    @pytest.mark.isa("avx512_vnni")
    def test_a_target_sees_no_more_than_the_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(machine.ISA_VARIABLE, "avx2")
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
        assert Target.detect(extensions=False).has_vnni

        machine.limit(monkeypatch)

        found = Target.detect(extensions=False)
        assert not found.has_vnni
        assert Target.for_testing(isa="avx2").features <= found.features
        assert found.features <= Target.for_testing(isa="avx2").features | {"f16c", "fma3"}

    def test_variables_are_set_for_subprocesses(self) -> None:
        environ = {machine.ISA_VARIABLE: "avx2", "PATH": "/bin"}
        machine.set_variables(environ)
        assert (environ["QFUSE_ISA"], environ["ATEN_CPU_CAPABILITY"]) == ("avx2", "avx2")

        environ = {machine.ISA_VARIABLE: ""}
        machine.set_variables(environ)
        assert environ == {machine.ISA_VARIABLE: ""}

    def test_paths_above_the_limit_are_hidden(self) -> None:
        library = KernelLibrary(available=True, instruction_sets=machine.PATHS)

        found = machine.limit_kernels("avx2", lambda **_: library, compiled=False)

        assert found.instruction_sets == ("portable", "avx2")


def test_few_rows_hold_every_pair() -> None:
    rows = list(itertools.product("abcd", range(7), (False, True), (None, 1)))

    kept = pairs.every_pair(rows)

    def pairs_of(found: Iterable[tuple[object, ...]]) -> set[object]:
        return {pair for row in found for pair in itertools.combinations(enumerate(row), 2)}

    assert pairs_of(kept) == pairs_of(rows)
    assert kept <= set(rows)
    assert len(kept) < 40 < len(rows)


def test_what_no_pair_needs_is_thorough() -> None:
    def item(name: str, params: dict[str, Any], *marks: str) -> Any:
        added: list[Any] = []
        return SimpleNamespace(
            path="test_it.py",
            originalname=name,
            callspec=SimpleNamespace(params=params),
            get_closest_marker=lambda mark: mark if mark in marks else None,
            add_marker=added.append,
            added=added,
        )

    values = [[0], [1]]
    three = [dict(zip("abc", row, strict=True)) for row in itertools.product(values, repeat=3)]
    some = [item("test_it", row, "pairs") for row in three]
    every = [item("test_other", row) for row in three]
    # What is left out already holds no pair.
    left_out = [item("test_it", three[0], "pairs", "thorough")]
    pairs.mark_the_rest([*left_out, *some, *every])

    assert sum(bool(one.added) for one in some) >= 2
    assert {mark.name for one in some for mark in one.added} == {"thorough"}
    assert not any(one.added for one in (*every, *left_out))


@pytest.mark.pairs
@pytest.mark.parametrize("first", range(2))
@pytest.mark.parametrize("second", [[0], [1]])
@pytest.mark.parametrize("third", "ab")
def test_pairs_of_three_parameters_with_two_values_need_four_combinations(
    first: int, second: list[int], third: str, request: pytest.FixtureRequest
) -> None:
    kept = request.node.get_closest_marker("thorough") is None

    assert kept == (
        (first, second[0], third) in {(0, 0, "a"), (0, 1, "b"), (1, 0, "b"), (1, 1, "a")}
    )
