"""Norms and activations that give codes: codes by bits, norms within the reference's own noise."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from tests.kernels.cases import REAL, STORED

from qfuse.ir.choose_spec import ChooseSpec, Formula, choose_qparams
from qfuse.ir.epilogue import Epilogue
from qfuse.ir.errors import InputError
from qfuse.ir.quant_math import quantize
from qfuse.ir.quant_spec import Arithmetic, QuantSpec, ZeroPointDomain
from qfuse.kernels import instruction_set
from qfuse.kernels.row_ops import (
    RowOutput,
    activation_quantized,
    layer_norm_quantized,
    rms_norm_quantized,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from qfuse.kernels import KernelLibrary

pytestmark = pytest.mark.numeric

EPS = 1.2e-7
FORMULAS = [formula for formula in Formula if formula is not Formula.AO_FLOAT8]
WIDTHS = (1, 3, 15, 16, 17, 63, 64, 65, 130, 1000)


def rows(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Rows of very different sizes: zeros, one sign only, numbers below every eps."""
    x = torch.randn(shape).reshape(-1, shape[-1])
    x = x * torch.logspace(-9, 4, x.shape[0]).reshape(-1, 1)
    x[:1] = 0
    x[1:2] = x[1:2].abs()
    x[2:3] = -x[2:3].abs()
    return x.reshape(shape).to(dtype)


def specs(output: RowOutput, x: torch.Tensor) -> tuple[ChooseSpec, QuantSpec]:
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


def assert_dynamic(x: torch.Tensor, output: RowOutput, got: tuple[torch.Tensor, ...]) -> None:
    """The codes of ``x`` are those of the canonical ops, bit for bit."""
    choose, spec = specs(output, x)
    scale, zero = choose_qparams(x, choose)
    used = zero if output.use_zero_point else None
    expected = quantize(x, scale, used, spec), scale, zero
    for mine, want in zip(got, expected, strict=False):
        assert (mine.dtype, mine.shape) == (want.dtype, want.shape)
        assert torch.equal(mine, want)


def dynamic(**options: Any) -> RowOutput:
    """Symmetric int8 per token, as torchao does it, with changes."""
    start = RowOutput(
        quant_min=-128, quant_max=127, dtype=torch.int8, formula="ao-symmetric", eps=EPS
    )
    return replace(start, **options)


def arithmetics(real: torch.dtype) -> Iterator[dict[str, Any]]:
    """Every order of operations that a source may have."""
    for scale in (torch.float32, torch.float64, torch.bfloat16):
        for compute in {torch.float32, real}:
            for reciprocal in (True, False):
                for first in (True, False):
                    yield {
                        "scale_dtype": scale,
                        "compute": compute,
                        "reciprocal": reciprocal,
                        "zero_point_first": first,
                    }


@pytest.mark.parametrize(
    ("formula", "span"),
    [
        (formula, span)
        for formula in FORMULAS
        for span in [(-128, 127), (-127, 127), (0, 255), (0, 127)]
        # It divides by the least code.
        if formula is not Formula.AO_SYMMETRIC_NO_CLIPPING or span[0]
    ],
)
@pytest.mark.parametrize("real", REAL)
def test_rows_choose_and_encode_by_bits(
    isa: str, formula: Formula, real: torch.dtype, span: tuple[int, int]
) -> None:
    del isa
    low, high = span
    dtype = torch.int8 if low < 0 else torch.uint8
    x = rows((9, 37), real)
    for arithmetic in arithmetics(real):
        output = dynamic(
            formula=str(formula), quant_min=low, quant_max=high, dtype=dtype, **arithmetic
        )
        assert_dynamic(x, output, activation_quantized(x, "", output))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("zero", [torch.int8, torch.int32, torch.int64, torch.float32])
