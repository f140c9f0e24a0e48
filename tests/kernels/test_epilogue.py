"""The epilogue's steps, their rounding and their types, and the quantized output."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.cases.linear_kernel import (
    REAL,
    STORED,
    codes,
    identity,
    linear,
)
from tests.support.cases.rowwise_kernel import dynamic

from qfuse.ir.ops.epilogue import Epilogue
from qfuse.kernels import (
    KernelLibrary,
    linear_w8a8_grouped,
    linear_w8a8_quantized,
    linear_w8a16,
    pack_grouped,
    pack_weight,
)
from qfuse.kernels.rowwise import activation_quantized

pytestmark = pytest.mark.numeric

# Steps without transcendental functions: the same operations as torch's, so the same bits.
EXACT = (
    "",
    "act(relu)",
    "act(hardtanh,-0.5,0.25)",
    "act(hardtanh,0.0,6.0)",
    "act(hardtanh,-inf,1e-05)",
    "act(hardswish)",
    "act(hardsigmoid)",
    "act(leaky_relu,0.1)",
    "add(0,1.0)",
    "mul(0)",
    "prelu(0)",
    "prelu(1)|cast(bfloat16)|prelu(0)",
    "act(relu)|add(0,1.0)|mul(1)",
    "cast(bfloat16)|act(relu)",
    "cast(float16)|add(1,1.0)|cast(bfloat16)|mul(0)",
    "mul(0)|cast(float32)|act(hardtanh,0.0,6.0)|add(0,1.0)|cast(float16)|add(1,1.0)|cast(float32)",
)


@pytest.mark.parametrize("real", REAL)
@pytest.mark.parametrize("text", EXACT)
def test_steps_round_as_torch_rounds(isa: str, text: str, real: torch.dtype) -> None:
    del isa
    for types in itertools.product((torch.float32, torch.bfloat16, torch.float16), repeat=2):
        case = linear((7, 36), 70)
        extras = [torch.randn(7, 70, dtype=t) for t in types]
        expected = Epilogue.parse(text).apply(case.expected().to(real), extras)

        y = case.with_options(
            extras=extras, epilogue=text, product_dtype=real, out_dtype=expected.dtype
        ).run()

        assert y.dtype == expected.dtype
        assert torch.equal(y, expected)


@pytest.mark.parametrize("alpha", [-1.0, 0.3, 2.5])
def test_add_scales_its_operand(isa: str, alpha: float) -> None:
    del isa
    case, extra = linear((7, 36), 70), torch.randn(7, 70)

    y = case.with_options(extras=[extra], epilogue=f"add(0,{alpha!r})").run()

    # alpha is rounded to float32, the product too: torch may do both at once.
    assert torch.equal(y, case.expected() + extra * torch.tensor(alpha))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_float_is_rounded_half_to_even(isa: str, dtype: torch.dtype) -> None:
    """All stored values, the ties between them, and just beside the ties."""
    del isa
    stored = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype).float()
    following = torch.roll(stored, -1)
    ties = torch.where(torch.isfinite(stored + following), (stored + following) / 2, stored)
    beside = torch.nextafter(ties, torch.tensor(torch.inf))
    wild = torch.tensor([torch.inf, -torch.inf, torch.nan, 65504.0, 65519.9, 65520.0, 1e-8, 3e38])
    x = torch.cat([stored, ties, beside, wild, wild.neg()]).reshape(-1, 16)
    expected = x.to(dtype)

    y = identity(x).with_options(epilogue=f"add(0,1.0)|cast({str(dtype)[6:]})", out_dtype=dtype)

    torch.testing.assert_close(y.run(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_float_is_read(isa: str, dtype: torch.dtype) -> None:
    del isa
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype).reshape(-1, 16)

    y = identity(x).with_options(epilogue="add(0,1.0)").run()

    torch.testing.assert_close(y, x.float() + 0.0, rtol=0, atol=0, equal_nan=True)


def quantize(y: torch.Tensor, output: dict[str, Any]) -> torch.Tensor:
    """What the op promises, in torch."""
    scale, zero = output["out_scale"], output["out_zero_point"]
    y = y.float()
    y = y * scale.reciprocal().float() if output["reciprocal"] else y / scale.float()
    shift = 0 if zero is None else zero.float()
    y = (y + shift).round() if output["zero_point_first"] else y.round() + shift
    return y.clamp(output["quant_min"], output["quant_max"]).to(output["out_dtype"])


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("reciprocal", [False, True])
@pytest.mark.parametrize("zero_point_first", [False, True])
def test_quantized_output(
    isa: str,
    dtype: torch.dtype,
    scale_dtype: torch.dtype,
    *,
    reciprocal: bool,
    zero_point_first: bool,
) -> None:
    del isa
    for narrow, zero in itertools.product((0, 20), (None, 3)):
        case = linear((9, 36), 70).with_options(epilogue="act(relu)|cast(bfloat16)")
        info = torch.iinfo(dtype)
        output = {
            "out_scale": torch.tensor([0.0123], dtype=scale_dtype),
            "out_zero_point": None if zero is None else torch.tensor([zero]),
            "quant_min": info.min + narrow,
            "quant_max": info.max - narrow,
            "reciprocal": reciprocal,
            "zero_point_first": zero_point_first,
            "out_dtype": dtype,
        }

        y = case.run_quantized(**output)

        assert y.dtype == dtype
        assert torch.equal(y, quantize(F.relu(case.expected()).bfloat16(), output))


@pytest.mark.parametrize("dtype", STORED)
def test_rows_in_several_strips(isa: str, dtype: torch.dtype) -> None:
    """More rows than stay in a cache while they are multiplied with all blocks."""
    del isa
    # As many blocks as rows of signed bytes are flipped for in a copy.
    case = linear((311, 3402), 330, dtype=dtype, per_token=False, zero_point=True)
    output = {
        "out_scale": case.expected().abs().max().reshape(1) / 100,
        "out_zero_point": torch.tensor([3]),
        "quant_min": -128,
        "quant_max": 127,
        "reciprocal": True,
        "zero_point_first": False,
        "out_dtype": torch.int8,
    }

    assert torch.equal(case.run(), case.expected())
    assert torch.equal(case.run_quantized(**output), quantize(case.expected(), output))


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("real", REAL)
@pytest.mark.parametrize(
    "text", ["", "act(gelu)", "act(gelu_tanh)", "act(silu)", "act(gelu)|act(relu)"]
)
@pytest.mark.parametrize("odd", ["nothing", "a small scale", "a bias", "a weight scale"])
def test_activations_are_quantized_in_registers(
    isa: str, dtype: torch.dtype, real: torch.dtype, text: str, odd: str
) -> None:
    """The bits are those of activations in memory, also where sums do not stay in registers."""
    del isa
    for columns in (16, 30, 70):
        case = linear((9, 36), columns, per_token=False, zero_point=True)
        case = case.with_options(epilogue=text, product_dtype=real)
        if odd == "a bias" and case.bias is not None:
            case.bias[:3] = torch.tensor([math.nan, math.inf, -math.inf])
        elif odd == "a weight scale":
            case.w_scale[:3] = torch.tensor([math.nan, math.inf, 3e38])
        info = torch.iinfo(dtype)
        output = {
            "out_scale": torch.tensor([1e-12 if odd == "a small scale" else 0.02]),
            "out_zero_point": torch.tensor([5]),
            "quant_min": info.min,
            "quant_max": info.max - 1,
            "reciprocal": True,
            "zero_point_first": False,
            "out_dtype": dtype,
        }
        steps = case.with_options(out_dtype=real).run()
        assert steps.nan_to_num().abs().max() > 1

        numbers = quantize_float(steps, output)
        expected = torch.where(numbers.isnan(), 0, numbers.nan_to_num()).to(dtype)
        assert torch.equal(case.run_quantized(**output), expected)


def test_codes_are_rounded_half_to_even_and_kept_in_range(isa: str) -> None:
    del isa
    values = [-1e30, -200.0, -2.5, -1.5, -0.5, 0.0, 0.5, 1.5, 2.5, 3.5, 126.5, 200.0, 1e30]
    values += [torch.inf, -torch.inf, torch.nan]
    x = torch.tensor([values])

    y = (
        identity(x)
        .with_options(epilogue="add(0,1.0)")
        .run_quantized(
            out_scale=torch.ones(1),
            out_zero_point=torch.tensor([1]),
            quant_min=-100,
            quant_max=127,
            out_dtype=torch.int8,
        )
    )

    expected = [-100, -100, -1, -1, 1, 1, 1, 3, 3, 5, 127, 127, 127, 127, -100, 0]
    assert y.tolist() == [expected]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out_dtype": torch.int16}, "codes must be int8 or uint8"),
        ({"quant_min": -129}, "range of the codes' type"),
        ({"quant_max": 128}, "range of the codes' type"),
        ({"quant_min": 5, "quant_max": 4}, "range of the codes' type"),
        ({"out_scale": torch.ones(2)}, "out_scale has 2 elements"),
        ({"out_scale": torch.ones(1, dtype=torch.int32)}, "out_scale must be a float"),
        ({"out_zero_point": torch.zeros(2)}, "out_zero_point has 2 elements"),
    ],
)
def test_refuses_an_output(library: KernelLibrary, change: dict[str, Any], message: str) -> None:
    del library
    case = linear((3, 8), 5)
    packed, sums = pack_weight(case.weight)
    output: dict[str, Any] = {
        "out_scale": torch.ones(1),
        "out_zero_point": None,
        "quant_min": -128,
        "quant_max": 127,
        "out_dtype": torch.int8,
    }

    with pytest.raises(RuntimeError, match=message):
        linear_w8a8_quantized(
            case.x, case.x_scale, None, packed, sums, case.w_scale, **{**output, **change}
        )


class TestQuantizedExtras:
    """Operands of ``add`` and ``mul`` that are dequantized on the way."""

    SCALE, ZERO = 0.0371, 5
    TEXT = f"add(0,1.0,{SCALE},{ZERO})|act(relu)|mul(1,{SCALE},{ZERO})|add(2,0.5)"

    @staticmethod
    def dequantized(q: torch.Tensor) -> torch.Tensor:
        """As ``qfuse.dequantize`` does."""
        scale, zero = torch.tensor(TestQuantizedExtras.SCALE), TestQuantizedExtras.ZERO
        return (q.float() - zero) * scale

    def expected(self, y: torch.Tensor, extras: list[torch.Tensor]) -> torch.Tensor:
        y = torch.relu(y + self.dequantized(extras[0])) * self.dequantized(extras[1])
        return y + extras[2] * 0.5

    @pytest.mark.parametrize("dtype", STORED)
    @pytest.mark.parametrize("real", REAL)
    def test_linear(self, isa: str, dtype: torch.dtype, real: torch.dtype) -> None:
        del isa
        for n in (1, 15, 64, 70, 96):
            case = linear((7, 36), n)
            views = (codes((7, n), dtype), codes((n,), dtype), codes((7, 1), dtype))
            for first, second in itertools.permutations(views, 2):
                extras = [first, second, torch.randn(7, n)]
                y = case.with_options(
                    extras=extras, epilogue=self.TEXT, product_dtype=real, out_dtype=torch.float32
                ).run()

                assert torch.equal(y, self.expected(case.expected().to(real), extras))

    @pytest.mark.parametrize("dtype", STORED)
    def test_every_value(self, isa: str, dtype: torch.dtype) -> None:
        del isa
        info = torch.iinfo(dtype)
        q = torch.arange(info.min, info.max + 1).to(dtype).reshape(4, 64)
        for zero in (info.min, 0, 3, info.max):
            text = f"add(0,1.0,0.1,{zero})"
            y = identity(q).with_options(epilogue=text).run()

            assert torch.equal(y, (q.float() - zero) * 0.1)

    @pytest.mark.parametrize("dtype", STORED)
    def test_other_users_of_epilogues(self, isa: str, dtype: torch.dtype) -> None:
        del isa
        extras = [codes((7, 70), dtype), codes((70,), dtype), torch.randn(7, 70)]
        weight = codes((70, 64), torch.int8)
        scale, x = torch.rand(70, 2) * 0.01, codes((7, 64), torch.int8)
        packed = pack_grouped(weight, scale)
        options = {"out_features": 70, "extras": extras}
        y = linear_w8a8_grouped(x, torch.ones(1), None, *packed, out_features=70)
        z = linear_w8a8_grouped(x, torch.ones(1), None, *packed, epilogue=self.TEXT, **options)
        assert torch.equal(z, self.expected(y, extras))

        packed8, x_real = pack_weight(weight)[0], torch.randn(7, 64)
        given = (x_real, packed8, torch.ones(70))
        y = linear_w8a16(*given, out_features=70)
        z = linear_w8a16(*given, epilogue=self.TEXT, **options)
        assert torch.equal(z, self.expected(y, extras))

        y = torch.randn(7, 70)
        output = dynamic(keep=True)
        *_, kept, _ = activation_quantized(y, self.TEXT, output, extras)
        assert torch.equal(kept, self.expected(y, extras))

    @pytest.mark.parametrize(
        ("extra", "text", "message"),
        [
            (torch.ones(5), "add(0,1.0,0.1,0)", "type Float, which is not quantized"),
            (torch.ones(5, dtype=torch.int8), "add(0,1.0)", "type Char, which is quantized"),
            (torch.ones(5, dtype=torch.uint8), "mul(0)", "type Byte, which is quantized"),
            (torch.ones(5, dtype=torch.int8), "add(0,1.0,0.1)", "has 3 arguments, expected 4"),
            (torch.ones(5, dtype=torch.int8), "mul(0,0.1)", "has 2 arguments, expected 3"),
            (torch.ones(5, dtype=torch.int8), "mul(0,0.1,a)", "not a number"),
            (torch.ones(5, dtype=torch.int32), "add(0,1.0)", "an extra must be"),
            (torch.ones(5, dtype=torch.int8), "prelu(0)", "type Char, which is quantized"),
            (torch.ones(5, dtype=torch.int8), "prelu(0,0.1,3)", "has 3 arguments, expected 1"),
        ],
    )
    def test_refuses(
        self, library: KernelLibrary, extra: torch.Tensor, text: str, message: str
    ) -> None:
        del library
        with pytest.raises(RuntimeError, match=message):
            linear((3, 8), 5).with_options(extras=[extra], epilogue=text).run()


CLAMPS = (
    "act(relu)",
    "act(hardtanh,0.0,6.0)",
    "act(hardtanh,-1.5,inf)|act(relu)",
    "act(hardtanh,-0.7,0.31)|act(hardtanh,-0.5,9.0)",
    "act(hardtanh,2.0,-2.0)",
    "act(relu)|act(hardtanh,-5.0,-1.0)",
    "act(gelu)|act(relu)",
    "cast(bfloat16)|act(relu)",
    "add(0,1.0)|act(hardtanh,-inf,0.25)",
)


@pytest.mark.parametrize("text", CLAMPS)
@pytest.mark.parametrize("scale", [0.037, 3e-39, 1e30, math.inf, -0.5, 0.0])
@pytest.mark.parametrize("reciprocal", [False, True])
def test_clamps_before_the_quantized_output(
    isa: str, text: str, scale: float, *, reciprocal: bool
) -> None:
    """They become a part of it; also at halves, infinities and NaN, and for any scale."""
    del isa
    wild = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 3e38, -3e38, 1e-40])
    x = torch.cat([torch.randn(1200), torch.arange(-30, 30) * 0.0185, wild]).repeat(3)
    x = x[: x.numel() // 12 * 12].reshape(-1, 12)
    for dtype, zero in itertools.product(STORED, (None, 3, 2_000_000, 0.5)):
        info = torch.iinfo(dtype)
        output = {
            "out_scale": torch.tensor([scale]),
            "out_zero_point": None if zero is None else torch.tensor([zero]),
            "quant_min": info.min + 1,
            "quant_max": info.max,
            "out_dtype": dtype,
            "reciprocal": reciprocal,
            "zero_point_first": False,
        }
        case = identity(x).with_options(epilogue=f"add(0,1.0)|{text}")
        steps = case.with_options(out_dtype=torch.bfloat16 if "cast" in text else None).run()

        y = case.run_quantized(**output)

        numbers = quantize_float(steps, output)
        expected = torch.where(numbers.isnan(), 0, numbers.nan_to_num()).to(dtype)
        assert torch.equal(y, expected), (zero, dtype)


def quantize_float(y: torch.Tensor, output: dict[str, Any]) -> torch.Tensor:
    """The quantized values as floats."""
    q = quantize(y, {**output, "out_dtype": torch.float32})
    assert q.dtype == torch.float32
    return q
