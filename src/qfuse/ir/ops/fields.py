"""The fields of a declaration (see ``ir/ops/declare.py``) as the arguments of a schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, ClassVar, Protocol, Self, get_args, get_origin

from torch.fx import Node
from torch.fx.node import Argument

from qfuse.ir.ops.output import Output, parse_keep
from qfuse.ir.ops.views import QuantParams
from qfuse.ir.quant.choose import ChooseSpec
from qfuse.ir.quant.spec import QuantSpec

RESULT = "out"
"""Stands for the result where the name of a field could stand."""

_PLAIN: tuple[type, ...] = (int, float, bool, str)

# Reads a tensor argument: a node in a view, the tensor itself in a call.
Leaf = Callable[[Any], Any]


class Text(Protocol):
    """What travels as its canonical text, which is its ``str``."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text back."""
        ...

    def widened(self) -> Self:
        """Return the form that computes in float64."""
        ...


@dataclass(frozen=True, slots=True)
class Arg:
    """What the name and type of a field leave open: ``Annotated[QuantParams, Arg(of="q")]``.

    Attributes:
        name: The argument's name, where it is not the field's.
        of: Whose quantization parameters they are: a field's or ``RESULT``. By default what the
            field's name begins with.
        levels: How many levels of scales there may be.
    """

    name: str = ""
    of: str = ""
    levels: int = 2


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a declaration, as arguments; this one is a tensor."""

    name: str
    optional: bool
    is_block: ClassVar[bool] = False
    """Whether it says how an operand or a result is quantized: the reference does not see it."""

    def formals(self) -> list[str]:
        """Return the arguments in the schema's language."""
        return [f"Tensor{'?' * self.optional} {self.name}"]

    def read(self, given: Mapping[str, Any], leaf: Leaf) -> Any:
        """Return the field's value from the arguments by name."""
        return _optional(given[self.name], leaf) if self.optional else leaf(given[self.name])

    def write(self, value: Any) -> Sequence[Argument]:
        """Return the arguments of a value, as many as ``formals``."""
        return (value,)


@dataclass(frozen=True, slots=True)
class _Tensors(Field):
    """Any number of tensors."""

    def formals(self) -> list[str]:
        return [f"Tensor[] {self.name}"]

    def read(self, given: Mapping[str, Any], leaf: Leaf) -> Any:
        return tuple(map(leaf, given[self.name]))

    def write(self, value: Any) -> Sequence[Argument]:
        return (list(value),)


@dataclass(frozen=True, slots=True)
class _Plain(Field):
    """A number or a string."""

    kind: type

    def formals(self) -> list[str]:
        return [f"{self.kind.__name__} {self.name}"]

    def read(self, given: Mapping[str, Any], leaf: Leaf) -> Any:
        del leaf
        return given[self.name]


@dataclass(frozen=True, slots=True)
class _Spelled(Field):
    """A value that travels as its text, under a name that may be another."""

    kind: type[Text]
    argument: str

    def formals(self) -> list[str]:
        return [f"str {self.argument}"]

    def read(self, given: Mapping[str, Any], leaf: Leaf) -> Any:
        del leaf
        return self.kind.parse(str(given[self.argument]))

    def write(self, value: Any) -> Sequence[Argument]:
        return (str(value),)


@dataclass(frozen=True, slots=True)
class _Params(Field):
    """The quantization parameters of a field or of the result."""

    of: str
    levels: int
    is_block: ClassVar[bool] = True

    @property
    def prefix(self) -> str:
        """What the names of the arguments begin with."""
        return self.name.removesuffix("params")

    def formals(self) -> list[str]:
        p = self.prefix
        return [f"Tensor{'?' * self.optional} {p}scale", f"Tensor? {p}zero_point", f"str {p}spec"]

    def read(self, given: Mapping[str, Any], leaf: Leaf) -> Any:
        p = self.prefix
        spec = given[f"{p}spec"]
        assert spec or self.optional, f"{self.name} is not optional, and has no spec"
        if not spec:
            return None
        zero_point = _optional(given[f"{p}zero_point"], leaf)
        outer = _optional(given.get(f"{p}outer_scale"), leaf)
        return QuantParams(QuantSpec.parse(str(spec)), leaf(given[f"{p}scale"]), zero_point, outer)

    def write(self, value: Any) -> Sequence[Argument]:
        assert value is None or self.levels > 1 or value.outer_scale is None, f"one level: {value}"
        return (None, None, "") if value is None else value.args


