"""The epilogue's steps, their rounding and their types, and the quantized output."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.cases.linear_kernel import ACTIVATION_ERROR, REAL, STORED, Linear, linear

from qfuse.ir.ops.epilogue import ACTIVATIONS, Epilogue
from qfuse.kernels import KernelLibrary, linear_w8a8_quantized, pack_weight

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
    "act(relu)|add(0,1.0)|mul(1)",
    "cast(bfloat16)|act(relu)",
    "cast(float16)|add(1,1.0)|cast(bfloat16)|mul(0)",
    "mul(0)|cast(float32)|act(hardtanh,0.0,6.0)|add(0,1.0)|cast(float16)|add(1,1.0)|cast(float32)",
)


def identity(values: torch.Tensor) -> Linear:
    """A linear whose product is zero, so that ``add(0,1.0)`` starts the epilogue from ``values``."""
    n = values.shape[-1]
    return Linear(
        x=torch.zeros(values.shape[0], 4, dtype=torch.int8),
        weight=torch.zeros(n, 4, dtype=torch.int8),
        x_scale=torch.ones(1),
        w_scale=torch.ones(n),
    ).with_options(extras=[values])


@pytest.mark.parametrize("real", REAL)
@pytest.mark.parametrize("text", EXACT)
def test_steps_round_as_torch_rounds(isa: str, text: str, real: torch.dtype) -> None:
    del isa
    for types in itertools.product((torch.float32, torch.bfloat16, torch.float16), repeat=2):
        case = linear((7, 36), 70)
        extras = [torch.randn(7, 70, dtype=t) for t in types]
        expected = Epilogue.parse(text).apply(case.expected().to(real), extras)

        y = case.with_options(
            extras=extras, epilogue=text, real=real, out_dtype=expected.dtype
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


@pytest.mark.parametrize("name", sorted(ACTIVATION_ERROR))
def test_activations_are_as_accurate_as_float32_allows(isa: str, name: str) -> None:
    del isa
    x = torch.linspace(-20, 20, 64 * 4001).reshape(-1, 64)
    exact = ACTIVATIONS[name](x.double())

    y = identity(x).with_options(epilogue=f"add(0,1.0)|act({name})").run()

    epsilons, floor = ACTIVATION_ERROR[name]
    allowed = epsilons * torch.finfo(torch.float32).eps * exact.abs().clamp_min(floor)
    assert ((y.double() - exact).abs() <= allowed + torch.finfo(torch.float32).tiny).all()


def test_every_activation_of_the_language_is_there(library: KernelLibrary) -> None:
    del library
    case = linear((3, 8), 5)
    arguments = {"hardtanh": (0.0, 6.0), "leaky_relu": (0.01,)}
    for name, function in ACTIVATIONS.items():
        args = arguments.get(name, ())
        text = f"act({','.join((name, *map(repr, args)))})"

        y = case.with_options(epilogue=text).run()

        torch.testing.assert_close(y, function(case.expected(), *args))


@pytest.mark.parametrize("name", [*sorted(ACTIVATION_ERROR), "relu", "leaky_relu,0.5"])
def test_extremes(isa: str, name: str) -> None:
    del isa
    x = torch.tensor([[0.0, -0.0, 1e-30, -1e-30, 90.0, -90.0, 1e37, -1e37, torch.nan]])
    function = ACTIVATIONS[name.partition(",")[0]]
    # In float64, since some of torch's own float32 versions overflow here.
    expected = function(x.double(), 0.5) if "," in name else function(x.double())

    y = identity(x).with_options(epilogue=f"add(0,1.0)|act({name})").run()

    assert torch.isnan(y[0, -1])
    torch.testing.assert_close(y[0, :-1], expected[0, :-1].float())


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
