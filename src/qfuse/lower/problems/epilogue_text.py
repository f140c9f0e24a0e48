"""The epilogue of a linear and of the following rowwise op, in the syntax of qfuse's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Node

from qfuse.ir.dtypes import BYTES, FLOATS
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.movement.glu_halves import GluSplit, glu_split_of, uncast
from qfuse.ir.ops.activation import Activation
from qfuse.ir.ops.epilogue import (
    Act,
    Add,
    Cast,
    Epilogue,
    EpilogueOp,
    Glu,
    Mul,
    Prelu,
    Round,
    Stored,
)
from qfuse.ir.ops.linear import FusedLinear
from qfuse.ir.ops.product import FusedProduct
from qfuse.ir.ops.views import dtype_of, has_values, shape_of, tensor_of
from qfuse.ir.quant.spec import QuantSpec, ZeroPointDomain, dtype_name
from qfuse.ir.refusal import Refusal
from qfuse.lower.problems.epilogue_limits import (
    KERNEL_ACTIVATIONS,
    MOST_EPILOGUE_OPERANDS,
    MOST_EPILOGUE_OPS,
    PRELU,
)

# The dtypes that kernels dequantize an operand to.
_OPERAND_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class GluProduct:
    """A GLU: the product of the halves of a value's last axis.

    Attributes:
        split: The value, and the ops that split it.
        up: The half without the activation, as an operand of the op, perhaps after casts.
        casts: The dtypes that it is cast to, in order.
        between: All nodes between the value and the op.
    """

    split: GluSplit
    up: Node
    casts: tuple[torch.dtype, ...]
    between: frozenset[Node]


def product_of(op: Activation) -> GluProduct | None:
    """Return the GLU of ``op``, whose factors are halves of one value, or ``None``."""
    for step in op.epilogue.ops:
        if not isinstance(step, Mul):
            continue
        up = op.extras[step.index]
        casts, part = uncast(up)
        halves = glu_split_of(op.x, part)
        if halves is not None:
            return GluProduct(halves, up, tuple(map(dtype_of, casts)), halves.cuts | {*casts})
    return None


@dataclass(frozen=True, slots=True)
class KernelEpilogue:
    """Epilogue ops in the syntax of the kernels.

    Attributes:
        text: The ops, see :mod:`qfuse.kernels.ops`.
        extras: The operands, which the text refers to by index.
        halved: Whether there is a GLU.
    """

    text: str
    extras: tuple[Node, ...]
    halved: bool

    @classmethod
    def of(
        cls, linear: FusedLinear, op: Activation, product: GluProduct | None
    ) -> KernelEpilogue | Refusal:
        """Write the epilogues of both in order, or refuse the first unsupported op."""
        writer = _Writer(linear.extras)
        refusal = writer.write_all(linear)
        # Operands of both epilogues are numbered together:
        # indices are relative to their own op's list.
        writer.continue_with(op, product)
        refusal = refusal or writer.write_all(op) or _check_result(op)
        if refusal is not None:
            return refusal
        if writer.multiplied and shape_of(linear.weight)[0] % 2:
            return Refusal("the halves of its features differ in size")
        return writer.done()

    @classmethod
    def of_product(cls, fused: FusedProduct, count: int) -> KernelEpilogue | Refusal:
        """Write the first ``count`` epilogue ops, or refuse the first unsupported op."""
        writer = _Writer(fused.extras)
        shown = replace(fused, epilogue=Epilogue(fused.epilogue.ops[:count]))
        return writer.write_all(shown) or writer.done()

    @classmethod
    def of_activation(cls, op: Activation) -> KernelEpilogue | Refusal:
        """Write the epilogue of an op of its own, or refuse the first unsupported op."""
        writer = _Writer(op.extras)
        return writer.write_all(op) or _check_result(op) or writer.done()


@dataclass(slots=True)
class _Writer:
    """Writes epilogue ops in order.

    Attributes:
        known: The operands of the current epilogue, by index.
        extras: The operands of the kernel, by index.
        words: The text written so far.
        count: How many of the words are epilogue ops.
        product: The GLU, if the op's operands are halves.
        multiplied: The number of GLUs written.
    """

    known: Sequence[Node]
    extras: list[Node] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    count: int = 0
    product: GluProduct | None = None
    multiplied: int = 0

    def continue_with(self, op: Activation, product: GluProduct | None) -> None:
        """Continue with the epilogue of the rowwise op."""
        self.known, self.product = op.extras, product
        if product is not None:
            self.words.append(f"halves({product.split.order})")

    def write_all(self, op: FusedProduct | Activation) -> Refusal | None:
        """Write the epilogue of an op, up to the first unsupported op."""
        # `_types` has one entry more, the dtype of the result.
        for step, real in zip(op.epilogue.ops, _types(op), strict=False):
            refusal = _refuse_activation(step) or self._write(step, real)
            if refusal is not None:
                return refusal
        return None

    def _write(self, step: EpilogueOp, float_dtype: torch.dtype) -> Refusal | None:
        """Write an epilogue op whose input has the dtype ``float_dtype``."""
        match step:
            case Cast(dtype):
                return self._cast(dtype)
            case Prelu(index):
                self._add(f"prelu({self._number(index)})")
            case Act():
                self._add(str(step))
            case Add(index, alpha, Stored() as stored):
                return self._stored(f"add({self._number(index)},{alpha!r}", stored, float_dtype)
            case Mul(index, None, Stored() as stored):
                return self._stored(f"mul({self._number(index)}", stored, float_dtype)
            case Add(index, alpha):
                self._add(f"add({self._number(index)},{alpha!r})")
            case Round():
                return self._round(step, float_dtype)
            case Mul():
                return self._mul(step)
            case Glu(act, order):
                self.multiplied += 1
                self._add(str(Glu(act, order)))
        return None

    def done(self) -> KernelEpilogue | Refusal:
        """Return the text, if it is within the limits of the kernels."""
        if self.count > MOST_EPILOGUE_OPS or len(self.extras) > MOST_EPILOGUE_OPERANDS:
            return Refusal("its epilogue has too many ops")
        if self.multiplied > 1:
            return Refusal("there are two GLUs")
        # The half exists in registers only. As an operand it
        # would be loaded from memory that is not written.
        if self.product is not None and self.product.up in self.extras:
            return Refusal("a GLU half has another use after the product")
        return KernelEpilogue("|".join(self.words), tuple(self.extras), self.multiplied == 1)

    def _add(self, word: str) -> None:
        self.words.append(word)
        self.count += 1

    def _number(self, index: int) -> int:
        """Return the index of an operand, and add it to those of the kernel."""
        extra = self.known[index]
        if extra not in self.extras:
            self.extras.append(extra)
        return self.extras.index(extra)

    def _mul(self, step: Mul) -> Refusal | None:
        if self.product is None or self.known[step.index] is not self.product.up:
            if step.rounded is not None:
                return Refusal("a factor has an intermediate rounding")
            self._add(f"mul({self._number(step.index)})")
            return None
        # These words are marks and not steps, so they do not count.
        self.words.append("up()")
        refusals = [self._cast(dtype) for dtype in self.product.casts]
        if step.rounded is not None:
            refusals.append(self._round(step.rounded, dtype_of(self.product.up)))
        self.words.append("times()")
        self.multiplied += 1
        return next((refusal for refusal in refusals if refusal is not None), None)

    def _cast(self, dtype: torch.dtype) -> Refusal | None:
        if dtype not in FLOATS:
            return Refusal(f"it has an intermediate cast to {dtype_name(dtype)}")
        self._add(str(Cast(dtype)))
        return None

    def _stored(self, word: str, stored: Stored, float_dtype: torch.dtype) -> Refusal | None:
        """Write an op whose operand is quantized; the kernels dequantize it to float32."""
        scale = _number_of(self.known[stored.scale])
        zero = 0 if stored.zero_point is None else _number_of(self.known[stored.zero_point])
        if scale is None or zero is None or not _dequantizes_simply(stored.spec):
            return Refusal("an operand has an unsupported quantization")
        if isinstance(zero, torch.Tensor) and zero.dtype.is_floating_point:
            return Refusal(f"an operand's zero point is stored as {dtype_name(zero.dtype)}")
        other = stored.spec.float_dtype
        if other not in _OPERAND_DTYPES or float_dtype not in FLOATS:
            names = dtype_name(other), dtype_name(float_dtype)
            return Refusal("an operand is dequantized to {} beside {}".format(*names))
        self._add(f"{word},{scale.to(torch.float32).item()!r},{int(zero)})")
        # The kernels do not round an operand that the source dequantizes to bfloat16, which is
        # closer to the exact result, and their result is float32.
        made = torch.promote_types(other, float_dtype)
        return None if made is torch.float32 else self._cast(made)

    def _round(self, step: Round, float_dtype: torch.dtype) -> Refusal | None:
        if step.spec.float_dtype is not float_dtype:
            # The kernel's ``round`` keeps the dtype of its input, so the two must agree.
            found, said = dtype_name(float_dtype), dtype_name(step.spec.float_dtype)
            return Refusal(f"it has an intermediate rounding of {found} as if it were {said}")
        scale = _number_of(self.known[step.scale])
        zero = 0.0 if step.zero_point is None else _number_of(self.known[step.zero_point])
        if scale is None or zero is None or not _is_simple(step.spec):
            return Refusal("it has an intermediate rounding to an unsupported quantization")
        # In the scale's own dtype first, as the source does: the float32 reciprocal of a rounded
        # float64 scale may differ in the last bit, which moves values at ties.
        factor = scale.reciprocal().to(torch.float32).item()
        spec, size = step.spec, scale.to(torch.float32).item()
        whole = float(zero)
        self._add(f"round({factor!r},{whole!r},{spec.quant_min},{spec.quant_max},{size!r})")
        return None


def _refuse_activation(step: EpilogueOp) -> Refusal | None:
    """Refuse an activation that no kernel has."""
    match step:
        case Act(name) | Glu(Act(name)):
            known = name in KERNEL_ACTIVATIONS
        case Prelu():
            name, known = PRELU, PRELU in KERNEL_ACTIVATIONS
        case _:
            return None
    return None if known else Refusal(f"no kernel has the activation {name}")


def _types(op: FusedProduct | Activation) -> tuple[torch.dtype, ...]:
    """Return the input dtype of every epilogue op, and the dtype of the last result."""
    return op.epilogue.float_types(op.float_dtype, [tensor_of(extra) for extra in op.extras])


def _check_result(op: Activation) -> Refusal | None:
    """Refuse a result that is quantized as if it had another dtype."""
    real, spec = _types(op)[-1], op.output.spec
    if spec is None or spec.float_dtype is real:
        return None
    return Refusal(f"it quantizes {dtype_name(real)} as if it were {dtype_name(spec.float_dtype)}")


def _number_of(node: Node) -> torch.Tensor | None:
    """Return the value of ``node`` if it is a constant of one element."""
    value = constant_of(node)
    return value if value is not None and value.numel() == 1 and has_values(value) else None


def _is_simple(spec: QuantSpec) -> bool:
    """Whether the kernels' ``round``, in float32, computes this quantize-dequantize round trip."""
    math = spec.arithmetic
    # x / s and x * (1 / s) differ at ties; so do round(y) + z and round(y + z).
    rounds = math.reciprocal and not math.zero_point_first
    return _dequantizes_simply(spec) and spec.float_dtype in FLOATS and rounds


def _dequantizes_simply(spec: QuantSpec) -> bool:
    """Whether dequantizing is ``(q - zero_point) * scale`` of bytes in float32."""
    return (
        spec.dtype in BYTES
        and spec.is_plain
        and spec.domain is not ZeroPointDomain.FLOAT_OFFSET
        and spec.arithmetic.compute is torch.float32
    )
