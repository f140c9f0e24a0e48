"""Bars per layer as an SVG image, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

_ROW, _BAR, _LEFT, _WIDTH, _TOP = 22, 8, 320, 420, 48
_FULL = 60.0
"""The SQNR in dB of a full bar, unless a layer has more."""


def bars_svg(rows: Sequence[tuple[str, float, float]]) -> str:
    """Draw two bars per layer.

    Args:
        rows: Name, own SQNR and total SQNR in dB of every layer, from top to bottom.
    """
    known = [db for _, *both in rows for db in both if math.isfinite(db)]
    full = max([_FULL, *known])
    height = _TOP + _ROW * max(len(rows), 1) + 12
    size = f'width="{_LEFT + _WIDTH + 80}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        '<text x="8" y="18" font-size="13">SQNR per layer in dB, worst first</text>',
        f'<rect x="{_LEFT}" y="10" width="10" height="{_BAR}" fill="#1f5fa8"/>',
        f'<text x="{_LEFT + 14}" y="18">this layer alone</text>',
        f'<rect x="{_LEFT + 130}" y="10" width="10" height="{_BAR}" fill="#9dc3e6"/>',
        f'<text x="{_LEFT + 144}" y="18">with all layers before it</text>',
    ]
    for index, (name, own, total) in enumerate(rows):
        y = _TOP + index * _ROW
        parts.append(
            f'<text x="{_LEFT - 8}" y="{y + 11}" text-anchor="end">{escape(_short(name))}</text>'
        )
        parts.append(_bar(y, own, full, "#1f5fa8"))
        parts.append(_bar(y + _BAR, total, full, "#9dc3e6"))
        parts.append(
            f'<text x="{_LEFT + _length(own, full) + 4}" y="{y + 9}">{_number(own)}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _bar(y: int, db: float, full: float, color: str) -> str:
    width = _length(db, full)
    return f'<rect x="{_LEFT}" y="{y}" width="{width}" height="{_BAR}" fill="{color}"/>'


def _length(db: float, full: float) -> int:
    # A bar of less than nothing: noise above the signal.
    return round(_WIDTH * min(max(db, 0.0), full) / full)


def _number(db: float) -> str:
    return f"{db:.1f}" if math.isfinite(db) else ("equal" if db > 0 else "not finite")


def _short(name: str, most: int = 50) -> str:
    return name if len(name) <= most else f"…{name[1 - most :]}"
