"""The benchmark: every model under every recipe, by qfuse and by its peers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from rich.console import Console

from qfuse.ir.errors import OptionsError
from qfuse_bench.experiments.aims import AIMS
from qfuse_bench.experiments.goal_run import GoalRun, run_goals
from qfuse_bench.experiments.goals import CELLS, CONVNET_CELLS, GOAL_RECIPES
from qfuse_bench.harness.comparison import Comparison
from qfuse_bench.harness.machine import BackgroundLoad, Setting, prepare_machine
from qfuse_bench.harness.machine_class import LIMITS
from qfuse_bench.harness.measure import LEAST_ROUNDS
from qfuse_bench.harness.process import WorkerError
from qfuse_bench.harness.progress import Watch, watching
from qfuse_bench.peers.cases import (
    CASES,
    GROUP_SIZES,
    RECIPES,
    USUAL_CASES,
    USUAL_RECIPES,
    Case,
    example_inputs,
    pick,
)
from qfuse_bench.peers.contenders import (
    Contender,
    FloatType,
    eager_model,
    float_peers,
    quantized_pair,
)
from qfuse_bench.report.outputs import Outputs
from qfuse_bench.report.results import Match, Results, pairs_of
from qfuse_bench.report.tables import show

_QUICK_MODELS = ("minilm",)
_QUICK_CONVNETS = ("resnet18-b1",)
_QUICK_RECIPES = ("dynamic",)
_SECTION = "models"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What to measure.

    Attributes:
        models: Names out of :data:`qfuse_bench.peers.cases.CASES`; none is all but convolutional
            networks.
        recipes: Names out of :data:`qfuse_bench.peers.cases.RECIPES`; none is those without a group
            size in their names. With ``--goals``, out of
            :data:`qfuse_bench.experiments.goals.GOAL_RECIPES`; none is all.
        floats: Float types of ``--goals``; none is all.
        isa: Hold qfuse and its rivals to this instruction set, out of
            :data:`qfuse_bench.harness.machine_class.LIMITS`; "" for all that the machine has.
        rounds: Interleaved rounds per model and recipe.
        threads: OpenMP threads of every contender; 0 takes torch's default.
        patience: Seconds to wait, per model and recipe, for other programs to leave the cores.
        quick: One model and one recipe.
        goals: Only what :data:`qfuse_bench.experiments.goals.CELLS` asks for, with what came of it.
        convnets: Only :data:`qfuse_bench.experiments.goals.CONVNET_CELLS`, likewise.
        tuned: Add Inductor with ``max_autotune``, which takes minutes to compile.
        json: Where to write everything that was measured.
        resume: With ``--goals`` or ``--convnets``, keep what ``json`` already has, if it was
            measured on this machine with this code, and measure the rest.
        page: A page with a section to write the tables into.
    """

    models: tuple[str, ...] = field(
        default=(),
        metadata={"help": f"what to measure, out of {', '.join(CASES)} [{', '.join(USUAL_CASES)}]"},
    )
    recipes: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": f"how to quantize, out of {', '.join(RECIPES)} [{', '.join(USUAL_RECIPES)}]"
        },
    )
    floats: tuple[str, ...] = field(
        default=(),
        metadata={"help": f"float types of --goals, out of {', '.join(FloatType)} [all]"},
    )
    isa: str = field(
        default="",
        metadata={"help": f"hold all engines to fewer instructions: {', '.join(LIMITS)}"},
    )
    rounds: int = field(default=21, metadata={"help": "interleaved rounds per model and recipe"})
    threads: int = field(
        default=0, metadata={"help": "threads of every contender; 0 takes torch's default"}
    )
    patience: float = field(
        default=60.0,
        metadata={"help": "seconds to wait, per model and recipe, for other programs to be quiet"},
    )
    quick: bool = field(default=False, metadata={"help": "one model and one recipe only"})
    goals: bool = field(
        default=False, metadata={"help": "only the goals, against every engine (hours)"}
    )
    convnets: bool = field(
        default=False, metadata={"help": "only convolutional networks, against every engine"}
    )
    tuned: bool = field(
        default=False, metadata={"help": "add Inductor with max_autotune (compiles for minutes)"}
    )
    json: Path | None = field(
        default=None, metadata={"help": "write everything that was measured to a file"}
    )
    resume: bool = field(
        default=False,
        metadata={"help": "keep the cells of --goals or --convnets that the --json file has"},
    )
    page: Path | None = field(
        default=None, metadata={"help": "a Markdown page to write the tables into"}
    )


