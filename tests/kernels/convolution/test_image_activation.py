"""Epilogue ops on images, quantized in the same pass: torch's own ops are the reference, to the bit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from tests.support.cases.fake_kernels import OPCHECKS
from tests.support.cases.linear_kernel import STORED, codes
from tests.support.guard_pages import assert_same_with_guards

from qfuse.ir.errors import InputError
from qfuse.kernels import cat_channels, image_activation_quantized

pytestmark = [pytest.mark.numeric, pytest.mark.usefixtures("library")]

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
# Blocks of 64, 32 and 16 channels, and of fewer; all of them in 127.
CHANNELS = (
    (1,),
    (7,),
    (16,),
    (32,),
    (48,),
    (64,),
    (127,),
    (192,),
    (64, 32, 32),
    (5, 0, 33),
    (3, 17),
)
SIZES = ((2, 5, 3), (1, 1, 1), (3, 1, 4), (1, 40, 41), (2, 3, 2, 3))


def last(x: torch.Tensor) -> torch.Tensor:
    """The same values, channels-last."""
    return x.contiguous(memory_format=FORMATS[x.dim()])


def part_of_a_split(x: torch.Tensor) -> torch.Tensor:
    """The same values as a part of the channels of another image."""
    n, c, *sizes = x.shape
    wide = last(torch.zeros((n, c + 5, *sizes), dtype=x.dtype))
    wide[:, 2 : c + 2] = x
    return wide[:, 2 : c + 2]


LAYOUTS: dict[str, Callable[[list[torch.Tensor]], list[torch.Tensor]]] = {
    "channels-last": lambda parts: [last(x) for x in parts],
    "parts of splits": lambda parts: [part_of_a_split(x) for x in parts],
    "rows": lambda parts: parts,
    "lines apart": lambda parts: [
        last(torch.nn.functional.pad(x, (1, 2)))[..., 1:-2] for x in parts
    ],
}


def output_of(
    dtype: torch.dtype, low: int = 0, high: int = 255, zero: int = 0, scale: float = 0.037
) -> dict[str, Any]:
    """A result in steps of ``scale``; the range counts from the least value of ``dtype``."""
    least = torch.iinfo(dtype).min
    return {
        "out_scale": torch.tensor([scale]),
        "out_zero_point": torch.tensor([zero + least]),
        "quant_min": low + least,
        "quant_max": high + least,
        "out_dtype": dtype,
    }


def per_channel(values: torch.Tensor, dims: int) -> torch.Tensor:
    """Values that broadcast to the channels of an image."""
    return values if values.numel() == 1 else values.reshape(-1, *(1,) * (dims - 2))


def quantized(y: torch.Tensor, o: dict[str, Any]) -> torch.Tensor:
    """What the op promises, in torch; what is not a number becomes 0."""
    scale, zero = o["out_scale"], o["out_zero_point"].float()
    y = y * scale.reciprocal().float() if o.get("reciprocal", True) else y / scale.float()
    y = (y + zero).round() if o.get("zero_point_first", False) else y.round() + zero
    return y.clamp(o["quant_min"], o["quant_max"]).nan_to_num(0.0).to(o["out_dtype"])


@dataclass(frozen=True)
class Case:
    """Images, their parameters, and float operands; ``expected`` applies ``steps`` in torch."""

    parts: list[torch.Tensor]
    scale: torch.Tensor | None
    zero: torch.Tensor | None
    text: str = ""
    extras: list[torch.Tensor] = field(default_factory=list)
    steps: Callable[..., torch.Tensor] = lambda y: y
    output: dict[str, Any] = field(default_factory=lambda: output_of(torch.uint8))

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = {"x_scale": self.scale, "x_zero_point": self.zero, "epilogue": self.text}
        args = self.parts[0], self.parts[1:] or None
        return args, {**given, "extras": self.extras or None, **self.output}

    def expected(self) -> torch.Tensor:
        y = torch.cat(self.parts, 1).float()
        if self.scale is not None:
            zero = torch.zeros(1) if self.zero is None else self.zero.float()
            y = (y - per_channel(zero, y.dim())) * per_channel(self.scale.float(), y.dim())
        return quantized(self.steps(y, *self.extras), self.output)

    def check(self) -> torch.Tensor:
        args, options = self.arguments()
        y, expected = image_activation_quantized(*args, **options), self.expected()
        assert torch.equal(y, expected), (self.text, self.output, self.scale, self.zero)
        assert y.stride() == torch.empty(y.shape, memory_format=FORMATS[y.dim()]).stride()
        return y


def images(
    size: Sequence[int], channels: Sequence[int], dtype: torch.dtype, layout: str = "channels-last"
) -> list[torch.Tensor]:
    n, *sizes = size
    shapes = [(n, c, *sizes) for c in channels]
    stored = not dtype.is_floating_point
    return LAYOUTS[layout]([codes(s, dtype) if stored else torch.randn(s) * 3 for s in shapes])


def norm(dims: int, channels: int) -> list[torch.Tensor]:
    """A factor and a summand per channel."""
    return [torch.randn(channels, *(1,) * (dims - 2)), torch.randn(channels, *(1,) * (dims - 2))]


NORM = "mul(0)|add(1,1.0)"


def normed(y: torch.Tensor, factor: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return y * factor + shift


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("each", [False, True])
def test_a_norm(isa: str, channels: tuple[int, ...], dtype: torch.dtype, each: bool) -> None:
    """Of every dtype and granularity, width, range and size."""
    del isa
    total, least = sum(channels), torch.iinfo(dtype).min
    count = total if each else 1
    ranges = ((0, 255, 0), (0, 255, 131), (0, 255, 255), (3, 200, 17), (7, 7, 0), (0, 127, 300))
    zeros = (None, torch.randint(least, least + 256, (count,)), torch.tensor([0]))
    for size, zero, target in itertools.product(SIZES[:3] + SIZES[4:], zeros, STORED):
        parts = images(size, channels, dtype)
        extras = norm(parts[0].dim(), total)
        case = Case(parts, torch.rand(count) * 0.05 + 0.001, zero, NORM, extras, normed)
        for low, high, z in ranges:
            replace(case, output=output_of(target, low, high, z)).check()
    large = images(SIZES[3], channels, dtype)
    Case(large, torch.rand(count) * 0.05, zeros[1], NORM, norm(4, total), normed).check()


ACTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "act(relu)": torch.relu,
    "act(hardtanh,-0.2,1.3)": lambda y: y.clamp(-0.2, 1.3),
    "act(hardtanh,0.0,6.0)": lambda y: y.clamp(0, 6),
    "act(squared_relu)": lambda y: torch.relu(y).square(),
    "act(relu)|act(hardtanh,0.5,0.25)": lambda y: torch.full_like(y, 0.25),
}


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("dtype", STORED)
def test_a_norm_and_an_activation(isa: str, act: str, dtype: torch.dtype) -> None:
    del isa
    for channels, (low, high, z) in itertools.product(
        ((127,), (64, 33)), ((0, 255, 0), (0, 255, 131), (20, 200, 60), (0, 255, 300))
    ):
        case = Case(
            images((2, 5, 3), channels, dtype),
            torch.tensor([0.03]),
            torch.tensor([7]),
            f"{NORM}|{act}",
            norm(4, sum(channels)),
            lambda y, f, s: ACTS[act](normed(y, f, s)),
            output_of(dtype, low, high, z),
        )
        case.check()


def gates(channels: int) -> dict[str, torch.Tensor]:
    """Factors in every shape that broadcasts."""
    shapes = {
        "image and channel": (2, channels, 1, 1),
        "channel": (1, channels, 1, 1),
        "channel without a batch": (channels, 1, 1),
        "image": (2, 1, 1, 1),
        "pixel": (2, 1, 5, 3),
        "column": (3,),
        "one": (1,),
        "all": (2, channels, 5, 3),
    }
    return {name: torch.rand(shape) * 2 - 0.5 for name, shape in shapes.items()}


@pytest.mark.parametrize("name", gates(1))
@pytest.mark.parametrize("dtype", [*STORED, torch.float32])
def test_a_gate(isa: str, name: str, dtype: torch.dtype) -> None:
    """An image times what broadcasts to it, as in squeeze-excite."""
    del isa
    stored = not dtype.is_floating_point
    scale, zero = (torch.tensor([0.02]), torch.tensor([3])) if stored else (None, None)
    for channels, kind, layout in itertools.product(((64,), (127,), (16, 9)), REAL, LAYOUTS):
        gate = gates(sum(channels))[name].to(kind)
        case = Case(
            images((2, 5, 3), channels, dtype, layout),
            scale,
            zero,
            "mul(0)",
            [gate],
            lambda y, g: y * g.float(),
            output_of(torch.int8, zero=100),
        )
        case.check()


REAL = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_a_quantized_gate_and_addend(isa: str, dtype: torch.dtype) -> None:
    del isa
    stored = not dtype.is_floating_point
    scale = torch.tensor([0.02]) if stored else None
    for channels, kind, (factor, z) in itertools.product(
        (64, 35), STORED, ((0.0371, 5), (0.002, 0))
    ):
        q, other = codes((2, channels, 1, 1), kind), last(codes((2, channels, 5, 3), kind))
        gate, addend = ((x.float() - z) * torch.tensor(factor) for x in (q, other))
        params = f"{factor},{z}"
        for text, stored_extras, floats, steps in (
            (f"mul(0,{params})", [q], [gate], torch.mul),
            (f"mul(0,{params})|add(1,0.5,{params})", [q, other], [gate, addend], half_added),
            (f"add(0,-1.0,{params})|act(relu)", [q], [gate], lambda y, g: (y - g).relu()),
        ):
            parts = images((2, 5, 3), (channels,), dtype)
            case = Case(parts, scale, None, text, floats, steps)
            args, options = case.arguments()
            y = image_activation_quantized(*args, **{**options, "extras": stored_extras})
            assert torch.equal(y, case.expected()), (text, channels)


def half_added(y: torch.Tensor, gate: torch.Tensor, addend: torch.Tensor) -> torch.Tensor:
    return y * gate + addend * 0.5


@pytest.mark.parametrize("options", [{"reciprocal": False}, {"zero_point_first": True}])
@pytest.mark.parametrize("dtype", [*STORED, torch.float32])
def test_other_roundings(isa: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    del isa
    scale = None if dtype.is_floating_point else torch.tensor([0.02], dtype=torch.float64)
    for channels in ((64,), (33,)):
        output = {**output_of(torch.uint8, zero=9), **options}
        Case(
            images((2, 5, 3), channels, dtype),
            scale,
            None,
            NORM,
            norm(4, *channels),
            normed,
            output,
        ).check()
        Case(images((2, 5, 3), channels, dtype), scale, None, output=output).check()


# What leads to infinities, NaN, or values that 32 bits do not hold.
ODD = (math.inf, -math.inf, math.nan, 3e38, -3e38, 1e30, 1e-40, -0.0)


@pytest.mark.parametrize("dtype", [*STORED, torch.float32])
@pytest.mark.parametrize("act", ["", "|act(relu)", "|act(hardtanh,-1.0,1.0)"])
def test_numbers_that_are_not_finite(isa: str, dtype: torch.dtype, act: str) -> None:
    del isa
    stored = not dtype.is_floating_point
    steps = {"": lambda y: y, "|act(relu)": torch.relu}.get(act, lambda y: y.clamp(-1, 1))
    for channels, at in itertools.product((64, 32, 35), range(4)):
        for number in ODD:
            parts = images((1, 5, 3), (channels,), dtype)
            scale = torch.full((channels,), 0.02)
            extras = norm(4, channels)
            if at == 0 and stored:
                scale[5] = number
            elif at == 0:
                parts[0][0, 5, 1, 1] = number
            elif at == 3:
                scale = scale * 1e20
                extras[0][7] = number
            else:
                extras[at - 1][5] = number
            Case(
                parts,
                scale if stored else None,
                None,
                NORM + act,
                extras,
                lambda y, f, s, after=steps: after(normed(y, f, s)),
                output_of(torch.uint8, zero=130),
            ).check()


@pytest.mark.parametrize("dtype", STORED)
def test_ties_are_even(isa: str, dtype: torch.dtype) -> None:
    del isa
    for channels in (64, 35):
        x = last(torch.arange(256).sub(128 if dtype is torch.int8 else 0).to(dtype)
                 .reshape(1, 1, 16, 16).repeat(1, channels, 1, 1))  # fmt: skip
        Case([x], torch.tensor([0.5]), None, output=output_of(torch.uint8, scale=1.0)).check()


def test_small_and_large_scales(isa: str) -> None:
    """Sums of 16 bits must not wrap, and factors of any size stay exact."""
    del isa
    for scale, out, zero in itertools.product(
        (1e-8, 1e-2, 1e4, 1e30), (1e-30, 1e-6, 1e3), (0, 128, 9000)
    ):
        Case(
            images((1, 3, 3), (64,), torch.uint8),
            torch.tensor([scale]),
            torch.tensor([100]),
            NORM,
            norm(4, 64),
            normed,
            output_of(torch.int8, zero=zero, scale=out),
        ).check()


@pytest.mark.parametrize("channels", [(64,), (31, 64, 65, 0, 7), (256, 24), (5,)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_reads_and_writes_nothing_else(isa: str, channels: tuple[int, ...], layout: str) -> None:
    del isa
    total = sum(channels)
    for size, dtype in itertools.product(SIZES[:3] + SIZES[4:], (torch.uint8, torch.float32)):
        stored = not dtype.is_floating_point
        parts = images(size, channels, dtype, layout)
        scale, zero = torch.rand(total) * 0.05, torch.randint(0, 255, (total,))
        for text, extras in (
            (NORM, norm(parts[0].dim(), total)),
            ("mul(0)|act(silu)", [torch.rand(size[0], total, *(1,) * (len(size) - 1))]),
            ("add(0,0.5)", [torch.rand(size[0], total, *size[1:])]),
        ):
            params = (scale, zero) if stored else (None, None)
            args, options = Case(parts, *params, text, extras).arguments()
            assert_same_with_guards(image_activation_quantized, args, options)


def test_threads_and_instruction_sets_do_not_matter(isa: str) -> None:
    del isa
    torch.manual_seed(0)
    parts = images((2, 57, 31), (64, 32, 5), torch.int8)
    case = Case(parts, torch.tensor([0.03]), None, NORM, norm(4, 101), normed)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            case.check()
    finally:
        torch.set_num_threads(threads)


def test_without_steps_it_is_a_join_of_other_scales(isa: str) -> None:
    del isa
    parts = images((2, 5, 3), (64, 32, 7), torch.uint8)
    y = Case(parts, torch.tensor([0.5]), None, output=output_of(torch.uint8, scale=0.5)).check()

    assert torch.equal(y, cat_channels(parts[0], parts[1:]))


@pytest.mark.parametrize("size", [(0, 4, 4), (2, 0, 4)])
def test_no_pixel(isa: str, size: tuple[int, ...]) -> None:
    del isa
    parts = [torch.empty(size[0], c, *size[1:], dtype=torch.uint8) for c in (3, 4)]
    Case(parts, torch.tensor([0.1]), None, NORM, norm(4, 7), normed).check()


def test_no_channel(isa: str) -> None:
    del isa
    parts = [torch.empty(2, 0, 4, 4, dtype=torch.uint8)] * 2
    Case(parts, torch.tensor([0.1]), None).check()


STORED_IMAGE = torch.zeros(2, 3, 4, 4, dtype=torch.int8)
SCALE = torch.tensor([0.1])
WRONG: dict[str, tuple[list[torch.Tensor], dict[str, Any]]] = {
    "4 or 5 axes": ([STORED_IMAGE[0]], {"x_scale": SCALE}),
    "int8, uint8 or float32": ([STORED_IMAGE.bfloat16()], {}),
    "channels only": ([STORED_IMAGE, STORED_IMAGE[:, :, 1:]], {"x_scale": SCALE}),
    "need a scale": ([STORED_IMAGE], {}),
    "neither scale nor zero point": ([STORED_IMAGE.float()], {"x_scale": SCALE}),
    "x_scale has 2 elements, expected 1 or 3": ([STORED_IMAGE], {"x_scale": torch.ones(2)}),
    "not float32": ([STORED_IMAGE], {"x_scale": SCALE, "epilogue": "cast(bfloat16)"}),
    "does not support GLU": ([STORED_IMAGE], {"x_scale": SCALE, "epilogue": "glu(silu,up-first)"}),
    "not there": ([STORED_IMAGE], {"x_scale": SCALE, "epilogue": "mul(0)"}),
    "at least one axis": (
        [STORED_IMAGE],
        {"x_scale": SCALE, "epilogue": "mul(0)", "extras": [torch.tensor(1.0)]},
    ),
    "range of the codes": ([STORED_IMAGE], {"x_scale": SCALE, "quant_max": 300}),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_it_refuses(message: str) -> None:
    parts, options = WRONG[message]
    with pytest.raises(RuntimeError, match=message):
        image_activation_quantized(parts[0], parts[1:], **{**output_of(torch.uint8), **options})


def test_what_the_fake_refuses() -> None:
    meta = [x.to("meta") for x in (STORED_IMAGE, STORED_IMAGE[:, :, 1:])]
    options = {**output_of(torch.uint8), "x_scale": SCALE}
    with pytest.raises(InputError, match="channels only"):
        image_activation_quantized(meta[0], meta[1:], **options)
    with pytest.raises(InputError, match="int8 or uint8"):
        image_activation_quantized(meta[0], None, **{**options, "out_dtype": torch.int32})
    with pytest.raises(InputError, match="4 or 5 axes"):
        image_activation_quantized(meta[0][0], None, **options)


@pytest.mark.parametrize("size", SIZES)
def test_the_fake_is_like_the_result(size: tuple[int, ...]) -> None:
    parts = images(size, (5, 16, 33), torch.uint8, "rows")
    args, options = Case(parts, SCALE, None, NORM, norm(parts[0].dim(), 54), normed).arguments()
    y = image_activation_quantized(*args, **options)

    fake = image_activation_quantized(
        args[0].to("meta"), [x.to("meta") for x in args[1]], **options
    )

    assert (fake.shape, fake.stride(), fake.dtype) == (y.shape, y.stride(), y.dtype)
    bound = image_activation_quantized._bind(args, options)
    op = torch.ops.qfuse.image_activation_quantized.default
    torch.library.opcheck(op, tuple(bound), test_utils=OPCHECKS)
