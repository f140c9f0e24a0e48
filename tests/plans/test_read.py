"""Plans that are nested too deeply for Python to read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qfuse.cost import CostProfile
from qfuse.ir.errors import PlanError
from qfuse.plans import read_plan
from qfuse.plans.data import FORMAT, VERSION, PlanData
from qfuse.targets import Target


@pytest.mark.parametrize("text", ["[" * 100_000, '{"format":' * 100_000])
def test_a_file_that_is_nested_too_deeply_is_not_a_plan(tmp_path: Path, text: str) -> None:
    file = tmp_path / "deep.json"
    file.write_text(text)
    with pytest.raises(PlanError, match="nested too deeply") as error:
        read_plan(file)
    assert error.value.where == str(file)
    assert "plan.save" in str(error.value.fix)


def test_a_mapping_that_is_nested_too_deeply_is_not_a_plan() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    empty: dict[str, Any] = {"versions": {}, "profile": {}, "sites": [], "kernels": []}
    options = {"without": [], "own_kernels": True, "float_dtype": None, "backends": []}
    plan = {"format": FORMAT, "version": VERSION, "options": options, **empty}
    with pytest.raises(PlanError, match="nested too deeply"):
        read_plan({**plan, "target": deep})


def test_of_a_link_the_file_that_it_leads_to_is_written(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to("plan.json")
    plan = PlanData({}, Target.for_testing(), CostProfile.pinned())
    plan.save(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "plan.json").read_text() == plan.to_json()
