"""A plan is data: saved, edited, replayed, and refused where it does not fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed
from tests.cases.package import write_package
from torch import nn

import qfuse
from qfuse.ir.errors import OptionsError, PlanError
from qfuse.ir.events import Missed, RolledBack
from qfuse.ir.signature._tree_api import tree_leaves
from qfuse.plans import read_plan
from qfuse.targets import Target
from qfuse.zoo import recipes
from qfuse.zoo.resolve import load_model

pytestmark = pytest.mark.own_kernels

q8 = torch.ops.quantized_decomposed
EAGER = {"backend": "eager"}


def qdq(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Quantize and dequantize per tensor."""
    q = q8.quantize_per_tensor(x, scale, 0, -128, 127, torch.int8)
    y: torch.Tensor = q8.dequantize_per_tensor(q, scale, 0, -128, 127, torch.int8)
    return y


class Siblings(nn.Module):
    """Three int8 linears of one input, the product of two, and one after them."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        for name in "abcd":
            weight = torch.randint(-127, 128, (width, width), generator=draw).to(torch.int8)
            self.register_buffer(f"w_{name}", weight)
            scale = torch.rand(width, generator=draw) * 1e-3 + 1e-4
            self.register_buffer(f"s_{name}", scale)

    def weight(self, name: str) -> torch.Tensor:
        """One dequantized weight."""
        weight, scale = getattr(self, f"w_{name}"), getattr(self, f"s_{name}")
        zero = torch.zeros(len(scale), dtype=torch.int64)
        y: torch.Tensor = q8.dequantize_per_channel(weight, scale, zero, 0, -127, 127, torch.int8)
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = qdq(x, 0.03)
        a, b, c = (nn.functional.linear(x, self.weight(name)) for name in "abc")
        y = qdq(torch.relu(a + b) + c, 0.05)
        return nn.functional.linear(y, self.weight("d"))


def example() -> torch.Tensor:
    """32 rows."""
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(2))


def compiled(plan: Any = None, model: nn.Module | None = None, **more: Any) -> qfuse.CompiledModel:
    given: dict[str, Any] = {"options": EAGER, "check": "site", "target": Target.for_testing()}
    model = model or Siblings()
    return qfuse.compile(model.eval(), (example(),), plan=plan, **{**given, **more})


@pytest.fixture(scope="module")
def plain() -> qfuse.CompiledModel:
    """The model, compiled without a plan."""
    return compiled()


def data_of(fast: qfuse.CompiledModel) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(fast.plan.to_json())
    return made


def site_of(plan: dict[str, Any], rule: str) -> dict[str, Any]:
    """The first site of a rule."""
    found: dict[str, Any] = next(s for s in plan["sites"] if f"/{rule}@" in s["site"])
    return found


def close(fast: qfuse.CompiledModel, other: qfuse.CompiledModel) -> None:
    """Compare two compilations within rounding, relative to the size of the result."""
    one, two = fast(example()), other(example())
    # Sums of 64 products in another order, and one step of the quantize between.
    bound = 1e-6 * two.abs().max() + 0.05 * 127e-3
    assert ((one - two).abs() <= bound).all()


def test_a_plan_lists_sites_and_kernels(plain: qfuse.CompiledModel) -> None:
    data = data_of(plain)
    site = site_of(data, "merge-linears")
    assert site["on"]
    assert site["where"].partition(": ")[2].startswith("a, b, c = ")
    assert {choice["kernel"] for choice in data["kernels"]} == {"qfuse.linear_w8a8"}
    assert data["versions"]["torch"] == torch.__version__


def test_a_replayed_plan_is_the_same_plan(plain: qfuse.CompiledModel, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    plain.plan.save(file)
    again = compiled(file)
    assert again.plan.to_json() == plain.plan.to_json() == file.read_text()
    assert str(again.plan) == str(plain.plan)
    assert torch.equal(again(example()), plain(example()))
    assert not [note for note in again.report.notes if note.stage == "plan"]


class NormFirst(Siblings):
    """With a norm that a kernel runs op by op, and that compiled code computes in a loop."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize first."""
        return super().forward(nn.functional.layer_norm(x, (64,)))


