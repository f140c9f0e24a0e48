"""Epilogue ops on channels-last images with a quantized result: what their kernel takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.fx import Node

from qfuse import kernels
from qfuse.cost import CostModel, CostProfile
from qfuse.ir.events import Lowered
from qfuse.ir.graph.schema import arguments, is_call
from qfuse.ir.graph.stage_graph import LoweredGraph, OptimizedGraph
from qfuse.ir.ops import library as ops
from qfuse.ir.quant.spec import Arithmetic, QuantSpec, ZeroPointDomain
from qfuse.kernels import KernelLibrary
from qfuse.lower import lower
from qfuse.lower.kernels.registry import all_kernels
from qfuse.rewrite.clone import clone
from qfuse.targets import Target
from qfuse.testing.build import GraphBuilder
from qfuse.testing.run import random_inputs, run

# There is no portable kernel of images.
pytestmark = [pytest.mark.numeric, pytest.mark.own_kernels, pytest.mark.isa("avx2")]

aten = torch.ops.aten
NAME = "qfuse.image_activation_quantized"
F32, BF16 = torch.float32, torch.bfloat16
NORM = "mul(0)|add(1,1.0)"
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def spec_of(dtype: torch.dtype, *block: int | None, **changes: Any) -> QuantSpec:
    """The whole range of a dtype."""
    info = torch.iinfo(dtype)
    return QuantSpec(dtype, info.min, info.max, block, **changes)


@dataclass(frozen=True)
class Case:
    """One op on an image; large enough for the kernel to pay."""

    x: torch.dtype = torch.uint8
    shape: tuple[int | str, ...] = ("n", 64, 30, "w")
    channels_last: bool = True
    block: tuple[int | None, ...] = (None,) * 4
    source: dict[str, Any] | None = None
    epilogue: str = NORM
    extras: tuple[tuple[int | str, ...], ...] = ((64, 1, 1), (64, 1, 1))
    extra_dtype: torch.dtype = F32
    out: torch.dtype = torch.int8
    out_block: tuple[int | None, ...] = (None,) * 4
    result: dict[str, Any] | None = None
    choose: str = ""
    keep: str = ""
    runtime: bool = False

    def program(self) -> OptimizedGraph:
        """The op on an image that enters."""
        b = GraphBuilder()
        x = b.arg("x", self.x, *self.shape)
        if self.channels_last:
            x = b.call(aten.clone.default, x, memory_format=LAST[len(self.shape)])
        return b.done(*self.results(b, x), stage=OptimizedGraph)

    def results(self, b: GraphBuilder, x: Node) -> list[Node]:
        """Add the op; return its results."""
        count = len(list(b.graph.nodes))
        operands: list[Any] = [x, None, None, ""]
        if not self.x.is_floating_point:
            spec = spec_of(self.x, *self.block, **(self.source or {}))
            operands = [x, *params(b, spec, self.shape, f"x{count}"), str(spec)]
        extras = [
            b.const(f"extra{count}_{i}", torch.randn(s).to(self.extra_dtype))  # type: ignore[arg-type]
            if all(isinstance(size, int) for size in s)
            else b.arg(f"extra{count}_{i}", self.extra_dtype, *s)
            for i, s in enumerate(self.extras)
        ]
        spec = spec_of(self.out, *self.out_block, **(self.result or {}))
        scale, zero = params(b, spec, self.shape, f"y{count}", runtime=self.runtime)
        node = b.call(
            ops.activation, *operands, self.epilogue, extras, scale, zero, str(spec), "", self.keep
        )
        return [b.item(node, i) for i in range(len(node.meta["val"]))]


def params(
    b: GraphBuilder,
    spec: QuantSpec,
    shape: Sequence[int | str],
    name: str,
    *,
    runtime: bool = False,
) -> tuple[Node, Node]:
    """A scale and a zero point."""
    grid = [1 if k is None else int(size) // k for k, size in zip(spec.block, shape, strict=True)]
    zero = b.const(f"{name}_zero", torch.randint(-9, 9, grid, dtype=torch.int32))
    if runtime:
        return b.arg(f"{name}_scale", F32, *grid), zero
    return b.const(f"{name}_scale", torch.rand(grid) * 0.05 + 0.01), zero


def lowered(
    program: OptimizedGraph, library: KernelLibrary | None = None, isa: str = "avx512_vnni"
) -> LoweredGraph:
    registry = all_kernels(library or kernels.load())
    target = Target.for_testing(isa=isa)
    return lower(clone(program), target, CostModel(CostProfile.pinned()), registry)


def check(program: OptimizedGraph, low: LoweredGraph, **sizes: int) -> None:
    """Values are those of the ops of torch, to the bit, and so are the strides."""
    inputs = random_inputs(program, **sizes)
    for old, new in zip(run(program, inputs), run(low, inputs), strict=True):
        assert torch.equal(old, new)
        assert old.stride() == new.stride()


def calls(low: LoweredGraph) -> list[Node]:
    op = torch.ops.qfuse.image_activation_quantized.default
    return [node for node in low.graph.nodes if is_call(node, op)]


def event(low: LoweredGraph) -> Lowered:
    (found,) = low.log.of(Lowered)
    return found


SIZES = {"n": 2, "w": 31}

TAKEN = {
    "a norm": Case(),
    "int8": Case(x=torch.int8, out=torch.uint8),
    "a scale per channel": Case(block=(None, 1, None, None)),
    "a norm and an activation": Case(epilogue=f"{NORM}|act(hardswish)"),
    "narrow constants": Case(extra_dtype=BF16),
    "a gate": Case(epilogue="mul(0)", extras=(("n", 64, 1, 1),)),
    "a float image and a gate": Case(x=F32, epilogue="mul(0)", extras=(("n", 64, 1, 1),)),
    "a volume": Case(
        shape=(2, 64, 5, 6, "w"),
        block=(None,) * 5,
        out_block=(None,) * 5,
        extras=((64, 1, 1, 1), (64, 1, 1, 1)),
    ),
    "divisions": Case(result={"arithmetic": Arithmetic(F32, False, False)}),
    "the zero point first": Case(result={"arithmetic": Arithmetic(F32, True, True)}),
}


@pytest.mark.parametrize("name", TAKEN)
def test_channels_last_images_run_on_the_kernel(name: str) -> None:
    case = TAKEN[name]
    program = case.program()
    low = lowered(program)

    assert event(low).kernel == NAME
    assert len(calls(low)) == 1
    check(program, low, **SIZES)


ONE_PIXEL = (1, 64, 1, 1)
REFUSED = {
    "rows": (Case(channels_last=False), "its result is not a channels-last image"),
    "one pixel": (Case(shape=ONE_PIXEL), "its result is not a channels-last image"),
    "blocks": (Case(block=(None, 32, None, None)), "its input is scaled in blocks of *x32x*x*"),
    "a scale per line": (
        Case(block=(None, None, 1, None)),
        "its input is scaled in blocks of *x*x1x*",
    ),
    "an output scale per channel": (
        Case(out_block=(None, 1, None, None)),
        "its result is scaled in blocks of *x1x*x*",
    ),
    "a float result too": (Case(keep="float"), "its float result has other users"),
    "a scale of run time": (Case(runtime=True), "its scale is computed at run time"),
    "bfloat16": (
        Case(x=BF16, result={"float_dtype": F32}, epilogue=NORM),
        "its input is bfloat16",
    ),
    "integers beside floats": (Case(extra_dtype=torch.int8), "an operand is int8"),
    "a wide operand": (
        Case(extra_dtype=torch.float64, epilogue=f"{NORM}|cast(float32)"),
        "an operand is float64",
    ),
    "an operand without axes": (Case(extras=((), ())), "an operand has no axis"),
    "halves": (
        Case(shape=(2, 64, 30, 32), epilogue="glu(silu,gate-first)", extras=()),
        "its operands broadcast its input to another shape",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_kernel_refuses(name: str) -> None:
    case, reason = REFUSED[name]
    program = case.program()
    low = lowered(program)

    assert calls(low) == []
    assert dict(event(low).losers)[NAME] == reason
    check(program, low, **SIZES)


def test_a_small_image_is_left_to_loops() -> None:
    program = Case(shape=(1, 8, 2, 2), extras=((8, 1, 1), (8, 1, 1))).program()
    low = lowered(program)

    assert "compiled loops" in dict(event(low).losers)[NAME]
    check(program, low)


def test_without_a_compiler_or_vectors_it_is_expanded() -> None:
    program = Case().program()
    low = lowered(program, KernelLibrary(available=False, reason="no compiler"))
    assert dict(event(low).losers)[NAME] == "no compiler"
    check(program, low, **SIZES)

    library = replace(kernels.load(), instruction_sets=("portable",))
    low = lowered(program, library)
    assert "no supported vector instructions" in dict(event(low).losers)[NAME]


def image(b: GraphBuilder, channels: int, dtype: torch.dtype = torch.uint8) -> Node:
    """A channels-last image that enters."""
    name = f"part{len(list(b.graph.nodes))}"
    x = b.arg(name, dtype, "n", channels, 30, 31)
    return b.call(aten.clone.default, x, memory_format=torch.channels_last)


CAT = replace(Case(), shape=("n", 64, 30, 31))


def test_the_images_of_a_cat_are_read_in_place() -> None:
    """In a dense block every cat is read by one norm, and every image by all cats behind it."""
    b = GraphBuilder()
    parts = [image(b, channels) for channels in (24, 32, 8)]
    first = CAT.results(b, b.call(aten.cat.default, parts, 1))
    second = CAT.results(b, b.call(aten.cat.default, parts[::-1], 1))
    program = b.done(*first, *second, stage=OptimizedGraph)
    low = lowered(program)

    found = [[node.args[0], *node.args[1]] for node in calls(low)]  # type: ignore[misc]
    assert [len(images) for images in found] == [3, 3]
    assert not any("cat" in str(node.target) for node in low.graph.nodes)
    check(program, low, n=2)


def test_a_cat_with_other_users_is_read_as_it_is() -> None:
    b = GraphBuilder()
    cat = b.call(aten.cat.default, [image(b, 24), image(b, 40)], 1)
    program = b.done(*CAT.results(b, cat), cat, stage=OptimizedGraph)
    low = lowered(program)

    (call,) = calls(low)
    assert arguments(call)["others"] is None
    assert is_call(arguments(call)["first"], torch.ops.qfuse.cat_channels.default)
    check(program, low, n=2)


def test_images_that_lie_otherwise_are_joined_before() -> None:
    b = GraphBuilder()
    rows = b.arg("rows", torch.uint8, "n", 24, 30, 31)
    cat = b.call(aten.cat.default, [image(b, 40), rows], 1)
    whole = b.call(aten.clone.default, cat, memory_format=torch.channels_last)
    program = b.done(*CAT.results(b, whole), stage=OptimizedGraph)
    low = lowered(program)

    (call,) = calls(low)
    assert arguments(call)["others"] is None
    check(program, low, n=2)


def test_float_offsets_are_refused() -> None:
    spec = {"domain": ZeroPointDomain.FLOAT_OFFSET}
    program = Case(source=spec).program()
    low = lowered(program)

    assert "float offset" in dict(event(low).losers)[NAME]
