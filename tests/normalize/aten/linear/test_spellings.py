from __future__ import annotations

from pathlib import Path

from qfuse.normalize.aten.linear.spellings import LINEAR_FROM


def test_every_row_has_its_own_tests() -> None:
    folder = Path(__file__).parent
    assert [name for name in LINEAR_FROM if not (folder / f"test_{name}.py").is_file()] == []


def test_no_two_rows_replace_the_same_op() -> None:
    anchors = [op for rule in LINEAR_FROM.values() for op in rule.anchors]
    assert len(anchors) == len(set(anchors))
