"""Rows that become codes, and the canonical ops that say which."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from qfuse.ir.quant.choose import ChooseSpec, Formula, choose_qparams
from qfuse.ir.quant.reference import quantize
from qfuse.ir.quant.spec import Arithmetic, QuantSpec, ZeroPointDomain
from qfuse.kernels.rowwise import RowwiseOutput

EPS = 1.2e-7


def rows(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Rows of very different sizes: zeros, one sign only, numbers below every eps."""
    x = torch.randn(shape).reshape(-1, shape[-1])
    x = x * torch.logspace(-9, 4, x.shape[0]).reshape(-1, 1)
    x[:1] = 0
    x[1:2] = x[1:2].abs()
    x[2:3] = -x[2:3].abs()
    return x.reshape(shape).to(dtype)


def specs(output: RowwiseOutput, x: torch.Tensor) -> tuple[ChooseSpec, QuantSpec]:
    """What the canonical ops are told where the kernel is told ``output``."""
    block = (*(1 for _ in x.shape[:-1]), None)
    kind = output.dtype, output.quant_min, output.quant_max, block
    choose = ChooseSpec(
        Formula(output.formula or "ao-symmetric"),
        *kind,
        output.eps,
        output.scale_dtype,
        output.zero_point_dtype,
    )
    arithmetic = Arithmetic(output.compute, output.reciprocal, output.zero_point_first)
    return choose, QuantSpec(*kind, x.dtype, arithmetic, ZeroPointDomain.INT)


def assert_dynamic(x: torch.Tensor, output: RowwiseOutput, got: tuple[torch.Tensor, ...]) -> None:
    """The codes of ``x`` are those of the canonical ops, bit for bit."""
    choose, spec = specs(output, x)
    scale, zero = choose_qparams(x, choose)
    expected = quantize(x, scale, zero, spec), scale, zero
    for mine, want in zip(got, expected, strict=False):
        assert (mine.dtype, mine.shape) == (want.dtype, want.shape)
        assert torch.equal(mine, want)


def dynamic(**options: Any) -> RowwiseOutput:
    """Symmetric int8 per token, as torchao does it, with changes."""
    start = RowwiseOutput(
        quant_min=-128, quant_max=127, dtype=torch.int8, formula="ao-symmetric", eps=EPS
    )
    return replace(start, **options)
