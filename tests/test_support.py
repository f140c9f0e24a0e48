"""What the suite says about itself: what a machine could not test, how much was drawn, which ISA."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
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
        *[skipped("needs amx_int8")] * 3,
        skipped("needs a C++ compiler: none was found"),
        skipped("it is done to the axis of the parts"),
        SimpleNamespace(longrepr=None),
    ]

    counts = summary.not_tested(reports)

    assert counts == {"needs amx_int8": 3, "needs a C++ compiler": 1}


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ({}, "not tested on this machine: nothing"),
        ({"needs amx_int8": 1}, "not tested on this machine: 1 test needs amx_int8"),
        (
            {"needs amx_int8": 312, "needs an accelerator": 12, "needs vnni": 1},
            "not tested on this machine: 312 tests need amx_int8, 12 need an accelerator, 1 needs vnni",
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


STATISTICS = """test_it.py::test_it:

  - during generate phase (70.17 seconds):
    - Typical runtimes: ~ 72-1025 ms, of which ~ 11-190 ms in data generation
    - 200 passing, 1 failing, and 23 invalid test cases
    - Events:
      * 50.45%, skipped: strides are not compared: an axis of size one
      * 12.50%, something else
      * 0.89%, invalid because: failed to satisfy assume()
"""


def test_what_was_skipped_is_counted_by_reason() -> None:
    assert summary.skipped_of(STATISTICS) == {
        "strides are not compared: an axis of size one": 113,
        "invalid because: failed to satisfy assume()": 2,
        "not run: it needs more choices than hypothesis draws for one example": 21,
    }
    assert summary.skipped_of("  - Stopped because nothing left to do") == {}


class TestFuzzNetworks:
    """A file of outcomes is what a run that is interrupted goes on from."""

    @pytest.fixture
    def tool(self) -> Any:
        path = Path(__file__).parents[1] / "tools" / "fuzz_networks.py"
        spec = importlib.util.spec_from_file_location("fuzz_networks", path)
        assert spec is not None, path
        assert spec.loader is not None, path
        module = importlib.util.module_from_spec(spec)
        # A dataclass looks its module up.
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "fuzz_networks", module)
            patch.setattr(sys, "path", list(sys.path))
            spec.loader.exec_module(module)
            yield module

    def test_a_line_that_was_cut_off_is_forgotten(self, tool: Any, tmp_path: Path) -> None:
        path, outcome = tmp_path / "networks.jsonl", tool.Outcome(3, 5, "a.py::it", 7, {"why": 1})
        assert tool.read(path) == []
        tool.write(path, outcome)
        path.write_text(path.read_text() + '{"chunk": 3, "se')

        assert tool.read(path) == [outcome]

    def test_the_end_says_what_was_drawn_skipped_and_failed(self, tool: Any) -> None:
        outcomes = [
            tool.Outcome(1, 11, "a.py::it", 1200, {"one": 2, "other": 3}),
            tool.Outcome(1, 12, "b.py::it", 50, {"one": 4}, "it is wrong"),
            tool.Outcome(2, 2, tool.PROCESS, 0, {}, "exit status -11"),
        ]
        variables = "HYPOTHESIS_PROFILE=fuzz QFUSE_FUZZ_EXAMPLES=200 QFUSE_TEST_SEED=1"
        again = f"{variables} .venv/bin/python -m pytest"
        assert tool.text_of(outcomes).splitlines() == [
            "drawn: 1,250 networks, in 2 chunks",
            *("skipped: 6 one", "skipped: 3 other", "failed: 2"),
            *("", "it is wrong", ""),
            f"again: {again} --hypothesis-seed=12 b.py::it",
            *("", "exit status -11", ""),
            "again: make fuzz-networks NETWORKS=1 SEED=2, after `rm -r build/fuzz`",
        ]

    def test_two_tests_of_a_chunk_have_two_seeds(self, tool: Any) -> None:
        seeds = [tool.seed_of(chunk, test) for chunk in (1, 2) for test in ("a.py::x", "a.py::y")]
        assert len(set(seeds)) == 4

    @pytest.mark.parametrize(
        ("code", "failure", "dead"),
        [(0, "", False), (1, "it is wrong", False), (1, "", True), (-11, "it is wrong", True)],
    )
    def test_a_process_that_dies_is_a_failure(
        self, tool: Any, tmp_path: Path, code: int, failure: str, dead: bool
    ) -> None:
        path = tmp_path / "networks.jsonl"

        def run(*_: object, **how: Any) -> Any:
            assert how["env"]["HYPOTHESIS_PROFILE"] == "fuzz"
            tool.write(path, tool.Outcome(4, 9, "a.py::it", 3, {}, failure))
            return SimpleNamespace(returncode=code, stdout="out", stderr="err")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tool.subprocess, "run", run)
            tool.run_chunk(path, 4)

        last = tool.read(path)[-1]
        assert last.test == tool.PROCESS
        assert bool(last.failure) == dead


class TestLimit:
    @pytest.fixture(autouse=True)
    def _no_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(machine.ISA_VARIABLE, raising=False)

    def test_nothing_is_limited_unless_asked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = torch.cpu.get_capabilities

        machine.limit(monkeypatch)

        assert torch.cpu.get_capabilities is before

    @pytest.mark.parametrize("isa", ["AMX", "AVX2", "sse"])
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
