from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.dialects import Source, assert_same_bits, fired, only_miss, ops_of, run

from qfuse.capture import capture
from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.normalize import normalize
from qfuse.normalize.aten.views.expand import ExpandMovement
from qfuse.normalize.aten.views.spellings import SPELLINGS
from qfuse.normalize.importers.dialect import Dialect

aten = torch.ops.aten
SPELL = Dialect("movements", lambda: [ExpandMovement()])


def test_golden_pixel_shuffle() -> None:
    source = Source()
    x = source.b.arg("x", torch.float32, "B", 8, 3, 5)
    y = source.b.call(aten.pixel_shuffle.default, x, 2)
    program = normalize(source.done(source.b.call(aten.neg.default, y)), dialects=(SPELL,))

    assert fired(program) == [ExpandMovement.name]
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[s0, 8, 3, 5]
%0 = aten.sym_size.int(%x, 0): SymInt
%1 = aten.reshape(%x, (%0, 2, 2, 2, 3, 5)): float32[s0, 2, 2, 2, 3, 5]
%2 = aten.permute(%1, (0, 1, 4, 2, 5, 3)): float32[s0, 2, 3, 2, 5, 2]
%3 = aten.clone(%2, memory_format=torch.contiguous_format): float32[s0, 2, 3, 2, 5, 2]
%4 = aten.view(%3, (%0, 2, 6, 10)): float32[s0, 2, 6, 10]
%5 = aten.neg(%4): float32[s0, 2, 6, 10]
return (%5)""",
    )


X = (4, 8, 6, 10)
CASES: dict[str, tuple[Any, tuple[Any, ...], list[str]]] = {
    "tile": (aten.tile.default, ([2, 1],), ["repeat"]),
    "tile to more axes": (aten.tile.default, ([2, 1, 1, 1, 3],), ["repeat"]),
    "pad": (aten.pad.default, ([1, 2], "constant", -1.5), ["constant_pad_nd"]),
    "pad with nothing": (aten.pad.default, ([1, 0, 2, 3],), ["constant_pad_nd"]),
    "fliplr": (aten.fliplr.default, (), ["flip"]),
    "flipud": (aten.flipud.default, (), ["flip"]),
    "quarter turn": (aten.rot90.default, (1, [1, 2]), ["flip", "transpose"]),
    "half turn": (aten.rot90.default, (-2, [3, 0]), ["flip"]),
    "back": (aten.rot90.default, (7, [-1, 0]), ["flip", "transpose"]),
    "full turn": (aten.rot90.default, (4, [0, 1]), ["clone"]),
    "pixel shuffle": (
        aten.pixel_shuffle.default,
        (2,),
        ["reshape", "permute", "clone", "view"],
    ),
    "pixel unshuffle": (
        aten.pixel_unshuffle.default,
        (2,),
        ["reshape", "permute", "clone", "view"],
    ),
    "channel shuffle": (
        aten.channel_shuffle.default,
        (4,),
        ["reshape", "permute", "clone", "view"],
    ),
    "native channel shuffle": (
        aten.native_channel_shuffle.default,
        (2,),
        ["reshape", "permute", "clone", "view"],
    ),
}


@pytest.mark.numeric
@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("batch", [5, "B"])
def test_values_and_strides_stay(name: str, batch: int | str) -> None:
    if name == "native channel shuffle":
        batch = 5  # torch itself reads the sizes as numbers
    op, args, spelled = CASES[name]
    source = Source()
    # Built with the size that it is run with, so that strides can be compared.
    x = source.arg(torch.randn(5, *X[1:]), (batch, *X[1:]))
    y = source.b.call(aten.neg.default, source.b.call(op, x, *args))
    program = assert_same_bits(source, y, dialects=(SPELL,))

    assert [name for name in ops_of(program, "aten") if name != "sym_size"] == [*spelled, "neg"]


@pytest.mark.numeric
@pytest.mark.parametrize("sizes", [("H", "W"), (6, "W"), ("L",), ("D", 6, "W")])
def test_channels_of_images_of_any_size_are_shuffled(sizes: tuple[int | str, ...]) -> None:
    source = Source()
    x = source.b.arg("x", torch.float32, "B", 8, *sizes)
    # Those that it is built with, so that strides can be compared; `int` would fix the symbols.
    shape = x.meta["val"].shape
    numbers = [size if isinstance(size, int) else size.node.hint for size in shape]
    source.inputs.append(torch.randn(numbers))
    y = source.b.call(aten.neg.default, source.b.call(aten.channel_shuffle.default, x, 4))
    program = assert_same_bits(source, y, dialects=(SPELL,))

    assert "channel_shuffle" not in ops_of(program, "aten")


@pytest.mark.numeric
@pytest.mark.parametrize("op", [aten.concat.default, aten.concatenate.default], ids=str)
@pytest.mark.parametrize("axis", [0, -1])
def test_every_name_of_cat(op: Any, axis: int) -> None:
    source = Source()
    parts = [source.arg(torch.randn(2, 6)), source.arg(torch.randn(2, 6))]
    program = assert_same_bits(source, source.b.call(op, parts, axis), dialects=(SPELL,))

    assert ops_of(program, "aten") == ["cat"]


@pytest.mark.numeric
@pytest.mark.parametrize(
    "op", [aten.hstack.default, aten.vstack.default, aten.dstack.default], ids=str
)
def test_stacks_of_tensors_that_have_the_axis(op: Any) -> None:
    source = Source()
    parts = [source.arg(torch.randn(2, 6, 3)), source.arg(torch.randn(2, 6, 3))]
    program = assert_same_bits(source, source.b.call(op, parts), dialects=(SPELL,))

    assert ops_of(program, "aten") == ["cat"]


@pytest.mark.numeric
def test_indices_along_an_axis() -> None:
    source = Source()
    x, index = source.arg(torch.randn(2, 6)), source.arg(torch.randint(0, 6, (2, 3)))
    program = assert_same_bits(
        source, source.b.call(aten.take_along_dim.default, x, index, -1), dialects=(SPELL,)
    )

    assert ops_of(program, "aten") == ["gather"]


def assert_unchanged(source: Source, *outs: Any) -> Any:
    """Normalize what is not spelled anew."""
    text = to_text(source.b.graph)
    program = normalize(source.done(*outs), dialects=(SPELL,))
    assert fired(program) == []
    assert to_text(program.graph).startswith(text)
    return program


def test_refuses_a_padding_with_what_is_there() -> None:
    source = Source()
    x = source.arg(torch.randn(2, 6, 3))
    program = assert_unchanged(source, source.b.call(aten.pad.default, x, [1, 1], "reflect"))
    assert ops_of(program, "aten") == ["pad"]


@pytest.mark.parametrize("op", [aten.hstack.default, aten.vstack.default], ids=str)
def test_refuses_vectors_that_get_an_axis(op: Any) -> None:
    source = Source()
    x = source.arg(torch.randn(6))
    assert_unchanged(source, source.b.call(op, [x, x]))


@pytest.mark.parametrize(("shape", "axis"), [((1, 3), 1), ((2, 3), None)])
def test_refuses_indices_that_are_spread(shape: tuple[int, ...], axis: int | None) -> None:
    source = Source()
    x, index = source.arg(torch.randn(2, 6)), source.arg(torch.randint(0, 2, shape))
    assert_unchanged(source, source.b.call(aten.take_along_dim.default, x, index, axis))


def test_refuses_images_of_unknown_size() -> None:
    source = Source()
    x = source.b.arg("x", torch.float32, 2, 8, "H", "W")
    assert_unchanged(source, source.b.call(aten.pixel_shuffle.default, x, 2))


def test_refuses_other_strides() -> None:
    source = Source()
    x = source.b.arg("x", torch.float32, 2, 8, 6, 4)
    last = source.b.call(aten.clone.default, x, memory_format=torch.channels_last)
    y = source.b.call(aten.neg.default, source.b.call(aten.pixel_shuffle.default, last, 2))
    assert not y.meta["val"].is_contiguous()
    miss = only_miss(assert_unchanged(source, y))
    assert miss.code is MissCode.SHAPE


@pytest.mark.numeric
def test_what_the_caller_gets_is_no_view_of_an_input() -> None:
    source = Source()
    x = source.arg(torch.randn(2, 6))
    program = assert_same_bits(
        source, source.b.call(aten.rot90.default, x, 1, [0, 1]), dialects=(SPELL,)
    )
    (out,) = run(program, source.inputs)

    assert out.untyped_storage().data_ptr() != source.inputs[0].untyped_storage().data_ptr()


def test_every_spelling_is_tested() -> None:
    tested = {op for op, _, _ in CASES.values()}
    rest = {"concat", "concatenate", "hstack", "vstack", "dstack", "take_along_dim"}
    assert {op.overloadpacket.__name__ for op in set(SPELLINGS) - tested} == rest


@pytest.mark.numeric
def test_a_padding_leaves_sizes_open() -> None:
    captured = capture(
        Padded(), (torch.randn(5, 8),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)
    )
    program = normalize(captured)

    assert "constant_pad_nd" in ops_of(program, "aten")
    for rows in (2, 7):
        x = torch.randn(rows, 8)
        for new, old in zip(run(program, [x]), Padded()(x), strict=True):
            assert torch.equal(new, old)
    sizes = [n.meta["val"].shape[0] for n in program.graph.nodes if n.op == "call_function"]
    assert not any(isinstance(size, int) for size in sizes)


class Padded(torch.nn.Module):
    """Grows and cuts off the last axis."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pad = torch.nn.functional.pad
        return pad(x, (1, 2)).relu(), pad(x, (-1, 0)).neg()