def test_widths_and_types_of_zero_points(isa: str, width: int, zero: torch.dtype) -> None:
    del isa
    x = rows((5, width), torch.float32)
    for used in (True, False):
        output = dynamic(
            formula="ao-asymmetric", zero_point_dtype=zero, use_zero_point=used, keep=True
        )
        got = activation_quantized(x, "", output)
        assert_dynamic(x, output, got)
        assert torch.equal(got[3], x)


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("scale", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("reciprocal", [True, False])
def test_a_given_scale_encodes_by_bits(
    isa: str, dtype: torch.dtype, scale: torch.dtype, *, reciprocal: bool
) -> None:
    del isa
    info = torch.iinfo(dtype)
    factor = torch.tensor(0.0123, dtype=scale)
    # Half steps of the scale, which round to even or away depending on the last bit of 1 / scale.
    x = torch.cat([torch.arange(-300, 300) * 0.5 * 0.0123, torch.randn(41)]).reshape(1, -1)
    for first in (True, False):
        for zero in (None, 0, info.min + 3):
            given = None if zero is None else torch.tensor(zero, dtype=torch.int32)
            output = RowOutput(
                quant_min=info.min,
                quant_max=info.max - 5,
                dtype=dtype,
                scale=factor,
                zero_point=given,
                reciprocal=reciprocal,
                zero_point_first=first,
            )
            _, spec = specs(output, x)
            spec = replace(spec, block=(None, None))
            grid = None if given is None else given.reshape(1, 1)
            want = quantize(x, factor.reshape(1, 1), grid, spec)
            codes, chosen, points, *_ = activation_quantized(x, "", output)
            assert torch.equal(codes, want)
            assert (chosen.numel(), points.numel()) == (0, 0)


@pytest.mark.parametrize("real", REAL)
@pytest.mark.parametrize(
    "steps", ["act(silu)|mul(0)", "mul(0)|act(relu)", "cast(bfloat16)|act(tanh)"]
)
def test_steps_come_before_codes(isa: str, real: torch.dtype, steps: str) -> None:
    """The float result is that of the steps; the codes are exactly those of it."""
    del isa
    x, gate = torch.randn(6, 5, 90).to(real), torch.randn(6, 5, 90).to(real)
    want = Epilogue.parse(steps).apply(x, [gate])
    output = dynamic(keep=True)
    got = activation_quantized(x, steps, output, [gate], real=want.dtype)

    assert_dynamic(got[3], output, got)
    step = torch.finfo(want.dtype).eps
    torch.testing.assert_close(got[3], want, atol=4 * step, rtol=4 * step)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, inner: torch.dtype, real: torch.dtype
) -> torch.Tensor:
    """The norm as Llama spells it, rounded where the kernel is told to."""
    h = x.to(weight.dtype) if weight is not None and weight.dtype is torch.float64 else x.float()
    h = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(inner)
    return (h if weight is None else weight * h).to(real)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("real", REAL)
@pytest.mark.parametrize("inner_is_real", [True, False])
def test_rms_norm(isa: str, width: int, real: torch.dtype, *, inner_is_real: bool) -> None:
    del isa
    inner = real if inner_is_real else torch.float32
    x, weight = torch.randn(3, 4, width).to(real) * 3, torch.randn(width).to(real)
    output = dynamic(keep=True)
    got = rms_norm_quantized(x, weight, 1e-6, output, inner=inner)

    assert_dynamic(got[3], output, got)
    want = rms_norm(x, weight, inner, real)
    # A last bit of the root moves what stands at a tie by one step, before the weight and after.
    step = torch.finfo(real).eps
    torch.testing.assert_close(got[3], want, atol=1e-6, rtol=3 * step)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("real", REAL)
