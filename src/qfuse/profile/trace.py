"""Traces: the format of Chrome and Perfetto, and the node data of Model Explorer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qfuse.profile.memory import LiveBytes
from qfuse.snapshots import StageSnapshot

_PROCESS = 1
_LANES = {1: "measured, op by op", 2: "predicted"}
_MEASURED, _PREDICTED = _LANES


@dataclass(frozen=True, slots=True)
class Span:
    """One op of a timeline.

    Attributes:
        name: Its name.
        op: What runs.
        nodes: Names of its nodes.
        nanoseconds: Its measured time; ``None`` if it was not measured.
        predicted: Its predicted time in seconds, or ``None``.
    """

    name: str
    op: str
    nodes: tuple[str, ...]
    nanoseconds: int | None
    predicted: float | None


def chrome_trace(spans: Sequence[Span], memory: Sequence[LiveBytes]) -> dict[str, Any]:
    """Return a trace with a measured and a predicted lane, and a counter of live bytes.

    The ops of a lane follow each other without gaps. Ops without a prediction are absent from the
    predicted lane. Memory changes at the ops of the measured lane.
    """
    events = [_named("process_name", 0, "qfuse")]
    events += [_named("thread_name", lane, name) for lane, name in _LANES.items()]
    live = {point.node: point for point in memory}
    measured = predicted = 0
    for span in spans:
        args = {"node": span.name}
        # In nanoseconds: a sum of floats would let ops overlap.
        if span.predicted is not None:
            lasts = round(span.predicted * 1e9)
            events.append(_complete(span.op, _PREDICTED, predicted, lasts, args))
            predicted += lasts
        if span.nanoseconds is not None:
            lasts = span.nanoseconds
            events.append(_complete(span.op, _MEASURED, measured, lasts, args))
            points = [live[name] for name in span.nodes if name in live]
            if points:
                events.append(_counter(measured, max(point.during for point in points)))
                events.append(_counter(measured + lasts, points[-1].after))
            measured += lasts
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def explorer_graphs(stages: Sequence[StageSnapshot]) -> dict[str, Any]:
    """Return the stages as the graphs of a file for Model Explorer, one graph per stage."""
    return {"graphs": [{"id": stage.stage, "nodes": _nodes(stage)} for stage in stages]}


def explorer_data(values: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Return node data for Model Explorer.

    Args:
        values: For each graph its values by node.
    """
    gradient = [{"stop": 0, "bgColor": "#ffffff"}, {"stop": 1, "bgColor": "#d9480f"}]
    return {
        graph: {
            "results": {node: {"value": value} for node, value in nodes.items()},
            "gradient": gradient,
        }
        for graph, nodes in values.items()
    }


def _nodes(stage: StageSnapshot) -> Iterable[dict[str, Any]]:
    return [
        {
            "id": node.name,
            "label": node.op,
            "namespace": node.module.replace(".", "/"),
            "attrs": [
                {"key": key, "value": value}
                for key, value in (("type", node.type), ("source", node.source))
                if value
            ],
            "incomingEdges": [{"sourceNodeId": name} for name in node.inputs],
        }
        for node in stage.nodes
    ]


def _named(what: str, lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": _PROCESS, "tid": lane, "args": {"name": name}}


def _complete(name: str, lane: int, start: int, lasts: int, args: dict[str, Any]) -> dict[str, Any]:
    common = {"ph": "X", "name": name, "pid": _PROCESS, "tid": lane, "args": args}
    return {**common, "ts": start / 1e3, "dur": lasts / 1e3}


def _counter(start: int, count: int) -> dict[str, Any]:
    common = {"ph": "C", "name": "live bytes", "pid": _PROCESS, "tid": 0}
    return {**common, "ts": start / 1e3, "args": {"bytes": count}}
