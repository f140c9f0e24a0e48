"""The fields of a declaration (see ``ir/ops/declare.py``) as the arguments of a schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

from torch.fx import Node
from torch.fx.node import Argument

from qfuse.ir.ops.output import Output, parse_extra_outputs
from qfuse.ir.ops.views import QuantParams
from qfuse.ir.quant.choose import ChooseSpec
from qfuse.ir.quant.spec import QuantSpec

RESULT = "out"
"""Names the result where a field name is expected."""

Given = Mapping[str, Any]
# Checks the type of a tensor argument: a node in a view, a tensor in a call.
TensorCheck = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class ArgInfo:
    """Details that a field's name and type do not imply: ``Annotated[QuantParams, Arg(of="q")]``.

    Attributes:
        name: The argument's name, if it differs from the field's.
        of: The field that these quantization parameters belong to, or ``RESULT``. The default is
            the prefix of the field's name.
        levels: Maximum number of scale levels.
    """

    name: str = ""
    of: str = ""
    levels: int = 2


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a declaration.

    Attributes:
        name: Its name.
        formals: Its arguments in schema syntax. Those with a default come after those of all
            other fields.
        read: Builds its value from the arguments by name.
        write: Returns the arguments for a value.
        of: For quantization parameters, the field that they belong to, or ``RESULT``.
    """

    name: str
    formals: tuple[str, ...]
    read: Callable[[Given, TensorCheck], Any]
    write: Callable[[Any], Sequence[Argument]]
    of: str = ""


@dataclass(frozen=True)
class ArgLayout:
    """All fields of a declaration, and the op's result in schema syntax."""

    fields: tuple[Field, ...]
    result: str

    @cached_property
    def params(self) -> tuple[Field, ...]:
        """The fields that are quantization parameters."""
        return tuple(f for f in self.fields if f.of)

    @cached_property
    def formals(self) -> tuple[str, ...]:
        """The arguments in schema syntax."""
        # In a schema, arguments with a default come last. The sort is stable.
        return tuple(sorted((text for f in self.fields for text in f.formals), key=_is_late))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the arguments."""
        return tuple(text.split()[1].removesuffix("=None") for text in self.formals)

    def bind(self, args: Sequence[Any], kwargs: Given) -> dict[str, Any]:
        """Return the arguments of a call by name; omitted ones are ``None``."""
        left_out = dict.fromkeys(self.names)
        return {**left_out, **dict(zip(self.names, args, strict=False)), **kwargs}

    def read(self, given: Given, leaf: TensorCheck) -> dict[str, Any]:
        """Build the values of all fields from the arguments by name."""
        return {f.name: f.read(given, leaf) for f in self.fields}

    def write(self, values: Given) -> tuple[Argument, ...]:
        """Return the positional arguments of a call, without trailing defaults of ``None``."""
        pairs = [
            pair
            for f in self.fields
            for pair in zip(f.formals, f.write(values[f.name]), strict=True)
        ]
        early = [value for text, value in pairs if not _is_late(text)]
        late = [value for text, value in pairs if _is_late(text)]
        # So a call without a second level of scales has one text.
        while late and late[-1] is None:
            late.pop()
        return (*early, *late)


def field_of(name: str, hint: Any, late: bool) -> Field:
    """Return the field of a declaration with a name and a type.

    Raises:
        TypeError: The type does not map to an argument.
    """
    arg = ArgInfo()
    if get_origin(hint) is Annotated:
        hint, arg = get_args(hint)
    optional = NoneType in get_args(hint)
    kind: Any = get_args(hint)[0] if optional else hint
    if kind is QuantParams:
        return _params(name, arg, optional)
    if kind is Output:
        return _output(name)
    if kind is Node:
        text = f"Tensor{'?' * optional} {name}{'=None' * late}"
        return Field(name, (text,), lambda given, leaf: _maybe(given[name], leaf), lambda v: (v,))
    if get_origin(kind) is tuple:
        return _list(name, kind)
    if kind in {int, float, bool, str}:
        text = f"{kind.__name__} {name}"
        return Field(name, (text,), lambda given, _: given[name], lambda v: (v,))
    if hasattr(kind, "parse"):
        key = arg.name or name
        return Field(
            name, (f"str {key}",), lambda given, _: kind.parse(given[key]), lambda v: (str(v),)
        )
    raise TypeError(f"no argument of an op is a {kind}: {name}")


def _list(name: str, kind: Any) -> Field:
    if kind == tuple[Node, ...]:

        def read(given: Given, check: TensorCheck) -> Any:
            return tuple(map(check, given[name]))

        return Field(name, (f"Tensor[] {name}",), read, lambda v: (list(v),))
    if kind == tuple[int, ...]:
        text = f"int[] {name}"
        return Field(name, (text,), lambda given, _: tuple(given[name]), lambda v: (list(v),))
    raise TypeError(f"no argument of an op is a {kind}: {name}")


def _params(name: str, arg: ArgInfo, optional: bool) -> Field:
    prefix = name.removesuffix("params")
    scale, zero_point, spec, outer = (
        f"{prefix}{part}" for part in ("scale", "zero_point", "spec", "outer_scale")
    )

    def read(given: Given, leaf: TensorCheck) -> QuantParams | None:
        assert given[spec] or optional, f"{name} is not optional, and has no spec"
        if not given[spec]:
            return None
        # An argument that the schema of this op lacks is absent, which means one level.
        zero, second = _maybe(given[zero_point], leaf), _maybe(given.get(outer), leaf)
        return QuantParams(QuantSpec.parse(given[spec]), leaf(given[scale]), zero, second)

    def write(value: QuantParams | None) -> Sequence[Argument]:
        if value is None:
            return (None, None, "", None)[: len(formals)]
        assert arg.levels > 1 or value.outer_scale is None, f"one level of scales: {value}"
        return (*value.args, value.outer_scale)[: len(formals)]

    formals = (f"Tensor{'?' * optional} {scale}", f"Tensor? {zero_point}", f"str {spec}")
    if arg.levels > 1:
        formals = (*formals, f"Tensor? {outer}=None")  # type: ignore[assignment]
    return Field(name, formals, read, write, arg.of or prefix.removesuffix("_"))


def _output(name: str) -> Field:
    given_params = _params("out_params", ArgInfo(levels=1), optional=True)

    def read(given: Given, leaf: TensorCheck) -> Output:
        keep = parse_extra_outputs(given["keep"])
        if not given["choose"]:
            return Output(given_params.read(given, leaf), None, keep)
        chosen = QuantSpec.parse(given["out_spec"]), ChooseSpec.parse(given["choose"])
        return Output(None, chosen, keep)

    def write(value: Output) -> Sequence[Argument]:
        if value.chosen is None:
            return (*given_params.write(value.params), "", value.extra_outputs_text)
        return (None, None, *map(str, value.chosen), value.extra_outputs_text)

    return Field(name, (*given_params.formals, "str choose", "str keep"), read, write)


def _is_late(formal: str) -> bool:
    return formal.endswith("=None")


def _maybe(value: Any, leaf: TensorCheck) -> Any:
    return None if value is None else leaf(value)
