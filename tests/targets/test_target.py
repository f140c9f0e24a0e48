"""A target is a value: the same facts, the same name, and back from JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from qfuse.ir.errors import OptionsError
from qfuse.targets import FEATURES, Compiler, KernelProbe, KernelState, Target, _torch_api

# Another value for each field.
CHANGES: dict[str, Any] = {
    "device": "npu",
    "architecture": "aarch64",
    "vendor": "GenuineIntel",
    "model": "Xeon",
    "features": frozenset({"avx2"}),
    "aten_capability": "AVX2",
    "onednn_isa_limit": "AVX512_CORE",
    "cores": 4,
    "usable_cores": 1,
    "threads": 1,
    "l2_bytes": 2 << 20,
    "l3_bytes": 0,
    "compiler": None,
    "torch_version": "2.14.0+cpu",
    "torchao_version": None,
    "mkldnn_enabled": False,
    "kernels": {"aten::_int_mm": KernelState.ABSENT},
}
# What measured speeds do not depend on.
NOT_MACHINE = {"compiler", "torchao_version", "kernels"}


def test_every_field_has_a_change() -> None:
    assert set(CHANGES) == {field.name for field in dataclasses.fields(Target)}


@pytest.mark.parametrize("name", CHANGES)
def test_every_fact_is_in_the_fingerprint(name: str) -> None:
    pinned, other = Target.for_testing(), Target.for_testing(**{name: CHANGES[name]})

    assert other != pinned
    assert other.fingerprint() != pinned.fingerprint()
    assert (other.machine_fingerprint() == pinned.machine_fingerprint()) is (name in NOT_MACHINE)


def test_the_compiler_counts_with_its_version_only() -> None:
    pinned = Target.for_testing(compiler=Compiler("/a/g++", "g++ 12.2.0"))
    moved = Target.for_testing(compiler=Compiler("/b/g++", "g++ 12.2.0"))
    newer = Target.for_testing(compiler=Compiler("/a/g++", "g++ 13.1.0"))

    assert moved.fingerprint() == pinned.fingerprint()
    assert newer.fingerprint() != pinned.fingerprint()


def test_the_fingerprint_is_a_readable_file_name() -> None:
    name = Target.for_testing(aten_capability="AVX512 256").fingerprint()

    assert name.startswith("x86_64-avx512_256-t2-")
    assert name.replace("-", "").replace("_", "").isalnum()


@pytest.mark.slow
def test_fingerprints_are_the_same_in_every_process() -> None:
    code = "from qfuse.targets import Target as T; t = T.for_testing(); print(t.fingerprint())"
    # This process has another seed of its hashes.
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )

    assert done.stdout.strip() == Target.for_testing().fingerprint()


def test_a_target_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Target.for_testing().threads = 3  # type: ignore[misc]


def test_detect_agrees_with_torch() -> None:
    target = Target.detect(extensions=False)

    assert target.torch_version == torch.__version__
    assert target.threads == torch.get_num_threads()
    assert target.aten_capability == torch.backends.cpu.get_cpu_capability()
    assert target.has("avx2") is torch.cpu.get_capabilities().get("avx2", False)
    assert target.features <= set(FEATURES)
    assert target.mkldnn_enabled == _torch_api.mkldnn_enabled()
    assert 1 <= target.usable_cores <= (os.cpu_count() or 1)


def test_detect_is_stable_and_sees_what_a_process_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    first = Target.detect(extensions=False)
    assert Target.detect(extensions=False) == first

    monkeypatch.setattr(_torch_api, "thread_count", lambda: first.threads + 1)
    monkeypatch.setattr(_torch_api, "mkldnn_enabled", lambda: not first.mkldnn_enabled)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    second = Target.detect(extensions=False)

    assert second.threads == first.threads + 1
    assert second.mkldnn_enabled is not first.mkldnn_enabled
    assert second.onednn_isa_limit == "AVX2"
    assert first.onednn_isa_limit != "AVX2"


@pytest.mark.slow
def test_the_machine_has_one_name_with_and_without_extensions() -> None:
    # The packages are probed in a process of their own: importing them here is no business of
    # this test.
    code = (
        "from qfuse.targets import Target as T; a, b = T.detect(extensions=False), T.detect(); "
        "print(a.machine_fingerprint() == b.machine_fingerprint(), "
        "a.fingerprint() == b.fingerprint(), 'unprobed' in b.to_json())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )

    assert done.stdout.split() == ["True", "False", "False"]


def test_further_kernels_can_be_asked_for() -> None:
    probe = KernelProbe("aten::add.Tensor", "CompositeExplicitAutograd")
    target = Target.detect(extensions=False, extra_kernels=[probe])

    assert target.kernel_state("aten::add.Tensor") is not KernelState.ABSENT
    with pytest.raises(OptionsError, match=r"'aten::sub\.Tensor' was not probed"):
        target.has_kernel("aten::sub.Tensor")


def test_only_code_counts_as_a_kernel() -> None:
    states = {f"test::{state.name.lower()}": state for state in KernelState}
    target = Target.for_testing(kernels=states)

    assert [name for name in states if target.has_kernel(name)] == ["test::available"]


def test_an_unknown_feature_is_an_error() -> None:
    with pytest.raises(OptionsError, match="unknown CPU feature 'avx512_f'"):
        Target.for_testing().has("avx512_f")


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ({"avx512f", "avx512bw"}, False),
        ({"avx2", "fma3"}, False),
        ({"avx_vnni"}, True),
        ({"avx512_vnni"}, True),
        ({"amx_int8"}, True),
        ({"neon"}, False),
        ({"neon", "dot"}, True),
    ],
)
def test_vnni(features: set[str], expected: bool) -> None:
    assert Target.for_testing(features=frozenset(features)).has_vnni is expected


@pytest.mark.parametrize(
    ("isa", "limit", "exact"),
    [
        ("avx512_vnni", "", True),
        ("avx512_vnni", "ALL", True),
        ("avx512_vnni", "AVX512_CORE_VNNI", True),
        ("avx512_vnni", "AVX512_CORE", False),
        ("avx512_vnni", "avx2", False),
        ("avx512_vnni", "AVX2_VNNI", False),
        ("avx_vnni", "AVX2_VNNI", True),
        ("avx_vnni", "AVX512_CORE_VNNI", False),
        ("avx2", "", False),
    ],
)
def test_onednn_is_exact_with_vnni_that_it_may_use(isa: str, limit: str, exact: bool) -> None:
    assert Target.for_testing(isa=isa, onednn_isa_limit=limit).has_exact_onednn is exact


@pytest.mark.parametrize(
    ("isa", "capability", "best", "vnni"),
    [
        ("portable", "DEFAULT", None, False),
        ("avx2", "AVX2", "avx2", False),
        ("avx_vnni", "AVX2", "avx_vnni", True),
        ("avx512", "AVX512", "avx512bw", False),
        ("avx512_vnni", "AVX512", "avx512_vnni", True),
        ("amx", "AVX512", "amx_int8", True),
    ],
)
def test_an_instruction_set_decides_features_and_capability(
    isa: str, capability: str, best: str | None, vnni: bool
) -> None:
    target = Target.for_testing(isa=isa)

    assert target.aten_capability == capability
    assert target.has_vnni is vnni
    assert best is None or target.has(best)
    assert target.features <= set(FEATURES)
    assert Target.for_testing(isa=isa, features=frozenset()).features == frozenset()


def test_targets_for_tests_have_avx512_vnni_unless_told_otherwise() -> None:
    assert Target.for_testing() == Target.for_testing(isa="avx512_vnni")
    names = {Target.for_testing(isa=isa).fingerprint() for isa in ("portable", "avx2", "amx")}
    assert len(names | {Target.for_testing().fingerprint()}) == 4


def test_an_unknown_instruction_set_is_an_error() -> None:
    with pytest.raises(OptionsError, match="unknown instruction set 'sse4'") as error:
        Target.for_testing(isa="sse4")
    assert "portable, avx2, avx_vnni, avx512, avx512_vnni, amx" in str(error.value)


@pytest.mark.parametrize("name", ["pinned", "no compiler", "this machine"])
def test_json_round_trip(name: str) -> None:
    target = {
        "pinned": Target.for_testing(),
        "no compiler": Target.for_testing(compiler=None, torchao_version=None),
        "this machine": Target.detect(extensions=False),
    }[name]

    back = Target.from_json(target.to_json())

    assert back == target
    assert back.fingerprint() == target.fingerprint()
    assert isinstance(back.features, frozenset)


def spoilt(**changes: Any) -> str:
    """The JSON of a target with some fields replaced; ``None`` removes one."""
    data = {**Target.for_testing().to_dict(), **changes}
    return json.dumps({name: value for name, value in data.items() if value != "remove"})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{}",
        spoilt(threads="remove"),
        spoilt(unknown=1),
        spoilt(threads="2"),
        spoilt(threads=True),
        spoilt(mkldnn_enabled=1),
        spoilt(features=[1]),
        spoilt(features=None),
        spoilt(kernels={"aten::x": "sometimes"}),
        spoilt(kernels=["aten::x"]),
        spoilt(compiler={"path": "/g++"}),
        spoilt(compiler="g++"),
    ],
)
def test_what_is_no_target_is_refused(text: str) -> None:
    with pytest.raises(OptionsError, match="not the description of a target"):
        Target.from_json(text)
