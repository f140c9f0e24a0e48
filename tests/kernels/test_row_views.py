"""What rows that become codes may look like, what torch believes about the results, and errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.cases.fake_kernels import to_meta
from tests.support.cases.rowwise_kernel import assert_dynamic, dynamic, specs

from qfuse.ir.errors import InputError
from qfuse.ir.quant.choose import choose_qparams
from qfuse.ir.quant.reference import quantize
from qfuse.kernels import KernelLibrary
from qfuse.kernels.rowwise import RowwiseOutput, activation_quantized, rms_norm_quantized

pytestmark = pytest.mark.numeric

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "columns": lambda x: x[..., 5:50],
    "rows": lambda x: x[::2],
    "transposed": lambda x: x.transpose(0, 1),
    "turned": lambda x: x.permute(2, 1, 0),
    "expanded": lambda x: x[:1].expand(4, *x.shape[1:]),
    "flipped stride of one row": lambda x: x[:1, :1].as_strided((1, 1, 40), (0, 0, 1)),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_are_read_as_they_are(isa: str, view: str) -> None:
    del isa
    x = VIEWS[view](torch.randn(6, 8, 60))
    before = x.clone()
    output = dynamic(keep=True, keep_sum=True)
    residual = torch.randn_like(x)
    got = rms_norm_quantized(x, None, 1e-6, output, residual=residual)
    dense = rms_norm_quantized(x.contiguous(), None, 1e-6, output, residual=residual.contiguous())

    assert all(map(torch.equal, got, dense))
    assert all(part.is_contiguous() for part in got)
    assert torch.equal(x, before)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0), (2, 0, 7)])
def test_nothing_gives_nothing(isa: str, shape: tuple[int, ...]) -> None:
    del isa
    x = torch.ones(shape)
    output = dynamic(keep=True)
    got = activation_quantized(x, "", output)
    assert_dynamic(x, output, got)
    assert got[3].shape == x.shape


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_in_its_row(isa: str, bad: float) -> None:
    del isa
    x = torch.randn(4, 70)
    want = activation_quantized(x, "", dynamic())
    x[2, 66] = bad
    codes, scale, *_ = activation_quantized(x, "", dynamic())

    choose, _ = specs(dynamic(), x)
    assert torch.equal(scale.nan_to_num(7), choose_qparams(x, choose)[0].nan_to_num(7))
    keep = torch.tensor([0, 1, 3])
    assert torch.equal(codes[keep], want[0][keep])
    assert not codes[2].any()

    given = RowwiseOutput(quant_min=-128, quant_max=127, dtype=torch.int8, scale=torch.tensor(0.1))
    spec = replace(specs(given, x)[1], block=(None, None))
    codes = activation_quantized(x, "", given)[0]
    want_codes = quantize(
        x.nan_to_num(0, float("inf"), float("-inf")), torch.full((1, 1), 0.1), None, spec
    )
    assert torch.equal(codes, want_codes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"formula": "best"}, "no formula 'best'"),
        ({"scale": torch.tensor(1.0)}, "either out_scale or a formula"),
        ({"formula": ""}, "either out_scale or a formula"),
        ({"quant_max": 300}, "range of the codes"),
        ({"dtype": torch.int16}, "codes must be"),
        ({"scale_dtype": torch.complex64}, "scale cannot have type"),
        ({"compute": torch.float64}, "compute must be"),
        ({"keep_sum": True}, "no sum to keep"),
    ],
)
def test_what_does_not_fit_is_named(
    library: KernelLibrary, change: dict[str, Any], message: str
) -> None:
    del library
    with pytest.raises(RuntimeError, match=message):
        rms_norm_quantized(torch.ones(2, 8), None, 1e-6, dynamic(**change))


def test_shapes_that_do_not_fit_are_named(library: KernelLibrary) -> None:
    del library
    x = torch.ones(2, 8)
    with pytest.raises(RuntimeError, match="weight has 7 elements"):
        rms_norm_quantized(x, torch.ones(7), 1e-6, dynamic())
    with pytest.raises(RuntimeError, match="residual has shape"):
        rms_norm_quantized(x, None, 1e-6, dynamic(), residual=torch.ones(8))
    with pytest.raises(RuntimeError, match="x must be float32"):
        rms_norm_quantized(x.double(), None, 1e-6, dynamic())
    with pytest.raises(RuntimeError, match="epilogue gives"):
        activation_quantized(x, "cast(bfloat16)", dynamic())


@pytest.mark.parametrize("shape", [(5, 20), (2, 3, 20), (20,), (0, 20)])
@pytest.mark.parametrize("keep", [True, False])
def test_fake_results_are_like_real_ones(
    library: KernelLibrary, shape: tuple[int, ...], *, keep: bool
) -> None:
    del library
    x = torch.randn(shape).bfloat16()
    w = torch.ones(20)
    source = (x, None, None, torch.bfloat16)
    stored = (x.to(torch.int8), torch.tensor(0.1), None, torch.float32)
    given = RowwiseOutput(
        quant_min=0, quant_max=255, dtype=torch.uint8, scale=torch.tensor(0.1), keep=keep
    )
    chosen = dynamic(keep=keep, keep_sum=keep, scale_dtype=torch.float64)
    ops = torch.ops.qfuse
    norm = (w, 1e-6, torch.float32, torch.bfloat16)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (
            ops.rms_norm_quantized,
            (*source, x.float(), None, None, torch.float32, *norm),
        ),
        (ops.layer_norm_quantized, (*source, *stored, w, None, 1e-6, torch.float32)),
    ]
    for op, args in calls:
        torch.library.opcheck(
            op.default,
            (*args, *chosen.arguments()),
            test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
        )
    steps = (*stored, [x.float()], "mul(0)", torch.float32)
    for op, args in [*calls, (ops.activation_quantized, steps)]:
        for output in (given, chosen):
            own = replace(output, keep_sum=output.keep_sum and op is not ops.activation_quantized)
            real = op(*args, *own.arguments())
            meta_args = to_meta((*args, *own.arguments()))
            for mine, want in zip(op(*meta_args), real, strict=True):
                assert (mine.shape, mine.dtype, mine.stride()) == (
                    want.shape,
                    want.dtype,
                    want.stride(),
                )


def test_fakes_refuse_what_cannot_be(library: KernelLibrary) -> None:
    del library
    x = torch.ones(2, 8, device="meta")
    with pytest.raises(InputError, match="x must be floats or bytes"):
        rms_norm_quantized(x.int(), None, 1e-6, dynamic())
    with pytest.raises(InputError, match="codes must be"):
        rms_norm_quantized(x, None, 1e-6, dynamic(dtype=torch.int32))