@dataclass(frozen=True, slots=True)
class _OutputBlock(Field):
    """How an op of several results gives them."""

    is_block: ClassVar[bool] = True
    params: ClassVar[_Params] = _Params("out_params", optional=True, of=RESULT, levels=1)

    def formals(self) -> list[str]:
        return [*self.params.formals(), "str choose", "str keep"]

    def read(self, given: Mapping[str, Any], leaf: Leaf) -> Any:
        keep = parse_keep(str(given["keep"]))
        if not given["choose"]:
            return Output(self.params.read(given, leaf), None, keep)
        spec = QuantSpec.parse(str(given["out_spec"]))
        return Output(None, (spec, ChooseSpec.parse(str(given["choose"]))), keep)

    def write(self, value: Any) -> Sequence[Argument]:
        if value.chosen is None:
            return (*self.params.write(value.params), "", value.keep_text)
        return (None, None, *map(str, value.chosen), value.keep_text)


@dataclass(frozen=True, slots=True)
class Layout:
    """All fields of a declaration, as the schema and as the arguments of calls.

    Attributes:
        fields: The fields, in order.
        late: Names of those fields that come behind all others, as they may be left out.
        result: What the op returns, in the schema's language.
    """

    fields: tuple[Field, ...]
    late: frozenset[str]
    result: str

    @property
    def params(self) -> tuple[_Params, ...]:
        """The fields that are quantization parameters."""
        return tuple(f for f in self.fields if isinstance(f, _Params))

    @property
    def result_params(self) -> _Params | None:
        """The field of the parameters that the result is quantized with."""
        return next((f for f in self.params if f.of == RESULT), None)

    @property
    def formals(self) -> tuple[str, ...]:
        """The arguments in the schema's language."""
        early = [text for f in self.fields if f.name not in self.late for text in f.formals()]
        late = [text for f in self.fields if f.name in self.late for text in f.formals()]
        late += [f"Tensor? {f.prefix}outer_scale" for f in self.params if f.levels > 1]
        return (*early, *(f"{text}=None" for text in late))

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name; those that may be left out are ``None``."""
        names = [text.split()[1].removesuffix("=None") for text in self.formals]
        return {**dict.fromkeys(names), **dict(zip(names, args, strict=False)), **kwargs}

    def read(self, given: Mapping[str, Any], leaf: Leaf) -> dict[str, Any]:
        """Return the values of all fields from the arguments by name."""
        return {f.name: f.read(given, leaf) for f in self.fields}

    def write(self, values: Mapping[str, Any]) -> tuple[Argument, ...]:
        """Return the positional arguments of a call, without those at the end that are left out."""
        early: list[Argument] = []
        late: list[Argument] = []
        for f in self.fields:
            (late if f.name in self.late else early).extend(f.write(values[f.name]))
        blocks = [values[f.name] for f in self.params if f.levels > 1]
        late += [None if block is None else block.outer_scale for block in blocks]
        while late and late[-1] is None:
            late.pop()
        return (*early, *late)


def field_of(name: str, hint: Any) -> Field:
    """Return the field of a declaration with a name and a type.

    Raises:
        TypeError: No argument has this type.
    """
    arg = Arg()
    if get_origin(hint) is Annotated:
        hint, arg = get_args(hint)
    optional = NoneType in get_args(hint)
    kind: Any = get_args(hint)[0] if optional else hint
    if kind is Node:
        return Field(name, optional)
    if kind == tuple[Node, ...]:
        return _Tensors(name, optional)
    if kind is QuantParams:
        return _Params(name, optional, arg.of or name.removesuffix("_params"), arg.levels)
    if kind is Output:
        return _OutputBlock(name, optional)
    if kind in _PLAIN:
        return _Plain(name, optional, kind)
    if hasattr(kind, "parse"):
        return _Spelled(name, optional, kind, arg.name or name)
    raise TypeError(f"no argument of an op is a {kind}: {name}")


def _optional(value: Any, leaf: Leaf) -> Any:
    return None if value is None else leaf(value)