def test_layer_norm(isa: str, width: int, real: torch.dtype) -> None:
    del isa
    x = torch.randn(3, 4, width).to(real) * 3 + 5
    weight, bias = torch.randn(width).to(real), torch.randn(width).to(real)
    output = dynamic(keep=True)
    got = layer_norm_quantized(x, weight, bias, 1e-5, output)

    assert_dynamic(got[3], output, got)
    exact = F.layer_norm(x.double(), (width,), weight.double(), bias.double(), 1e-5)
    # The mean, the difference and the factor round in float32 at the size of the row's elements,
    # which the deviation and the weight scale; the result rounds once in its own type.
    deviation = (x.double().var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    size = x.double().abs().amax(-1, keepdim=True) / deviation * weight.double().abs()
    allowed = 4 * torch.finfo(torch.float32).eps * size + torch.finfo(real).eps * exact.abs()
    assert ((got[3].double() - exact).abs() <= allowed + 1e-30).all()


@pytest.mark.parametrize(
    "kinds", [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16),
              (torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)],
)  # fmt: skip
def test_the_residual_is_added_before_and_kept(
    isa: str, kinds: tuple[torch.dtype, torch.dtype]
) -> None:
    del isa
    x, residual = torch.randn(7, 70).to(kinds[0]), torch.randn(7, 70).to(kinds[1])
    weight = torch.randn(70)
    total = x + residual
    real = total.dtype
    output = dynamic(keep=True, keep_sum=True)
    got = rms_norm_quantized(x, weight, 1e-6, output, residual=residual, inner=real, real=real)
    alone = rms_norm_quantized(total, weight, 1e-6, dynamic(keep=True), inner=real, real=real)

    assert torch.equal(got[4], total)
    assert got[4].dtype is total.dtype
    for mine, want in zip(got[:4], alone[:4], strict=True):
        assert torch.equal(mine, want)


def test_instruction_sets_give_the_same_bits(library: KernelLibrary) -> None:
    x, weight = torch.randn(5, 333).bfloat16(), torch.randn(333)
    output = dynamic(keep=True)

    def run() -> list[tuple[torch.Tensor, ...]]:
        return [
            rms_norm_quantized(x, weight, 1e-6, output, inner=torch.bfloat16),
            layer_norm_quantized(x, weight, weight, 1e-5, output),
            activation_quantized(x, "act(silu)|mul(0)", output, [x]),
        ]

    want = run()
    for name in library.instruction_sets:
        with instruction_set(name):
            for mine, theirs in zip(run(), want, strict=True):
                assert all(map(torch.equal, mine, theirs)), name


def test_threads_do_not_change_a_bit(library: KernelLibrary) -> None:
    del library
    x = torch.randn(301, 1000)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(rms_norm_quantized(x, None, 1e-6, dynamic()))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


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

    given = RowOutput(quant_min=-128, quant_max=127, dtype=torch.int8, scale=torch.tensor(0.1))
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
    given = RowOutput(
        quant_min=0, quant_max=255, dtype=torch.uint8, scale=torch.tensor(0.1), keep=keep
    )
    chosen = dynamic(keep=keep, keep_sum=keep, scale_dtype=torch.float64)
    ops = torch.ops.qfuse
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (ops.rms_norm_quantized, (x, x.float(), w, 1e-6, torch.float32, torch.bfloat16)),
        (ops.layer_norm_quantized, (x, x, w, None, 1e-6, torch.float32)),
    ]
    for op, args in calls:
        torch.library.opcheck(
            op.default,
            (*args, *chosen.arguments()),
            test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
        )
    steps = (x, [x.float()], "mul(0)", torch.float32)
    for op, args in [*calls, (ops.activation_quantized, steps)]:
        for output in (given, chosen):
            own = replace(output, keep_sum=output.keep_sum and op is not ops.activation_quantized)
            real = op(*args, *own.arguments())
            meta_args = torch.utils._pytree.tree_map_only(
                torch.Tensor, lambda t: t.to("meta"), (*args, *own.arguments())
            )
            for mine, want in zip(op(*meta_args), real, strict=True):
                assert (mine.shape, mine.dtype, mine.stride()) == (
                    want.shape,
                    want.dtype,
                    want.stride(),
                )


def test_fakes_refuse_what_cannot_be(library: KernelLibrary) -> None:
    del library
    x = torch.ones(2, 8, device="meta")
    with pytest.raises(InputError, match="must be floats"):
        rms_norm_quantized(x.int(), None, 1e-6, dynamic())
    with pytest.raises(InputError, match="codes must be"):
        rms_norm_quantized(x, None, 1e-6, dynamic(dtype=torch.int32))
