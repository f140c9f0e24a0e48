"""The parts of patterns: calls of ops, literals, alternatives, optional operands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch._ops import OpOverload
from torch.fx import Node

from qfuse.ir.aten import aten
from qfuse.ir.events import MissCode
from qfuse.ir.graph.schema import argument_defaults, argument_names, arguments, is_call, overload_of
from qfuse.ir.quant.spec import dtype_name
from qfuse.rewrite.pattern.base import Part, argument_text
from qfuse.rewrite.pattern.search import Frame, Mismatch, Search, same_value
from qfuse.rewrite.pattern.writer import Writer

# `add` commutes as long as `alpha` is 1, which is its default.
_COMMUTATIVE = frozenset(
    (
        *(aten.add.Tensor, aten.mul.Tensor, aten.maximum.default, aten.minimum.default),
        *(aten.eq.Tensor, aten.ne.Tensor, aten.logical_and.default, aten.logical_or.default),
        *(aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_xor.Tensor),
    )
)
_INFIX = {
    aten.add.Tensor: "+",
    aten.sub.Tensor: "-",
    aten.mul.Tensor: "*",
    aten.div.Tensor: "/",
}


class Pattern(Part):
    """A pattern. Arithmetic operators on patterns build the pattern of that arithmetic op."""

    def __add__(self, other: object) -> Pattern:
        return op(aten.add.Tensor, self, other)

    def __sub__(self, other: object) -> Pattern:
        return op(aten.sub.Tensor, self, other)

    def __mul__(self, other: object) -> Pattern:
        return op(aten.mul.Tensor, self, other)

    def __truediv__(self, other: object) -> Pattern:
        return op(aten.div.Tensor, self, other)

    # Graphs have the tensor first: `0.5 * x` is traced as `mul(x, 0.5)`.
    __radd__, __rmul__ = __add__, __mul__


def fit_all(
    pairs: Sequence[tuple[Part, object]], search: Search, frame: Frame, index: int = 0
) -> Iterator[None]:
    """Match each value to its part in order, with backtracking."""
    if index == len(pairs):
        yield
        return
    part, value = pairs[index]
    for _ in part.walk(value, search, frame):
        yield from fit_all(pairs, search, frame, index + 1)


class Literal(Pattern):
    """An argument that equals a literal and is not a node.

    Args:
        value: The value.
        name: The name of the argument.
        code: The code of the miss for any other value. A literal that the pattern names selects the
            form; a default that it omits is an argument which that form does not support.
    """

    def __init__(self, value: object, name: str = "", code: MissCode = MissCode.PATTERN) -> None:
        self.value = value
        self.name = name
        self.code = code

    def read(self, value: object) -> object | Mismatch:
        """Compare with the literal."""
        if same_value(self.value, value):
            return value
        fields = {"wanted": _text(self.value), "found": argument_text(value)}
        name = f"{self.name}=" if self.name else ""
        text = f"expected {{node}} with {name}{{wanted}}, found {{found}}"
        return Mismatch(self.code, text, fields)

    def show(self, out: Writer) -> None:
        """Write the value."""
        out.put(_text(self.value))


class Items(Pattern):
    """A list of arguments, each with its own pattern."""

    weight = 0

    def __init__(self, items: Sequence[Pattern]) -> None:
        self.items = tuple(items)

    @property
    def children(self) -> Sequence[Part]:
        """The items."""
        return self.items

    def read(self, value: object) -> object | Mismatch:
        """Accept a list of the right length."""
        if isinstance(value, (list, tuple)) and len(value) == len(self.items):
            return value
        fields = {"wanted": len(self.items)}
        return Mismatch(MissCode.PATTERN, "expected {wanted} items, found {found}", fields)

    def parts(self, value: object, search: Search, frame: Frame) -> Iterator[None]:
        """Match each item."""
        assert isinstance(value, (list, tuple)), "read says so"
        yield from fit_all(tuple(zip(self.items, value, strict=True)), search, frame)

    def show(self, out: Writer) -> None:
        """Write the items in brackets."""
        out.put("[")
        out.parts(self.items)
        out.put("]")


class OpPattern(Pattern):
    """A call of an op; arguments that are not given must have their defaults.

    Args:
        ops: The ops, which must have the same arguments.
        args: Patterns of arguments, by their names in the schema.
    """

    def __init__(self, ops: Sequence[OpOverload], args: Mapping[str, Pattern]) -> None:
        self.ops = tuple(ops)
        self.args = dict(args)
        self._rest: dict[OpOverload, dict[str, object]] = {}
        for each in self.ops:
            names, defaults = argument_names(each), argument_defaults(each)
            unknown = [name for name in args if name not in names]
            # An argument that the pattern does not name and that has no default would be matched
            # whatever it is.
            open_ = [n for n in names if n not in args and n not in defaults]
            assert not unknown, f"{each} has no arguments {unknown}"
            assert not open_, f"the pattern of {each} must say what {open_} are"
            self._rest[each] = {k: v for k, v in defaults.items() if k not in args}

    @property
    def children(self) -> Sequence[Part]:
        """The arguments."""
        return tuple(self.args.values())

    @cached_property
    def heads(self) -> frozenset[OpOverload] | None:
        """The ops."""
        return frozenset(self.ops)

    def read(self, value: object) -> object | Mismatch:
        """Compare the op."""
        return value if is_call(value, *self.ops) else unlike(self.ops)

    def parts(self, value: object, search: Search, frame: Frame) -> Iterator[None]:
        """Match the arguments, in both orders for a commutative op; defaults come last."""
        assert isinstance(value, Node), "read says so"
        given = arguments(value)
        # Defaults come last, so that a wrong `alpha` is told only where the operands fit.
        for order in self._orders:
            pairs = [(part, given.get(name)) for name, part in order]
            for _ in fit_all(pairs, search, frame):
                if self._has_defaults(value, given, search, frame):
                    yield

    @cached_property
    def _orders(self) -> tuple[tuple[tuple[str, Pattern], ...], ...]:
        plain = tuple(self.args.items())
        one, other = self.args.get("self"), self.args.get("other")
        # `x + 2 * y` is not `y + 2 * x`.
        commutes = _COMMUTATIVE.issuperset(self.ops) and "alpha" not in self.args
        if not commutes or one is None or other is None:
            return (plain,)
        turned = {"self": "other", "other": "self"}
        return plain, tuple((turned.get(name, name), part) for name, part in plain)

    def _has_defaults(
        self, node: Node, given: Mapping[str, object], search: Search, frame: Frame
    ) -> bool:
        called = overload_of(node)
        assert called is not None, "read says so"
        for name, default in self._rest[called].items():
            if not same_value(default, given[name]):
                details = Literal(default, name, MissCode.ARGUMENT).read(given[name])
                assert isinstance(details, Mismatch), "they differ"
                search.fail(frame, details, 1 + len(self.guards))
                return False
        return True

    def show(self, out: Writer) -> None:
        """Write an infix operator, or a call."""
        sign, args = _INFIX.get(self.ops[0]), list(self.args.items())
        if sign is not None and self.args.keys() == {"self", "other"}:
            out.put("(" if out.is_nested else "")
            out.part(self.args["self"])
            out.put(" ")
            out.head(sign)
            out.put(" ")
            out.part(self.args["other"])
            out.put(")" if out.is_nested else "")
            return
        out.head("|".join(dict.fromkeys(_short(each) for each in self.ops)))
        out.put("(")
        names = argument_names(self.ops[0])
        for index, (name, part) in enumerate(args):
            out.put(", " if index else "")
            out.put("" if name == names[index] else f"{name}=")
            out.part(part)
        out.put(")")


class Either(Pattern):
    """The first of several patterns that matches."""

    weight = 0

    def __init__(self, *alternatives: Pattern) -> None:
        self.alternatives = alternatives

    @property
    def children(self) -> Sequence[Part]:
        """The alternatives."""
        return self.alternatives

    @cached_property
    def heads(self) -> frozenset[OpOverload] | None:
        """The ops of all alternatives."""
        found = [each.heads for each in self.alternatives]
        known = [heads for heads in found if heads is not None]
        return frozenset().union(*known) if len(known) == len(found) else None

    def read(self, value: object) -> object | Mismatch:
        """Accept a value if any alternative could match it."""
        if self.heads is None or is_call(value, *self.heads):
            return value
        ordered = dict.fromkeys(h for each in self.alternatives for h in _sorted(each.heads))
        return unlike(tuple(ordered))

    def parts(self, value: object, search: Search, frame: Frame) -> Iterator[None]:
        """Try the alternatives that could match, in order."""
        for each in self.alternatives:
            # An alternative for other ops cannot match here, so it is not counted as an attempt.
            if each.heads is None or self.heads is None or is_call(value, *each.heads):
                yield from each.walk(value, search, frame)

    @cached_property
    def least(self) -> int:
        """Those of the alternative with the fewest."""
        return min(each.least for each in self.alternatives) + len(self.guards)

    def behind(self, child: object) -> int:
        """Return the number of guards: only one alternative has to match."""
        del child
        return len(self.guards)

    def show(self, out: Writer) -> None:
        """Write the alternatives."""
        out.put("{")
        out.parts(self.alternatives, " | ")
        out.put("}")


class Maybe(Either):
    """An optional call: the call, or its operand alone.

    Args:
        call: The call.
        operand: Its operand.
        plain_first: Try the operand alone first.
    """

    def __init__(self, call: Pattern, operand: Pattern, *, plain_first: bool = False) -> None:
        super().__init__(*((operand, call) if plain_first else (call, operand)))
        self.call = call

    @cached_property
    def size(self) -> int:
        """Number of parts; the operand is counted with the call."""
        # The operand is one object, matched alone or inside the call.
        return 1 + self.call.size

    def show(self, out: Writer) -> None:
        """Write the call with a question mark."""
        out.part(self.call)
        out.put("?")


class Opt:
    """An optional operand, and its op: ``x + Opt(z)`` matches ``x + z`` or ``x``."""

    def __init__(self, operand: Pattern) -> None:
        self.operand = operand


def op(ops: OpOverload | Sequence[OpOverload], *args: object, **named: object) -> Pattern:
    """Return the pattern of a call.

    Args:
        ops: The op, or several with the same arguments.
        args: The positional arguments: patterns, or literals that must be equal.
        named: The other arguments by their names in the schema. An argument that is not given
            must have its default.
    """
    several = tuple(ops) if isinstance(ops, (list, tuple)) else (ops,)
    names = argument_names(several[0])
    given: dict[str, object] = {**dict(zip(names, args, strict=False)), **named}
    plain = {k: v.operand if isinstance(v, Opt) else v for k, v in given.items()}
    call = OpPattern(several, {name: as_pattern(value, name) for name, value in plain.items()})
    if plain == given:
        return call
    kept = [k for k, v in given.items() if isinstance(v, Pattern)]
    # The other operand is what remains without the optional one.
    assert len(kept) == 1, "an op with an optional operand has one other"
    return Maybe(call, call.args[kept[0]])


def as_pattern(value: object, name: str = "") -> Pattern:
    """Return ``value`` if it is a pattern, otherwise the pattern of that literal."""
    if isinstance(value, Pattern):
        return value
    if isinstance(value, (list, tuple)) and any(isinstance(v, Pattern) for v in value):
        return Items([as_pattern(v) for v in value])
    return Literal(value, name)


def unlike(ops: Iterable[OpOverload]) -> Mismatch:
    """Return the refusal for a value that does not call any of ``ops``."""
    wanted = " or ".join(str(each).removesuffix(".default") for each in ops)
    return Mismatch(MissCode.PATTERN, "expected {wanted}, found {found}", {"wanted": wanted})


def _sorted(heads: frozenset[OpOverload] | None) -> list[OpOverload]:
    return sorted(heads or (), key=str)


def _short(each: OpOverload) -> str:
    return str(each).split(".")[1].strip("_")


def _text(value: object) -> str:
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)
