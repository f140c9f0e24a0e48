from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.normalize.sources import difference, equal_but_for_nan, results, strides
from tests.optimize.move_cases import Graph, spec_of

from qfuse.ir import ops
from qfuse.ir.choose_spec import ChooseSpec, Formula, fixed_zero_point
from qfuse.ir.events import MissCode
from qfuse.ir.fused_views import as_activation
from qfuse.ir.program import OptimizedGraph
from qfuse.ir.text import to_text
from qfuse.ir.verify import verify
from qfuse.ir.views import shape_of
from qfuse.optimize.fuse_activation_quantize import FuseActivationQuantize
from qfuse.optimize.schedule import optimize
from qfuse.rewrite.clone import clone
from qfuse.rewrite.driver import apply_rules
from qfuse.testing.quant import QuantizedLinear, per_tensor
from qfuse.testing.run import random_inputs, run

if TYPE_CHECKING:
    from torch.fx import Node

    from qfuse.ir.program import NormalGraph, StageGraph
    from qfuse.ir.quant_spec import Block
    from qfuse.rewrite.driver import PassResult
    from qfuse.rewrite.rule import Miss

aten = torch.ops.aten

ACTS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "act(relu)": (aten.relu.default, (), {}),
    "act(gelu)": (aten.gelu.default, (), {}),
    "act(gelu_tanh)": (aten.gelu.default, (), {"approximate": "tanh"}),
    "act(silu)": (aten.silu.default, (), {}),
    "act(sigmoid)": (aten.sigmoid.default, (), {}),
    "act(tanh)": (aten.tanh.default, (), {}),
    "act(hardswish)": (aten.hardswish.default, (), {}),
    "act(hardsigmoid)": (aten.hardsigmoid.default, (), {}),
    "act(hardtanh,-0.5,0.75)": (aten.hardtanh.default, (-0.5, 0.75), {}),
    "act(hardtanh,0.0,6.0)": (aten.relu6.default, (), {}),
    "act(hardtanh,-1.0,2.0)": (aten.clamp.default, (-1, 2), {}),
    "act(leaky_relu,0.2)": (aten.leaky_relu.default, (0.2,), {}),
}


def activated(g: Graph, x: Node, name: str = "act(silu)") -> Node:
    """An activation of ``x``."""
    op, args, kwargs = ACTS[name]
    return g.call(op, x, *args, **kwargs)


def cast(g: Graph, x: Node, dtype: torch.dtype) -> Node:
    """A cast."""
    return g.call(aten._to_copy.default, x, dtype=dtype)


def times(g: Graph, a: Node, b: Node) -> Node:
    """A product."""
    return g.call(aten.mul.Tensor, a, b)


def stored(
    g: Graph, y: Node, how: str = "static", block: Block | None = None, **changes: Any
) -> Node:
    """Quantize ``y`` and dequantize it again for a reader."""
    rank = len(shape_of(y))
    blocks: dict[str, Block] = {
        "static": (None,) * rank,
        "dynamic": (None,) * rank,
        "token": (*[1] * (rank - 1), None),
        "symmetric": (*[1] * (rank - 1), None),
        "group": (*[1] * (rank - 1), 4),
        "channel": (*[None] * (rank - 1), 1),
    }
    spec = spec_of(*(block or blocks[how]), real=y.meta["val"].dtype, **changes)
    if how in {"static", "channel"}:
        params: tuple[Node, Node | None] = g.params(y, spec)
    else:
        formula = Formula.AO_SYMMETRIC if how == "symmetric" else Formula.AO_ASYMMETRIC
        low, high = spec.quant_min, spec.quant_max
        choose = ChooseSpec(formula, spec.dtype, low, high, spec.block, 1e-7)
        pair = g.call(ops.choose_qparams, y, str(choose))
        zero = None if fixed_zero_point(choose) == 0 else g.b.item(pair, 1)
        params = g.b.item(pair, 0), zero
    return g.dequantize(g.quantize(y, spec, params), spec, params)


def fused(program: NormalGraph, **sizes: int) -> PassResult:
    """Fuse; bits, types and strides of all outputs must stay."""
    source = clone(program)
    result = apply_rules(program, [FuseActivationQuantize()])
    verify(OptimizedGraph(program.module, program.signature, program.log))
    inputs = random_inputs(program, **sizes)
    for old, new, node in zip(
        run(source, inputs), run(program, inputs), results(program), strict=True
    ):
        assert (old.dtype, old.shape) == (new.dtype, new.shape)
        assert equal_but_for_nan(old, new), f"{to_text(program.graph)}\n{difference(old, new)}"
        assert strides(old) == strides(new), f"strides of {node}\n{to_text(program.graph)}"
    return result


def refused(program: NormalGraph, **sizes: int) -> Miss:
    """Refuse once and change nothing; return the refusal."""
    before = to_text(program.graph)
    result = fused(program, **sizes)
    assert not result.modified
    assert to_text(program.graph) == before
    (miss,) = [m for _, m in result.misses]
    return miss


