"""The first screen fits a terminal and says what matters first."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

import qfuse
from qfuse.ir.events import (
    EXPAND,
    FLOAT,
    Checked,
    Estimated,
    Event,
    Exactness,
    ExpandCause,
    Left,
    Lowered,
    MissCode,
    Missed,
    Noted,
    Place,
    RolledBack,
)
from qfuse.report import Report
from qfuse.report.facts import Facts, TargetFacts
from qfuse.targets import Target

FACTS = Facts(target=TargetFacts("CPU", "x86_64", "AVX512", (), 1))


def place(name: str, op: str = "aten.linear") -> Place:
    return Place(name, op, f"/src/model.py:{len(name)}: y = self.{name}(x)", f"layers.{name}")


def product(name: str, multiply_adds: int = 100) -> tuple[Event, ...]:
    """A float linear whose weight is not quantized."""
    at = place(name)
    return (
        Missed("optimize", "fuse-linear", MissCode.NOT_QUANTIZED, f"{name} is not", at, at),
        Estimated("lower", at, multiply_adds, multiply_adds * 1e-6, multiply_adds * 1e-7),
    )


def kernel(name: str, multiply_adds: int = 100, cause: ExpandCause | None = None) -> list[Event]:
    at = place(name, "qfuse.linear")
    size = Estimated("lower", at, multiply_adds, multiply_adds * 1e-6, multiply_adds * 1e-7)
    losers = (("kernel-b", "the weight has a bad scale"), ("kernel-c", "predicted 7 us"))
    if cause is None:
        return [size, Lowered("lower", at, "kernel-a", f"op {name}", 2e-6, losers)]
    why = "no kernel accepts it"
    return [size, Lowered("lower", at, EXPAND, f"op {name}", None, losers, why, cause)]


def test_it_fits_24_lines_of_80_columns() -> None:
    long = "x" * 200
    events: list[Event] = [
        Checked("check", "model", True, Exactness.ROUNDING, 0.12, 8.0),
        RolledBack("optimize", "rule", "rule@x", (place("r"),), long),
        Noted("lower", f"qfuse's own kernels are not available: {long}", warn=True),
        Left("lower", Place("q", "qfuse.quantize", f"/a/b.py:1: {long}", long), long),
    ]
    for index in range(9):
        events += product(f"{'p' * index}{long}", 1000 + index)
    lines = Report((*events, *kernel("k")), FACTS).text().splitlines()

    assert len(lines) <= 23, "the prompt takes one more"
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith(f"{n}. ") for n in range(1, 9) for line in lines) == 5
    assert "7 more with --verbose" in "\n".join(lines)


def test_the_place_and_the_module_survive_and_a_reason_takes_two_lines() -> None:
    module = "encoder.layer.1.intermediate.dense"
    code = "hidden_states = self.dense(hidden_states) + input_tensor"
    at = Place("linear", "aten.linear", f"/src/modeling_bert.py:335: {code}", module)
    deep = Place("deep", "aten.linear", at.source, f"model.{'blocks.7.' * 12}dense")
    reason = "the weight's scales run along the input features, one each, and" * 2
    events: list[Event] = []
    for place_, why in ((at, reason), (deep, "short")):
        events += [
            Missed("optimize", "fuse-linear", MissCode.NOT_QUANTIZED, why, place_, place_),
            Estimated("lower", place_, 100, 1e-4, 1e-5),
        ]

    assert_expected_inline(
        "\n".join(Report(tuple(events), FACTS).text().splitlines()[2:9]),
        """\

To do, by what it costs here per call:
1. 90 us  fuse-linear: the weight's scales run along the input features, one
     each, andthe weight's scales run along the input features, one each, and
   modeling_bert.py:335: hidden_states...  [encoder.layer.1.intermediate.dense]
2. 90 us  fuse-linear: short
   modeling_bert.py:335  [...blocks.7.blocks.7.blocks.7.blocks.7.blocks.7.dense]""",
    )


def test_the_most_expensive_comes_first_and_equal_reasons_once() -> None:
    twice = [e for name in ("ab", "cd") for e in product(name, 300)]
    same = [
        Missed(e.stage, e.rule, e.code, "same", e.anchor, e.at) if isinstance(e, Missed) else e
        for e in twice
    ]
    report = Report((*product("cheap", 10), *same, *kernel("k", 1000)), FACTS)

    assert_expected_inline(
        report.text(),
        """\
1 of 4 products (62 % of MACs) quantized; predicted 0.61 ms, 1.61 ms if in float

