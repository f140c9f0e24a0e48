"""Options come from dataclass fields, and wrong ones are refused before anything is measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from qfuse.cli import main
from qfuse.cli.options import options_of
from qfuse.ir.errors import OptionsError
from qfuse.zoo import names as zoo_names
from qfuse.zoo import recipes
from qfuse.zoo.convnets import FAMILIES
from qfuse_bench.experiments import demo
from qfuse_bench.experiments.compile_time import main as compile_cost
from qfuse_bench.experiments.models import BenchOptions
from qfuse_bench.kernels.run import main as kernels
from qfuse_bench.peers.cases import (
    CASES,
    CONVNETS,
    GROUP_SIZES,
    RECIPES,
    USUAL_CASES,
    USUAL_RECIPES,
    pick,
)
from qfuse_bench.peers.contenders import Contender, Engine, FloatType, float_peers, quantized_pair


class Color(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Wishes:
    some_number: int = field(default=3, metadata={"help": "how many"})
    share: float = field(default=0.5, metadata={"help": "how much"})
    loud: bool = field(default=False, metadata={"help": "whether"})
    color: Color = field(default=Color.RED, metadata={"help": "which"})
    names: tuple[str, ...] = field(default=(), metadata={"help": "who"})
    to: Path | None = field(default=None, metadata={"help": "where"})


def parsed(*arguments: str) -> Wishes:
    seen: list[Wishes] = []

    @click.command()
    @options_of(Wishes)
    def command(**given: Any) -> None:
        seen.append(Wishes(**given))

    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    return seen[0]


def test_without_options_the_defaults_hold() -> None:
    assert parsed() == Wishes()


def test_every_kind_of_field_is_an_option() -> None:
    wishes = parsed(
        *("--some-number", "7", "--share", "0.25", "--loud", "--color", "blue"),
        *("--names", "a", "--names", "b", "--to", "x/y.md"),
    )

    assert wishes == Wishes(7, 0.25, True, Color.BLUE, ("a", "b"), Path("x/y.md"))


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        (main, ["bench", "--models", "gpt"], "unknown model 'gpt'"),
        (main, ["bench", "--recipes", "fp3"], "unknown recipe 'fp3'"),
        (main, ["bench", "--rounds", "3"], "3 rounds are too few"),
        (main, ["bench", "--threads", "-1"], "-1 threads"),
        (main, ["bench", "--goals", "--recipes", "w4a8-g64"], "unknown recipe of --goals"),
        (main, ["bench", "--goals", "--floats", "f64"], "unknown float type 'f64'"),
        (main, ["bench", "--floats", "f32"], "--floats is for --goals"),
        (main, ["bench", "--goals", "--models", "resnet50-b1"], "unknown model of --goals"),
        (main, ["bench", "--goals", "--rounds", "3"], "3 rounds are too few"),
        (main, ["bench", "--isa", "sse"], "holds all engines to 'sse'"),
        (main, ["bench", "--sites", "--floats", "f32"], "are not for --sites"),
        (main, ["bench", "--convnets", "--recipes", "static"], "not for --convnets"),
        (kernels, ["--isa", "sse"], "holds all engines to 'sse'"),
        (main, ["bench", "--goals", "--quick"], "--quick and --tuned are not for --goals"),
        (main, ["bench", "--goals", "--convnets"], "--goals and --convnets are two runs"),
        (main, ["bench", "--convnets", "--tuned"], "--tuned are not for --convnets"),
        (main, ["bench", "--convnets", "--models", "vit"], "unknown model of --convnets 'vit'"),
        (
            main,
            ["bench", "--models", "unet-b1", "--recipes", "w4a8"],
            "no more than a layer of unet-b1",
        ),
        (demo.main, ["--recipe", "w9a9"], "unknown recipe 'w9a9'"),
        (demo.main, ["--rounds", "2"], "2 rounds are too few"),
        (demo.main, ["--sentences", "8", "--batch", "9"], "no full batch of 9"),
        (compile_cost, ["--rounds", "0"], "0 rounds"),
    ],
)
def test_what_cannot_be_is_refused_at_once(
    command: click.Command, arguments: list[str], message: str
) -> None:
    result = CliRunner().invoke(command, arguments)

    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_the_demo_names_every_recipe_that_it_takes() -> None:
    result = CliRunner().invoke(main, ["demo", "--recipe", "nope"])

    assert "there are " in result.stderr
    offered = result.stderr.partition("there are ")[2].strip().split(", ")
    assert set(offered) == {*RECIPES, *recipes.names()}
    assert len(offered) == len(set(offered))


def test_every_field_of_every_option_has_a_help_text() -> None:
    for command in (main, demo.main, compile_cost):
        assert CliRunner().invoke(command, ["--help"]).exit_code == 0
    assert BenchOptions().models == ()


def test_pick() -> None:
    known = {"a": 1, "b": 2}

    assert pick((), known, "thing") == ["a", "b"]
    assert pick(("b",), known, "thing") == ["b"]
    with pytest.raises(OptionsError, match="unknown thing 'c'"):
        pick(("a", "c"), known, "thing")


def test_the_matrix_is_of_the_zoo() -> None:
    assert {case.model for case in CASES.values()} <= set(zoo_names())
    assert set(RECIPES.values()) <= set(recipes.names())
    for recipe in RECIPES.values():
        for contender in quantized_pair("bert", {}, recipe, FloatType.BF16):
            assert contender.zoo_recipe in recipes.names()


def test_convnets_are_measured_on_request_with_the_recipe_that_quantizes_them() -> None:
    assert len(CONVNETS) == 2 * len(FAMILIES)
    assert {case.model for case in CONVNETS.values()} == set(FAMILIES)
    assert set(USUAL_CASES) | set(CONVNETS) == set(CASES)
    assert not set(USUAL_CASES) & set(CONVNETS)
    for case in CONVNETS.values():
        assert [recipe for recipe in RECIPES if case.takes(recipe)] == ["static"]
    assert all(map(CASES["bert"].takes, RECIPES))


def test_recipes_with_groups_are_known_by_name() -> None:
    sizes = {f"{recipe}-g{size}": size for recipe in ("w4a8", "w4a16") for size in (64, 128)}
    assert dict(GROUP_SIZES) == sizes
    assert USUAL_RECIPES == ("static", "dynamic", "weight-only", "w4a8", "w4a16")
    pair = quantized_pair("bert", {}, "w4a8", FloatType.F32, group_size=64)
    assert [c.group_size for c in pair] == [64, 64]
    assert pair[0].name == "inductor f32 w4a8 g64"


def test_contenders_survive_the_pipe() -> None:
    for contender in (
        *float_peers("bert", {"batch": 2}),
        *quantized_pair("vit", {}, "w8a16", FloatType.BF16, dynamic=True, tuned=True),
    ):
        assert Contender.from_dict(contender.to_dict()) == contender


def test_bf16_is_cast_weights_or_autocast() -> None:
    static, dynamic = (
        quantized_pair("bert", {}, recipe, FloatType.BF16)[0]
        for recipe in ("w8a8-static", "w8a8-dynamic")
    )

    assert (static.zoo_recipe, static.casts_weights) == ("w8a8-static-bf16", False)
    assert (dynamic.zoo_recipe, dynamic.casts_weights) == ("w8a8-dynamic", True)


def test_a_recipe_without_a_bf16_form_says_so() -> None:
    contender = Contender(
        engine=Engine.EAGER, float_type=FloatType.BF16, model="bert", recipe="pt2e-dynamic"
    )

    with pytest.raises(OptionsError, match="no bf16 form"):
        assert contender.zoo_recipe


def test_only_qfuse_compiles_for_all_sizes() -> None:
    pair = quantized_pair("bert", {}, "w8a16", FloatType.F32, dynamic=True, tuned=True)

    assert [(c.engine, c.dynamic) for c in pair] == [
        (Engine.INDUCTOR, False),
        (Engine.INDUCTOR_TUNED, False),
        (Engine.QFUSE, True),
    ]
