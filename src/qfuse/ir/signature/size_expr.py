"""Expressions over symbolic sizes, stored as text and evaluated on the sizes of a call.

Signatures are saved with compiled models, so their text is data from a file: it is parsed into
closures over a small set of operators, never passed to ``eval``.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import TypeAlias

from qfuse.ir.errors import InputError

Number: TypeAlias = int | float
SizeFunction: TypeAlias = Callable[[Mapping[str, int]], Number]

_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {
    ast.USub: operator.neg,
    ast.Not: operator.not_,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Number, Number], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
# Keyed by the last part of the name: `math.floor`, `torch.sym_float`, plain `max`.
_CALLS: dict[str, Callable[..., Number]] = {
    "abs": abs,
    "ceil": math.ceil,
    "floor": math.floor,
    "int": int,
    "max": max,
    "min": min,
    "sqrt": math.sqrt,
    "_sym_sqrt": math.sqrt,
    "sym_float": float,
    "trunc": math.trunc,
}


def parse_size(text: str) -> SizeFunction:
    """Return the function that evaluates ``text`` on sizes by name.

    >>> parse_size("2*s0 == s1")({"s0": 3, "s1": 6})
    True

    Raises:
        InputError: The text is not an expression over sizes.
    """
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise _unknown(text) from error
    return _build(tree, text)


def _build(node: ast.expr, text: str) -> SizeFunction:
    match node:
        case ast.Constant(value=int() | float() as value):
            return lambda sizes: value  # noqa: ARG005
        case ast.Name(id=name):
            return operator.itemgetter(name)
        case ast.Attribute(value=ast.Name(id="math"), attr="inf"):
            return lambda sizes: math.inf  # noqa: ARG005
        case ast.BinOp() | ast.UnaryOp():
            return _build_arithmetic(node, text)
        case ast.Compare() | ast.BoolOp():
            return _build_condition(node, text)
        case ast.Call(func=function, args=args, keywords=[]):
            return _build_call(function, [_build(arg, text) for arg in args], text)
        case _:
            raise _unknown(text)


def _build_arithmetic(node: ast.BinOp | ast.UnaryOp, text: str) -> SizeFunction:
    if isinstance(node, ast.UnaryOp):
        unary, operand = _UNARY.get(type(node.op)), _build(node.operand, text)
        if unary is None:
            raise _unknown(text)
        return lambda sizes: unary(operand(sizes))
    binary = _BINARY.get(type(node.op))
    if binary is None:
        raise _unknown(text)
    left, right = _build(node.left, text), _build(node.right, text)
    return lambda sizes: binary(left(sizes), right(sizes))


def _build_condition(node: ast.Compare | ast.BoolOp, text: str) -> SizeFunction:
    if isinstance(node, ast.BoolOp):
        parts = [_build(value, text) for value in node.values]
        join = all if isinstance(node.op, ast.And) else any
        # Short-circuits as the source does: `a and b % a == 0` must not divide by zero.
        return lambda sizes: join(part(sizes) for part in parts)
    values = [_build(value, text) for value in (node.left, *node.comparators)]
    steps = []
    for op, left, right in zip(node.ops, values, values[1:], strict=False):
        compare = _COMPARE.get(type(op))
        if compare is None:
            raise _unknown(text)
        steps.append((compare, left, right))
    return lambda sizes: all(compare(a(sizes), b(sizes)) for compare, a, b in steps)


def _build_call(function: ast.expr, args: list[SizeFunction], text: str) -> SizeFunction:
    name = ast.unparse(function).rsplit(".", maxsplit=1)[-1]
    call = _CALLS.get(name)
    if call is None:
        raise _unknown(text)
    return lambda sizes: call(*(arg(sizes) for arg in args))


def _unknown(text: str) -> InputError:
    return InputError(
        f"{text!r} is not an expression over sizes",
        fix="the signature was written by another version of qfuse, or it is damaged",
    )
