"""Drop the expansion of an operand that arithmetic broadcasts by itself."""

from __future__ import annotations

from itertools import zip_longest

import torch

from qfuse.ir.graph.schema import is_call, overload_of
from qfuse.ir.ops.views import node_of, shape_of, tensor_of
from qfuse.ir.sizes import Size, is_one, same_size
from qfuse.rewrite.pattern import Either, Match, PatternRule, Read, V, guard, op
from qfuse.rewrite.prelude import Exactness, MissCode, Node, Rewriter, arguments, aten

_ARITHMETIC = (aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, aten.sub.Tensor)


def _expanded(node: Node) -> Node | None:
    return node_of(arguments(node)["self"]) if is_call(node, aten.expand.default) else None


# Arithmetic without an expanded operand is not this rule's business.
X, SOURCE = V("x"), Read("source", _expanded, "expand").core()


def _broadcast(one: tuple[Size, ...], other: tuple[Size, ...]) -> list[Size | None]:
    """Return the broadcast shape, the last axis first; ``None`` where sizes are not known equal."""
    sizes: list[Size | None] = []
    for a, b in zip_longest(reversed(one), reversed(other), fillvalue=1):
        known = b if is_one(a) else a if is_one(b) or same_size(a, b) else None
        sizes.append(known)
    return sizes


@guard(MissCode.SHAPE, "the result has the shape only of the expanded operand", at="source")
def _keeps_shape(node: Node, x: Node, source: Node) -> bool:
    shape = tuple(reversed(shape_of(node)))
    found = _broadcast(tuple(shape_of(x)), tuple(shape_of(source)))
    return len(found) == len(shape) and all(
        size is not None and same_size(size, wanted)
        for size, wanted in zip(found, shape, strict=True)
    )


@guard(MissCode.DTYPE, "as a scalar the operand would be promoted in another way", at="source")
def _keeps_dtype(x: Node, source: Node) -> bool:
    # A tensor without axes takes part in promotion as a number does.
    if shape_of(source):
        return True
    wide = tensor_of(source).expand(1)
    promoted = torch.result_type(tensor_of(x), tensor_of(source))
    return bool(promoted == torch.result_type(tensor_of(x), wide))


class DropExpand(PatternRule):
    """``x * expand(s)`` becomes ``x * s`` where ``s`` broadcasts to the same shape.

    Before::

        s -> expand --+
        x ------------+-> mul

    After::

        s --+
        x --+-> mul

    Exact: broadcasting reads the same elements. The sum, difference and quotient are alike.

    Refuses: an expansion that gives the result its shape; a scalar that is promoted differently.
    """

    name = "drop-expand"
    exactness = Exactness.EXACT
    pattern = Either(
        *(
            op(target, *operands).given(_keeps_shape, _keeps_dtype)
            for target in _ARITHMETIC
            for operands in ((X, SOURCE), (SOURCE, X))
        )
    )

    def rewrite(self, site: Match, rw: Rewriter) -> None:
        """Repeat the call on the operand itself."""
        a = arguments(site.node)
        operands = [a["self"], a["other"]]
        # With both expanded, the other one is dropped in the next visit.
        index = next(
            i
            for i, operand in enumerate(operands)
            if isinstance(operand, Node) and _expanded(operand) is site[SOURCE]
        )
        operands[index] = site[SOURCE]
        target = overload_of(site.node)
        assert target is not None, "the pattern is a call"
        rw.replace(site.node, rw.call(target, *operands))
