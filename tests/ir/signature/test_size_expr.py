"""Size expressions mean what Python means by them, and nothing else is evaluated."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qfuse.ir.errors import InputError
from qfuse.ir.signature.size_expr import parse_size

LEAVES = st.sampled_from(["a", "b", "c"]) | st.integers(1, 9).map(str)


def combine(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    arithmetic = st.tuples(inner, st.sampled_from(["+", "-", "*", "//", "%"]), inner)
    calls = st.tuples(st.sampled_from(["max", "min"]), inner, inner)
    return arithmetic.map(lambda t: f"({t[0]} {t[1]} {t[2]})") | calls.map(
        lambda t: f"{t[0]}({t[1]}, {t[2]})"
    )


EXPRESSIONS = st.recursive(LEAVES, combine, max_leaves=8)
CONDITIONS = st.tuples(
    EXPRESSIONS, st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), EXPRESSIONS
).map(" ".join)
SIZES = st.fixed_dictionaries({name: st.integers(1, 64) for name in "abc"})


@pytest.mark.property
@given(EXPRESSIONS | CONDITIONS, SIZES)
def test_it_is_python(text: str, sizes: dict[str, int]) -> None:
    try:
        want = eval(text, {"max": max, "min": min}, dict(sizes))
    except ZeroDivisionError:
        with pytest.raises(ZeroDivisionError):
            parse_size(text)(sizes)
        return
    got = parse_size(text)(sizes)
    assert got == want
    assert type(got) is type(want)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 <= a <= 4 < b", True),
        ("a == 3 and b == 5", True),
        ("a == 4 or b == 4", False),
        ("not a == 3", False),
        ("-a + 2**b", 29),
        ("math.floor(a / 2)", 1),
        ("math.ceil(a / 2)", 2),
        ("math.trunc(torch.sym_float(a) / 2)", 1),
        ("abs(a - b)", 2),
        ("a < math.inf", True),
    ],
)
def test_what_torch_prints(text: str, value: float) -> None:
    assert parse_size(text)({"a": 3, "b": 5}) == value


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "a.b",
        "a[0]",
        "[a]",
        "lambda: a",
        "open('x')",
        "max(a, key=b)",
        "'text'",
        "a if b else c",
        "a +",
        "a << 2",
        "a is b",
        "~a",
        "a; b",
    ],
)
def test_nothing_else_is_an_expression(text: str) -> None:
    with pytest.raises(InputError, match="is not an expression over sizes"):
        parse_size(text)


def test_infinity_is_the_only_attribute() -> None:
    assert parse_size("math.inf")({}) == math.inf
    with pytest.raises(InputError):
        parse_size("math.pi")