def test_a_plan_decides_the_same_for_compiled_code_and_op_by_op() -> None:
    op_by_op = compiled(model=NormFirst()).plan.data
    assert op_by_op is not None
    for_loops = json.loads(op_by_op.to_json())
    for_loops["options"]["loops"] = True
    with pytest.raises(PlanError, match="lower-rowwise@layer_norm"):
        compiled(for_loops, NormFirst())
    for_loops["sites"] = [s for s in for_loops["sites"] if "rowwise" not in s["site"]]
    for_loops["kernels"] = [k for k in for_loops["kernels"] if "norm" not in k["op"]]
    again = compiled(for_loops, NormFirst()).plan.data
    assert again is not None
    assert again.loops
    assert [s.site for s in again.sites] == [s["site"] for s in for_loops["sites"]]
    for_loops["options"].pop("loops")  # As in plans of older versions: the options say it.
    older = compiled(for_loops, NormFirst()).report
    assert any("lower-rowwise@layer_norm" in note.text for note in older.notes)


def test_the_plan_is_the_same_in_every_process(plain: qfuse.CompiledModel, tmp_path: Path) -> None:
    assert compiled().plan.to_json() == plain.plan.to_json()
    script = f"""
import sys
sys.path[:0] = {sys.path!r}
from qfuse import session
from qfuse.cost import CostProfile
session.load_or_measure = lambda target, **_: CostProfile.pinned()
from tests.plans.test_plans import compiled
compiled().plan.save({str(tmp_path / "plan.json")!r})
"""
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-c", script], env=env, check=True)
        assert (tmp_path / "plan.json").read_text() == plain.plan.to_json()


def test_a_site_that_is_off_does_not_happen(plain: qfuse.CompiledModel) -> None:
    data = data_of(plain)
    key = site_of(data, "merge-linears")["site"]
    site_of(data, "merge-linears")["on"] = False
    fast = compiled(data)
    assert "merge-linears" in plain.report.fired
    assert "merge-linears" not in fast.report.fired
    assert len(fast.plan.lowered.log.of(RolledBack)) == 0
    close(fast, plain)
    assert any("sites off: 1" in note.text for note in fast.report.notes)
    # What was switched off stays so in the plan that is saved, and replays to the same.
    saved = data_of(fast)
    assert next(s for s in saved["sites"] if s["site"] == key)["why"] == "switched off by the plan"
    assert compiled(saved).plan.to_json() == fast.plan.to_json()


@pytest.mark.parametrize("kernel", ["aten._int_mm", "qfuse.linear_w8a16", "expand", "float"])
def test_a_forced_kernel_runs_with_the_same_values(plain: qfuse.CompiledModel, kernel: str) -> None:
    data = data_of(plain)
    forced = data["kernels"][-1]
    forced["kernel"] = kernel
    fast = compiled(data)
    assert {c.op: c.kernel for c in read_plan(data_of(fast)).kernels}[forced["op"]] == kernel
    assert [check.what for check in fast.report.checks if not check.passed] == []
    close(fast, plain)


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        ("qfuse.linear_w4a16", "refuses it: "),
        ("qfuse.linear_w16a4", "is not the name of a kernel"),
        ("qfuse.rms_norm_quantized", "does not cover such an op"),
    ],
)
def test_an_illegal_kernel_is_refused_with_its_reason(
    plain: qfuse.CompiledModel, kernel: str, reason: str
) -> None:
    data = data_of(plain)
    data["kernels"][-1]["kernel"] = kernel
    with pytest.raises(PlanError, match=reason) as raised:
        compiled(data)
    assert raised.value.where
    assert data["kernels"][-1]["op"] in raised.value.what


def test_the_plan_of_another_model_names_the_site_and_the_line(
    plain: qfuse.CompiledModel,
) -> None:
    class Alone(Siblings):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(qdq(x, 0.03), self.weight("a"))

    with pytest.raises(PlanError, match="of the plan are not part of this model") as raised:
        compiled(data_of(plain), Alone())
    assert "test_plans.py" in (raised.value.where or "")


