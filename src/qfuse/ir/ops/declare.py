"""Ops as declarations: one class says what an op takes, what it means and what it gives.

Schema, registration, fake, typed view, call arguments, float64 form and verification
(``ir/ops/check.py``) are derived. A declaration is a frozen dataclass under :func:`define_op`. Its
fields are the arguments of the schema, in order:

====================================  ========================================================
field                                 arguments
====================================  ========================================================
``x: Node``, ``bias: Node | None``    ``Tensor x``, ``Tensor? bias``
``zero: Node | None = None``          ``Tensor? zero=None``, behind all others
``extras: tuple[Node, ...]``          ``Tensor[] extras``
``norm: NormSpec``                    ``str norm``: any class that is a :class:`Text`
``count: int`` (float, bool, str)     ``int count``
``x_params: QuantParams``             ``Tensor x_scale, Tensor? x_zero_point, str x_spec`` and,
                                      behind all others, ``Tensor? x_outer_scale=None``. Where it
                                      may be ``None``, ``x`` may be float: its spec is empty then
``out_params: QuantParams``           the same of the result
``output: Output``                    ``Tensor? out_scale, Tensor? out_zero_point, str out_spec,
                                      str choose, str keep``; the op returns ``Tensor[]``
====================================  ========================================================

The reference computes in float: its operands come dequantized, and its result is quantized behind
it, both as the declaration says.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, ClassVar, Self, TypeVar, get_type_hints

import torch
from torch._ops import OpOverload
from torch.fx import Node
from torch.fx.node import Argument

from qfuse.ir.graph.schema import arguments, is_call
from qfuse.ir.ops.fields import RESULT, Layout, field_of
from qfuse.ir.ops.output import Output
from qfuse.ir.ops.views import QuantParams, node_of
from qfuse.ir.quant.reference import dequantize, quantize
from qfuse.ir.quant.spec import QuantSpec

_RESULTS = {torch.Tensor: "Tensor", tuple[torch.Tensor, torch.Tensor]: "(Tensor, Tensor)"}

D = TypeVar("D", bound="Op")


@dataclass(frozen=True, slots=True)
class Op:
    """A call of an op, viewed: the base of all declarations.

    Attributes:
        node: The call; before there is one, the node that it comes to replace.
    """

    node: Node
    op: ClassVar[OpOverload]
    layout: ClassVar[Layout]
    library: ClassVar[torch.library.Library]

    @classmethod
    def of(cls, value: object) -> Self | None:
        """View ``value`` as a call of this op, or ``None``."""
        if not isinstance(value, Node) or not is_call(value, cls.op):
            return None
        return cls(value, **cls.layout.read(arguments(value), node_of))

    def call_args(self) -> tuple[Argument, ...]:
        """Return the positional arguments of a call with these values."""
        return self.layout.write({f.name: getattr(self, f.name) for f in self.layout.fields})

    @staticmethod
    def reference(*args: Any, **kwargs: Any) -> Any:
        """Compute the result in float.

        Its arguments are the fields but those of quantization parameters and ``output``. With an
        ``output``, it returns the result and the sum that it made first, or ``None``.
        """
        raise NotImplementedError

    @staticmethod
    def fake(*args: Any, **kwargs: Any) -> Any:
        """Return an empty result; by default the reference runs on fake tensors.

        Its arguments are the fields but ``output``, the specs alone of quantization parameters.
        """
        raise NotImplementedError

    @classmethod
    def meaning(cls, *args: Any, **kwargs: Any) -> Any:
        """Compute the op: what a kernel is tested against and what a call is expanded to."""
        return cls.compute(cls.reference, *args, **kwargs)

    @classmethod
    def compute(cls, reference: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the op with another reference for what it does in float."""
        values = cls.layout.read(cls.layout.bind(args, kwargs), _same)
        result: Any = None
        for block in cls.layout.params:
            params: Any = values.pop(block.name)
            if block.of == RESULT:
                result = params
            elif params is not None:
                values[block.of] = dequantize(values[block.of], *params.reference_args)
        output: Output | None = values.pop("output", None)
        y = reference(**values)
        if output is not None:
            return output.results(*y)
        return y if result is None else quantize(y, *result.reference_args)

    @classmethod
    def infer(cls, *args: Any, **kwargs: Any) -> Any:
        """Return the result for fake tensors."""
        if cls.fake is Op.fake:
            return cls.meaning(*args, **kwargs)
        values = cls.layout.read(cls.layout.bind(args, kwargs), _same)
        for block in cls.layout.params:
            params = values[block.name]
            values[block.name] = None if params is None else params.spec
        return cls.fake(**values)

    @classmethod
    def widened_args(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Argument, ...]:
        """Return the arguments of the call that computes in float64."""
        values = cls.layout.read(cls.layout.bind(args, kwargs), _same)
        wide = {n: v.widened() if hasattr(v, "widened") else v for n, v in values.items()}
        return cls.layout.write(wide)

    @property
    def result_params(self) -> QuantParams | None:
        """The parameters that the only result is quantized with."""
        block = self.layout.result_params
        return None if block is None else getattr(self, block.name)

    @property
    def result_spec(self) -> QuantSpec | None:
        """What the first result is quantized as; ``None`` if it is float."""
        output: Output | None = getattr(self, "output", None)
        if output is not None:
            return output.spec
        return None if self.result_params is None else self.result_params.spec

    def with_result_params(self, params: QuantParams) -> Self:
        """Return the op with its only result quantized as ``params`` say."""
        block = self.layout.result_params
        assert block is not None, f"{self.op} does not quantize one result"
        changed: dict[str, Any] = {block.name: params}
        return replace(self, **changed)

    def float_type(self) -> torch.dtype | None:
        """Return the type of the first result before it is quantized; ``None`` is not checked."""
        return None

    def problems(self) -> Iterator[str]:
        """Say what is wrong with the call that its fields do not tell by themselves."""
        yield from ()


def define_op(name: str, namespace: str = "qfuse") -> Callable[[type[D]], type[D]]:
    """Define the op that a declaration declares, in ``torch.library``.

    Raises:
        TypeError: A field has a type that no argument has, or the reference takes other arguments
            than the fields.
    """

    def define(cls: type[D]) -> type[D]:
        cls.layout = layout = _layout(cls)
        schema = f"{name}({', '.join(layout.formals)}) -> {layout.result}"
        cls.library = library = torch.library.Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
        library.define(schema)  # type: ignore[no-untyped-call]
        library.impl(name, cls.meaning, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"{namespace}::{name}", cls.infer, lib=library)
        cls.op = getattr(getattr(torch.ops, namespace), name).default
        return cls

    return define


def _layout(cls: type[Op]) -> Layout:
    hints = get_type_hints(cls, include_extras=True)
    declared = fields(cls)[1:]
    found = tuple(field_of(f.name, hints[f.name]) for f in declared)
    late = frozenset(f.name for f in declared if f.default is not MISSING)
    taken = [f.name for f in found if not f.is_block]
    if taken != list(inspect.signature(cls.reference).parameters):
        raise TypeError(f"the reference of {cls.__name__} does not take {', '.join(taken)}")
    if "output" in hints:
        return Layout(found, late, "Tensor[]")
    return Layout(found, late, _RESULTS[get_type_hints(cls.reference)["return"]])


def _same(value: Any) -> Any:
    return value
