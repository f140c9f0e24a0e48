"""Values with several readers: who crosses what, what is shared, and what stays for the others."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tests.support.cases.propagate import Graph, priced, spec_of, steps
from tests.support.sources.dialects import equal_but_for_nan

from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.stages.verify import verify
from qfuse.optimize.merge.cse import Combine
from qfuse.optimize.schedule import move
from qfuse.rewrite.clone import clone
from qfuse.testing.run import random_inputs, run

pytestmark = pytest.mark.numeric

aten = torch.ops.aten
FLAT = spec_of(None, None)


def moved(program: NormalGraph) -> Counter[str]:
    """Run the phase; bits must stay. Return how many calls there are of each op."""
    source = clone(program)
    Combine().run(program, priced())
    move(program, priced())
    verify(program)
    inputs = random_inputs(program)
    for new, old in zip(run(program, inputs), run(source, inputs), strict=True):
        assert equal_but_for_nan(new, old)
    assert not move(clone(program), priced()), "it has not come to rest"
    return Counter(step.partition("[")[0] for step in steps(program))


def through(g: Graph, x: Any, scale: float = 0.1, zero: int = 3) -> Any:
    """A quantize and dequantize with one scale."""
    ones = [1] * x.meta["val"].ndim
    params = (
        g.constant(torch.full(ones, scale), "scale"),
        g.constant(torch.full(ones, zero, dtype=torch.int32), "zero"),
    )
    spec = spec_of(*(None,) * len(ones))
    return g.dequantize(g.quantize(x, spec, params), spec, params)


def test_all_readers_of_a_chain_take_one_quantize() -> None:
    g = Graph(2, 6, 8)
    flat = g.call(aten.view.default, g.x, [12, 8])
    heads = g.call(aten.view.default, g.x, [2, 6, 2, 4])
    program = g.done(
        through(g, flat), through(g, flat), through(g, heads), through(g, g.x), through(g, heads)
    )

    made = moved(program)
    assert made["quantize"] == 1
    assert steps(program)[0] == "quantize[2, 6, 8]"


def test_a_float_reader_of_the_middle_keeps_the_chain_up_to_there() -> None:
    g = Graph(2, 6, 8)
    middle = g.call(aten.view.default, g.x, [12, 8])
    last = g.call(aten.permute.default, middle, [1, 0])
    program = g.done(through(g, last), middle)

    made = moved(program)
    assert made["quantize"] == 1
    assert made["permute"] == 1
    assert steps(program).count("quantize[2, 6, 8]") == 1
    assert middle in list(program.graph.nodes)
    assert last not in list(program.graph.nodes)


def test_rebuilt_chains_are_shared() -> None:
    g = Graph(2, 6, 8)
    middle = g.call(aten.view.default, g.x, [12, 8])
    ends = [g.call(aten.unsqueeze.default, middle, axis) for axis in (0, 1)]
    program = g.done(*(through(g, end) for end in ends), middle)

    made = moved(program)
    assert made["quantize"] == 1
    # One chain of real numbers for the reader of the middle, one dequantize for both others.
    assert made["dequantize"] <= 2
    assert made["view"] + made["reshape"] <= 2


def test_two_parameters_of_one_view_are_two_quantizes_above_it() -> None:
    g = Graph(2, 6, 8)
    flat = g.call(aten.view.default, g.x, [12, 8])
    program = g.done(through(g, flat, 0.1), through(g, flat, 0.2), flat)

    moved(program)
    assert steps(program).count("quantize[2, 6, 8]") == 2


def test_a_copy_that_is_read_as_real_numbers_too_is_not_made_twice() -> None:
    g = Graph(6, 8)
    copy = g.call(aten.clone.default, g.call(aten.permute.default, g.x, [1, 0]))
    program = g.done(through(g, copy), copy)

    assert moved(program)["clone"] <= 1


@pytest.mark.parametrize("kinds", ["real", "constant", "quantized", "twice"])
def test_a_join_of_several_producers(kinds: str) -> None:
    g = Graph(4, 8)
    other: Any
    match kinds:
        case "real":
            other = g.call(aten.neg.default, g.x)
        case "constant":
            other = g.constant(torch.randn(4, 8), "table")
        case "quantized":
            other = through(g, g.call(aten.neg.default, g.x))
        case _:
            other = g.x
    joined = g.call(aten.cat.default, [g.x, other, g.x], 0)
    made = moved(g.done(through(g, joined)))

    # Equal parts are quantized once; what was stored with these parameters stays as it is.
    assert made["quantize"] == (1 if kinds == "twice" else 2)
    assert made["cat"] == 1


def test_a_join_of_stored_and_real_numbers_is_joined_as_stored_ones() -> None:
    g = Graph(4, 8)
    stored = through(g, g.call(aten.neg.default, g.x), 0.2)
    joined = g.call(aten.cat.default, [stored, g.x], 1)
    made = moved(g.done(through(g, joined)))

    assert (made["requantize"], made["dequantize"]) == (1, 1)


@pytest.mark.parametrize("op", ["split", "unbind", "slice"])
def test_parts_that_are_quantized_alike_are_quantized_together(op: str) -> None:
    g = Graph(4, 32)
    parts: list[Any]
    if op == "split":
        pieces = g.call(aten.split.Tensor, g.x, 8, 1)
        parts = [g.b.item(pieces, i) for i in range(4)]
    elif op == "unbind":
        pieces = g.call(aten.unbind.int, g.x, 0)
        parts = [g.b.item(pieces, i) for i in range(4)]
    else:
        parts = [g.call(aten.slice.Tensor, g.x, 1, 8 * i, 8 * i + 8) for i in range(4)]
    made = moved(g.done(*(through(g, part) for part in parts)))

    assert made["quantize"] == 1


def test_parts_that_are_quantized_differently_stay_apart() -> None:
    g = Graph(4, 32)
    pieces = g.call(aten.split.Tensor, g.x, 8, 1)
    parts = [g.b.item(pieces, i) for i in range(4)]
    reals = [through(g, part, scale) for part, scale in zip(parts, (0.1, 0.2, 0.3), strict=False)]
    program = g.done(*reals, parts[3])

    made = moved(program)
    assert made["quantize"] == 3
    assert steps(program).count("quantize[4, 32]") == 0


def test_readers_of_different_results_of_one_choice() -> None:
    g = Graph(2, 6, 8)
    flat = g.call(aten.view.default, g.x, [12, 8])
    scale, zero = g.choose(flat, (1, None))
    spec = spec_of(1, None)
    q = g.quantize(flat, spec, (scale, zero))
    # Another reader of the scale alone, and one of the zero point.
    doubled = g.call(aten.mul.Tensor, scale, 2.0)
    shifted = g.call(aten.add.Tensor, zero, 1)
    made = moved(g.done(g.dequantize(q, spec, (scale, zero)), doubled, shifted))

    assert (made["quantize"], made["dequantize"]) == (1, 1)


def test_two_choices_of_one_value_are_one() -> None:
    g = Graph(2, 6, 8)
    spec = spec_of(1, None)
    reals = []
    for shape in ([12, 8], [12, 8], [3, 4, 8]):
        flat = g.call(aten.view.default, g.x, shape)
        block = (*(1,) * (len(shape) - 1), None)
        params = g.choose(flat, block)
        whole = spec.with_block(block)
        reals.append(g.dequantize(g.quantize(flat, whole, params), whole, params))
    program = g.done(*reals)

    assert moved(program)["quantize"] == 1
    chosen = torch.ops.qfuse.choose_qparams.default
    assert sum(n.target is chosen for n in program.graph.nodes) == 1


def test_a_chain_that_ends_in_an_input_and_in_an_output() -> None:
    g = Graph(2, 6, 8)
    flat = g.call(aten.view.default, g.x, [12, 8])
    spec = spec_of(None, None)
    params = g.params(flat, spec)
    q = g.quantize(flat, spec, params)
    source = clone(g.b.done(q))
    program = source
    before = clone(program)
    move(program, priced())
    inputs = random_inputs(program)

    # Its quantized values are a tensor of their own, and stay one.
    ((new,), (old,)) = run(program, inputs), run(before, inputs)
    assert torch.equal(new, old)
    assert new.stride() == old.stride()
    assert steps(program) == ["view[12, 8]", "quantize[12, 8]"]


@pytest.mark.parametrize("op", ["gather", "windows", "pad", "each"])
def test_rebuilt_movements_of_every_kind_are_shared(op: str) -> None:
    g = Graph(6, 8)
    calls: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "gather": (
            aten.index_select.default,
            (0, g.constant(torch.tensor([2, 0, 1, 1, 3, 5, 4, 2]), "index")),
        ),
        "windows": (aten.unfold.default, (1, 2, 2)),
        "pad": (aten.pad.default, ([1, 1], "circular")),
        "each": (aten.repeat_interleave.self_int, (2, 0)),
    }
    target, args = calls[op]
    ends = [g.call(target, g.x, *args) for _ in range(3)]
    program = g.done(*(through(g, end) for end in ends))

    made = moved(program)
    assert made["quantize"] == made["dequantize"] == 1
    assert sum(n.target is target for n in program.graph.nodes) == 1
