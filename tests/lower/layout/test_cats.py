from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch.fx import Node

from qfuse import kernels
from qfuse.cost import CostModel, CostProfile
from qfuse.ir.events import Lowered
from qfuse.ir.graph.schema import arguments, is_call
from qfuse.ir.graph.stage_graph import CLAIM_META, LoweredGraph, OptimizedGraph
from qfuse.kernels import KernelLibrary
from qfuse.lower import lower
from qfuse.lower.kernels.registry import all_kernels
from qfuse.lower.layout.cats import CAT_CHANNELS
from qfuse.rewrite.clone import clone
from qfuse.targets import Target
from qfuse.testing.build import GraphBuilder
from qfuse.testing.run import random_inputs, run

aten = torch.ops.aten
LAST = torch.channels_last


@pytest.fixture(scope="module", autouse=True)
def library() -> KernelLibrary:
    library = kernels.load()
    if not library.available:
        pytest.skip(library.reason)
    return library


class Images(GraphBuilder):
    """A graph of quantized images."""

    def image(
        self,
        channels: int,
        dtype: torch.dtype = torch.uint8,
        sizes: Sequence[int | str] = (2, 5, 6),
        memory_format: torch.memory_format = LAST,
    ) -> Node:
        n, *spatial = sizes
        x = self.arg(f"x{len(list(self.graph.nodes))}", dtype, n, channels, *spatial)
        return self.call(aten.clone.default, x, memory_format=memory_format)

    def cat(self, *parts: Node, dim: int = 1) -> Node:
        return self.call(aten.cat.default, list(parts), dim)


def lowered(program: OptimizedGraph, library: KernelLibrary | None = None) -> LoweredGraph:
    registry = all_kernels(library or kernels.load())
    cost = CostModel(CostProfile.pinned())
    return lower(clone(program), Target.for_testing(), cost, registry)


def check(program: OptimizedGraph, low: LoweredGraph, **sizes: int) -> None:
    inputs = random_inputs(program, **sizes)
    for old, new in zip(run(program, inputs), run(low, inputs), strict=True):
        assert torch.equal(old, new)
        assert old.stride() == new.stride()


def joined(low: LoweredGraph) -> list[list[Node]]:
    """The operands of the kernel's calls, in order."""
    op = torch.ops.qfuse.cat_channels.default
    calls = [node for node in low.graph.nodes if is_call(node, op)]
    return [[first, *others] for first, others in (node.args for node in calls)]


def left(low: LoweredGraph) -> int:
    return sum(is_call(node, aten.cat.default) for node in low.graph.nodes)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
@pytest.mark.parametrize("dim", [1, -3])
def test_channels_last_images_are_joined_by_the_kernel(dtype: torch.dtype, dim: int) -> None:
    b = Images()
    program = b.done(b.cat(b.image(3, dtype), b.image(8, dtype), dim=dim), stage=OptimizedGraph)
    low = lowered(program)

    assert [len(parts) for parts in joined(low)] == [2]
    (event,) = low.log.of(Lowered)
    assert event.kernel == CAT_CHANNELS
    assert event.what == f"cat of {str(dtype).removeprefix('torch.')} images, 3 + 8 channels"
    check(program, low)


def test_a_dense_block() -> None:
    """Every image is read by all cats that follow, and so are cats."""
    b = Images()
    a, c, d = (b.image(channels) for channels in (4, 2, 3))
    two = b.cat(a, c)
    program = b.done(two, b.cat(a, c, d), b.cat(two, d), b.cat(c, a), stage=OptimizedGraph)
    low = lowered(program)

    assert [len(parts) for parts in joined(low)] == [2, 3, 2, 2]
    check(program, low)


def test_an_image_may_come_twice_and_have_other_users() -> None:
    b = Images()
    a, c = b.image(4), b.image(2)
    program = b.done(b.cat(a, c, a), a, stage=OptimizedGraph)
    low = lowered(program)

    assert len(joined(low)) == 1
    check(program, low)


def test_the_parts_of_a_split_are_read_in_place() -> None:
    b = Images()
    first, second = (b.call(aten.slice.Tensor, b.image(8), 1, i, i + 3) for i in (0, 4))
    program = b.done(b.cat(second, first), stage=OptimizedGraph)
    low = lowered(program)

    assert all(is_call(part, aten.slice.Tensor) for part in joined(low)[0])
    check(program, low)


def test_dynamic_sizes_stay_dynamic() -> None:
    b = Images()
    sizes = ("n", "h", 6)
    program = b.done(b.cat(b.image(4, sizes=sizes), b.image(2, sizes=sizes)), stage=OptimizedGraph)
    low = lowered(program)

    assert len(joined(low)) == 1
    for n, h in ((1, 3), (4, 7)):
        check(program, low, n=n, h=h)


def test_volumes() -> None:
    b = Images()
    parts = [b.image(c, torch.int8, (2, 3, 4, 5), torch.channels_last_3d) for c in (2, 3)]
    program = b.done(b.cat(*parts), stage=OptimizedGraph)
    low = lowered(program)

    assert len(joined(low)) == 1
    check(program, low)


OTHERS = {
    "rows": lambda b: b.cat(b.image(4, memory_format=torch.contiguous_format), b.image(4)),
    "rows behind": lambda b: b.cat(b.image(4), b.image(4, memory_format=torch.contiguous_format)),
    "another axis": lambda b: b.cat(b.image(4), b.image(4), dim=2),
    "floats": lambda b: b.cat(b.image(4, torch.float32), b.image(4, torch.float32)),
    "two dtypes": lambda b: b.cat(b.image(4, torch.uint8), b.image(4, torch.int8)),
    "one image": lambda b: b.cat(b.image(4)),
    "one pixel": lambda b: b.cat(b.image(4, sizes=(2, 1, 1)), b.image(4, sizes=(2, 1, 1))),
    "no image": lambda b: b.cat(b.arg("x", torch.uint8, 3, 4), b.arg("y", torch.uint8, 3, 5)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_cats_stay(name: str) -> None:
    b = Images()
    program = b.done(OTHERS[name](b), stage=OptimizedGraph)
    low = lowered(program)

    assert (joined(low), left(low)) == ([], 1)
    check(program, low)


def test_a_claimed_cat_and_one_without_kernels_stay() -> None:
    b = Images()
    cat = b.cat(b.image(4), b.image(4))
    program = b.done(cat, stage=OptimizedGraph)
    assert left(lowered(program, KernelLibrary(available=False, reason="no compiler"))) == 1

    cat.meta[CLAIM_META] = "elsewhere"
    low = lowered(program)
    assert arguments(next(n for n in low.graph.nodes if is_call(n, aten.cat.default)))["dim"] == 1