def run_bench(options: BenchOptions, console: Console | None = None) -> None:
    """Measure, show a table, and write what was asked for.

    Raises:
        OptionsError: A model, a recipe or a number does not exist.
    """
    console = console or Console()
    plan = _Plan.of(_matrix(options))
    setting = Setting.here(plan.threads)
    if options.resume and not (options.json and (options.goals or options.convnets)):
        raise OptionsError(
            "--resume is for --goals and --convnets with a --json file",
            fix="name the file that an interrupted run wrote with --json",
        )
    if options.goals or options.convnets:
        run_goals(_goal_run(options, plan, setting), console)
    else:
        _run_models(options, plan, setting, console)
    if options.page is not None:
        console.print(f"the tables are in {options.page}", highlight=False)


def _matrix(options: BenchOptions) -> BenchOptions:
    """Return the options without what only the goals have."""
    if options.goals:
        return replace(options, recipes=())
    if options.floats:
        raise OptionsError("--floats is for --goals", fix="without it both float types are run")
    return options


def _goal_run(options: BenchOptions, plan: _Plan, setting: Setting) -> GoalRun:
    name = "convnets" if options.convnets else "goals"
    if options.goals and options.convnets:
        raise OptionsError("--goals and --convnets are two runs", fix="give one of them")
    if options.tuned or (options.quick and options.goals):
        raise OptionsError(
            f"--quick and --tuned are not for --{name}",
            fix="--models, --recipes and --floats pick a part of --goals",
        )
    if options.convnets and (options.recipes or options.floats):
        raise OptionsError(
            "--recipes and --floats are not for --convnets",
            fix="they are quantized statically, with the rest in f32; --models picks among them",
        )
    cells = CONVNET_CELLS if options.convnets else CELLS
    pick(options.recipes, dict.fromkeys(GOAL_RECIPES), "recipe of --goals")
    pick(options.floats, dict.fromkeys(FloatType), "float type")
    models = options.models or (_QUICK_CONVNETS if options.quick else ())
    pick(models, dict.fromkeys(cell.case for cell in cells), f"model of --{name}")
    return GoalRun(
        setting=setting,
        rounds=plan.rounds,
        patience=plan.patience,
        cells=cells,
        models=models,
        recipes=options.recipes,
        floats=options.floats,
        aims=() if options.convnets else AIMS,
        section=name,
        json=options.json,
        resume=options.resume,
        page=options.page,
    )


def _run_models(options: BenchOptions, plan: _Plan, setting: Setting, console: Console) -> None:
    outputs = Outputs(_SECTION, options.page, options.json)
    matches: list[Match] = []
    skipped: dict[str, str] = {}
    with watching(console, plan.steps) as watch:
        watch.say("building kernels and measuring speeds, once per machine")
        prepare_machine(plan.threads)
        for case in plan.cases:
            try:
                for match in _measure_case(case, plan, watch):
                    matches.append(match)
                    # A run takes hours: what is measured is kept, whatever happens to the rest.
                    results = Results(setting, plan.rounds, tuple(matches), skipped)
                    outputs.write(results.to_dict(), results=results)
            except WorkerError as error:
                skipped[case.name] = str(error)
    results = Results(setting, plan.rounds, tuple(matches), skipped)
    show(results, console)
    outputs.write(results.to_dict(), results=results)


