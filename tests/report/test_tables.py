"""What the report's tables say."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from rich.console import Console
from torch import nn

import qfuse
from qfuse.ir.events import Checked, Event, Exactness, Fired, Left, MissCode, Missed, Noted, Place
from qfuse.report import Report
from qfuse.report.facts import Facts, TargetFacts

LINEAR = Place("linear", "aten.linear")
FACTS = Facts(target=TargetFacts("CPU", "x86_64", "AVX512", (), 1), backend="eager")
MISS = Missed("optimize", "fuse-linear", MissCode.NOT_QUANTIZED, "not quantized", LINEAR, LINEAR, 1)


def quantized_ops(report: Report) -> str:
    """The verdict in the row ``quantized ops``, or "" without that row."""
    lines = report.text(verbose=True).splitlines()
    (row,) = [line for line in lines if "│ quantized ops" in line] or [""]
    return row.partition("quantized ops")[2].strip(" │")


def test_what_is_left_names_the_rule_that_came_closest() -> None:
    place = Place("q", "qfuse.quantize", "model.py:1: q(x)", "")
    left = Left("lower", place, "no fused op uses it")
    miss = Missed(
        *("optimize", "fuse-output", MissCode.PATTERN, "expected aten.neg", place, place, 2),
        held=2,
        conditions=5,
    )
    text = Report((left, miss)).text(verbose=True, width=300)
    (row,) = [line for line in text.splitlines() if "no fused op uses it" in line]

    assert "fuse-output (2 of 5 conditions hold): expected aten.neg" in row


def test_a_float_model_is_called_one() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()
    report = qfuse.explain(model, (torch.randn(2, 8),))

    assert report.closest_misses != ()
    assert quantized_ops(report).startswith("none: the model is not quantized")


@pytest.mark.parametrize(
    ("events", "verdict"),
    [
        ((), "none: the model is not quantized, or its quantization was not recognized"),
        ((MISS,), "none: the model is not quantized, or its quantization was not recognized"),
        ((MISS, Left("lower", LINEAR, "")), "none: the quantized ops could not be fused"),
    ],
)
def test_why_there_are_no_quantized_ops(events: tuple[Event, ...], verdict: str) -> None:
    assert quantized_ops(Report(events, FACTS)).startswith(verdict)


def test_a_note_that_several_places_have_is_written_once() -> None:
    places = [Place(name, "aten.linear", f"model.py:{i}: f(x)") for i, name in enumerate("abc")]
    notes = [Noted("lower", "it is slow", place) for place in places]
    warned = [Noted("lower", "it is bad", place, warn=True) for place in places[:2]]
    pair = [Noted("lower", "it is new", place) for place in places[:2]]
    report = Report((*notes, Noted("lower", "of all"), *warned, *pair))
    text = report.text(verbose=True, width=200)

    assert "note: it is slow (aten.linear (model.py:0: f(x)), and 2 more)\n" in text
    for i in range(2):
        assert f"warning: it is bad (aten.linear (model.py:{i}: f(x)))\n" in text
    assert "note: it is new (aten.linear (model.py:0: f(x)), and 1 more)\n" in text
    assert text.count("it is slow") == 1
    assert "note: of all\n" in text


def test_passes_say_nothing_of_kernels() -> None:
    fired = Fired("optimize", "merge-linears", "merge-linears@a", Exactness.EXACT, (LINEAR,))
    text = Report((fired,), Facts(standalone_pass="MergeLinears")).text(verbose=True)

    assert "merge-linears 1" in text
    assert "quantized ops" not in text
    assert "left as they are" not in text


TEXT = "cast to 8 bits({clamp((round({(x / scale) | (x * inverse)}) + zero_point)?, low, high) | round(clamp(x))})"
PATTERN = f"{TEXT}\n{' ' * TEXT.index('round')}^^^^^"


def patterns(width: int, *misses: Missed) -> str:
    """What a report of that width says below the table "Not fused"."""
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        console.print(Report(misses, FACTS).renderable(verbose=True))
    return capture.get().partition("\nNot fused")[2].partition("┘")[2].strip("\n")


def unmatched(rule: str, node: str, pattern: str) -> Missed:
    place = Place(node, "aten._to_copy")
    reason = "expected aten.round, found aten.floor"
    return Missed("normalize", rule, MissCode.PATTERN, reason, place, place, 3, pattern)


def test_a_pattern_is_shown_below_the_table_once() -> None:
    twice = [unmatched("quantize-chain", node, PATTERN) for node in ("a", "b")]

    assert_expected_inline(
        patterns(120, *twice, MISS, unmatched("fuse-bias", "c", "a[red] + b\n       ^")),
        """\
