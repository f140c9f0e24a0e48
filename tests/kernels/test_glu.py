"""The halves of a linear multiplied in its own pass: by bits, on every path, at any size."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.cases.glu import activated, halves
from tests.support.cases.linear_kernel import REAL, STORED, Linear
from tests.support.cases.rowwise_kernel import dynamic

from qfuse.ir.ops.epilogue import Epilogue
from qfuse.kernels import (
    KernelLibrary,
    instruction_set,
    linear_w8a8,
    linear_w8a16,
    pack_weight,
)
from qfuse.kernels.rowwise import activation_quantized
from qfuse.lower.problems.epilogue_limits import KERNEL_ACTIVATIONS, PRELU

pytestmark = pytest.mark.numeric

ROWS = (1, 4, 5, 6, 7, 17, 70)
WIDTHS = (1, 2, 15, 17, 63, 64, 65, 130)
DEPTHS = (1, 3, 4, 63, 66, 129)
_WITH_ARGUMENTS = {"hardtanh", "leaky_relu", "elu", "quick_gelu", PRELU}
ACTS = sorted(KERNEL_ACTIVATIONS - _WITH_ARGUMENTS)


@pytest.mark.parametrize("rows", ROWS)
def test_every_size(isa: str, rows: int) -> None:
    for index, (h, k) in enumerate(itertools.product(WIDTHS, DEPTHS)):
        case = halves((rows, k), h, dtype=STORED[index % 2])
        y = case.run()

        assert y.shape == (rows, h)
        assert torch.equal(y, case.in_parts()), (isa, rows, h, k)


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("real", REAL)
@pytest.mark.parametrize("flags", list(itertools.product((False, True), repeat=4)), ids=str)
def test_every_granularity(
    isa: str, dtype: torch.dtype, real: torch.dtype, flags: tuple[bool, ...]
) -> None:
    del isa
    names = ("per_token", "zero_point", "weight_zero_point", "bias")
    kind = dict(zip(names, flags, strict=True))
    for h in (3, 64, 70):
        case = replace(halves((7, 20), h, dtype=dtype, **kind), float_dtype=real)

        assert torch.equal(case.run(), case.in_parts())


@pytest.mark.parametrize("side", ["gate-first", "up-first"])
@pytest.mark.parametrize("act", [*ACTS, "hardtanh,-0.5,0.25", "leaky_relu,0.125"])
def test_every_activation(isa: str, act: str, side: str) -> None:
    """Against torch's own functions, within the activations' errors."""
    del isa
    case = replace(halves((9, 20), 70), epilogue=f"glu({act},{side})")
    wide = case.linear.expected()
    want = Epilogue.parse(case.epilogue).apply(wide.double(), []).float()

    assert torch.equal(case.run(), case.in_parts())
    scale = want.abs().max()
    torch.testing.assert_close(case.run(), want, rtol=1e-5, atol=float(scale) * 2e-6)


@pytest.mark.parametrize("real", REAL)
@pytest.mark.parametrize(
    "epilogue",
    [
        "mul(0)|glu(silu,gate-first)|add(1,0.5)|cast(bfloat16)",
        "add(0,1.0)|glu(silu,up-first)|mul(1)",
        "cast(bfloat16)|mul(0)|glu(gelu,gate-first)|cast(float32)|add(1,-2.0)",
        "cast(float16)|add(0,1.0)|cast(bfloat16)|glu(sigmoid,up-first)|cast(float16)|mul(1)",
        "mul(0)|add(0,0.25)|glu(relu,gate-first)|mul(1)|add(1,1.0)",
    ],
)
def test_steps_in_front_and_behind_round_where_torch_does(
    isa: str, epilogue: str, real: torch.dtype
) -> None:
    del isa
    h = 70
    case = replace(halves((2, 5, 20), h), float_dtype=real, epilogue=epilogue)
    wide, behind = torch.randn(2, 5, 2 * h).bfloat16(), torch.randn(5, h)
    case = replace(case, extras=[wide, behind])

    got, want = case.run(), case.in_parts()
    assert got.dtype == want.dtype
    assert torch.equal(got, want)


def test_an_extra_of_one_column_is_read_on_both_sides(isa: str) -> None:
    del isa
    column = torch.randn(5, 1)
    case = replace(
        halves((5, 20), 3),
        epilogue="mul(0)|glu(silu,gate-first)|add(0,1.0)",
        extras=[column],
    )
    assert torch.equal(case.run(), case.in_parts())


@pytest.mark.parametrize("dtype", STORED)
def test_codes_with_a_given_scale(isa: str, dtype: torch.dtype) -> None:
    del isa
    low = torch.iinfo(dtype).min
    output: dict[str, Any] = {
        "quant_min": low,
        "quant_max": low + 255,
        "out_dtype": dtype,
        "out_scale": torch.tensor([0.013], dtype=torch.float64),
        "out_zero_point": torch.tensor([low + 100]),
    }
    case = halves((9, 36), 70, zero_point=True)
    y = case.run()
    codes = torch.round(y * torch.tensor(1 / 0.013)) + (low + 100)
    want = codes.clamp(low, low + 255).to(dtype)

    assert torch.equal(case.run_quantized(**output), want)


@pytest.mark.parametrize("shape", [(20,), (2, 3, 20), (2, 1, 4, 20)])
def test_every_rank(isa: str, shape: tuple[int, ...]) -> None:
    del isa
    case = halves(shape, 10, zero_point=True)
    assert torch.equal(case.run(), case.in_parts())


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (4, 0)])
def test_empty(isa: str, shape: tuple[int, ...]) -> None:
    del isa
    case = halves(shape, 10, per_token=False, zero_point=True)
    assert torch.equal(case.run(), case.in_parts())


def test_no_features(isa: str) -> None:
    del isa
    assert halves((3, 8), 0).run().shape == (3, 0)


def test_rows_that_repeat(isa: str) -> None:
    del isa
    case = halves((1, 20), 70, per_token=False)
    spread = replace(case, linear=replace(case.linear, x=case.linear.x.expand(9, 20)))
    assert torch.equal(spread.run(), case.run().expand(9, 70))


def test_paths_and_threads_agree_bit_for_bit(library: KernelLibrary) -> None:
    case = replace(
        halves((61, 200), 203, zero_point=True, weight_zero_point=True),
        epilogue="glu(gelu,up-first)|act(silu)",
    )
    before, results = torch.get_num_threads(), []
    for name in library.instruction_sets:
        with instruction_set(name):
            for threads in (1, 2, 8):
                torch.set_num_threads(threads)
                results.append(case.run())
    torch.set_num_threads(before)

    assert len(results) == 3 * len(library.instruction_sets)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_whole_blocks_are_packed_as_without_halves() -> None:
    weight, zero = torch.randint(-128, 128, (256, 7), dtype=torch.int8), torch.arange(256)
    halves = pack_weight(weight, zero, halves=True)
    for mine, plain in zip(halves, pack_weight(weight, zero), strict=True):
        assert torch.equal(mine, plain)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epilogue": "glu(silu,first)"}, "which half is the gate"),
        ({"epilogue": "glu(silu)"}, "which half is the gate"),
        ({"epilogue": "glu(softplus,gate-first)"}, "unknown activation"),
        ({"epilogue": "glu(leaky_relu,gate-first)"}, "has 2 arguments, expected 3"),
        ({"epilogue": "glu(silu,gate-first)|glu(silu,gate-first)"}, "halves of halves"),
        ({"epilogue": "halves(gate-first)|act(silu)"}, "are not multiplied"),
        ({"epilogue": "act(silu)|up()"}, "without a gate"),
        ({"epilogue": "times()"}, "without halves"),
        ({"epilogue": "round(1.0,0.0,0.0)"}, "has 3 arguments, expected 5"),
        ({"extras": [torch.ones(3, 12)], "epilogue": "glu(silu,gate-first)|mul(0)"}, "expand"),
        ({"extras": [torch.ones(3, 6)], "epilogue": "mul(0)|glu(silu,gate-first)"}, "expand"),
        ({"extras": [torch.ones(3, 12)]}, "expand"),
    ],
)
def test_refuses(library: KernelLibrary, change: dict[str, Any], message: str) -> None:
    del library
    case = halves((3, 8), 6)
    case.run()
    changed = replace(case, **change)
    args, options = changed.arguments()

    with pytest.raises(RuntimeError, match=message):
        torch.ops.qfuse.linear_w8a8.default(
            *args, options["w_zero_point"], options["bias"], options["extras"],
            options["epilogue"], torch.float32, torch.float32,
        )  # fmt: skip


def test_refuses_weights_that_are_packed_otherwise(library: KernelLibrary) -> None:
    del library
    case: Linear = halves((3, 8), 6).linear
    with pytest.raises(RuntimeError, match="each half for itself"):
        case.with_options(epilogue="glu(silu,gate-first)").run()
    odd = replace(case, weight=case.weight[:11], w_scale=case.w_scale[:11], bias=None)
    with pytest.raises(RuntimeError, match="halves 11 features"):
        odd.with_options(epilogue="glu(silu,gate-first)").run()


def test_other_kernels_refuse_a_glu(library: KernelLibrary) -> None:
    del library
    packed, _ = pack_weight(torch.ones(4, 8, dtype=torch.int8))
    with pytest.raises(RuntimeError, match="does not support GLU"):
        linear_w8a16(torch.ones(3, 8), packed, torch.ones(4), epilogue="glu(silu,gate-first)")
    with pytest.raises(RuntimeError, match="does not support GLU"):
        activation_quantized(torch.ones(3, 8), "glu(silu,gate-first)", dynamic())


@pytest.mark.parametrize("order", ["gate-first", "up-first"])
def test_each_half_is_rounded_by_itself(isa: str, order: str) -> None:
    """The trips to quantized values that a source makes between the activation and the product."""
    del isa
    trips = [(1 / 0.013, 17.0, 0, 255, 0.013), (1 / 0.02, -3.0, -128, 120, 0.02)]
    text = ["round(" + ",".join(map(repr, trip)) + ")" for trip in trips]
    act = f"halves({order})|act(silu)|{text[0]}|up()|{text[1]}|times()|{text[0]}"
    glu = replace(halves((9, 20), 70, bias=False), epilogue=f"glu(silu,{order})")
    args, options = glu.arguments()
    got = linear_w8a8(*args, **{**options, "epilogue": act})

    parts = [glu.part(slice(0, 70)), glu.part(slice(70, 140))]
    gate, up = parts if order == "gate-first" else parts[::-1]
    want = trip(trip(activated(gate, "act(silu)"), *trips[0]) * trip(up, *trips[1]), *trips[0])
    assert torch.equal(got, want)


def trip(y: torch.Tensor, *numbers: float) -> torch.Tensor:
    """Quantize and dequantize as torch does it in float32."""
    factor, zero, low, high, scale = (torch.tensor(n, dtype=torch.float32) for n in numbers)
    return (((y * factor).round() + zero).clamp(low, high) - zero) * scale


def test_steps_of_one_half_read_columns_of_the_result(isa: str) -> None:
    del isa
    plain = replace(halves((5, 20), 33), float_dtype=torch.bfloat16)
    args, options = plain.arguments()
    gate_extra, up_extra = torch.randn(5, 33), torch.randn(33).bfloat16()
    text = "halves(up-first)|act(relu)|add(0,1.0)|up()|mul(1)|times()|cast(bfloat16)"
    got = linear_w8a8(
        *args,
        **{**options, "epilogue": text, "extras": [gate_extra, up_extra]},
        out_dtype=torch.bfloat16,
    )
    up, gate = (plain.part(slice(i * 33, (i + 1) * 33)) for i in (0, 1))
    want = ((gate.relu() + gate_extra) * (up * up_extra)).bfloat16()
    assert torch.equal(got, want)
