"""Results of a run that never was, for the tests of tables and pages."""

from __future__ import annotations

from qfuse_bench.harness.comparison import Entry, Verdict
from qfuse_bench.harness.machine import Setting
from qfuse_bench.harness.measure import Series
from qfuse_bench.harness.memory import Memory
from qfuse_bench.peers.contenders import Contender, Engine, FloatType, float_peers, quantized_pair
from qfuse_bench.report.results import Match, Results, pairs_of

SETTING = Setting(
    "Some CPU (avx2)", 2, 2, 8 << 30, (("qfuse", "0.1"), ("torch", "2.13")), "2030-01-02"
)


def entry(contender: Contender, seconds: float, sqnr: float) -> Entry:
    """A contender that was as fast in every round."""
    memory = Memory(100_000_000, 200_000_000)
    return Entry(
        contender.name, Verdict.OK, "", Series([seconds] * 15, [seconds] * 45), sqnr, memory
    )


def results() -> Results:
    """One model under one recipe: at f32 all is well, at bf16 a peer is wrong and ours failed."""
    floats = float_peers("toy", {})
    quantized = [c for kind in FloatType for c in quantized_pair("toy", {}, "w8a8-dynamic", kind)]
    entries = {c.name: entry(c, 0.04, 50.0) for c in floats}
    theirs, ours, theirs_bf16, ours_bf16 = quantized
    entries[theirs.name] = entry(theirs, 0.02, 30.0)
    entries[ours.name] = entry(ours, 0.01, 31.0)
    fast_and_wrong = Series([0.001] * 15, [0.001] * 45)
    entries[theirs_bf16.name] = Entry(
        theirs_bf16.name, Verdict.WRONG, "its answers are wrong", fast_and_wrong, 1.0
    )
    entries[ours_bf16.name] = Entry(ours_bf16.name, Verdict.FAILED, "it fell over")
    named = {(c.engine, c.float_type, c.recipe is not None): c.name for c in floats + quantized}
    pairs = pairs_of("toy", "dynamic", entries, named, FloatType)
    assert named[Engine.QFUSE, FloatType.F32, True] == ours.name
    match = Match("toy", "of no size", "dynamic", entries, pairs, 0.03)
    return Results(SETTING, 15, (match,), {"other": "it did not start"})
