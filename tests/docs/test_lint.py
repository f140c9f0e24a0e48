"""Every finding of the lint has an entry, and the examples have the finding before the change only."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qfuse
from qfuse.analysis.placement.lint import CHECKS
from qfuse.targets import Target

PAGE = Path(__file__).resolve().parents[2] / "docs" / "lint.md"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def sections() -> dict[str, str]:
    """The text below each heading of the second level."""
    _, *parts = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    return dict(part.split("\n", 1) for part in parts)


def test_every_check_has_an_entry_in_order() -> None:
    assert list(sections()) == [check.code for check in CHECKS]


class Example(nn.Module):
    def __init__(self, run: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(x)


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What the page defines in front of the entries, and functions that entries share."""
    start = PAGE.read_text().split("\n## ", 1)[0]
    found: dict[str, Any] = {}
    exec(BLOCK.findall(start)[-1], found)
    return found


@pytest.mark.parametrize("code", [check.code for check in CHECKS])
def test_the_change_makes_the_finding_disappear(code: str, names: dict[str, Any]) -> None:
    for text in sections().values():
        # Later entries use functions of earlier ones.
        exec("".join(BLOCK.findall(text)), names)
    exec("".join(BLOCK.findall(sections()[code])), names)
    found = {
        when: qfuse.lint(Example(names[when]).eval(), (names["x"],), target=Target.for_testing())
        for when in ("before", "after")
    }
    assert code in {finding.code for finding in found["before"]}
    assert code not in {finding.code for finding in found["after"]}
    # Every finding says what it costs, in time or in accuracy.
    assert all(finding.cost for finding in (*found["before"], *found["after"]))