def test_a_site_that_never_was_is_an_error(plain: qfuse.CompiledModel) -> None:
    data = data_of(plain)
    data["sites"].append({"site": "optimize/merge-linears@linear_99", "on": False})
    with pytest.raises(PlanError, match=r"1 site of the plan is not part.*merge-linears@linear_99"):
        compiled(data)


def test_a_site_that_is_off_says_so(plain: qfuse.CompiledModel) -> None:
    data = data_of(plain)
    site_of(data, "fuse-linear")["on"] = False
    missed = compiled(data).plan.lowered.log.of(Missed)
    assert "it is off in the plan" in {miss.reason for miss in missed}


def test_sites_that_a_plan_does_not_list_are_applied_and_noted(plain: qfuse.CompiledModel) -> None:
    data = data_of(plain)
    data["sites"] = [s for s in data["sites"] if "merge-linears" not in s["site"]]
    fast = compiled(data)
    assert "merge-linears" in fast.report.fired
    (note,) = [note for note in fast.report.notes if note.stage == "plan"]
    assert note.warn
    assert "not in the plan" in note.text


def test_what_was_rolled_back_stays_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(write_package(tmp_path / "site")))

    class Wrong(Siblings):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + torch.tanh(x.exp()).sum(-1, keepdim=True)

    for check in ("site", "pipeline"):
        fast = compiled(model=Wrong(), check=check)
        assert [event.rule for event in fast.report.rolled_back] == ["scale-tanh"]
        site = site_of(data_of(fast), "scale-tanh")
        assert not site["on"]
        assert site["why"].startswith("rolled back: ")
        again = compiled(data_of(fast), Wrong(), check=check)
        assert again.report.rolled_back == ()
        assert again.plan.to_json() == fast.plan.to_json()
        # Switched on by hand, it is checked and rolled back again.
        data = data_of(fast)
        site_of(data, "scale-tanh").update(on=True)
        with pytest.raises(PlanError, match="rolled back: "):
            compiled(data, Wrong(), check=check)
    sys.modules.pop("doubtful_rules", None)


def test_a_plan_without_any_rewrite_is_replayed(plain: qfuse.CompiledModel) -> None:
    data = data_of(plain)
    data["sites"] = [{"site": "pipeline/every-rewrite", "on": False, "why": "rolled back: x"}]
    data["kernels"] = []
    fast = compiled(data)
    assert not fast.report.fired
    assert torch.equal(fast(example()), Siblings()(example()))


def test_sizes_that_vary_and_exported_programs(plain: qfuse.CompiledModel) -> None:
    shapes = {"x": {0: torch.export.Dim("rows", min=2, max=128)}}
    program = torch.export.export(Siblings().eval(), (example(),), dynamic_shapes=shapes)
    given: dict[str, Any] = {"options": EAGER, "target": Target.for_testing()}
    fast = qfuse.compile(program, (example(),), **given)
    data = data_of(fast)
    site_of(data, "merge-linears")["on"] = False
    again = qfuse.compile(program, (example(),), plan=data, **given)
    x = torch.randn(7, 64)
    assert "merge-linears" not in again.report.fired
    assert torch.allclose(again(x), Siblings()(x), atol=0.05 * 127e-3)
    assert plain.plan.to_json() != again.plan.to_json()


