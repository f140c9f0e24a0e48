"""Every finding is provoked, and a healthy machine has none of them."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from qfuse.extensions import Installed
from qfuse.targets import (
    KERNELS,
    Compiler,
    Environment,
    Finding,
    KernelState,
    Level,
    Target,
    _torch_api,
    diagnose,
)
from qfuse.targets.compiler import CompilerFault

HEALTHY = Environment(freezing=True, grad_enabled=False)
ALL_THERE = dict.fromkeys((probe.name for probe in KERNELS), KernelState.AVAILABLE)


def troubles(target: Target, environment: Environment) -> dict[str, Finding]:
    """Findings that are not fine, by what was looked at."""
    found = [f for f in diagnose(target, environment) if f.level is not Level.OK]
    assert len({f.what for f in found}) == len(found)
    return {f.what: f for f in found}


def test_a_healthy_machine() -> None:
    found = diagnose(Target.for_testing(kernels=ALL_THERE), HEALTHY)

    assert [f.what for f in found if f.level is not Level.OK] == ["plain AOTInductor"]
    assert [f.what for f in found if f.level is Level.OK] == [
        "instruction set",
        "threads",
        "C++ compiler",
        "torch",
        "torchao",
        "oneDNN",
        "kernels",
    ]


def test_refused_tiles_of_amx() -> None:
    found = troubles(Target.for_testing(), replace(HEALTHY, tiles_refused=True))

    assert "Linux refuses its tiles" in found["AMX"].detail


def test_extensions_are_listed_with_their_package() -> None:
    rules = Installed("set of rules", "mine", "acme 1.2", "acme.rules:mine")
    (found,) = [
        finding
        for finding in diagnose(Target.for_testing(), replace(HEALTHY, extensions=(rules,)))
        if finding.what == "set of rules 'mine'"
    ]
    assert (found.level, found.detail) == (Level.OK, "of acme 1.2: acme.rules:mine")


CASES: list[tuple[dict[str, Any], dict[str, Any], str, Level, str]] = [
    ({"features": frozenset()}, {}, "instruction set", Level.BAD, "no AVX2"),
    ({"features": frozenset({"avx2"})}, {}, "instruction set", Level.WARN, "VNNI (avx2)"),
    (
        {"features": frozenset({"neon"}), "architecture": "aarch64"},
        {},
        "instruction set",
        Level.WARN,
        "neon",
    ),
    (
        {"onednn_isa_limit": "AVX512_CORE_VNNI"},
        {},
        "oneDNN's instruction set",
        Level.WARN,
        "ISA=AVX512_CORE_VNNI",
    ),
    ({"aten_capability": "DEFAULT"}, {}, "ATen's instruction set", Level.WARN, "on DEFAULT"),
    ({"threads": 3}, {}, "threads", Level.BAD, "uses 3, this process may use 2 of 2"),
    ({"threads": 2, "usable_cores": 1}, {}, "threads", Level.BAD, "may use 1 of 2"),
    ({"threads": 1}, {}, "threads", Level.WARN, "idle"),
    ({"compiler": None}, {}, "C++ compiler", Level.BAD, "none found"),
    ({}, {"compiler_fault": CompilerFault("no omp.h")}, "C++ compiler", Level.BAD, "no omp.h"),
    (
        {},
        {"compiler_fault": CompilerFault("it was killed", "free memory")},
        "C++ compiler",
        Level.BAD,
        "it was killed",
    ),
    ({}, {"python_headers": False}, "Python headers", Level.WARN, "Python.h"),
    ({"torch_version": "2.12.1"}, {}, "torch", Level.BAD, "2.12.1 is outside"),
    ({"torch_version": "2.16.0a0+git123"}, {}, "torch", Level.BAD, ">=2.13, <2.16"),
    ({"torch_version": "3.0"}, {}, "torch", Level.BAD, "3.0"),
    ({"torch_version": "main"}, {}, "torch", Level.BAD, "main"),
    ({"torchao_version": "0.17.0"}, {}, "torchao", Level.BAD, "0.17.0"),
    ({"torchao_version": "0.19.0"}, {}, "torchao", Level.BAD, "<0.19"),
    ({"torchao_version": None}, {}, "torchao", Level.BAD, "not installed"),
    ({"mkldnn_enabled": False}, {}, "oneDNN", Level.BAD, "reference code"),
    (
        {"kernels": ALL_THERE | {"torchao::da8w4_linear_cpu": KernelState.SCHEMA_ONLY}},
        {},
        "kernels that are only declared",
        Level.WARN,
        "torchao::da8w4_linear_cpu: hasattr",
    ),
    (
        {"kernels": ALL_THERE | {"aten::_int_mm": KernelState.ABSENT}},
        {},
        "kernels that do not exist",
        Level.WARN,
        "aten::_int_mm",
    ),
    ({}, {"int_mm_fills_one_row": False}, "aten._int_mm of one row", Level.BAD, "uninitialized"),
    ({}, {"int_mm_exact": False}, "aten._int_mm at full range", Level.BAD, "overflow"),
    ({"features": frozenset({"avx2"})}, {}, "aten._int_mm without VNNI", Level.WARN, "overflow"),
    (
        {},
        {"extensions": (Installed("backend", "npu", "acme 1.2", "acme:npu", "no such module"),)},
        "backend 'npu'",
        Level.BAD,
        "no such module",
    ),
    ({}, {"freezing": False}, "plain torch.compile: freezing is off", Level.WARN, "float"),
    ({}, {"grad_enabled": True}, "plain torch.compile: grad mode is on", Level.WARN, "skipped"),
    (
        {"torch_version": "2.14.0"},
        {},
        "plain torch.compile: int8 patterns moved",
        Level.WARN,
        "since torch 2.14",
    ),
    (
        {},
        {"pre_grad_pass": "mine.my_pass"},
        "plain torch.compile: a pre-grad pass is already set",
        Level.WARN,
        "mine.my_pass",
    ),
]


@pytest.mark.parametrize(("facts", "process", "what", "level", "says"), CASES)
def test_each_trouble_is_found(
    facts: dict[str, Any], process: dict[str, Any], what: str, level: Level, says: str
) -> None:
    target = Target.for_testing(**{"kernels": ALL_THERE, **facts})
    environment = Environment(**{"freezing": True, "grad_enabled": False, **process})

    found = troubles(target, environment)

    assert found[what].level is level
    assert says in found[what].detail
    assert found[what].fix
    expected = {what, "plain AOTInductor"}
    if "features" in facts:
        expected |= {"instruction set", "aten._int_mm without VNNI"}
    if what == "torch" and not facts["torch_version"].startswith(("2.12", "main")):
        expected |= {"plain torch.compile: int8 patterns moved"}
    assert set(found) == expected


def test_onednn_that_is_held_below_vnni_saturates() -> None:
    found = troubles(Target.for_testing(kernels=ALL_THERE, onednn_isa_limit="AVX2"), HEALTHY)

    assert "ISA=AVX2" in found["oneDNN's instruction set"].detail
    assert found["aten._int_mm without VNNI"].level is Level.WARN


def test_bfloat16_convolutions_with_amx_are_told() -> None:
    what = "bfloat16 convolutions with AMX"
    amx = Target.for_testing(isa="amx", kernels=ALL_THERE)

    assert troubles(amx, HEALTHY)[what].level is Level.WARN
    assert what not in troubles(Target.for_testing(kernels=ALL_THERE), HEALTHY)
    for changes, told in (
        ({"mkldnn_enabled": False}, False),
        ({"onednn_isa_limit": "AVX512_CORE_BF16"}, False),
        ({"onednn_isa_limit": "avx512_core_amx_fp16"}, True),
    ):
        limited: Any = {"isa": "amx", "kernels": ALL_THERE, **changes}
        assert (what in troubles(Target.for_testing(**limited), HEALTHY)) is told


def test_patches_of_supported_versions_are_fine() -> None:
    for torch_version in ("2.13.0", "2.13.1+cpu", "2.15.0a0", "2.15.9"):
        target = Target.for_testing(torch_version=torch_version)
        assert "torch" not in troubles(target, HEALTHY)


def test_the_checks_see_what_int_mm_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def right(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        product = (a.double() @ b.double()).to(torch.int32)
        return product if out is None else out.copy_(product)

    def idle(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.zeros(a.shape[0], b.shape[1]) if out is None else out

    def saturating(a: torch.Tensor, b: torch.Tensor, **_: Any) -> torch.Tensor:
        products = a.to(torch.int32).unsqueeze(-1) * b.to(torch.int32)
        pairs = products[:, 0::2] + products[:, 1::2]
        return pairs.clamp(-(2**15), 2**15 - 1).sum(1)

    monkeypatch.setattr(torch, "_int_mm", right)
    assert _torch_api.int_mm_fills_one_row()
    assert _torch_api.int_mm_exact()
    monkeypatch.setattr(torch, "_int_mm", idle)
    assert not _torch_api.int_mm_fills_one_row()
    monkeypatch.setattr(torch, "_int_mm", saturating)
    assert not _torch_api.int_mm_exact()


def test_probing_this_machine() -> None:
    target = Target.detect(extensions=False)
    with torch.no_grad():
        seen = Environment.probe(target)

    assert seen.grad_enabled is False
    # The sample row of 64 is what Inductor's code passes for one token; padded to two rows, the
    # same numbers are right on every machine that is exact at all.
    two = torch._int_mm(torch.ones(2, 64, dtype=torch.int8), torch.ones(64, 32, dtype=torch.int8))
    assert bool((two == 64).all())
    assert seen.int_mm_exact or not target.has_exact_onednn
    assert all(f.fix for f in diagnose(target, seen) if f.level is not Level.OK)


def test_probing_works_while_something_is_traced() -> None:
    target = Target.for_testing(compiler=None)
    seen: list[Environment] = []

    def traced(x: torch.Tensor) -> torch.Tensor:
        seen.append(Environment.probe(target))
        return x + 1

    graph = make_fx(traced, tracing_mode="fake")(torch.ones(2)).graph

    assert seen == [Environment.probe(target)]
    assert [node.op for node in graph.nodes] == ["placeholder", "call_function", "output"]


def test_a_target_without_int_mm_is_not_probed_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("called")

    monkeypatch.setattr(torch, "_int_mm", never)
    target = Target.for_testing(compiler=None, kernels={"aten::_int_mm": KernelState.ABSENT})

    assert Environment.probe(target).int_mm_fills_one_row


def test_a_broken_compiler_is_tried() -> None:
    target = Target.for_testing(compiler=Compiler("/nowhere/g++", "g++ 1.0"))

    fault = Environment.probe(target).compiler_fault
    assert fault is not None
    assert "No such file" in fault.what


def test_inductors_settings_are_read_where_they_are() -> None:
    config = importlib.import_module("torch._inductor.config")
    target = Target.for_testing(compiler=None)
    # Its own patching: to undo by deleting, as other tools do, hides a setting for good.
    with config.patch(freezing=True):
        assert Environment.probe(target).freezing
    with config.patch(freezing=False, pre_grad_custom_pass=None):
        assert not Environment.probe(target).freezing
        assert Environment.probe(target).pre_grad_pass is None
    with config.patch(pre_grad_custom_pass=test_a_broken_compiler_is_tried):
        name = str(Environment.probe(target).pre_grad_pass)
    assert name.endswith("test_a_broken_compiler_is_tried")
