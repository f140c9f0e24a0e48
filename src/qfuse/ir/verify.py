"""Structure checks at every doorway: which ops may pass, and which invariants hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch._ops import OpOverload

from qfuse.ir import ops
from qfuse.ir.errors import BlockError, VerifyError
from qfuse.ir.program import constant_of, place_of
from qfuse.ir.views import (
    QuantParams,
    as_choose,
    as_dequantize,
    as_fused_linear,
    as_quantize,
    as_requantize,
    dtype_of,
    shape_of,
)

if TYPE_CHECKING:
    from torch.fx import Node

    from qfuse.ir.program import StageGraph

__all__ = ["STAGES", "StageSpec", "verify", "verify_node"]


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
    "captured": StageSpec(own=()),
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
        _verify_edge(node, node, quantize.params, real=quantize.x)
    elif (dequantize := as_dequantize(node)) is not None:
        _verify_edge(node, dequantize.q, dequantize.params, real=node)
    elif (requantize := as_requantize(node)) is not None:
        _verify_edge(node, requantize.q, requantize.params, real=None)
        _verify_edge(node, node, requantize.out_params, real=None)
        if requantize.params.spec.real != requantize.out_params.spec.real:
            raise _broken(node, "its two sides have real edges of other types")
    elif (choose := as_choose(node)) is not None:
        if (choose.outer_scale is None) == choose.spec.outer:
            raise _broken(node, f"a second scale is given or asked for, not both: {choose.spec}")
    elif (fused := as_fused_linear(node)) is not None:
        for value, params in (
            (fused.x, fused.x_params),
            (fused.weight, fused.weight_params),
            (node, fused.out_params),
        ):
            if params is not None:
                _verify_edge(node, value, params, real=None)


def _verify_edge(at: Node, stored: Node, params: QuantParams, real: Node | None) -> None:
    spec = params.spec
    if dtype_of(stored) != spec.dtype:
        raise _broken(at, f"stored numbers are {dtype_of(stored)}, the spec says {spec}")
    if real is not None and dtype_of(real) != spec.real:
        raise _broken(at, f"real numbers are {dtype_of(real)}, the spec says {spec}")
    if spec.scale_format.dtype not in {None, dtype_of(params.scale)}:
        raise _broken(at, f"the scale is {dtype_of(params.scale)}, the spec says {spec}")
    outer = params.outer_scale
    try:
        spec.check(shape_of(stored), shape_of(params.scale))
        if params.zero_point is not None:
            spec.check(shape_of(stored), shape_of(params.zero_point))
        spec.check_outer(shape_of(stored), None if outer is None else shape_of(outer))
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