@pytest.mark.zoo
@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        # There is no portable rowwise kernel. Without a compiler, loops are no alternative to it.
        pytest.param(
            *("layer_norm", "qfuse.layer_norm_quantized", "expand"), marks=pytest.mark.isa("avx2")
        ),
        # One of them also runs the gelu after it, which has no kernel then.
        ("int8", "qfuse.linear_w8a8", "aten._int_mm"),
    ],
)
def test_kernels_of_an_encoder_are_forced_against_their_price(
    kind: str, before: str, after: str
) -> None:
    sizes = {"layers": 1, "hidden": 32, "intermediate": 64, "vocab": 50, "heads": 2, "seq": 4}
    loaded = load_model("bert", sizes)
    assert isinstance(loaded.model, nn.Module)
    model = recipes.quantize(loaded.model, "w8a8-dynamic", loaded.args, loaded.kwargs or {}).model
    given: dict[str, Any] = {"options": EAGER, "target": Target.for_testing(), "check": "site"}
    fast = qfuse.compile(model, loaded.args, loaded.kwargs, **given)
    data = data_of(fast)
    chosen = [c for c in data["kernels"] if c["what"].startswith(kind)]
    assert {c["kernel"] for c in chosen} == {before}
    for choice in chosen:
        choice["kernel"] = after
    again = qfuse.compile(model, loaded.args, loaded.kwargs, plan=data, **given)
    assert again.report.rolled_back == ()
    assert again.report.kernels[after] == len(chosen)
    one, two = (f(*loaded.args, **(loaded.kwargs or {})) for f in (fast, again))
    for a, b in zip(tree_leaves(one), tree_leaves(two), strict=True):
        assert torch.allclose(a, b, atol=0.05 * float(b.abs().max()))


def test_a_plan_of_another_torch_is_refused(plain: qfuse.CompiledModel) -> None:
    data = data_of(plain)
    data["versions"]["torch"] = "2.99.0"
    with pytest.raises(PlanError, match=r"made with torch 2\.99\.0"):
        compiled(data)
    data["versions"].pop("torch")
    compiled(data)


def test_options_that_decide_come_from_the_plan(plain: qfuse.CompiledModel) -> None:
    data = data_of(compiled(options={**EAGER, "without": ["merge-linears"]}))
    fast = compiled(data)
    assert "merge-linears" not in fast.report.fired
    with pytest.raises(OptionsError, match="without is"):
        compiled(data, options={**EAGER, "without": ["fuse-add"]})
    with pytest.raises(OptionsError, match="float_dtype is 'bfloat16'"):
        compiled(data_of(plain), float_dtype=torch.bfloat16)


GONE = object()


@pytest.mark.parametrize(
    ("path", "value", "word"),
    [
        (("format",), GONE, "not a plan"),
        (("version",), 9, "version 9"),
        (("sites",), GONE, "no 'sites'"),
        (("site",), [], "unknown entry 'site'"),
        (("sites", 0, "on"), "yes", "'on' has the wrong type"),
        (("sites", 0, "times"), True, "'times' has the wrong type"),
        (("sites", 0, "off"), True, "'off' is unknown"),
        (("sites", 0, "site"), GONE, "'site' is missing"),
        (("sites", 0, "site"), "merge-linears", "not stage/rule@node"),
        (("sites", 0), 3, "must be an object"),
        (("kernels",), {}, "must be a list"),
        (("versions",), ["torch"], "an object of texts"),
        (("options", "own_kernels"), "yes", "'own_kernels' has the wrong type"),
        (("profile", "threads"), GONE, "not a cost profile"),
        (("target", "threads"), True, "not the description of a target"),
    ],
)
def test_a_malformed_plan_says_which_entry(
    plain: qfuse.CompiledModel, path: tuple[Any, ...], value: Any, word: str
) -> None:
    data = at = data_of(plain)
    for step in path[:-1]:
        at = at[step]
    if value is GONE:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    with pytest.raises(PlanError, match=word):
        read_plan(data)


def test_a_site_is_listed_once(plain: qfuse.CompiledModel) -> None:
    data = data_of(plain)
    data["sites"].append(data["sites"][0])
    with pytest.raises(PlanError, match="listed twice"):
        read_plan(data)


def test_a_file_that_is_not_a_plan(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be read"):
        read_plan(tmp_path / "absent.json")
    (tmp_path / "text.json").write_text("not json")
    with pytest.raises(PlanError, match="not JSON"):
        read_plan(tmp_path / "text.json")
    with pytest.raises(PlanError, match="a path or a mapping, not int"):
        read_plan(3)  # type: ignore[arg-type]
