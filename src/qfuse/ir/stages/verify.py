"""The graph verifier, run at every stage boundary: allowed ops and invariants."""

from __future__ import annotations

from dataclasses import dataclass

from torch._ops import OpOverload
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import is_concrete_int

from qfuse.ir.errors import VerifyError
from qfuse.ir.graph.stage_graph import (
    CLAIM_META,
    RULE_META,
    StageGraph,
    constant_of,
    place_of,
)
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.check import problems_of


@dataclass(frozen=True, slots=True)
class StageSpec:
    """The ops that a stage allows.

    Attributes:
        own: Ops of the ``qfuse`` namespace that may appear, besides kernels.
        kernels: Whether kernel ops (every other op of the ``qfuse`` namespace) may appear.
        claimed: Whether any op may appear that a backend claimed.
    """

    own: tuple[OpOverload, ...]
    kernels: bool = False
    claimed: bool = False


STAGES: dict[str, StageSpec] = {
    # A model may use canonical ops itself, or get them from another compiler.
    "captured": StageSpec(own=ops.CANONICAL),
    "normal": StageSpec(own=ops.CANONICAL),
    "optimized": StageSpec(own=(*ops.CANONICAL, *ops.FUSED)),
    "lowered": StageSpec(own=(), kernels=True, claimed=True),
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
    _verify_sizes(program)
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
        raise _broken(node, f"{node.op} nodes are not allowed between stages")
    _verify_call(node, spec)
    op = ops.as_op(node)
    why = None if op is None else next(problems_of(op), None)
    if why is not None:
        raise _broken(node, why)


def _verify_call(node: Node, spec: StageSpec) -> None:
    op = node.target
    # Such as `getitem`, and arithmetic on sizes.
    if not isinstance(op, OpOverload):
        return
    if op._schema.is_mutable:  # noqa: SLF001
        raise _broken(node, "it writes to its arguments, and graphs are functional")
    is_own = op.namespace == "qfuse"
    is_kernel = spec.kernels and ops.declaration_of(op) is None
    is_claimed = spec.claimed and CLAIM_META in node.meta
    if is_own and op not in spec.own and not is_kernel and not is_claimed:
        raise _broken(node, "this op does not belong to this stage")


def _verify_constant(node: Node) -> None:
    value = constant_of(node)
    fake = node.meta["val"]
    # A buffer that the program writes has no fixed value to compare.
    if value is None:
        return
    if tuple(value.shape) != tuple(fake.shape) or value.dtype != fake.dtype:
        raise _broken(node, f"its value is {value.dtype}{tuple(value.shape)}, its meta says {fake}")


def _verify_sizes(program: StageGraph) -> None:
    """Check that the sizes that may vary are still symbols: an op may read one as a number."""
    shapes = {spec.placeholder: spec.shape for spec in program.signature.inputs}
    for node in program.graph.find_nodes(op="placeholder"):
        sizes = zip(shapes.get(str(node.target), ()), node.meta["val"].shape, strict=False)
        for axis, (symbol, size) in enumerate(sizes):
            if isinstance(symbol, str) and is_concrete_int(size):
                raise _broken(node, f"its size in axis {axis} may vary, and became {int(size)}")


def _verify_output(program: StageGraph) -> None:
    output = program.graph.output_node()
    values = output.args[0]
    if not isinstance(values, (tuple, list)):
        raise _broken(output, "the output is not one flat tuple")
    # Leaves that are the same tensor share one output.
    used = {o.index for o in program.signature.outputs if o.index is not None}
    want = len(program.signature.mutations) + len(used)
    if len(values) < want:
        raise _broken(output, f"{len(values)} outputs, the signature needs {want}")


def _broken(node: Node, why: str) -> VerifyError:
    rule = node.meta.get(RULE_META)
    fix = "this is a bug of qfuse; please report it"
    if rule is not None:
        fix = f"fix the rule {rule}, which made it; please report it if the rule is qfuse's"
    return VerifyError(
        f"{node.format_node() or node.name}: {why}",
        where=str(place_of(node)),
        fix=fix,
    )
