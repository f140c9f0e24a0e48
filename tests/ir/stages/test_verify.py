"""Every invariant of a stage has a graph that breaks it, and the message names the node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from qfuse.ir.errors import VerifyError
from qfuse.ir.graph.stage_graph import (
    MUTABLE_META,
    SOURCE_META,
    CapturedGraph,
    LoweredGraph,
    NormalGraph,
    OptimizedGraph,
    OutputSpec,
    StageGraph,
)
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.activation import Activation
from qfuse.ir.ops.epilogue import Epilogue
from qfuse.ir.ops.norm_spec import NormSpec
from qfuse.ir.ops.norms import RmsNorm
from qfuse.ir.ops.output import ExtraOutput, Output
from qfuse.ir.ops.views import QuantParams
from qfuse.ir.quant.choose import ChooseSpec, Formula
from qfuse.ir.quant.element import ScaleFormat
from qfuse.ir.quant.spec import QuantSpec, ZeroPointDomain
from qfuse.ir.stages.verify import STAGES, verify
from qfuse.testing.build import GraphBuilder

aten = torch.ops.aten
F32, BF16 = torch.float32, torch.bfloat16
SPEC = QuantSpec(torch.int8, -128, 127, (None, None))
CHOOSE = ChooseSpec(Formula.AO_SYMMETRIC, torch.int8, -128, 127, (1, None), 1e-5)

# An op of the namespace that is neither canonical nor fused: to verify, a kernel.
_LIBRARY: Any = torch.library.Library("qfuse", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("kernel_of_test_verify(Tensor x) -> Tensor")
_LIBRARY.impl("kernel_of_test_verify", lambda x: x.clone(), "CompositeExplicitAutograd")
KERNEL = torch.ops.qfuse.kernel_of_test_verify.default


def builder() -> tuple[GraphBuilder, Any, Any]:
    """A builder with a float input ``[4, 6]`` and a scale."""
    b = GraphBuilder()
    return b, b.arg("x", F32, 4, 6), b.const("scale", torch.tensor([[0.1]]))


def unary(op: Any = aten.neg.default, stage: type[StageGraph] = NormalGraph) -> StageGraph:
    """``op(x)``."""
    b, x, _ = builder()
    return b.done(b.call(op, x), stage=stage)


def call_of(program: StageGraph, op: Any) -> Any:
    """The call of ``op``."""
    (node,) = [n for n in program.graph.nodes if n.target is op]
    return node


def with_args(program: StageGraph, op: Any, changes: dict[int, Any]) -> StageGraph:
    """The program with other arguments of the call of ``op``; what it gives stays."""
    node = call_of(program, op)
    node.args = tuple(changes.get(i, a) for i, a in enumerate(node.args))
    return program


def assert_broken(program: StageGraph, at: str, why: str) -> None:
    """``program`` breaks an invariant at ``at``, and the message says which."""
    with pytest.raises(VerifyError, match=why) as error:
        verify(program)
    assert at in str(error.value)


def no_value() -> StageGraph:
    program = unary()
    del call_of(program, aten.neg.default).meta["val"]
    return program


def input_without_value() -> StageGraph:
    program = unary()
    del next(iter(program.graph.nodes)).meta["val"]
    return program


def other_call(kind: str, target: str) -> StageGraph:
    """A call that is none of an op, such as of a submodule."""
    program = unary()
    program.module.add_submodule("inner", torch.nn.ReLU())
    old = call_of(program, aten.neg.default)
    with program.graph.inserting_before(old):
        new = program.graph.create_node(kind, target, old.args)
    new.meta = dict(old.meta)
    old.replace_all_uses_with(new)
    return program


def write() -> StageGraph:
    b, x, _ = builder()
    return b.done(b.call(aten.add_.Tensor, b.call(aten.clone.default, x), x))


def constant_of_another_shape() -> StageGraph:
    b, x, scale = builder()
    program = b.done(b.call(aten.mul.Tensor, x, scale))
    b.module.scale = torch.ones(2, 1)
    return program


def constant_of_another_type() -> StageGraph:
    b, x, scale = builder()
    program = b.done(b.call(aten.mul.Tensor, x, scale))
    b.module.scale = torch.ones(1, 1, dtype=BF16)
    return program


STRUCTURE: dict[str, tuple[Callable[[], StageGraph], str, str]] = {
    "a call without a value": (no_value, "aten.neg", "it has no fake value"),
    "an input without a value": (input_without_value, "x", "it has no fake value"),
    "a submodule": (
        partial(other_call, "call_module", "inner"),
        "inner",
        "call_module nodes are not allowed",
    ),
    "a method": (
        partial(other_call, "call_method", "relu"),
        "relu",
        "call_method nodes are not allowed",
    ),
    "a write": (write, "aten.add_", "it writes to its arguments"),
    "a constant of another shape": (constant_of_another_shape, "scale", r"float32\(2, 1\)"),
    "a constant of another type": (constant_of_another_type, "scale", "bfloat16"),
}


@pytest.mark.parametrize(("build", "at", "why"), STRUCTURE.values(), ids=list(STRUCTURE))
def test_structure(build: Callable[[], StageGraph], at: str, why: str) -> None:
    assert_broken(build(), at, why)


def test_a_node_that_is_read_before_it_is_made() -> None:
    program = unary()
    node = call_of(program, aten.neg.default)
    next(iter(program.graph.nodes)).prepend(node)

    with pytest.raises(RuntimeError, match="before"):
        verify(program)


def test_the_message_shows_the_node_and_the_place() -> None:
    program = unary(KERNEL)
    call_of(program, KERNEL).meta[SOURCE_META] = "model.py:7"

    with pytest.raises(VerifyError, match="belong to this stage") as error:
        verify(program)
    assert "kernel_of_test_verify" in error.value.what
    assert "model.py:7" in str(error.value)
    assert "report it" in str(error.value)


def test_a_buffer_that_is_written_is_no_constant() -> None:
    b, x, scale = builder()
    program = b.done(b.call(aten.mul.Tensor, x, scale))
    b.module.scale = torch.ones(1, 1, dtype=BF16)
    scale.meta[MUTABLE_META] = True

    verify(program)
    assert STAGES["normal"].own == ops.CANONICAL


CANONICAL, FUSED = "canonical", "fused"
ALLOWED = {
    CapturedGraph: {CANONICAL},
    NormalGraph: {CANONICAL},
    OptimizedGraph: {CANONICAL, FUSED},
    LoweredGraph: {"kernel"},
}


def of_kind(kind: str, stage: type[StageGraph]) -> StageGraph:
    """A graph of one op of the ``qfuse`` namespace."""
    b, x, scale = builder()
    if kind == CANONICAL:
        return b.done(b.call(ops.quantize, x, scale, None, str(SPEC)), stage=stage)
    if kind == "kernel":
        return b.done(b.call(KERNEL, x), stage=stage)
    act = Activation(x, x, None, Epilogue.parse("act(relu)"), (), Output(None, None, frozenset()))
    return b.done(b.item(b.call(ops.activation, *act.call_args()), 0), stage=stage)


@pytest.mark.parametrize("kind", [CANONICAL, FUSED, "kernel"])
@pytest.mark.parametrize("stage", list(ALLOWED))
def test_own_ops_have_their_stages(kind: str, stage: type[StageGraph]) -> None:
    program = of_kind(kind, stage)

    if kind in ALLOWED[stage]:
        verify(program)
        assert program.stage in STAGES
    else:
        assert_broken(program, "qfuse.", "does not belong to this stage")


def quantized() -> StageGraph:
    b, x, scale = builder()
    return b.done(b.call(ops.quantize, x, scale, None, str(SPEC)))


def dequantized() -> StageGraph:
    b, _, scale = builder()
    q = b.arg("q", torch.int8, 4, 6)
    return b.done(b.call(ops.dequantize, q, scale, None, str(SPEC)))


def requantized(out: QuantSpec = SPEC) -> StageGraph:
    b, _, scale = builder()
    q = b.arg("q", torch.int8, 4, 6)
    params = QuantParams(SPEC, scale, None)
    other = QuantParams(out, scale, None)
    args = (q, *params.call_args(q)[1:4], *other.call_args(q)[1:4])
    return b.done(b.call(ops.requantize, *args))


def fused_linear(x_spec: str = "", w_spec: str = "", out: str = "") -> StageGraph:
    b, _, scale = builder()
    q, w = b.arg("q", torch.int8, 4, 6), b.const("w", torch.ones(3, 6, dtype=torch.int8))
    edges = [(scale, None, spec or str(SPEC)) for spec in (x_spec, w_spec, out)]
    return b.done(
        b.call(ops.linear, q, *edges[0], w, *edges[1], None, *edges[2], "", []),
        stage=OptimizedGraph,
    )


def text(**changes: Any) -> str:
    """The text of the spec with some fields replaced."""
    return str(replace(SPEC, **changes))


UINT8 = text(dtype=torch.uint8, quant_min=0, quant_max=255)
ROWS = text(block=(1, None))
EDGES: dict[str, tuple[Callable[[], StageGraph], str]] = {
    "quantize: another float type": (
        lambda: with_args(quantized(), ops.quantize, {3: text(float_dtype=BF16)}),
        "float values are torch.float32",
    ),
    "quantize: another storage": (
        lambda: with_args(quantized(), ops.quantize, {3: UINT8}),
        "quantized values are torch.int8",
    ),
    "quantize: a scale of another block": (
        lambda: with_args(quantized(), ops.quantize, {3: ROWS}),
        "scale",
    ),
    "dequantize: another float type": (
        lambda: with_args(dequantized(), ops.dequantize, {3: text(float_dtype=BF16)}),
        "float values are torch.float32",
    ),
    "dequantize: another storage": (
        lambda: with_args(dequantized(), ops.dequantize, {3: UINT8}),
        "quantized values are torch.int8",
    ),
    "dequantize: a scale of another block": (
        lambda: with_args(dequantized(), ops.dequantize, {3: ROWS}),
        "scale",
    ),
    "requantize: another storage before": (
        lambda: with_args(requantized(), ops.requantize, {3: UINT8}),
        "quantized values are torch.int8",
    ),
    "requantize: another storage after": (
        lambda: with_args(requantized(), ops.requantize, {6: UINT8}),
        "quantized values are torch.int8",
    ),
    "requantize: two float types": (
        lambda: requantized(replace(SPEC, float_dtype=BF16)),
        "float values are torch.float32",
    ),
    "linear: another storage of the activation": (
        lambda: fused_linear(x_spec=UINT8),
        "quantized values are torch.int8",
    ),
    "linear: another block of the weight": (lambda: fused_linear(w_spec=ROWS), "scale"),
    "linear: another float type of the result": (
        lambda: fused_linear(out=text(float_dtype=BF16)),
        "float values are torch.float32",
    ),
}


@pytest.mark.parametrize("build", [quantized, dequantized, requantized, fused_linear])
def test_edges_that_fit_pass(build: Callable[[], StageGraph]) -> None:
    program = build()

    verify(program)
    assert len(program.graph.output_node().all_input_nodes) == 1


@pytest.mark.parametrize(("build", "why"), EDGES.values(), ids=list(EDGES))
def test_quantized_operands(build: Callable[[], StageGraph], why: str) -> None:
    assert_broken(build(), "qfuse.", why)


def test_a_scale_has_the_format_of_its_spec() -> None:
    spec = replace(SPEC, domain=ZeroPointDomain.NONE, scale_format=ScaleFormat.E8M0)
    program = with_args(quantized(), ops.quantize, {3: str(spec)})

    assert_broken(program, "qfuse.quantize", "the scale is torch.float32")


def test_a_second_level_of_scales_is_there_if_the_spec_has_one() -> None:
    spec = replace(SPEC, domain=ZeroPointDomain.NONE, outer=(None, None))
    program = with_args(quantized(), ops.quantize, {3: str(spec)})

    assert_broken(program, "qfuse.quantize", "second level")


def norm(keep: frozenset[ExtraOutput], *, residual: bool) -> StageGraph:
    b, x, _ = builder()
    spec = NormSpec(1, 1e-6, F32, F32, F32, F32)
    r = x if residual else None
    op = RmsNorm(x, x, None, r, None, None, spec, Output(None, None, keep))
    return b.done(b.item(b.call(ops.rms_norm, *op.call_args()), 0), stage=OptimizedGraph)


def test_there_is_no_sum_without_a_residual() -> None:
    program = norm(frozenset({ExtraOutput.SUM}), residual=True)
    verify(program)

    assert_broken(with_args(program, ops.rms_norm, {4: None}), "rms_norm", "no sum to keep")


def activation(steps: str, keep: frozenset[ExtraOutput]) -> StageGraph:
    """An activation whose first result is quantized."""
    b, x, scale = builder()
    block = Output(QuantParams(SPEC, scale, None), None, keep)
    op = Activation(x, x, None, Epilogue.parse(steps), (), block)
    node = b.call(ops.activation, *op.call_args())
    return b.done(b.item(node, 0), stage=OptimizedGraph)


def test_an_activation_without_steps_has_no_float_result_of_its_own() -> None:
    verify(activation("act(relu)", frozenset({ExtraOutput.FLOAT})))

    program = activation("act(relu)", frozenset({ExtraOutput.FLOAT}))
    node = call_of(program, ops.activation)
    index = node.args.index("act(relu)")
    assert_broken(with_args(program, ops.activation, {index: ""}), "activation", "empty epilogue")


def test_an_activation_has_no_sum() -> None:
    program = activation("act(relu)", frozenset({ExtraOutput.FLOAT}))
    node = call_of(program, ops.activation)
    index = len(node.args) - 1
    assert node.args[index] == "float"
    assert_broken(with_args(program, ops.activation, {index: "sum"}), "activation", "no sum")


def test_results_are_as_many_as_the_arguments_say() -> None:
    program = activation("act(relu)", frozenset({ExtraOutput.FLOAT}))
    node = call_of(program, ops.activation)
    node.meta["val"] = node.meta["val"][:1]

    assert_broken(program, "activation", "its arguments say 2 results")


def test_a_choice_asks_for_two_levels_if_it_is_given_one() -> None:
    b, x, scale = builder()
    program = b.done(b.item(b.call(ops.choose_qparams, x, str(CHOOSE)), 0))
    verify(program)

    node = call_of(program, ops.choose_qparams)
    node.args = (*node.args, scale)
    assert_broken(program, "choose_qparams", "the second scale must be present")


def test_outputs_are_one_flat_tuple() -> None:
    program = unary()
    output = program.graph.output_node()
    output.args = (output.all_input_nodes[0],)

    assert_broken(program, "output", "not one flat tuple")


def test_the_signature_needs_its_outputs() -> None:
    program = unary()
    signature = replace(program.signature, outputs=(OutputSpec(0), OutputSpec(1)))
    program = NormalGraph(program.module, signature, program.log)

    assert_broken(program, "output", "1 outputs, the signature needs 2")
