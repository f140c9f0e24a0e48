"""The sizes of a product, and its predicted times in float and on 8-bit integers.

Both are those of the models that choose its kernel, so that what the report promises for a
quantized product is what it then predicts for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Self

import torch

from qfuse.cost.model import CostModel, Workload
from qfuse.cost.sizes import SizeRange
from qfuse.cost.work import Bits, ComputeKind, Work, WorkRange, linear_work
from qfuse.ir.dtypes import bit_width
from qfuse.lower.kernels.aten_int_mm import INT_MM, fits_int_mm, int_mm_work
from qfuse.lower.select.kernel import Kernel
from qfuse.targets.target import Target

_BYTE = 8
# All of qfuse's kernels of 8-bit integers are there, or none.
_OWN = "qfuse.linear_w8a8"


class Form(Enum):
    """The kernels that a product has when it is quantized."""

    LINEAR = auto()
    CONVOLUTION = auto()
    MATMUL = auto()
    RECURRENT = auto()


@dataclass(frozen=True, slots=True)
class Int8Kernels:
    """The kernels of 8-bit integers that a target has.

    Attributes:
        own: Whether it has qfuse's.
        int_mm: Whether it has ``aten._int_mm``.
    """

    own: bool = True
    int_mm: bool = True

    @classmethod
    def of(cls, kernels: Sequence[Kernel[Any]], target: Target) -> Self:
        """Return those of a registry that a target supports."""
        asked = (kernel for kernel in kernels if kernel.name in {_OWN, INT_MM})
        names = {kernel.name for kernel in asked if kernel.supported(target) is None}
        # On another device than a CPU, the kernels are those of a backend, which are not known.
        own = target.device != "cpu" or _OWN in names
        return cls(own, INT_MM in names)


@dataclass(frozen=True, slots=True)
class ProductSize:
    """A product of a left operand of ``left`` elements with ``right`` elements.

    Attributes:
        form: Its kernels.
        multiply_adds: Products of two elements.
        rows: Rows of the result, as a matrix or as each of ``count`` matrices.
        left: Elements of the activation.
        right: Elements of the weight, or of the second activation.
        out: Elements of the result.
        dtype: Float dtype.
        k: Products per element of a linear.
        n: Columns of a linear.
        count: Matrices of a batch.
        quantized: Whether it is a fused op of quantized operands.
    """

    form: Form
    multiply_adds: int
    rows: SizeRange
    left: int
    right: int
    out: int
    dtype: torch.dtype
    k: int = 0
    n: int = 0
    count: int = 1
    quantized: bool = False

    @property
    def _width(self) -> int:
        return bit_width(self.dtype)

    def float_seconds(self, cost: CostModel) -> float:
        """Return the predicted time in the float dtype."""
        kind = ComputeKind.BF16 if self.dtype is torch.bfloat16 else ComputeKind.F32
        if self.form is Form.LINEAR:
            return cost.seconds(self._linear(kind, self._width)) * self.count
        return cost.seconds(self._work(kind, self._width))

    def int8_seconds(self, cost: CostModel, kernels: Int8Kernels) -> float:
        """Return the predicted time on 8-bit integers, after a pass that quantizes activations.

        It is that of the fastest kernel of the target. Without one, a product that is not quantized
        would go on in float, between a quantize and a dequantize; one that is quantized already
        needs the kernels of qfuse.
        """
        plans = list(self._plans(kernels))
        if plans:
            seconds = min(map(cost.seconds, plans)) * self.count
        else:
            seconds = self.float_seconds(cost) + cost.seconds(self._dequantize())
        return cost.seconds(self._quantize()) + seconds

    def _plans(self, kernels: Int8Kernels) -> list[Workload]:
        """Return the work of each kernel that would take the product.

        That of two activations packs the right one in every call. This is not counted, so that
        products of few rows keep their reason in the report.
        """
        own = kernels.own or self.quantized
        if self.form is not Form.LINEAR:
            return [self._work(ComputeKind.INT8, _BYTE)] if own else []
        plans: list[Workload] = [self._linear(ComputeKind.INT8, _BYTE)] if own else []
        if kernels.int_mm and fits_int_mm(self.rows, self.k, self.n):
            plans.append(int_mm_work(self.rows, self.k, self.n))
        return plans

    def _linear(self, kind: ComputeKind, width: int) -> WorkRange:
        return linear_work(self.rows, self.k, self.n, Bits(width, width, self._width), kind)

    def _work(self, kind: ComputeKind, width: int) -> Work:
        constant = self.form is not Form.MATMUL
        right = float(self.right * width / _BYTE)
        flops = 2.0 * self.multiply_adds
        # oneDNN sets up a primitive for a float convolution.
        library = self.form is Form.CONVOLUTION and kind is not ComputeKind.INT8
        return Work(
            flops=flops,
            kind=kind,
            weight_bytes=right if constant else 0.0,
            reads=(self.left * width / _BYTE, *(() if constant else (right,))),
            writes=(self.out * self._width / _BYTE,),
            one_row_flops=flops / max(self.rows.hint, 1),
            library_calls=int(library),
        )

    @property
    def _moved(self) -> int:
        """Elements of the activations."""
        return self.left + (self.right if self.form is Form.MATMUL else 0)

    def _quantize(self) -> Work:
        return Work(reads=(self._moved * self._width / _BYTE,), writes=(float(self._moved),))

    def _dequantize(self) -> Work:
        floats = self._moved * self._width / _BYTE
        return Work(reads=(float(self._moved),), writes=(floats,), kernel_calls=0)
