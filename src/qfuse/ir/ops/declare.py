"""Op declarations: one class states an op's arguments, reference semantics and results.

Schema, registration, fake, typed view, call arguments, float64 form and verification
(``ir/ops/check.py``) are derived. A declaration is a frozen dataclass under :func:`define_op`. Its
fields are the arguments of the schema, in order:

====================================  ========================================================
field                                 arguments
====================================  ========================================================
``x: Node``, ``bias: Node | None``    ``Tensor x``, ``Tensor? bias``
``zero: Node | None = None``          ``Tensor? zero=None``, after all others
``extras: tuple[Node, ...]``          ``Tensor[] extras``
``norm: NormSpec``                    ``str norm``: any class with ``parse`` and ``widened``
``count: int`` (float, bool, str)     ``int count``
``stride: tuple[int, ...]``           ``int[] stride``
``x_params: QuantParams``             ``Tensor x_scale, Tensor? x_zero_point, str x_spec`` and,
                                      after all others, ``Tensor? x_outer_scale=None``. If it may
                                      be ``None``, ``x`` may be float, with an empty spec
``out_params: QuantParams``           the same for the result
``output: Output``                    ``Tensor? out_scale, Tensor? out_zero_point, str out_spec,
                                      str choose, str keep``; the op returns ``Tensor[]``
====================================  ========================================================

The reference computes in float: its operands are dequantized before it and its result is quantized
after it, as the declaration states.
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
from qfuse.ir.ops.epilogue import Epilogue
from qfuse.ir.ops.fields import RESULT, ArgLayout, field_of
from qfuse.ir.ops.output import Output
from qfuse.ir.ops.views import QuantParams, dtype_of, node_of, tensor_of
from qfuse.ir.quant.reference import dequantize, quantize
from qfuse.ir.quant.spec import QuantSpec

_RESULTS = {torch.Tensor: "Tensor", tuple[torch.Tensor, torch.Tensor]: "(Tensor, Tensor)"}

D = TypeVar("D", bound="Op")


@dataclass(frozen=True, slots=True)
class Op:
    """The base of all declarations: a typed view of a call of the op.

    Attributes:
        node: The call; before it is created, the node that it will replace.
    """

    node: Node
    overload: ClassVar[OpOverload]
    layout: ClassVar[ArgLayout]
    library: ClassVar[torch.library.Library]

    @classmethod
    def of(cls, value: object) -> Self | None:
        """View ``value`` as a call of this op, or ``None``."""
        if not isinstance(value, Node) or not is_call(value, cls.overload):
            return None
        return cls(value, **cls.layout.read(arguments(value), node_of))

    def call_args(self) -> tuple[Argument, ...]:
        """Return the positional arguments of a call with these values."""
        return self.layout.write({f.name: getattr(self, f.name) for f in self.layout.fields})

    @staticmethod
    def reference(*args: Any, **kwargs: Any) -> Any:
        """Compute the result in float.

        Its arguments are the fields in order, without quantization parameters and ``output``.
        With an ``output``, it returns the result and the residual sum, or ``None`` for the latter.
        """
        raise NotImplementedError

    @classmethod
    def meaning(cls, *args: Any, **kwargs: Any) -> Any:
        """Compute the op: the reference for kernel tests, and the expansion of a call."""
        return cls.compute(cls.reference, *args, **kwargs)

    @classmethod
    def compute(cls, reference: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the op with another reference for its float part."""
        return cls._evaluate((reference, quantize, dequantize), args, kwargs)

    @classmethod
    def in_parts(cls, *args: Any, **kwargs: Any) -> Any:
        """Compute the op with calls of ``qfuse::quantize`` and ``dequantize``.

        What an epilogue quantizes, and parameters that are chosen, are computed by plain ops.
        """
        parts = cls.reference, _calls("quantize"), _calls("dequantize")
        return cls._evaluate(parts, args, kwargs)

    @classmethod
    def _evaluate(
        cls, parts: Sequence[Callable[..., Any]], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Compute the op from a reference for its float part, a quantize and a dequantize."""
        reference, to_stored, to_float = parts
        values = cls.values(args, kwargs)
        result: Any = None
        for block in cls.layout.params:
            params: Any = values.pop(block.name)
            if block.of == RESULT:
                result = params
            elif params is not None:
                values[block.of] = to_float(values[block.of], *params.reference_args)
        output: Output | None = values.pop("output", None)
        # The parameters were taken out above, so the fields that remain are the reference's, in
        # order.
        y = reference(*values.values())
        if output is not None:
            float_result, total = y
            return output.results(float_result, total, to_stored)
        return y if result is None else to_stored(y, *result.reference_args)

    @classmethod
    def infer(cls, *args: Any, **kwargs: Any) -> Any:
        """Return the result for fake tensors by running the reference on them."""
        return cls.meaning(*args, **kwargs)

    @classmethod
    def values(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a call with tensors."""
        return cls.layout.read(cls.layout.bind(args, kwargs), _tensor)

    @classmethod
    def widened_args(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Argument, ...]:
        """Return the arguments of the call that computes in float64."""
        values = cls.values(args, kwargs).items()
        return cls.layout.write({n: v.widened() if hasattr(v, "widened") else v for n, v in values})

    @property
    def result_params(self) -> QuantParams | None:
        """The quantization parameters of its only result."""
        return next((getattr(self, f.name) for f in self.layout.params if f.of == RESULT), None)

    def with_result_params(self, params: QuantParams) -> Self:
        """Return the op with its only result quantized with ``params``."""
        changed: dict[str, Any] = {f.name: params for f in self.layout.params if f.of == RESULT}
        assert changed, f"{self.overload} does not quantize one result"
        return replace(self, **changed)

    @property
    def result_spec(self) -> QuantSpec | None:
        """The spec of the first result; ``None`` if it is float."""
        block: Output | QuantParams | None = getattr(self, "output", self.result_params)
        return None if block is None else block.spec

    @property
    def float_dtype(self) -> torch.dtype:
        """The float dtype of its first operand."""
        first = self.layout.fields[0].name
        params = (getattr(self, f.name) for f in self.layout.params if f.of == first)
        known: QuantParams | None = next(params, None)
        return dtype_of(getattr(self, first)) if known is None else known.spec.float_dtype

    def float_types(self) -> tuple[torch.dtype, ...]:
        """Return the float dtypes of its first operand and of the result of every epilogue op."""
        epilogue: Epilogue | None = getattr(self, "epilogue", None)
        if epilogue is None:
            return (self.float_dtype,)
        extras: Sequence[Node] = getattr(self, "extras", ())
        return epilogue.float_types(self.float_dtype, [tensor_of(extra) for extra in extras])

    def problems(self) -> Iterator[str]:
        """Yield problems of the call that the types of its fields do not imply."""
        yield from ()


def define_op(name: str, namespace: str = "qfuse") -> Callable[[type[D]], type[D]]:
    """Define the declared op in ``torch.library``.

    Raises:
        TypeError: A field has a type that does not map to an argument, or the reference does not
            accept the fields.
    """

    def define(cls: type[D]) -> type[D]:
        cls.layout = layout = _layout(cls)
        schema = f"{name}({', '.join(layout.formals)}) -> {layout.result}"
        # The class keeps it: torch removes the op when its library object dies.
        cls.library = library = torch.library.Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
        library.define(schema)  # type: ignore[no-untyped-call]
        # Explicit, so that the op runs on every device and tracing still records it as one call; an
        # implicit composite would be traced through.
        library.impl(name, cls.meaning, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"{namespace}::{name}", cls.infer, lib=library)
        cls.overload = getattr(getattr(torch.ops, namespace), name).default
        return cls

    return define


def _layout(cls: type[Op]) -> ArgLayout:
    hints = get_type_hints(cls, include_extras=True)
    # Without `node`, which is no argument.
    found = tuple(
        field_of(f.name, hints[f.name], f.default is not MISSING) for f in fields(cls)[1:]
    )
    taken = [f.name for f in found if not f.of and f.name != "output"]
    if len(taken) != len(inspect.signature(cls.reference).parameters):
        raise TypeError(f"the reference of {cls.__name__} does not take {', '.join(taken)}")
    returned = get_type_hints(cls.reference)["return"]
    return ArgLayout(found, "Tensor[]" if "output" in hints else _RESULTS[returned])


def _calls(name: str) -> Callable[..., torch.Tensor]:
    """Return the reference of quantize or dequantize, by a call of the op."""

    def call(
        value: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None,
        spec: QuantSpec,
        outer_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        outer = () if outer_scale is None else (outer_scale,)
        op = getattr(torch.ops.qfuse, name).default
        result: torch.Tensor = op(value, scale, zero_point, str(spec), *outer)
        return result

    return call


def _tensor(value: Any) -> torch.Tensor:
    assert isinstance(value, torch.Tensor), f"not a tensor: {value!r}"
    return value
