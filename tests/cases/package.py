"""A package with a wrong rule, as an installed distribution in a folder."""

from __future__ import annotations

from pathlib import Path

NAME = "doubtful-rules"

_MODULE = '''
from typing import ClassVar

from qfuse.rewrite.prelude import Exactness, Node, Rewriter, Rule, aten
from qfuse.rewrite.scheduled import Phase, ScheduledRules

FACTOR = {factor}


class ScaleTanh(Rule[Node]):
    """Replace a tanh by a multiple of it."""

    name = "scale-tanh"
    anchors: ClassVar = (aten.tanh.default,)
    exactness = Exactness.ROUNDING

    def match(self, node):
        return node

    def rewrite(self, site, rw):
        x = site.args[0]
        rw.replace(site, rw.call(aten.mul.Tensor, rw.call(aten.sinh.default, x),
            rw.call(aten.mul.Tensor, rw.call(aten.reciprocal.default,
                rw.call(aten.cosh.default, x)), FACTOR)))


rules = ScheduledRules((ScaleTanh,), after=Phase.FUSE)
'''


def write_package(folder: Path, factor: float = 1.5) -> Path:
    """Write the distribution; its rule is right with a factor of 1."""
    folder.mkdir(exist_ok=True)
    (folder / "doubtful_rules.py").write_text(_MODULE.format(factor=factor))
    info = folder / f"{NAME}-1.2.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[qfuse.rules]\ndoubtful = doubtful_rules:rules\n")
    return folder
