"""Tables are kept by what the engines were allowed to use."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest

from qfuse.ir.errors import OptionsError
from qfuse.targets import Target
from qfuse_bench.harness.machine_class import (
    LIMITS,
    VARIABLES,
    MachineClass,
    narrower,
    order_of,
    restart_with_limits,
)

AVX2 = tuple(LIMITS["avx2"].items())


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend to be on a machine."""

    def pretend(isa: str, **changes: Any) -> None:
        made = Target.for_testing(isa=isa, **changes)
        monkeypatch.setattr(Target, "detect", lambda **_: made)

    return pretend


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx_vnni", "avx512", "avx512_vnni", "amx"])
def test_a_machine_is_of_the_class_of_its_best_instructions(on: Any, isa: str) -> None:
    on(isa)
    found = MachineClass.here({})

    assert (found.name, found.note, found.is_whole) == (isa, "", True)
    assert found.has_vnni == Target.for_testing(isa=isa).has_vnni


def test_another_architecture_is_a_class(on: Any) -> None:
    on("portable", architecture="aarch64")

    assert MachineClass.here({}).name == "aarch64"


def test_limits_make_a_class_of_their_own(on: Any) -> None:
    on("avx512_vnni")
    found = MachineClass.here({**LIMITS["avx2"], "PATH": "/bin"})

    assert found.name == "avx2-forced-on-avx512_vnni"
    assert found.title == "AVX2 (forced on a machine with AVX512-VNNI)"
    assert not found.has_vnni
    assert "`QFUSE_ISA=avx2`" in found.note
    assert all(name in found.note for name in LIMITS["avx2"])


def test_a_machine_that_has_no_more_is_not_forced(on: Any) -> None:
    on("avx2")

    assert MachineClass.here(LIMITS["avx2"]).name == "avx2"


@pytest.mark.parametrize("name", VARIABLES)
def test_a_part_of_the_limits_never_passes_for_the_machine(on: Any, name: str) -> None:
    on("avx512_vnni")
    found = MachineClass.here({name: LIMITS["avx2"][name]})

    assert found.name == "avx512_vnni-partly-limited"
    assert found.title == "AVX512-VNNI, partly limited"
    assert f"`{name}=" in found.note
    rest = {other: value for other, value in LIMITS["avx2"].items() if other != name}
    assert MachineClass.here(rest).name == "avx512_vnni-partly-limited"


def test_the_best_machine_comes_first_and_forced_ones_after_it() -> None:
    names = [
        "amx",
        "avx512_vnni-forced-on-amx",
        "avx2-forced-on-amx",
        "avx512_vnni",
        "avx512-forced-on-avx512_vnni",
        "avx2-forced-on-avx512_vnni",
        "avx512_vnni-partly-limited",
        "avx2",
        "aarch64",
    ]

    assert sorted(set(names), key=order_of) == names


class _ReplacedError(Exception):
    """The process is another now."""


def _execute(*given: object) -> None:
    raise _ReplacedError(*given)


def test_a_restart_gives_the_same_program_all_limits(
    on: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    on("avx512_vnni")
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "thing", "--isa", "avx2"])
    environ = {"PATH": "/bin", "ONEDNN_MAX_CPU_ISA": "ALL"}

    with pytest.raises(_ReplacedError) as replaced:
        restart_with_limits("avx2", environ, _execute)

    program, arguments, variables = replaced.value.args
    assert program == sys.executable
    assert arguments == [sys.executable, "-m", "thing", "--isa", "avx2"]
    assert variables == {"PATH": "/bin", **LIMITS["avx2"]}


@pytest.mark.parametrize(("isa", "environ"), [("", {}), ("avx2", LIMITS["avx2"])])
def test_a_program_goes_on_that_is_not_to_be_limited_or_is_already(
    on: Any, isa: str, environ: dict[str, str]
) -> None:
    on("avx512_vnni")
    replaced: list[object] = []

    restart_with_limits(isa, environ, lambda *given: replaced.append(given))

    assert not replaced


def test_a_limit_that_is_unknown_or_above_the_machine_is_refused(on: Any) -> None:
    on("avx2")

    with pytest.raises(OptionsError, match="no AVX512 without VNNI"):
        restart_with_limits("avx512", {}, _execute)
    with pytest.raises(OptionsError, match="holds all engines to 'sse'"):
        restart_with_limits("sse", {}, _execute)


def test_every_limit_says_something_to_every_library() -> None:
    assert len({frozenset(limits) for limits in LIMITS.values()}) == 1
    assert dict(AVX2)["ONEDNN_MAX_CPU_ISA"] == dict(AVX2)["OV_CPU_MAX_ISA"]


@pytest.mark.parametrize(
    ("best", "below"),
    [
        ("amx", ["avx512_vnni", "avx512", "avx2"]),
        ("avx512_vnni", ["avx512", "avx2"]),
        ("avx_vnni", ["avx2"]),
        ("avx512", ["avx2"]),
        ("avx2", []),
        ("portable", []),
    ],
)
def test_a_machine_is_measured_with_all_that_is_below_it(best: str, below: list[str]) -> None:
    assert narrower(Target.for_testing(isa=best)) == below


def test_avx_vnni_is_below_avx512_vnni_where_both_are() -> None:
    target = Target.for_testing(isa="avx512_vnni")
    both = replace(target, features=target.features | {"avx_vnni"})

    assert narrower(both) == ["avx_vnni", "avx512", "avx2"]


def test_another_architecture_cannot_be_held_to_less() -> None:
    assert narrower(Target.for_testing(isa="portable", architecture="aarch64")) == []
