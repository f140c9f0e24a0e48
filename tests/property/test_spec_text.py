"""What graphs carry as text: every spec can be written down and read back, and nothing else reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.strategies.quant_specs import any_specs, choose_specs, epilogues

from qfuse.ir.errors import NormalizeError
from qfuse.ir.ops.epilogue import Epilogue
from qfuse.ir.quant.choose import ChooseSpec
from qfuse.ir.quant.spec import QuantSpec

pytestmark = pytest.mark.property

TEXTS = st.one_of(any_specs(), choose_specs(), epilogues()).map(str)
PARSERS = [QuantSpec.parse, ChooseSpec.parse, Epilogue.parse]


@given(any_specs())
def test_a_quantization_spec_reads_back(spec: QuantSpec) -> None:
    assert QuantSpec.parse(str(spec)) == spec


@given(any_specs(), any_specs())
def test_specs_are_equal_exactly_when_their_texts_are(a: QuantSpec, b: QuantSpec) -> None:
    assert (a == b) == (str(a) == str(b))


@given(choose_specs())
def test_a_choose_spec_reads_back(spec: ChooseSpec) -> None:
    assert ChooseSpec.parse(str(spec)) == spec


@given(epilogues())
def test_an_epilogue_reads_back(epilogue: Epilogue) -> None:
    assert Epilogue.parse(str(epilogue)) == epilogue
    assert str(Epilogue.parse(str(epilogue))) == str(epilogue)


@pytest.mark.parametrize("parse", PARSERS)
@given(text=TEXTS, at=st.integers(0, 200), letter=st.sampled_from("x*,()[]:| -.19aé"))
def test_a_text_with_a_typo_is_read_or_refused(
    parse: Callable[[str], object], text: str, at: int, letter: str
) -> None:
    at = min(at, len(text))
    for garbled in (text[:at] + letter + text[at:], text[:at] + letter + text[at + 1 :]):
        try:
            again = parse(garbled)
        except NormalizeError:
            continue
        assert parse(str(again)) == again, "what is read can be written and read again"
