"""Structure checks at every doorway: which ops may pass, and which invariants hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch._ops import OpOverload
from torch.fx import Node

from qfuse.ir.errors import BlockError, VerifyError
from qfuse.ir.graph.stage_graph import StageGraph, constant_of, place_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.epilogue import Mul, Round
from qfuse.ir.ops.fused_reference import Keep
from qfuse.ir.ops.fused_views import Activation, Output, as_activation, as_fused_norm
from qfuse.ir.ops.views import (
    FusedLinear,
    QuantParams,
    as_choose,
    as_dequantize,
    as_fused_linear,
    as_quantize,
    as_requantize,
    dtype_of,
    tensor_of,
)
from qfuse.ir.quant.spec import QuantSpec


@dataclass(frozen=True, slots=True)
class StageSpec:
    """What may pass a doorway.

    Attributes:
        own: Ops of the ``qfuse`` namespace that may appear; kernels are told by ``kernels``.
        kernels: Whether kernel ops (every other op of the ``qfuse`` namespace) may appear.
    """

    own: tuple[OpOverload, ...]
    kernels: bool = False


STAGES: dict[str, StageSpec] = {
    # A model may be written in canonical ops, or come with them from another compiler.
    "captured": StageSpec(own=ops.CANONICAL),
    "normal": StageSpec(own=ops.CANONICAL),
    "optimized": StageSpec(own=(*ops.CANONICAL, *ops.FUSED)),
    "lowered": StageSpec(own=(), kernels=True),
}
"""The spec of each stage, by ``StageGraph.stage``."""


def verify(program: StageGraph) -> None:
    """Check every invariant of ``program``'s stage.

    Raises:
        VerifyError: An invariant does not hold; the message names the node and shows it.
    """
    spec = STAGES[program.stage]
    program.graph.lint()
    for node in program.graph.nodes:
        verify_node(node, spec)
    _verify_output(program)


def verify_node(node: Node, spec: StageSpec) -> None:
    """Check one node against a stage's spec."""
    if node.op == "output":
        return
    if "val" not in node.meta:
        raise _broken(node, "it has no fake value")
    if node.op == "get_attr":
        _verify_constant(node)
        return
    if node.op == "placeholder":
        return
    if node.op != "call_function":
        raise _broken(node, f"{node.op} nodes do not pass doorways")
    _verify_call(node, spec)
    _verify_params(node)
    _verify_choice(node)


def _verify_call(node: Node, spec: StageSpec) -> None:
    op = node.target
    if not isinstance(op, OpOverload):
        return
    if op._schema.is_mutable:  # noqa: SLF001
        raise _broken(node, "it writes to its arguments, and graphs are functional")
    is_own = op.namespace == "qfuse"
    if is_own and op not in spec.own and not _is_kernel(op, spec):
        raise _broken(node, "this op does not belong to this stage")


def _is_kernel(op: OpOverload, spec: StageSpec) -> bool:
    return spec.kernels and op not in (*ops.CANONICAL, *ops.FUSED)


def _verify_constant(node: Node) -> None:
    value = constant_of(node)
    fake = node.meta["val"]
    if value is None:
        return
    if tuple(value.shape) != tuple(fake.shape) or value.dtype != fake.dtype:
        raise _broken(node, f"its value is {value.dtype}{tuple(value.shape)}, its meta says {fake}")


def _verify_params(node: Node) -> None:
    """Check storage, block and real type of every quantized edge of ``node``."""
    if (quantize := as_quantize(node)) is not None:
        _verify_edge(node, tensor_of(node), quantize.params, real=quantize.x)
    elif (dequantize := as_dequantize(node)) is not None:
        _verify_edge(node, tensor_of(dequantize.q), dequantize.params, real=node)
    elif (requantize := as_requantize(node)) is not None:
        _verify_edge(node, tensor_of(requantize.q), requantize.params, real=None)
        _verify_edge(node, tensor_of(node), requantize.out_params, real=None)
        if requantize.params.spec.real != requantize.out_params.spec.real:
            raise _broken(node, "its two sides have real edges of other types")
    elif (fused := as_fused_linear(node)) is not None:
        _verify_edge(node, tensor_of(fused.x), fused.x_params, real=None)
        _verify_edge(node, tensor_of(fused.weight), fused.weight_params, real=None)
        _verify_edge(node, tensor_of(node), fused.out_params, real=None)
        out = None if fused.out_params is None else fused.out_params.spec
        _verify_steps(fused, out)
    else:
        _verify_kept(node)


