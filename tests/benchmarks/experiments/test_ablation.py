"""What is left out is this phase and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from rich.console import Console
from tests.support.bench.results import SETTING

from qfuse.cost import CostModel, CostProfile
from qfuse.ir.errors import OptionsError
from qfuse.ir.events import Fired
from qfuse.kernels import KernelLibrary
from qfuse.optimize import ATTENTION, FUSING, rewrite_names
from qfuse.optimize.lower_precision import LowerPrecision
from qfuse.optimize.schedule import (
    ATTENTION_RULES,
    FUSION_RULES,
    MOVING_RULES,
    RESULT_RULES,
    SPLIT_RULES,
)
from qfuse.pipeline import Pipeline
from qfuse.targets import Target
from qfuse_bench.experiments.ablation import (
    CASES,
    AblationOptions,
    experiment,
    phase,
    run_ablation,
)
from qfuse_bench.experiments.before_after import GainResults
from qfuse_bench.peers.contenders import Contender, Engine, FloatType
from qfuse_bench.workloads.block_graphs import BLOCK, blocks

BEFORE = Contender(
    engine=Engine.QFUSE, float_type=FloatType.F32, model="llama", without=("combine",)
)
AFTER = replace(BEFORE, without=())


def test_the_phase_is_all_but_what_grows_one_linear() -> None:
    assert {"combine", "lift-quantize", "sink-dequantize", "merge-linears"} <= set(phase())
    assert set(phase()) | FUSING | ATTENTION == rewrite_names()
    assert not (FUSING | ATTENTION) & set(phase())


def test_what_grows_linears_is_what_the_fusion_rules_do_and_narrowing() -> None:
    assert {rule.name for rule in FUSION_RULES} | {LowerPrecision.name} == FUSING
    assert {rule.name for rule in ATTENTION_RULES} == ATTENTION
    others = {rule.name for rule in (*MOVING_RULES, *SPLIT_RULES, *RESULT_RULES)}
    assert others <= set(phase())


def test_without_the_phase_none_of_it_fires_and_the_rest_does() -> None:
    target, cost = Target.for_testing(), CostModel(CostProfile.pinned())
    fired = []
    for without in ((), phase()):
        pipeline = Pipeline(target, cost, KernelLibrary(False, "test"), without=without)
        log = pipeline.rewrite(blocks(BLOCK)).log
        fired.append({e.rule for e in log.of(Fired) if e.stage == "optimize"})

    assert "merge-linears" in fired[0]
    assert "fuse-linear" in fired[1]
    assert not fired[1] & set(phase())


def test_a_contender_keeps_what_it_does_without() -> None:
    assert Contender.from_dict(BEFORE.to_dict()) == BEFORE
    assert BEFORE.name != AFTER.name


def test_a_decoder_is_asked_about_one_place() -> None:
    # It writes its cache there: at two places its answers would depend on which came last.
    assert len(CASES["decode"].seeds) == 1
    assert CASES["decode"].model == "llama-decode"


def test_the_file_says_what_is_left_out() -> None:
    results = GainResults(experiment(), SETTING, 15, ())

    assert json.loads(json.dumps(results.to_dict()))["without"] == list(phase())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (AblationOptions(rounds=3), "cannot be measured"),
        (AblationOptions(cases=("train",)), "unknown case 'train'"),
        (AblationOptions(recipes=("int1",)), "unknown recipe 'int1'"),
    ],
)
def test_refuses_what_cannot_be_measured(options: AblationOptions, message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        run_ablation(options, Console(quiet=True))