The part of a pattern that did not match
quantize-chain: expected aten.round, found aten.floor
  cast to 8 bits({clamp((round({(x / scale) | (x * inverse)}) + zero_point)?, low, high) | round(clamp(x))})
                         ^^^^^
fuse-bias: expected aten.round, found aten.floor
  a[red] + b
         ^""",
    )


def test_a_pattern_of_two_rows() -> None:
    assert_expected_inline(
        patterns(60, unmatched("quantize-chain", "a", f"{TEXT}\n{' ' * TEXT.index('low')}^^^")),
        """\
The part of a pattern that did not match
quantize-chain: expected aten.round, found aten.floor
  cast to 8 bits({clamp((round({(x / scale) | (x *
  inverse)}) + zero_point)?, low, high) | round(clamp(x))})
                             ^^^""",
    )


def test_a_long_pattern_takes_rows_and_its_carets_stay_under_it() -> None:
    part = TEXT[TEXT.index("round(") : TEXT.index(", low")]
    carets = " " * TEXT.index(part) + "^" * len(part)
    longer = f"{'prefix(x) | ' * 9}{TEXT}\n{' ' * 108}{carets}"

    assert_expected_inline(
        patterns(60, unmatched("a", "a", f"{TEXT}\n{carets}")),
        """\
The part of a pattern that did not match
a: expected aten.round, found aten.floor
  cast to 8 bits({clamp((round({(x / scale) | (x *
                         ^^^^^^^^^^^^^^^^^^^^^^^^^^
  inverse)}) + zero_point)?, low, high) | round(clamp(x))})
  ^^^^^^^^^^^^^^^^^^^^^^^^^""",
    )
    assert_expected_inline(
        patterns(60, unmatched("a", "a", longer)),
        """\
The part of a pattern that did not match
a: expected aten.round, found aten.floor
  ...| prefix(x) | prefix(x) | prefix(x) | prefix(x) |
  prefix(x) | cast to 8 bits({clamp((round({(x / scale) |
                                     ^^^^^^^^^^^^^^^^^^^^^
  (x * inverse)}) + zero_point)?, low, high) |
  ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  round(clamp(x))})""",
    )


def test_without_patterns_the_table_is_all() -> None:
    assert patterns(80, MISS) == ""


def test_a_chain_that_is_rounded_down_is_shown_with_its_pattern() -> None:
    class RoundsDown(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.clamp(torch.floor(x / 0.05) + 3, -128, 127).to(torch.int8)

    report = qfuse.explain(RoundsDown(), (torch.randn(2, 8),)).text(verbose=True)

    assert_expected_inline(
        "\n".join(report.partition("did not match\n")[2].splitlines()[:3]),
        """\
quantize-chain: expected aten.round to the nearest integer, found aten.floor
  cast to integers({clamp((round({(x / scale) | (x * (reciprocal(scale) * 1)?) | (x * inverse)}) + zer...
                           ^^^^^""",
    )


def test_the_error_is_told_in_rounding_errors_of_the_source() -> None:
    check = Checked("check", "model", True, Exactness.ROUNDING, 0.12, 8.0)
    text = Report((check,), FACTS).text(verbose=True)

    assert "passed (error: 0.12 x the source's rounding error; up to 8 x passes)" in text