def epilogues(program: StageGraph) -> list[str]:
    """The steps of every fused activation."""
    views = map(as_activation, program.graph.nodes)
    return [str(view.epilogue) for view in views if view is not None]


@pytest.mark.numeric
def test_golden_halves_of_one_tensor_are_quantized_per_token() -> None:
    g = Graph("m", 16)
    split = g.call(aten.split.Tensor, g.x, 8, -1)
    gate, up = (g.b.item(split, index) for index in range(2))
    program = g.done(stored(g, times(g, activated(g, gate), up), "token"))

    assert fused(program, m=3).fired == {"fuse-activation-quantize": 1}
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[s0, 16]
%0 = qfuse.activation(%x, None, None, '', 'glu(silu,gate-first)', (), None, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int', 'ao-asymmetric int8[-128,127] 1x* eps=1e-07 float32 int32', ''): (int8[s0, 8], float32[s0, 1], int32[s0, 1])
%1 = getitem(%0, 0): int8[s0, 8]
%2 = getitem(%0, 2): int32[s0, 1]
%3 = getitem(%0, 1): float32[s0, 1]
%4 = qfuse.dequantize(%1, %3, %2, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[s0, 8]
%5 = aten.neg(%4): float32[s0, 8]
return (%5)""",
    )


@pytest.mark.numeric
def test_golden_a_gelu_is_quantized_with_given_parameters_and_kept() -> None:
    g = Graph("m", 8)
    y = activated(g, g.x, "act(gelu_tanh)")
    program = g.done(stored(g, y), y)

    assert fused(program, m=3).fired == {"fuse-activation-quantize": 1}
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[s0, 8]
const %scale1: float32[1, 1]
const %zero2: int32[1, 1]
%0 = qfuse.activation(%x, None, None, '', 'act(gelu_tanh)', (), %scale1, %zero2, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int', '', 'float'): (int8[s0, 8], float32[s0, 8])
%1 = getitem(%0, 0): int8[s0, 8]
%2 = getitem(%0, 1): float32[s0, 8]
const %scale1: float32[1, 1]
const %zero2: int32[1, 1]
%3 = qfuse.dequantize(%1, %scale1, %zero2, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int'): float32[s0, 8]
%4 = aten.neg(%3): float32[s0, 8]
%5 = aten.neg(%2): float32[s0, 8]
return (%4, %5)""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize("name", list(ACTS))
@pytest.mark.parametrize("how", ["static", "channel", "dynamic", "token", "symmetric", "group"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gate", [False, True])
def test_bits_stay(name: str, how: str, dtype: torch.dtype, gate: bool) -> None:
    g = Graph("m", 3, 9 if how != "group" else 11, dtype=dtype)
    y = activated(g, g.x, name)
    if gate:
        up = g.b.arg("u", dtype, *[s if isinstance(s, int) else "m" for s in shape_of(g.x)])
        y = times(g, up, y)
    program = g.done(stored(g, y, how))

    assert fused(program, m=5).fired == {"fuse-activation-quantize": 1}
    assert epilogues(program) == [f"{name}|mul(0)" if gate else name]


@pytest.mark.numeric
@pytest.mark.parametrize("shape", [(1, 1), (0, 4), (7, 33), (2, 1, 3, 17), (5,)], ids=str)
@pytest.mark.parametrize("how", ["static", "token"])
def test_odd_sizes(shape: tuple[int, ...], how: str) -> None:
    g = Graph(*shape)
    up = g.b.arg("u", torch.float32, *shape)
    program = g.done(stored(g, times(g, activated(g, g.x), up), how))

    assert fused(program).modified


@pytest.mark.numeric
@pytest.mark.parametrize("storage", [torch.uint8, torch.int16, torch.float8_e4m3fn])
def test_other_storage(storage: torch.dtype) -> None:
    g = Graph("m", 8)
    y = activated(g, g.x)
    low, high = (-448, 448) if storage.is_floating_point else (0, 15)
    spec = spec_of(None, None, dtype=torch.uint8)
    spec = type(spec)(storage, low, high, (None, None))
    scale = g.constant(torch.tensor([[0.02]]), "scale")
    program = g.done(g.dequantize(g.quantize(y, spec, (scale, None)), spec, (scale, None)))

    assert fused(program, m=3).modified


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
def test_a_dequantize_in_front_is_taken_along() -> None:
    g = Graph(1)
    q = g.stored(6, 8)
    spec = spec_of(1, 4)
    x = g.dequantize(q, spec, g.params(q, spec))
    program = g.done(stored(g, activated(g, x), "token"), x)

    fused(program)
    (view,) = [v for v in map(as_activation, program.graph.nodes) if v is not None]
    assert view.x is q
    assert view.x_params is not None
    assert view.x_params.spec == spec


@pytest.mark.numeric
@pytest.mark.parametrize("how", ["static", "token"])
def test_the_float_result_is_kept_with_its_strides(how: str) -> None:
    g = Graph(4, 6)
    turned = g.call(aten.transpose.int, g.x, 0, 1)
    y = activated(g, turned)
    early = g.call(aten.sum.dim_IntList, y, [0])
    real = stored(g, y, how)
    program = g.b.done(y, early, real)

    assert fused(program).modified
    assert epilogues(program) == ["act(silu)"]


@pytest.mark.numeric
def test_two_quantizes_of_one_result() -> None:
    g = Graph("m", 8)
    y = activated(g, g.x)
    program = g.done(stored(g, y), stored(g, y, "token"))

    assert fused(program, m=3).fired == {"fuse-activation-quantize": 1}


@pytest.mark.numeric
def test_a_chosen_zero_point_that_is_read_elsewhere() -> None:
    g = Graph("m", 8)
    y = activated(g, g.x)
    spec = spec_of(1, None)
    scale, zero = g.choose(y, (1, None))
    real = g.dequantize(g.quantize(y, spec, (scale, zero)), spec, (scale, zero))
    program = g.b.done(real, scale, g.call(aten.neg.default, zero))

    assert fused(program, m=3).modified


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
def test_a_linear_keeps_its_activation() -> None:
    g = Graph("m", 8)
    block = QuantizedLinear(g.b, 4, 8)
    gate = g.call(aten.silu.default, block.linear(block.quantized(g.x, per_tensor(2)), "gate"))
    up = g.b.arg("u", torch.float32, "m", 4)
    program = g.done(stored(g, times(g, gate, up), "token"), stored(g, g.x, "token"))
    source = clone(program)
    done = optimize(program)

    names = [str(n.args[12]) for n in done.graph.nodes if n.target is ops.linear]
    assert names == ["act(silu)"]
    assert epilogues(done) == ["mul(0)"]
    inputs = random_inputs(done, m=5)
    for new, old in zip(run(done, inputs), run(source, inputs), strict=True):
        assert equal_but_for_nan(new, old)


def test_refuses_what_is_no_activation() -> None:
    g = Graph("m", 8)
    program = g.done(stored(g, g.call(aten.clamp.default, g.x, None, 1.0)))

    assert refused(program, m=2).code is MissCode.ARGUMENT


@pytest.mark.parametrize("other", [0.5, "tensor"])
def test_refuses_nothing_where_there_is_no_activation(other: object) -> None:
    g = Graph("m", 8)
    up = g.b.arg("u", torch.float32, "m", 8)
    program = g.done(stored(g, g.call(aten.mul.Tensor, g.x, up if other == "tensor" else other)))
    result = fused(program, m=2)

    assert not result.modified
    assert result.misses == []


def test_refuses_parameters_of_something_else() -> None:
    g = Graph("m", 8)
    y = activated(g, g.x)
    spec = spec_of(1, None)
    params = g.choose(g.x, (1, None))
    program = g.done(g.dequantize(g.quantize(y, spec, params), spec, params))

    miss = refused(program, m=2)
    assert (miss.code, miss.at) == (MissCode.NOT_CONSTANT, params[0])


def test_refuses_a_zero_point_of_something_else() -> None:
    g = Graph("m", 8)
    y = activated(g, g.x)
    spec = spec_of(1, None)
    scale, zero = g.choose(y, (1, None))[0], g.choose(g.x, (1, None))[1]
    program = g.done(g.dequantize(g.quantize(y, spec, (scale, zero)), spec, (scale, zero)))

    assert refused(program, m=2).code is MissCode.NOT_CONSTANT


def test_refuses_a_chosen_zero_point_that_is_left_out() -> None:
    g = Graph("m", 8)
    y = activated(g, g.x)
    spec = spec_of(1, None)
    scale, _ = g.choose(y, (1, None))
    program = g.done(g.dequantize(g.quantize(y, spec, (scale, None)), spec, (scale, None)))

    assert refused(program, m=2).code is MissCode.NOT_CONSTANT


def test_refuses_parameters_chosen_for_another_type() -> None:
    g = Graph("m", 8)
    y = activated(g, g.x)
    spec = spec_of(1, None, dtype=torch.uint8)
    params = g.choose(y, (1, None))
    program = g.done(g.dequantize(g.quantize(y, spec, params), spec, params))

    assert refused(program, m=2).code is MissCode.DTYPE


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


def test_refuses_factors_in_other_orders_of_axes() -> None:
    g = Graph(4, 6)
    up = g.call(aten.transpose.int, g.b.arg("u", torch.float32, 6, 4), 0, 1)
    program = g.done(stored(g, times(g, activated(g, g.x), up)))

    assert refused(program).code is MissCode.SHAPE
