"""Plans that cannot be read: nested too deeply, or with contradictions."""

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


def written(**rows: Any) -> dict[str, Any]:
    """A plan with rows of the user's."""
    return PlanData({}, Target.for_testing(), CostProfile.pinned()).to_dict() | rows


@pytest.mark.parametrize("times", [-1, 0])
def test_a_site_happens_once_or_more(times: int) -> None:
    site = {"site": "optimize/a@x", "on": True, "times": times}
    with pytest.raises(PlanError, match=f"'times' is {times}, and a rewrite") as error:
        read_plan(written(sites=[site]))
    assert "sites[0]" in str(error.value.where)
    assert read_plan(written(sites=[site | {"times": 1}])).sites[0].times == 1


def test_an_op_is_listed_once() -> None:
    rows = [{"op": "linear", "kernel": name} for name in ("qfuse.linear_w8a8", "float")]
    with pytest.raises(PlanError, match="the op linear is listed twice") as error:
        read_plan(written(kernels=rows))
    assert "remove one of the lines" in str(error.value.fix)
    assert len(read_plan(written(kernels=rows[:1])).kernels) == 1
