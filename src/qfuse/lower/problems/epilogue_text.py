"""The steps of a linear and of the op behind it, in the words of qfuse's own kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.movement.glu_halves import TwoHalves, halves_of, uncast
from qfuse.ir.ops.activation import Activation
from qfuse.ir.ops.epilogue import Act, Add, Cast, Glu, Mul, Round, Step
from qfuse.ir.ops.linear import FusedLinear
from qfuse.ir.ops.views import dtype_of, has_values, shape_of, tensor_of
from qfuse.ir.quant.spec import QuantSpec, ZeroPointDomain, dtype_name
from qfuse.ir.refusal import Refusal
from qfuse.lower.operands.checks import FLOATS, MOST_EXTRAS, MOST_STEPS

_BYTES = (torch.int8, torch.uint8)


@dataclass(frozen=True, slots=True)
class Product:
    """The product of the halves of the last axis of a value.

    Attributes:
        halves: The value, and what cuts it.
        up: The half that is not activated as the op reads it, perhaps in another type.
        casts: The types that it is cast to, one after the other.
        between: Everything between the value and the op.
    """

    halves: TwoHalves
    up: Node
    casts: tuple[torch.dtype, ...]
    between: frozenset[Node]


def product_of(op: Activation) -> Product | None:
    """Return the halves of one value that ``op`` multiplies; ``None`` if it does not."""
    for step in op.epilogue.steps:
        if not isinstance(step, Mul):
            continue
        up = op.extras[step.index]
        casts, part = uncast(up)
        halves = halves_of(op.x, part)
        if halves is not None:
            return Product(halves, up, tuple(map(dtype_of, casts)), halves.cuts | {*casts})
    return None


@dataclass(frozen=True, slots=True)
class KernelSteps:
    """Steps in the words of the kernels.

    Attributes:
        text: The words, see :mod:`qfuse.kernels.ops`.
        extras: The operands that they name by number.
        halved: Whether halves are multiplied.
    """

    text: str
    extras: tuple[Node, ...]
    halved: bool

    @classmethod
    def of(
        cls, linear: FusedLinear, op: Activation, product: Product | None
    ) -> KernelSteps | Refusal:
        """Write the steps of both, one after the other, or say which one has no word."""
        writer = _Writer(linear.extras)
        refusal = writer.write_all(linear)
        writer.continue_with(op, product)
        refusal = refusal or writer.write_all(op) or _check_result(op)
        if refusal is not None:
            return refusal
        if writer.multiplied and shape_of(linear.weight)[0] % 2:
            return Refusal("the halves of its features are not alike")
        return writer.done()


@dataclass(slots=True)
class _Writer:
    """Writes steps one after the other.

    Attributes:
        known: The operands that the steps of now name by number.
        extras: Those that the kernel will read.
        words: What is written.
        count: How many of the words are steps.
        product: The halves that are multiplied, if the op reads halves.
        multiplied: How often.
    """

    known: Sequence[Node]
    extras: list[Node] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    count: int = 0
    product: Product | None = None
    multiplied: int = 0

    def continue_with(self, op: Activation, product: Product | None) -> None:
        """Go on with the steps of the op behind."""
        self.known, self.product = op.extras, product
        if product is not None:
            self.words.append(f"halves({product.halves.order})")

    def write_all(self, op: FusedLinear | Activation) -> Refusal | None:
        """Write the steps of an op, up to the first one that has no word."""
        for step, real in zip(op.epilogue.steps, _types(op), strict=False):
            refusal = self._write(step, real)
            if refusal is not None:
                return refusal
        return None

    def _write(self, step: Step, real: torch.dtype) -> Refusal | None:
        """Write a step of numbers of the type ``real``."""
        match step:
            case Cast(dtype):
                return self._cast(dtype)
            case Act():
                self._add(str(step))
            case Add(index, alpha):
                self._add(f"add({self._number(index)},{alpha!r})")
            case Round():
                return self._round(step, real)
            case Mul():
                return self._mul(step)
            case Glu(act, order):
                self.multiplied += 1
                self._add(str(Glu(act, order)))
        return None

    def done(self) -> KernelSteps | Refusal:
        """Return what was written, if kernels take so much."""
        if self.count > MOST_STEPS or len(self.extras) > MOST_EXTRAS:
            return Refusal("the two have too many steps")
        if self.multiplied > 1:
            return Refusal("halves are multiplied twice")
        if self.product is not None and self.product.up in self.extras:
            return Refusal("a half is read again behind the product")
        return KernelSteps("|".join(self.words), tuple(self.extras), self.multiplied == 1)

    def _add(self, word: str) -> None:
        self.words.append(word)
        self.count += 1

    def _number(self, index: int) -> int:
        """Return the number of an operand, which the kernel reads now."""
        extra = self.known[index]
        if extra not in self.extras:
            self.extras.append(extra)
        return self.extras.index(extra)

    def _mul(self, step: Mul) -> Refusal | None:
        if self.product is None or self.known[step.index] is not self.product.up:
            if step.rounded is not None:
                return Refusal("a factor is rounded on the way")
            self._add(f"mul({self._number(step.index)})")
            return None
        self.words.append("up()")
        refusals = [self._cast(dtype) for dtype in self.product.casts]
        if step.rounded is not None:
            refusals.append(self._round(step.rounded, dtype_of(self.product.up)))
        self.words.append("times()")
        self.multiplied += 1
        return next((refusal for refusal in refusals if refusal is not None), None)

    def _cast(self, dtype: torch.dtype) -> Refusal | None:
        if dtype not in FLOATS:
            return Refusal(f"it casts to {dtype_name(dtype)} on the way")
        self._add(str(Cast(dtype)))
        return None

    def _round(self, step: Round, real: torch.dtype) -> Refusal | None:
        if step.spec.real is not real:
            # The word goes on in the type that it finds.
            found, said = dtype_name(real), dtype_name(step.spec.real)
            return Refusal(f"it rounds {found} to stored numbers as if it were {said}")
        scale = _number_of(self.known[step.scale])
        zero = 0.0 if step.zero_point is None else _number_of(self.known[step.zero_point])
        if scale is None or zero is None or not _is_simple(step.spec):
            return Refusal("it rounds on the way to stored numbers of another kind")
        factor = scale.reciprocal().to(torch.float32).item()
        spec, size = step.spec, scale.to(torch.float32).item()
        whole = float(zero)
        self._add(f"round({factor!r},{whole!r},{spec.quant_min},{spec.quant_max},{size!r})")
        return None


def _types(op: FusedLinear | Activation) -> tuple[torch.dtype, ...]:
    """Return the type in front of every step, and the one behind the last."""
    return op.epilogue.real_types(op.real, [tensor_of(extra) for extra in op.extras])


def _check_result(op: Activation) -> Refusal | None:
    """Refuse a result that is stored as if it were of another type than it is."""
    real, spec = _types(op)[-1], op.output.spec
    if spec is None or spec.real is real:
        return None
    return Refusal(f"it stores {dtype_name(real)} as if it were {dtype_name(spec.real)}")


def _number_of(node: Node) -> torch.Tensor | None:
    """Return a constant of one element."""
    value = constant_of(node)
    return value if value is not None and value.numel() == 1 and has_values(value) else None


def _is_simple(spec: QuantSpec) -> bool:
    """Whether a trip to stored numbers is what the word ``round`` says, in float32."""
    math = spec.arithmetic
    return (
        spec.dtype in _BYTES
        and spec.is_plain
        and spec.domain is not ZeroPointDomain.FLOAT_OFFSET
        and math.compute is torch.float32
        and spec.real in FLOATS
        and math.reciprocal
        and not math.zero_point_first
    )
