from __future__ import annotations

import pytest
import torch
from tests.support.cases.gated import (
    activated,
    cast,
    epilogues,
    fused,
    refused,
    stored,
    times,
    two_levels,
)
from tests.support.cases.propagate import Graph

from qfuse.ir.events import MissCode
from qfuse.optimize.fuse.epilogue_activation import FuseActivation
from qfuse.optimize.fuse.linear import FuseLinear
from qfuse.rewrite.driver import apply_rules
from qfuse.testing.quant import QuantizedLinear, per_tensor

aten = torch.ops.aten


@pytest.mark.numeric
@pytest.mark.parametrize(("first", "order"), [(0, "gate-first"), (1, "up-first")])
@pytest.mark.parametrize("gate_left", [True, False])
def test_either_half_may_be_the_gate(first: int, order: str, gate_left: bool) -> None:
    g = Graph("m", 3, 16)
    split = g.call(aten.split_with_sizes.default, g.x, [8, 8], 2)
    gate, up = g.b.item(split, first), g.b.item(split, 1 - first)
    sides = [activated(g, gate), up]
    program = g.done(stored(g, times(g, *(sides if gate_left else sides[::-1])), "token"))

    fused(program, m=2)
    assert epilogues(program) == [f"glu(silu,{order})"]
    assert not [n for n in program.graph.nodes if n.target is aten.split_with_sizes.default]


@pytest.mark.numeric
def test_slices_are_halves_too() -> None:
    g = Graph("m", 16)
    gate = g.call(aten.slice.Tensor, g.x, 1, 0, 8)
    up = g.call(aten.slice.Tensor, g.x, -1, 8, 9223372036854775807)
    act = activated(g, gate, "act(leaky_relu,0.2)")
    program = g.done(stored(g, times(g, act, up)))

    fused(program, m=2)
    assert epilogues(program) == ["glu(leaky_relu,0.2,gate-first)"]


@pytest.mark.numeric
@pytest.mark.parametrize("sizes", [(6, 6, 4), (4, 4, 8)], ids=str)
def test_parts_that_are_not_the_halves_are_two_tensors(sizes: tuple[int, ...]) -> None:
    g = Graph("m", 16)
    split = g.call(aten.split_with_sizes.default, g.x, list(sizes), 1)
    gate, up = g.b.item(split, 0), g.b.item(split, 1)
    program = g.done(stored(g, times(g, activated(g, gate), up)))

    fused(program, m=2)
    assert epilogues(program) == ["act(silu)|mul(0)"]


@pytest.mark.numeric
def test_halves_along_another_axis_are_two_tensors() -> None:
    g = Graph("m", 4, 8)
    split = g.call(aten.split.Tensor, g.x, 2, 1)
    gate, up = g.b.item(split, 0), g.b.item(split, 1)
    program = g.done(stored(g, times(g, activated(g, gate), up)))

    fused(program, m=2)
    assert epilogues(program) == ["act(silu)|mul(0)"]


@pytest.mark.numeric
def test_a_half_that_others_read_stays_for_them() -> None:
    g = Graph("m", 16)
    split = g.call(aten.split.Tensor, g.x, 8, -1)
    gate, up = (g.b.item(split, index) for index in range(2))
    program = g.done(stored(g, times(g, activated(g, gate), up)), gate)

    fused(program, m=2)
    assert epilogues(program) == ["glu(silu,gate-first)"]


@pytest.mark.numeric
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_casts_stand_where_the_source_rounds(wide: torch.dtype) -> None:
    g = Graph("m", 16, dtype=torch.bfloat16)
    split = g.call(aten.split.Tensor, g.x, 8, -1)
    gate, up = (g.b.item(split, index) for index in range(2))
    act = cast(g, activated(g, cast(g, gate, wide)), torch.bfloat16)
    y = cast(g, times(g, act, up), torch.float32)
    program = g.done(stored(g, y, "token"))

    fused(program, m=4)
    name = str(wide).removeprefix("torch.")
    assert epilogues(program) == [
        f"cast({name})|act(silu)|cast(bfloat16)|mul(0)|cast(float32)",
    ]


