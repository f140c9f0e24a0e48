"""Draw a trace of ``profile.save_chrome_trace`` as a page: its lanes and its counter, to scale."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

WIDTH, HEIGHT, GAP = 1360, 28, 26
_COLORS = {"qfuse": "#2f8f4e", "aten": "#8aa4c2"}
_OTHER = "#b08a4e"
_LETTER = 6.7

Event = Mapping[str, Any]


def trace_page(trace: Mapping[str, Any], least_percent: float = 0.05) -> str:
    """Return an HTML page with the lanes and the counter of a trace.

    Args:
        trace: The JSON of the trace.
        least_percent: Ops that last less, in percent of the whole, are drawn as wide as that.
    """
    events: Sequence[Event] = trace["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    spans = [e for e in events if e["ph"] == "X"]
    counters = [e for e in events if e["ph"] == "C"]
    end = max(e["ts"] + e["dur"] for e in spans)
    least = WIDTH * least_percent / 100
    parts, top = list[str](), 8
    for lane in sorted(names):
        own = [e for e in spans if e["tid"] == lane]
        total = sum(e["dur"] for e in own)
        parts.append(_text(0, top + 12, f"{names[lane]}: {len(own)} ops, {total / 1e3:.2f} ms"))
        parts += (_bar(e, end, top + 18, least) for e in own)
        top += 18 + HEIGHT + GAP
    parts += _counter(counters, end, top)
    for tenth in range(11):
        x = WIDTH * tenth / 10
        parts.append(
            _text(x, top + 150, f"{end * tenth / 1e4:.1f} ms", "end" if tenth else "start")
        )
    drawn = "\n".join(parts)
    size = f'width="{WIDTH}" height="{top + 160}"'
    return (
        '<!DOCTYPE html><meta charset="utf-8"><body style="margin: 16px 20px; background: white">'
        f'<svg {size} font-family="system-ui, sans-serif" font-size="12">{drawn}</svg>'
    )


def _bar(event: Event, end: float, top: float, least: float) -> str:
    left, wide = WIDTH * event["ts"] / end, max(WIDTH * event["dur"] / end, least)
    family, _, name = event["name"].partition(".")
    color = _COLORS.get(family, _OTHER)
    bar = (
        f'<rect x="{left:.2f}" y="{top}" width="{wide:.2f}" height="{HEIGHT}" fill="{color}" '
        'stroke="white" stroke-width="0.5"/>'
    )
    fits = len(name) * _LETTER + 8 < wide
    return bar + (_text(left + 4, top + 18, name, color="white") if fits else "")


def _counter(events: Sequence[Event], end: float, top: float) -> Iterator[str]:
    values = [(e["ts"], next(iter(e["args"].values()))) for e in events]
    if not values:
        return
    most, floor = max(value for _, value in values), top + 130
    yield _text(0, top + 12, f"{events[0]['name']}: up to {most / 1e6:.2f} MB")
    points, height = list[str](), 0.0
    for time, value in values:
        x = WIDTH * time / end
        points.append(f"{x:.2f},{floor - height:.2f}")
        height = 106 * value / most
        points.append(f"{x:.2f},{floor - height:.2f}")
    yield f'<polygon points="0,{floor} {" ".join(points)} {WIDTH},{floor}" fill="#8aa4c2"/>'


def _text(x: float, y: float, text: str, anchor: str = "start", color: str = "#1c2128") -> str:
    shown = html.escape(text)
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{shown}</text>'
