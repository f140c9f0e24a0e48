"""Reports of any size without a model, to be shown as a page."""

from __future__ import annotations

from qfuse.cost import CostProfile
from qfuse.ir.events import EXPAND, Event, ExpandCause, Left, Lowered, MissCode, Missed, Place
from qfuse.profile import OpTime, Profile
from qfuse.profile.memory import LiveBytes
from qfuse.profile.work import OpWork
from qfuse.report import Report
from qfuse.report.facts import Facts
from qfuse.snapshots import STAGES, NodeSnapshot, StageSnapshot

_FACTS = Facts(backend="eager", model="many sites")


def many_sites(count: int) -> tuple[Report, Profile]:
    """A report with ``count`` sites of five kinds in turn, and times of them."""
    events = [_event(number) for number in range(count)]
    stages = tuple(_stage(name, count) for name in STAGES)
    memory = tuple(LiveBytes(f"lowered_{n}", 1000 + n % 7 * 100, 500) for n in range(count))
    ops = tuple(_op(number) for number in range(count))
    profile = Profile(ops, 90_000, 80_000, "eager", 5, CostProfile.pinned(), memory)
    return Report(tuple(events), _FACTS, stages, memory), profile


def _place(number: int) -> Place:
    source = f"model.py:{number}: y = self.layer_{number}(x)"
    return Place(f"optimized_{number}", "qfuse.linear", source, f"layers.{number // 5}")


def _event(number: int) -> Event:
    place = _place(number)
    match number % 5:
        case 0:
            return Left("lower", place, f"the scale of number {number} is not a constant")
        case 1:
            losers, cause = (("a_kernel", "not here"),), ExpandCause.NO_KERNEL
            return Lowered("lower", place, EXPAND, "a linear", losers=losers, cause=cause)
        case 2:
            reason = "the weight is not quantized"
            return Missed(
                "optimize", "fuse-linear", MissCode.DTYPE, reason, place, place, 2, "a\n^"
            )
        case _:
            return Lowered("lower", place, "qfuse.linear_w8a8", "int8 x int8", number * 1e-8)


def _stage(name: str, count: int) -> StageSnapshot:
    """A chain of one node per site; three of them are one in the captured graph."""
    nodes = []
    for number in range(count):
        first = number // 3 * 3
        origins = tuple(f"captured_{n}" for n in range(first, min(first + 3, count)))
        place = _place(number)
        nodes.append(
            NodeSnapshot(
                name=f"{name}_{number}",
                op="qfuse.linear" if name == "optimized" else "aten.linear",
                inputs=(f"{name}_{number - 1}",) if number else (),
                type="float32[8, 16]",
                bytes=512,
                source=place.source,
                module=place.module,
                rule="fuse-linear" if name == "optimized" else "",
                origins=(f"{name}_{number}",) if name == STAGES[0] else origins,
                site=place.node if name == STAGES[-1] else "",
            )
        )
    return StageSnapshot(name, tuple(nodes))


def _op(number: int) -> OpTime:
    work = None if number % 5 in {0, 1} else OpWork(number * 1e-8, number * 5e-9, 1e6, 1e3)
    node, place = f"lowered_{number}", _place(number)
    time = 1000 * (number % 50 + 1)
    return OpTime(node, (node,), "aten.linear", place.node, place.module, place.source, time, work)