@pytest.mark.numeric
def test_factors_of_two_types_promote() -> None:
    g = Graph("m", 8, dtype=torch.bfloat16)
    up = g.b.arg("u", torch.float32, "m", 8)

    assert fused(g.done(stored(g, times(g, activated(g, g.x), up))), m=4).modified


@pytest.mark.numeric
@pytest.mark.parametrize("gate_left", [True, False])
@pytest.mark.parametrize("how", ["static", "token"])
def test_factors_that_are_stored_on_the_way_are_rounded(gate_left: bool, how: str) -> None:
    g = Graph("m", 3, 16)
    split = g.call(aten.split.Tensor, g.x, 8, -1)
    gate, up = (g.b.item(split, index) for index in range(2))
    sides = [stored(g, activated(g, gate)), stored(g, up, "channel")]
    y = times(g, *(sides if gate_left else sides[::-1]))
    program = g.done(stored(g, y, how))

    assert fused(program, m=3).fired == {"fuse-activation-quantize": 1}
    (steps,) = epilogues(program)
    assert [step.partition("(")[0] for step in steps.split("|")] == ["act", "round", "mul"]
    assert "int8[-128,127] *x*x1" in steps.split("|")[2]


@pytest.mark.numeric
def test_a_factor_that_others_read_stored_is_rounded_before() -> None:
    g = Graph("m", 8)
    up = stored(g, g.b.arg("u", torch.float32, "m", 8))
    program = g.done(stored(g, times(g, stored(g, activated(g, g.x)), up)), up)

    fused(program, m=3)
    assert epilogues(program)[0].endswith("|mul(2)")


@pytest.mark.numeric
def test_a_stored_activation_that_others_read_is_quantized_by_itself() -> None:
    g = Graph("m", 8)
    up = g.b.arg("u", torch.float32, "m", 8)
    act = stored(g, activated(g, g.x))
    program = g.done(stored(g, times(g, act, up)), act)

    fused(program, m=3)
    assert epilogues(program) == ["act(silu)"]


@pytest.mark.numeric
def test_two_activations_multiplied() -> None:
    g = Graph("m", 8)
    up = g.b.arg("u", torch.float32, "m", 8)
    y = times(g, activated(g, g.x), activated(g, up, "act(sigmoid)"))
    program = g.done(stored(g, y))

    fused(program, m=3)
    assert epilogues(program) == ["act(silu)|mul(0)"]


@pytest.mark.numeric
def test_a_hand_written_silu_reads_one_tensor() -> None:
    g = Graph("m", 8)
    y = times(g, g.x, activated(g, g.x, "act(sigmoid)"))

    fused(program := g.done(stored(g, y)), m=3)
    assert epilogues(program) == ["act(sigmoid)|mul(0)"]


@pytest.mark.numeric
def test_a_factor_with_scales_of_two_levels_is_rounded_before() -> None:
    g = Graph(4, 32)
    up = two_levels(g, g.b.arg("u", torch.float32, 4, 32))
    program = g.done(stored(g, times(g, activated(g, g.x), up)))

    assert fused(program).fired == {"fuse-activation-quantize": 1}
    assert epilogues(program) == ["act(silu)|mul(0)"]


@pytest.mark.parametrize("gate", [False, True])
def test_refuses_an_activation_that_is_rounded_with_scales_of_two_levels(gate: bool) -> None:
    g = Graph(4, 32)
    act = two_levels(g, activated(g, g.x))
    y = times(g, act, g.b.arg("u", torch.float32, 4, 32)) if gate else act
    program = g.done(stored(g, y))
    result = fused(program)

    assert not result.modified
    # The quantize of two levels refuses for itself, too.
    assert {m.code for _, m in result.misses} == {MissCode.GRANULARITY}
    assert act in {m.at for _, m in result.misses}