To do, by what it costs here per call:
1. 0.54 ms  fuse-linear: same (2 places)
   model.py:2: y = self.ab(x)  [layers.ab]
2. 9.0 us  fuse-linear: cheap is not
   model.py:5: y = self.cheap(x)  [layers.cheap]
With --verbose, or report.text(verbose=True): machine, versions, times, and
   1 quantized op on 1 kernel, 0 expanded, each with its alternatives
   3 nodes not fused, with the rule that came closest
""",
    )


def test_a_sentence_that_many_rows_have_is_written_once() -> None:
    events = [e for index in range(4) for e in kernel(f"k{index}")]
    text = Report(tuple(events), FACTS).text(verbose=True)

    assert text.count("the weight has a bad scale") == 1
    assert text.count("kernel-b: [1]") == 4
    assert text.count("kernel-c: predicted 7 us") == 4


def test_an_op_that_only_lost_a_fusion_is_not_a_failure() -> None:
    lost, failed = kernel("a", cause=ExpandCause.LOOPS), kernel("b", cause=ExpandCause.NO_KERNEL)
    report = Report((*lost, *failed, *kernel("c", cause=ExpandCause.PROFIT)), FACTS)

    assert [e.failed for e in report.expanded] == [False, True, False]
    assert [action.places[0].node for action in report.actions] == ["b"]
    (action,) = report.actions
    assert (action.tried, action.reason) == ("kernel-b", "the weight has a bad scale")


@pytest.mark.parametrize(
    ("checks", "text"),
    [
        ([("model", True, 0.0, 0.0)], "passed (the same bits)"),
        (
            [("model", True, 0.0, 0.0), ("compiled", True, 0.067, 8.0)],
            "passed (error: <0.1 x the source's rounding error; up to 8 x passes)",
        ),
        (
            [("model", True, 0.5, 8.0), ("compiled", True, 0.1, 8.0)],
            "passed (error: 0.5 x the source's rounding error; up to 8 x passes)",
        ),
        # The graph runs op by op then.
        ([("model", True, 0.0, 0.0), ("compiled", False, 9.0, 8.0)], "passed (the same bits)"),
    ],
)
def test_values_are_those_of_the_worst_check(
    checks: list[tuple[str, bool, float, float]], text: str
) -> None:
    made = [Checked("check", w, ok, Exactness.ROUNDING, e, most) for w, ok, e, most in checks]
    assert f"values: {text}" in Report((*made, *kernel("k")), FACTS).text().splitlines()


def weight_only(name: str, multiply_adds: int = 100) -> list[Event]:
    size, lowered = kernel(name, multiply_adds)
    assert isinstance(lowered, Lowered)
    return [size, replace(lowered, predicted=5e-5, weight_only=True)]


def test_products_of_float_activations_are_told_apart() -> None:
    alone = Report(tuple(weight_only("a")), FACTS).text().splitlines()
    mixed = Report((*weight_only("aa"), *kernel("b")), FACTS).text().splitlines()

    assert alone[0] == (
        "1 of 1 products (100 % of MACs) weight-only; predicted 50 us, 100 us if in float"
    )
    assert mixed[:2] == [
        "2 of 2 products (100 % of MACs) quantized, 1 of them weight-only",
        "predicted 52 us, 0.20 ms if in float",
    ]


def measured(name: str, in_float: float | None) -> list[Event]:
    size, lowered = kernel(name)
    assert isinstance(lowered, Lowered)
    return [size, replace(lowered, measured=True, measured_float=in_float)]


def test_measured_times_are_not_compared_with_predicted_ones() -> None:
    def times(*events: Event) -> str:
        return str(Report(events, FACTS).work).partition("quantized; ")[2]

    assert times(*kernel("a")) == "predicted 2.0 us, 100 us if in float"
    assert times(*measured("a", 7e-6)) == "measured 2.0 us, 7.0 us if in float"
    # One that only the cost model knows makes the sums other than measured.
    assert times(*measured("a", None)) == "partly measured 2.0 us, 100 us if in float"
    both = times(*measured("a", 7e-6), *kernel("bc"))
    assert both == "partly measured 4.0 us, 0.11 ms if in float"


def test_a_quantization_that_was_missed_costs_what_its_product_loses() -> None:
    chain = Place("chain", "aten._to_copy", "model.py:7: q = torch.floor(x / s)")
    size, lowered = weight_only("a")
    assert isinstance(size, Estimated)
    events = (
        Missed("normalize", "quantize-chain", MissCode.PATTERN, "expected round", chain, chain, 5),
        replace(size, upstream=("mul", "chain")),
        lowered,
        *product("cheap", 10),
    )
    first, second = Report(events, FACTS).actions

    assert (first.places, second.places[0].module) == ((chain,), "layers.cheap")
    assert first.seconds is not None
    assert abs(first.seconds - 4e-5) < 1e-9


def test_what_nothing_helps_against_and_costs_nothing_known_is_not_on_the_screen() -> None:
    at = Place("cast", "aten._to_copy")
    miss = Missed("normalize", "quantize-chain", MissCode.DTYPE, "not a cast", at, at, 5)
    report = Report((miss, *kernel("k")), FACTS)

    assert [action.reason for action in report.actions] == ["not a cast"]
    assert "To do" not in report.text()


def test_what_costs_nothing_is_not_to_be_done() -> None:
    at = place("small")
    miss = Missed("optimize", "fuse-linear", MissCode.NOT_QUANTIZED, "not quantized", at, at)
    report = Report((miss, Estimated("lower", at, 1, 1e-6, 2e-6)), FACTS)

    assert report.actions == ()


def test_a_chain_that_was_not_recognized_explains_its_linear() -> None:
    chain = Place("chain", "aten._to_copy")
    at = place("linear")
    events = (
        Missed("normalize", "quantize-chain", MissCode.PATTERN, "expected round", chain, chain, 5),
        Missed("optimize", "fuse-linear", MissCode.NOT_QUANTIZED, "not quantized", at, at),
        Estimated("lower", at, 100, 1e-4, 1e-5, ("mul", "chain")),
    )
    (action,) = Report(events, FACTS).actions

    assert (action.tried, action.reason) == ("quantize-chain", "expected round")
    assert action.places == (at,)
    assert action.seconds is not None
    assert abs(action.seconds - 9e-5) < 1e-9


@pytest.mark.own_kernels
def test_a_real_model_names_the_users_line() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(256, 512), nn.Linear(512, 256)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.up(x).relu())  # type: ignore[no-any-return]

    model = Half().eval()
    quantize_(model, Int8DynamicActivationInt8WeightConfig(), filter_fn=lambda _, n: n == "up")
    report = qfuse.explain(model, (torch.randn(64, 256),), target=Target.for_testing())
    (action,) = report.actions

    assert action.advice is not None
    assert "return self.down(self.up(x).relu())" in report.text()
    assert report.work is not None
    assert report.work.quantized_products == 1
    assert report.work.share == 0.5
    assert report.work.multiply_adds == 2 * 64 * 256 * 512


@pytest.mark.own_kernels
def test_places_with_another_suggestion_are_another_entry() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(256, 256)
            self.weight = nn.Parameter(torch.randn(256, 256))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(self.up(x), self.weight)

    report = qfuse.explain(Both().eval(), (torch.randn(64, 256),), target=Target.for_testing())
    advice = [action.advice.name for action in report.actions if action.advice is not None]

    assert sorted(advice) == ["quantize-parameter", "quantize-weight"]
    assert {action.reason for action in report.actions} == {"the weight is not quantized"}


@pytest.mark.parametrize(
    ("events", "told"),
    [
        (
            (Noted("lower", "a remark"),),
            "the model is not quantized, or its quantization was not recognized",
        ),
        (
            (
                RolledBack("lower", "lower-linear", "k", (place("a"),), "the values differ", ""),
                Lowered("lower", place("a"), EXPAND, why="its kernel is not permitted"),
            ),
            "the rewrites of the quantized ops were undone, see below",
        ),
        (
            (Lowered("lower", place("a"), EXPAND, why="none", cause=ExpandCause.NO_KERNEL),),
            "no kernel takes the quantized ops, see below",
        ),
        (
            (Left("lower", place("a"), "no rule fused it"),),
            "the quantized ops could not be fused, see below",
        ),
        (
            (Left("lower", place("a"), "rows of a table", needed=True),),
            "nothing quantized is multiplied",
        ),
        (
            (
                Left("lower", place("a"), "it feeds a product"),
                Lowered("lower", place("b"), FLOAT, why="faster"),
            ),
            "they run in float, which is faster",
        ),
    ],
)
def test_why_nothing_is_quantized(events: tuple[Event, ...], told: str) -> None:
    text = " ".join(Report(events, FACTS).text().split())
    assert text.startswith(f"quantized ops: none: {told}")
