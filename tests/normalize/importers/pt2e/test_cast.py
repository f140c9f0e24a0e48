from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.dialects import Source, assert_same_bits, fired, hard_numbers, only_miss

from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.normalize import normalize

cast = torch.ops.quantized_decomposed.convert_element_type.no_fuse


def test_golden_it_is_a_copy_to_another_type() -> None:
    source = Source()
    x = source.b.arg("x", torch.float32, 3, 8)
    program = normalize(source.done(source.b.call(cast, x, torch.bfloat16)))

    assert fired(program) == ["normalize-element-cast"]
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[3, 8]
%0 = aten._to_copy(%x, dtype=bfloat16): bfloat16[3, 8]
return (%0)""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float32])
def test_values_are_those_of_the_source(dtype: torch.dtype) -> None:
    source = Source()
    x = source.arg(hard_numbers((3, 8), torch.float32))

    program = assert_same_bits(source, source.b.call(cast, x, dtype))
    assert fired(program) == ["normalize-element-cast"]


def test_refuses_complex_numbers() -> None:
    source = Source()
    x = source.arg(torch.randn(3, 8))

    miss = only_miss(assert_same_bits(source, source.b.call(cast, x, torch.complex64)))
    assert miss.code is MissCode.DTYPE