def _verify_kept(node: Node) -> None:
    """Check an op that gives several results: that it has what it gives."""
    if (norm := as_fused_norm(node)) is not None:
        if Keep.SUM in norm.output.keep and norm.residual is None:
            raise _broken(node, "without a residual there is no sum to keep")
        _verify_results(node, norm.output)
    elif (activation := as_activation(node)) is not None:
        if Keep.SUM in activation.output.keep:
            raise _broken(node, "an activation has no sum to keep")
        if Keep.FLOAT in activation.output.keep and not activation.epilogue.steps:
            raise _broken(node, "without steps its float result is its input")
        _verify_edge(node, tensor_of(activation.x), activation.x_params, real=None)
        _verify_steps(activation, activation.output.spec)
        _verify_results(node, activation.output)


def _verify_steps(op: FusedLinear | Activation, out: QuantSpec | None) -> None:
    """Check that what is rounded on the way, and at the end, has the type that the specs say."""
    types = op.epilogue.real_types(op.real, [tensor_of(extra) for extra in op.extras])
    edges = [] if out is None else [(types[-1], out)]
    for step, real in zip(op.epilogue.steps, types, strict=False):
        if isinstance(step, Round):
            edges.append((real, step.spec))
        elif isinstance(step, Mul) and step.rounded is not None:
            edges.append((dtype_of(op.extras[step.index]), step.rounded.spec))
    for real, spec in edges:
        if real != spec.real:
            raise _broken(op.node, f"real numbers are {real}, the spec says {spec}")


def _verify_choice(node: Node) -> None:
    choose = as_choose(node)
    if choose is not None and (choose.outer_scale is None) == choose.spec.outer:
        raise _broken(node, f"a second scale is given or asked for, not both: {choose.spec}")


def _verify_results(node: Node, output: Output) -> None:
    """Check the results of an op that gives several of them."""
    results = node.meta["val"]
    if not isinstance(results, (list, tuple)) or len(results) != output.count:
        raise _broken(node, f"it gives {results}, its arguments say {output.count} results")
    _verify_edge(node, results[0], output.params, real=None)
    if output.chosen is None:
        return
    spec, choose = output.chosen
    if spec.dtype != choose.dtype:
        raise _broken(node, f"its parameters are chosen for {choose.dtype}, the spec says {spec}")
    _verify_stored(node, results[0], spec, results[1:3])


def _verify_edge(
    at: Node, stored: torch.Tensor, params: QuantParams | None, real: Node | None
) -> None:
    if params is None:
        return
    spec = params.spec
    if real is not None and dtype_of(real) != spec.real:
        raise _broken(at, f"real numbers are {dtype_of(real)}, the spec says {spec}")
    zero = [] if params.zero_point is None else [tensor_of(params.zero_point)]
    _verify_stored(at, stored, spec, [tensor_of(params.scale), *zero])
    outer = params.outer_scale
    try:
        spec.check_outer(stored.shape, None if outer is None else tensor_of(outer).shape)
    except BlockError as error:
        raise _broken(at, error.what) from error


def _verify_stored(
    at: Node, stored: torch.Tensor, spec: QuantSpec, params: Sequence[torch.Tensor]
) -> None:
    if stored.dtype != spec.dtype:
        raise _broken(at, f"stored numbers are {stored.dtype}, the spec says {spec}")
    if spec.scale_format.dtype not in {None, params[0].dtype}:
        raise _broken(at, f"the scale is {params[0].dtype}, the spec says {spec}")
    try:
        for param in params:
            spec.check(stored.shape, param.shape)
    except BlockError as error:
        raise _broken(at, error.what) from error


def _verify_output(program: StageGraph) -> None:
    output = program.graph.output_node()
    values = output.args[0]
    if not isinstance(values, (tuple, list)):
        raise _broken(output, "the output is not one flat tuple")
    used = {o.index for o in program.signature.outputs if o.index is not None}
    want = len(program.signature.mutations) + len(used)
    if len(values) < want:
        raise _broken(output, f"{len(values)} outputs, the signature needs {want}")


def _broken(node: Node, why: str) -> VerifyError:
    return VerifyError(
        f"{node.format_node() or node.name}: {why}",
        where=str(place_of(node)),
        fix="this is a bug in the rule or dialect that made the node; please report it",
    )
