"""Products with a constant matrix, whatever op computes them.

What they read, and along which axis of each operand the features of the output lie.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from qfuse.ir.schema import arguments, overload_of
from qfuse.ir.views import dtype_of, shape_of, tensor_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from torch._ops import OpOverload

    from qfuse.inductor.numbers import Numbers
    from qfuse.rewrite.rewriter import Rewriter

__all__ = ["Product", "as_product", "call", "rebuild"]

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Spec:
    """How an op of products takes its arguments.

    Attributes:
        x: Name of what siblings share.
        columns: The operands that have one entry per output feature, by name, and the axis.
        bias: Name of the bias, a vector that may be missing.
        family: What ops are called that differ in the bias alone.
    """

    x: str
    columns: Mapping[str, int]
    bias: str | None = None
    family: str = ""


_SPECS: Mapping[OpOverload, Spec] = {
    _aten.mm.default: Spec("self", {"mat2": 1}, family="mm"),
    _aten.addmm.default: Spec("mat1", {"mat2": 1}, bias="self", family="mm"),
    _aten.bmm.default: Spec("self", {"mat2": 2}),
    _aten.linear.default: Spec("input", {"weight": 0}, bias="bias"),
    _aten._int_mm.default: Spec("self", {"mat2": 1}),
    _aten._weight_int8pack_mm.default: Spec("self", {"mat2": 0, "scales": 0}),
    _aten._scaled_mm.default: Spec("self", {"mat2": 1, "scale_b": 1}, bias="bias"),
}


@dataclass(frozen=True, slots=True)
class Product:
    """One call of an op of products.

    Attributes:
        node: The call.
        spec: How it takes its arguments.
        x: What siblings share.
        columns: What is concatenated, by the name of the argument.
        bias: A vector of one entry per output feature, or ``None``.
        n: Output features.
        fixed: All other arguments, which siblings have in common.
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
        """The constants: what is concatenated, and the bias."""
        return [*self.columns.values(), *([] if self.bias is None else [self.bias])]

    def kind(self, numbers: Numbers) -> tuple[tuple[str, Hashable], ...]:
        """Return what siblings have in common besides the input, by names for people."""
        found: list[tuple[str, Hashable]] = [("op", self.spec.family or str(self.node.target))]
        for name, node in self.columns.items():
            others = [s for a, s in enumerate(shape_of(node)) if a != self.spec.columns[name]]
            found.append((f"the type of {name}", str(dtype_of(node))))
            found.append((f"the shape of {name}", tuple(map(str, others))))
        found.append(("the type of its result", str(dtype_of(self.node))))
        return (*found, *((name, numbers.frozen(value)) for name, value in self.fixed.items()))


def as_product(node: Node) -> Product | None:
    """View a call as a product with a matrix."""
    op = overload_of(node)
    spec = _SPECS.get(op) if op is not None else None
    if spec is None:
        return None
    named = arguments(node)
    x, shape = named.pop(spec.x), shape_of(node)
    bias = named.pop(spec.bias, None) if spec.bias else None
    columns = {
        name: value
        for name in spec.columns
        if isinstance(value := named.get(name), Node) and tensor_of(value).numel() != 1
    }
    assert isinstance(x, Node), "what is multiplied is a tensor"
    if not shape or not isinstance(shape[-1], int):
        return None
    fixed = {k: v for k, v in named.items() if k not in columns}
    if spec.family == "mm":
        fixed = {"beta": fixed.get("beta", 1), "alpha": fixed.get("alpha", 1)}
    given = bias if isinstance(bias, Node) else None
    wrong = _wrong(columns, given, spec, shape[-1])
    return Product(node, spec, x, columns, given, shape[-1], fixed, wrong)


def rebuild(
    product: Product, x: Node, columns: Mapping[str, Node], bias: Node | None, rw: Rewriter
) -> Node:
    """Add the product again with other operands."""
    op: OpOverload = product.node.target  # type: ignore[assignment]
    if product.spec.family == "mm":
        op = _aten.mm.default if bias is None else _aten.addmm.default
    spec = _SPECS[op]
    given = {**product.fixed, **columns, spec.x: x}
    if spec.bias is not None:
        given[spec.bias] = bias
    return call(op, given, rw)


def call(op: OpOverload, given: Mapping[str, Any], rw: Rewriter) -> Node:
    """Add a call of ``op``; arguments that are their defaults are left out, as tracing does."""
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for formal in op._schema.arguments:  # noqa: SLF001 - the way to ask
        if formal.name not in given:
            continue
        value = given[formal.name]
        plain = formal.has_default_value() and _is_default(value, formal.default_value)
        if not plain and (formal.kwarg_only or len(positional) < _place(op, formal.name)):
            named[formal.name] = value
        elif not plain:
            positional.append(value)
    return rw.call(op, *positional, **named)


def _place(op: OpOverload, name: str) -> int:
    return [formal.name for formal in op._schema.arguments].index(name)  # noqa: SLF001


def _is_default(value: object, default: object) -> bool:
    return value is None if default is None else type(value) is type(default) and value == default


def _wrong(columns: Mapping[str, Node], bias: Node | None, spec: Spec, n: int) -> str:
    for name, axis in spec.columns.items():
        node = columns.get(name)
        if node is not None and (len(shape_of(node)) <= axis or shape_of(node)[axis] != n):
            return f"its {name} has not one entry per output feature along axis {axis}"
    if not columns:
        return "its weight is a single number"
    if bias is not None and tuple(shape_of(bias)) != (n,):
        return "its bias is not a vector"
    return ""