def test_refuses_what_is_no_activation() -> None:
    g = Graph("m", 8)
    program = g.done(stored(g, g.call(aten.clamp.default, g.x, 1.0, -1.0)))

    assert refused(program, m=2).code is MissCode.ARGUMENT


@pytest.mark.parametrize("other", [0.5, "tensor"])
def test_says_nothing_where_there_is_no_activation(other: object) -> None:
    g = Graph("m", 8)
    up = g.b.arg("u", torch.float32, "m", 8)
    program = g.done(stored(g, g.call(aten.mul.Tensor, g.x, up if other == "tensor" else other)))
    result = fused(program, m=2)

    assert not result.modified
    assert result.misses == []


def test_refuses_a_factor_that_is_spread() -> None:
    g = Graph("m", 8)
    row = g.constant(torch.randn(8), "row")
    program = g.done(stored(g, times(g, activated(g, g.x), row)))

    miss = refused(program, m=2)
    assert (miss.code, miss.at) == (MissCode.SHAPE, row)


def test_refuses_a_gate_that_is_spread() -> None:
    g = Graph("m", 1)
    up = g.b.arg("u", torch.float32, "m", 8)
    gate = activated(g, g.x)
    program = g.done(stored(g, times(g, gate, up)))

    miss = refused(program, m=2)
    assert (miss.code, miss.at) == (MissCode.SHAPE, gate)


def test_refuses_integers() -> None:
    g = Graph("m", 8)
    whole = g.b.arg("whole", torch.int32, "m", 8)
    program = g.done(stored(g, times(g, activated(g, g.x), whole)))

    miss = refused(program, m=2)
    assert (miss.code, miss.at) == (MissCode.DTYPE, whole)


def test_refuses_an_activation_of_integers() -> None:
    g = Graph("m", 8)
    whole = g.b.arg("whole", torch.int32, "m", 8)
    program = g.done(stored(g, times(g, g.x, activated(g, whole, "act(relu)"))))

    miss = refused(program, m=2)
    assert (miss.code, miss.at) == (MissCode.DTYPE, whole)


def test_refuses_a_value_on_the_way_that_others_read() -> None:
    g = Graph("m", 8)
    up = g.b.arg("u", torch.float32, "m", 8)
    act = activated(g, g.x)
    program = g.done(stored(g, times(g, act, up)), act)

    miss = refused(program, m=2)
    assert (miss.code, miss.at) == (MissCode.SHARED, act)


def test_refuses_an_activation_times_itself() -> None:
    g = Graph("m", 8)
    act = activated(g, g.x)
    program = g.done(stored(g, times(g, act, act)))

    assert refused(program, m=2).code is MissCode.SHARED


@pytest.mark.numeric
@pytest.mark.parametrize("also", [False, True])
@pytest.mark.parametrize("act", [False, True])
def test_parameters_are_chosen_for_what_a_linear_gives(also: bool, act: bool) -> None:
    g = Graph("m", 8)
    block = QuantizedLinear(g.b, 4, 8)
    y = block.linear(block.quantized(g.x, per_tensor(2)))
    y = g.call(aten.gelu.default, y) if act else y
    program = g.done(stored(g, y, "token"), *([y] if also else []))
    apply_rules(program, [FuseLinear(), FuseActivation()])

    assert fused(program, m=4).fired == {"fuse-activation-quantize": 1}
    assert epilogues(program) == [""]


@pytest.mark.numeric
def test_given_parameters_are_for_the_linear_itself() -> None:
    g = Graph("m", 8)
    block = QuantizedLinear(g.b, 4, 8)
    y = g.call(aten.gelu.default, block.linear(block.quantized(g.x, per_tensor(2))))
    program = g.done(stored(g, y))
    apply_rules(program, [FuseLinear(), FuseActivation()])

    assert not fused(program, m=4).modified
