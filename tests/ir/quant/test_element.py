"""Elements of 4 and 6 bits, over all codes, against torchao's conversions."""

from __future__ import annotations

import pytest
import torch

from qfuse.ir.quant.element import (
    CONTAINER,
    Element,
    decode,
    encode,
    round_to_element,
    scale_divisor,
)
from qfuse.zoo._torchao_api import quiet_imports

with quiet_imports():
    from torchao.prototype.custom_fp_utils import _f32_to_floatx_unpacked, _floatx_unpacked_to_f32
    from torchao.prototype.mx_formats.mx_tensor import get_fp_scale

from collections.abc import Sequence

pytestmark = pytest.mark.numeric

FORMATS = [Element.E2M1, Element.E2M3, Element.E3M2]
VALUES = {
    Element.E2M1: (6.0, 1.0, 0.5),
    Element.E2M3: (7.5, 1.0, 0.125),
    Element.E3M2: (28.0, 0.25, 0.0625),
}


def all_codes(element: Element) -> torch.Tensor:
    return torch.arange(2 << (element.exponent_bits + element.mantissa_bits), dtype=torch.uint8)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32).view(torch.int32)


@pytest.mark.parametrize("element", FORMATS)
def test_every_code_is_the_number_that_torchao_says(element: Element) -> None:
    codes = all_codes(element)
    sizes = element.exponent_bits, element.mantissa_bits

    values = decode(codes, element)
    assert values.dtype is CONTAINER
    assert torch.equal(bits(values), bits(_floatx_unpacked_to_f32(codes, *sizes)))
    assert torch.equal(encode(values, element), codes), "the sign of zero too"
    top, normal, least = VALUES[element]
    magnitudes = values.float().abs()
    assert magnitudes.max() == element.greatest == top
    assert magnitudes[magnitudes > 0].min() == least
    assert 2.0**element.least_exponent == normal


@pytest.mark.parametrize("element", FORMATS)
def test_rounding_keeps_the_strides(element: Element) -> None:
    x = torch.randn(2, 3, 4)
    for turned in (x, x.permute(2, 0, 1), x.mT, torch.randn(4, 6)[:, ::2], x[:1].mT):
        assert round_to_element(turned, element).stride() == torch.empty_like(turned).stride()


def neighbours(points: Sequence[float]) -> torch.Tensor:
    """Numbers, and those right below and above them."""
    x = torch.tensor(points, dtype=torch.float32)
    up = torch.nextafter(x, torch.tensor(torch.inf))
    return torch.cat([x, up, torch.nextafter(x, torch.tensor(-torch.inf))])


@pytest.mark.parametrize("element", FORMATS)
def test_rounding_is_that_of_torchao(element: Element) -> None:
    sizes = element.exponent_bits, element.mantissa_bits
    known = decode(all_codes(element), element).float().sort().values
    ties = (known[1:] + known[:-1]) / 2
    anything = torch.arange(-(2**31), 2**31, 2**14 + 7).to(torch.int32).view(torch.float32)
    anything = anything[~anything.isnan()]
    special = [torch.inf, -torch.inf, 0.0, -0.0, 3.4e38, 1e-45, -1e-38, torch.nan]
    x = torch.cat([neighbours([*known.tolist(), *ties.tolist(), *special]), anything])

    rounded = round_to_element(x, element)
    assert torch.equal(bits(rounded.to(CONTAINER)), bits(rounded)), "the container holds them"
    assert torch.equal(encode(rounded, element), _f32_to_floatx_unpacked(x, *sizes))


def test_every_power_of_two_is_read_as_torchao_reads_it() -> None:
    scales = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    mine, theirs = scales.to(torch.float32), get_fp_scale(scales)
    assert torch.equal(mine.nan_to_num(-1.0), theirs.nan_to_num(-1.0))
    assert mine[-1].isnan()


def test_what_real_numbers_are_divided_by() -> None:
    scales = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    divisor = scale_divisor(scales, reciprocal=False)
    factor = scale_divisor(scales, reciprocal=True)
    plain = torch.arange(1, 255)
    assert torch.equal(divisor[plain], torch.exp2(plain.double() - 127).float())
    assert torch.equal(factor[plain], torch.exp2(127 - plain.double()).float())
    assert divisor[0] == 2.0**-126
    assert factor[0] == 1.0
    assert divisor[255].isinf()
    assert factor[255].isnan()


def test_an_element_that_is_not_a_number_is_a_finite_one() -> None:
    x = torch.tensor([torch.nan, -torch.nan])
    for element in FORMATS:
        assert round_to_element(x, element).tolist() == [1.5, -1.5]