@dataclass(frozen=True, slots=True)
class _Plan:
    cases: tuple[Case, ...]
    recipes: tuple[str, ...]
    rounds: int
    threads: int
    patience: float
    tuned: bool

    def recipes_of(self, case: Case) -> list[str]:
        """Return the recipes that a case is measured with."""
        return [recipe for recipe in self.recipes if case.takes(recipe)]

    @classmethod
    def of(cls, options: BenchOptions) -> _Plan:
        models = options.models or (_QUICK_MODELS if options.quick else ())
        recipes = options.recipes or (_QUICK_RECIPES if options.quick else USUAL_RECIPES)
        if options.rounds < LEAST_ROUNDS:
            raise OptionsError(
                f"{options.rounds} rounds are too few", fix=f"ask for {LEAST_ROUNDS} or more"
            )
        if options.threads < 0:
            raise OptionsError(f"{options.threads} threads cannot be", fix="give 1, or 0")
        chosen = tuple(pick(recipes, RECIPES, "recipe"))
        return cls(
            tuple(_cases(models or USUAL_CASES, chosen)),
            chosen,
            options.rounds,
            options.threads or torch.get_num_threads(),
            options.patience,
            options.tuned,
        )

    def floats(self, case: Case) -> list[Contender]:
        return float_peers(case.model, case.sizes)

    def quantized(self, case: Case, recipe: str, kind: FloatType) -> list[Contender]:
        return quantized_pair(
            case.model,
            case.sizes,
            RECIPES[recipe],
            kind,
            tuned=self.tuned,
            group_size=GROUP_SIZES.get(recipe),
        )

    @property
    def steps(self) -> int:
        """Contenders to build, and rounds."""
        per_recipe = 1 + len(FloatType) * (2 + self.tuned) + self.rounds
        return sum(3 + len(self.recipes_of(case)) * per_recipe for case in self.cases)


def _cases(names: Sequence[str], chosen: Sequence[str]) -> list[Case]:
    cases = [CASES[name] for name in pick(names, CASES, "model")]
    for case in cases:
        if not any(map(case.takes, chosen)):
            raise OptionsError(
                f"{', '.join(chosen)}: these recipes quantize no more than a layer of {case.name}",
                fix=f"ask for {', '.join(case.recipes)}",
            )
    return cases


def _measure_case(case: Case, plan: _Plan, watch: Watch) -> Iterator[Match]:
    """Measure one model under every recipe; the float contenders live on from one to the next.

    Raises:
        WorkerError: The float model does not run.
    """
    inputs = example_inputs(case, case.seeds)
    floats = plan.floats(case)
    with Comparison(inputs, floats[0].name, plan.threads, watch) as contest:
        contest.enter([peer.competitor() for peer in floats])
        for recipe in plan.recipes_of(case):
            yield _measure_recipe(case, recipe, plan, contest, floats)


def _measure_recipe(
    case: Case, recipe: str, plan: _Plan, contest: Comparison, floats: list[Contender]
) -> Match:
    group_size = GROUP_SIZES.get(recipe)
    eager = eager_model(case.model, case.sizes, RECIPES[recipe], group_size=group_size)
    quantized = [c for kind in FloatType for c in plan.quantized(case, recipe, kind)]
    contest.enter([eager.competitor(timed=False), *(c.competitor(eager.name) for c in quantized)])
    background = BackgroundLoad()
    entries = contest.run(plan.rounds, f"{case.name}, {recipe}", plan.patience)
    others = background.share()
    contest.leave([eager.name, *(contender.name for contender in quantized)])
    named = {(c.engine, c.float_type, c.recipe is not None): c.name for c in (*floats, *quantized)}
    pairs = pairs_of(case.name, recipe, entries, named, FloatType)
    return Match(case.name, case.what, recipe, entries, pairs, others, floats[0].name)
