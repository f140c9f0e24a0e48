"""Matmuls with a constant matrix, by any op: their operands, and the feature axis of each."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from qfuse.inductor._inductor_api import has_kernel
from qfuse.inductor.numbers import Numbers
from qfuse.ir.graph.schema import overload_of
from qfuse.ir.ops.views import dtype_of, shape_of, tensor_of
from qfuse.rewrite.prelude import Node, OpOverload, Rewriter, arguments, aten

_BLOCKED = 4


@dataclass(frozen=True, slots=True)
class Spec:
    """The arguments of a matmul op.

    Attributes:
        x: Name of the argument that siblings share.
        columns: Names of the operands with one entry per output feature, with the axis.
        bias: Name of the bias, an optional vector.
        family: Common name of ops that differ only in the bias.
        block: For a packed weight, the features per entry along the axis; 0 for a weight whose
            first axis counts blocks, with the block as the last axis of other operands.
        needs_kernel: Whether some builds have the op without a kernel.
    """

    x: str
    columns: Mapping[str, int]
    bias: str | None = None
    family: str = ""
    block: int = 1
    needs_kernel: bool = False


_PACKED = {"weight": 0, "weight_scales": 0}
_SPECS: Mapping[str, Spec] = {
    "aten::mm": Spec("self", {"mat2": 1}, family="mm"),
    "aten::addmm": Spec("mat1", {"mat2": 1}, bias="self", family="mm"),
    "aten::bmm": Spec("self", {"mat2": 2}),
    "aten::linear": Spec("input", {"weight": 0}, bias="bias"),
    "aten::_int_mm": Spec("self", {"mat2": 1}),
    "aten::_scaled_mm": Spec("self", {"mat2": 1, "scale_b": 1}, bias="bias"),
    "aten::_weight_int8pack_mm": Spec("self", {"mat2": 0, "scales": 0}),
    # Blocks have 64 rows with AVX-512, and 32 or 16 with other ISAs.
    "aten::_weight_int4pack_mm_for_cpu": Spec("self", {"mat2": 0, "qScaleAndZeros": 1}, block=64),
    "onednn::qlinear_pointwise": Spec(
        "qx", {"qw": 1, "w_scale": 0, "w_zero_point": 0}, bias="bias"
    ),
    "torchao::da8w4_linear_cpu": Spec(
        "input",
        {**_PACKED, "weight_qzeros": 0, "compensation": 0},
        bias="bias",
        block=0,
        needs_kernel=True,
    ),
    "torchao::float8_linear_cpu": Spec("input", _PACKED, bias="bias", block=0, needs_kernel=True),
}
_UNARY = ("default", "tensor")  # overloads that do not mutate


@dataclass(frozen=True, slots=True)
class MatrixProduct:
    """One call of a matmul op.

    Attributes:
        node: The call.
        spec: The arguments of the op.
        x: The operand that siblings share.
        columns: The operands to concatenate, by argument name.
        bias: A vector of one entry per output feature, or ``None``.
        n: Output features.
        fixed: All other arguments, which must be equal for siblings.
        wrong: Why it cannot be merged whatever its siblings are; "" if it can.
    """

    node: Node
    spec: Spec
    x: Node
    columns: Mapping[str, Node]
    bias: Node | None
    n: int
    fixed: Mapping[str, Any] = field(default_factory=dict)
    wrong: str = ""

    @property
    def operands(self) -> list[Node]:
        """The constant operands: those to concatenate, and the bias."""
        return [*self.columns.values(), *([] if self.bias is None else [self.bias])]

    def kind(self, numbers: Numbers) -> tuple[tuple[str, Hashable], ...]:
        """Return what siblings must have in common besides the input, by names for the report."""
        found: list[tuple[str, Hashable]] = [("op", self.spec.family or str(self.node.target))]
        for name, node in self.columns.items():
            others = [s for a, s in enumerate(shape_of(node)) if a != self.spec.columns[name]]
            found.append((f"the type of {name}", str(dtype_of(node))))
            found.append((f"the shape of {name}", tuple(map(str, others))))
        found.append(("the type of its result", str(dtype_of(self.node))))
        return (*found, *((name, numbers.frozen(value)) for name, value in self.fixed.items()))


def as_matrix_product(node: Node) -> MatrixProduct | None:
    """View a call as a matmul."""
    op = overload_of(node)
    spec = None if op is None else _SPECS.get(op._schema.name)  # noqa: SLF001 - the way to ask
    if op is None or spec is None or op._overloadname not in _UNARY:  # noqa: SLF001
        return None
    if spec.needs_kernel and not has_kernel(op, "CPU"):
        return None
    named = arguments(node)
    x, shape = named.pop(spec.x), shape_of(node)
    bias = named.pop(spec.bias, None) if spec.bias else None
    columns = {
        name: value
        for name in spec.columns
        # One scale for the whole tensor is an argument that siblings must share.
        if isinstance(value := named.get(name), Node) and tensor_of(value).numel() != 1
    }
    assert isinstance(x, Node), "what is multiplied is a tensor"
    # Parts of unknown width cannot be split apart.
    if not shape or not isinstance(shape[-1], int):
        return None
    fixed = {k: v for k, v in named.items() if k not in columns}
    if spec.family == "mm":
        # `mm` has no factors, and is an `addmm` with factors of 1.
        fixed = {"beta": fixed.get("beta", 1), "alpha": fixed.get("alpha", 1)}
    given = bias if isinstance(bias, Node) else None
    wrong = _wrong(columns, given, spec, shape[-1])
    return MatrixProduct(node, spec, x, columns, given, shape[-1], fixed, wrong)


def rebuild(
    product: MatrixProduct, x: Node, columns: Mapping[str, Node], bias: Node | None, rw: Rewriter
) -> Node:
    """Emit the matmul with other operands."""
    op: OpOverload = product.node.target  # type: ignore[assignment]
    if product.spec.family == "mm":
        # The first sibling may be an `mm` and another an `addmm`.
        op = aten.mm.default if bias is None else aten.addmm.default
    spec = _SPECS[op._schema.name]  # noqa: SLF001 - the way to ask
    given = {**product.fixed, **columns, spec.x: x}
    if spec.bias is not None:
        given[spec.bias] = bias
    return call(op, given, rw)


def call(op: OpOverload, given: Mapping[str, Any], rw: Rewriter) -> Node:
    """Emit a call of ``op``, without arguments that equal their defaults, as in tracing."""
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for formal in op._schema.arguments:  # noqa: SLF001 - the way to ask
        if formal.name not in given:
            continue
        value = given[formal.name]
        plain = formal.has_default_value() and _is_default(value, formal.default_value)
        # Behind an argument that was left out, only names tell which one is meant.
        if not plain and (formal.kwarg_only or len(positional) < _place(op, formal.name)):
            named[formal.name] = value
        elif not plain:
            positional.append(value)
    return rw.call(op, *positional, **named)


def _place(op: OpOverload, name: str) -> int:
    return [formal.name for formal in op._schema.arguments].index(name)  # noqa: SLF001


def _is_default(value: object, default: object) -> bool:
    # By type too, since True == 1.
    return value is None if default is None else type(value) is type(default) and value == default


def _wrong(columns: Mapping[str, Node], bias: Node | None, spec: Spec, n: int) -> str:
    if not columns:
        return "its weight is a single number"
    if bias is not None and tuple(shape_of(bias)) != (n,):
        return "its bias is not a vector"
    if spec.block == 0:
        return _wrong_blocks(columns, spec, n)
    if n % spec.block:
        return f"its packed weight has {n} rows, which are not whole blocks of {spec.block}"
    for name, node in columns.items():
        axis, shape = spec.columns[name], shape_of(node)
        if len(shape) <= axis or shape[axis] != n:
            return f"its {name} does not have one entry per output feature along axis {axis}"
    return ""


def _wrong_blocks(columns: Mapping[str, Node], spec: Spec, n: int) -> str:
    """Check a block layout: [N/b, K/c, c, b/2 or b], and [N/b, ..., b] for its parameters.

    Blocks of features are consecutive, so concatenating packed weights equals packing the
    concatenation. For other layouts this is not known.
    """
    shapes = {name: tuple(shape_of(node)) for name, node in columns.items()}
    weight = shapes.get("weight", ())
    others = [shape for name, shape in shapes.items() if name != "weight"]
    blocks = {shape[0] for shape in shapes.values() if shape}
    widths = {shape[-1] for shape in others}
    known = len(weight) == _BLOCKED and all(len(shape) == _BLOCKED - 1 for shape in others)
    if not known or len(shapes) != len(spec.columns) or len(blocks) != 1 or len(widths) != 1:
        return "its weight is packed in a layout that is not known how to join"
    (count,), (width,) = blocks, widths
    return "" if count * width == n else "its packed weight is padded"
