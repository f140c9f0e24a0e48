"""Linears whose halves are multiplied: their packing, and what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tests.support.cases.linear_kernel import Linear, linear

from qfuse.ir.ops.epilogue import Epilogue, EpilogueOp, Glu
from qfuse.kernels import linear_w8a8, linear_w8a8_quantized, linear_w8a8_rows, pack_weight
from qfuse.kernels.rowwise import RowwiseOutput


@dataclass(frozen=True)
class GluOrder:
    """A linear of ``2 * h`` features with a glu among its steps."""

    linear: Linear
    epilogue: str = "glu(silu,gate-first)"
    extras: Sequence[torch.Tensor] = ()
    float_dtype: torch.dtype = torch.float32

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        case = self.linear
        packed, sums = pack_weight(case.weight, case.w_zero_point, halves=True)
        args = (case.x, case.x_scale, case.x_zero_point, packed, sums, case.w_scale)
        return args, {
            "w_zero_point": case.w_zero_point,
            "bias": case.bias,
            "extras": list(self.extras),
            "epilogue": self.epilogue,
            "product_dtype": self.float_dtype,
        }

    def dtype(self) -> torch.dtype:
        """The dtype behind the last step, as torch has it."""
        y = self.linear.x.new_empty((*self.linear.x.shape[:-1], self.linear.weight.shape[0]))
        return Epilogue.parse(self.epilogue).apply(y.to(self.float_dtype), self.extras).dtype

    def run(self) -> torch.Tensor:
        args, options = self.arguments()
        return linear_w8a8(*args, **options, out_dtype=self.dtype())

    def run_quantized(self, **output: Any) -> torch.Tensor:
        args, options = self.arguments()
        return linear_w8a8_quantized(*args, **{**options, **output})

    def run_rows(self, output: RowwiseOutput) -> tuple[torch.Tensor, ...]:
        args, options = self.arguments()
        return linear_w8a8_rows(*args, **{**options, "output": output, "float_dtype": self.dtype()})

    def in_parts(self) -> torch.Tensor:
        """The same by kernels that know no halves: the steps of each half, then their product.

        The activation is the kernel's own, so this is the same bit for bit.
        """
        steps = Epilogue.parse(self.epilogue).ops
        at = next(i for i, step in enumerate(steps) if isinstance(step, Glu))
        glu = steps[at]
        assert isinstance(glu, Glu)
        half = self.linear.weight.shape[0] // 2
        parts = [self.part(slice(i * half, (i + 1) * half), steps[:at]) for i in (0, 1)]
        gate, up = parts if glu.order == "gate-first" else parts[::-1]
        if gate.numel() == 0:
            return Epilogue(steps[at + 1 :]).apply(gate * up, self.extras)
        y = activated(gate, str(glu.act)) * up
        return Epilogue(steps[at + 1 :]).apply(y, self.extras)

    def part(self, columns: slice, steps: tuple[EpilogueOp, ...] = ()) -> torch.Tensor:
        """One half of the linear, with the steps in front of the glu."""
        case = self.linear
        zero = case.w_zero_point
        one = replace(
            case,
            weight=case.weight[columns],
            w_scale=case.w_scale[columns],
            w_zero_point=zero if zero is None or zero.numel() == 1 else zero[columns],
            bias=None if case.bias is None else case.bias[columns],
        )
        wide = [_columns(e, columns, case.weight.shape[0]) for e in self.extras]
        y = one.with_options(product_dtype=self.float_dtype, out_dtype=self.float_dtype).run()
        return Epilogue(steps).apply(y, wide)


def _columns(extra: torch.Tensor, columns: slice, n: int) -> torch.Tensor:
    return extra[..., columns] if extra.shape[-1] == n else extra


def activated(gate: torch.Tensor, act: str) -> torch.Tensor:
    """The kernel's own activation of any numbers: a linear with the weight one."""
    rows = gate.reshape(-1, 1).float()
    count = rows.shape[0]
    one = Linear(
        x=torch.ones(count, 1, dtype=torch.int8),
        weight=torch.ones(1, 1, dtype=torch.int8),
        x_scale=torch.ones(1),
        w_scale=torch.ones(1),
    )
    # The sum 1 plus the number less 1 would round; 0 plus the number is the number.
    zero = replace(one, x=torch.zeros(count, 1, dtype=torch.int8))
    text = f"add(0,1.0)|{act}"
    y = zero.with_options(epilogue=text, extras=[rows]).run()
    return y.reshape(gate.shape).to(gate.dtype)


def halves(shape: tuple[int, ...], h: int, **kind: Any) -> GluOrder:
    """A random problem of ``2 * h`` features."""
    return GluOrder(linear(shape, 2 * h, **kind))
