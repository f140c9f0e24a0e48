"""Invalid arguments of the int8 product of two activations, and what torch believes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.cases.fake_kernels import OPCHECKS
from tests.support.cases.matmul_kernel import product

from qfuse.ir.errors import InputError
from qfuse.kernels import KernelLibrary, matmul_a8a8, matmul_a8a8_quantized


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 8)}, "x must be int8 or uint8"),
        ({"other": torch.zeros(8, 5)}, "other must be int8 or uint8"),
        ({"x": torch.zeros(8, dtype=torch.int8)}, "x must have at least two axes"),
        ({"other": torch.zeros(8, dtype=torch.int8)}, "other must have at least two axes"),
        ({"x": torch.zeros(3, 9, dtype=torch.int8)}, "x has 9 columns and other has 8 rows"),
        ({"x": torch.zeros(3, 3, 8, dtype=torch.int8)}, "do not broadcast"),
        ({"x_scale": torch.ones(2)}, "x_scale of shape"),
        ({"x_scale": torch.ones(2, 1, 8)}, "x_scale of shape"),
        ({"x_scale": torch.ones(2, 3, 1, dtype=torch.int32)}, "x_scale has type Int"),
        ({"other_scale": torch.ones(3)}, "other_scale of shape"),
        ({"other_scale": torch.ones(1, 8, 5)}, "other_scale of shape"),
        ({"x_zero_point": torch.tensor([128])}, "x_zero_point 128 is outside of the range"),
        ({"other_zero_point": torch.tensor([-129])}, "other_zero_point -129 is outside"),
        ({"other_zero_point": torch.full((5,), 300)}, "other_zero_point 300 is outside"),
        ({"other_zero_point": torch.tensor([0.0])}, "whole numbers"),
        ({"out_dtype": torch.bfloat16}, "the epilogue gives Float"),
        ({"product_dtype": torch.float64}, "must be float32, bfloat16 or float16"),
        ({"epilogue": "glu(silu,gate-first)"}, "GLU|halves"),
        ({"epilogue": "add(0,1.0)", "extras": [torch.ones(2, 2, 3, 5)]}, "does not broadcast"),
        ({"epilogue": "add(0,1.0)", "extras": [torch.ones(())]}, "at least one axis"),
    ],
    ids=str,
)
def test_refused_arguments(library: KernelLibrary, change: dict[str, Any], message: str) -> None:
    del library
    case = product((2, 3, 8), (2, 8, 5))
    known = dict(
        zip(
            ("x", "x_scale", "x_zero_point", "other", "other_scale", "other_zero_point"),
            case.arguments,
            strict=True,
        )
    )
    with pytest.raises(RuntimeError, match=message):
        matmul_a8a8(**{**known, **change})


@pytest.mark.parametrize("transposed", [False, True])
def test_what_torch_believes_while_it_traces(library: KernelLibrary, transposed: bool) -> None:
    del library
    case = product((2, 1, 5, 8), (3, 8, 7), transposed=transposed, zero_points=(True, False))
    extras = [torch.randn(3, 5, 7)]
    args = (*case.arguments, extras, "add(0,1.0)", torch.float32, torch.float32)
    torch.library.opcheck(torch.ops.qfuse.matmul_a8a8.default, args, test_utils=OPCHECKS)
    output = (torch.tensor([0.1]), torch.tensor([1]), -128, 127, True, False, torch.int8)
    op = torch.ops.qfuse.matmul_a8a8_quantized.default
    torch.library.opcheck(op, (*args[:-1], *output), test_utils=OPCHECKS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 8)}, "x must be int8 or uint8"),
        ({"other": torch.zeros(8, dtype=torch.int8)}, "two axes"),
        ({"x": torch.zeros(3, 3, 8, dtype=torch.int8)}, "do not broadcast"),
        ({"out_dtype": torch.int8}, "the result must be"),
        ({"product_dtype": torch.float64}, "product_dtype must be"),
    ],
    ids=str,
)
def test_errors_while_tracing(library: KernelLibrary, change: dict[str, Any], message: str) -> None:
    del library
    case = product((2, 3, 8), (2, 8, 5))
    values = {
        "x": case.x, "x_scale": case.x_scale, "other": case.other, "other_scale": case.other_scale,
        **change,
    }  # fmt: skip
    meta = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in values.items()}
    with pytest.raises(InputError, match=message):
        matmul_a8a8(**meta)


def test_a_quantized_result_has_a_storage_of_bytes(library: KernelLibrary) -> None:
    del library
    case = product((2, 3, 8), (2, 8, 5))
    args = [t.to("meta") if isinstance(t, torch.Tensor) else t for t in case.arguments]
    with pytest.raises(InputError, match="the result must be"):
        matmul_a8a8_quantized(
            *args, out_scale=torch.ones(1, device="meta"), out_zero_point=None,
            quant_min=-128, quant_max=127, out_dtype=torch.float32,
        )  # fmt: skip
