"""What is in Inductor's slots before, meanwhile and afterwards."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.support.frozen_inductor import freeze
from torch import nn
from torch.fx import Graph

import qfuse

config: Any = importlib.import_module("torch._inductor.config")
passes: Any = importlib.import_module("torch._inductor.custom_graph_pass")

dynamo: Any = importlib.import_module("torch._dynamo")

SLOT = "joint_custom_post_pass"
SLOTS = (SLOT, "post_grad_custom_pre_pass")


class Theirs(passes.CustomGraphPass):  # type: ignore[misc]
    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, _: Graph) -> None:
        self.seen += 1

    def uuid(self) -> str:
        return "theirs"


def function(graph: Graph) -> None:
    """Somebody's pass."""


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    before = {slot: getattr(config, slot) for slot in SLOTS}
    yield
    with warnings.catch_warnings(action="ignore"):
        qfuse.uninstall()
    for slot, value in before.items():
        setattr(config, slot, value)
    assert all(getattr(config, slot) is None for slot in SLOTS)


def ours(value: object) -> int:
    found = passes.get_custom_graph_passes(value)
    return sum(type(one).__module__.startswith("qfuse.") for one in found)


@pytest.mark.parametrize("kind", ["nothing", "function", "pass", "list", "tuple", "empty"])
def test_appended_to_what_is_there_and_taken_out_again(kind: str) -> None:
    theirs = Theirs()
    base: Any = {
        "nothing": None,
        "function": function,
        "pass": theirs,
        "list": [function, theirs],
        "tuple": (theirs, function),
        "empty": [],
    }[kind]
    setattr(config, SLOT, base)
    qfuse.install()
    qfuse.install()
    now = passes.get_custom_graph_passes(getattr(config, SLOT))
    assert list(now[:-1]) == list(passes.get_custom_graph_passes(base))
    assert ours(now[-1]) == ours(now) == 1
    qfuse.uninstall()
    assert getattr(config, SLOT) is base
    qfuse.uninstall()


def test_nested_in_any_order() -> None:
    base = [function]
    setattr(config, SLOT, base)
    with warnings.catch_warnings(action="ignore"):
        outer, inner = qfuse.inductor_passes(), qfuse.inductor_passes()
        outer.__enter__()
        inner.__enter__()
        assert ours(getattr(config, SLOT)) == 1
        outer.__exit__(None, None, None)
        assert ours(getattr(config, SLOT)) == 1
        inner.__exit__(None, None, None)
    assert getattr(config, SLOT) is base
    assert base == [function]


def test_an_exception_inside_leaves_nothing_behind() -> None:
    with pytest.raises(AttributeError), qfuse.inductor_passes(freezing=True):
        config.freezing.there_is_none()
    assert not config.freezing
    assert getattr(config, SLOT) is None


def test_nothing_compiled_inside_is_a_warning() -> None:
    with pytest.warns(UserWarning, match="nothing was compiled"), qfuse.inductor_passes():
        pass


def test_what_is_compiled_without_caches_is_seen_too() -> None:
    """No key for a cache is made then, so nobody asks a pass for its name."""
    before = len(qfuse.reports())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with qfuse.inductor_passes():
            freeze(nn.Linear(4, 4).eval(), torch.randn(2, 4), force_disable_caches=True)
    assert not [one for one in told if "nothing was compiled" in str(one.message)]
    assert len(qfuse.reports()) > before


def test_asking_for_the_name_of_a_pass_changes_nothing() -> None:
    options = qfuse.inductor_options()
    with pytest.warns(UserWarning, match="nothing was compiled"), qfuse.inductor_passes():
        names = {options[slot].uuid() for slot in SLOTS}
    assert len(names) == 1


def test_somebody_who_overwrites_the_slot_is_named() -> None:
    qfuse.install()
    theirs = Theirs()
    setattr(config, SLOT, theirs)
    with pytest.warns(UserWarning, match=r"Theirs from .*test_slots"):
        qfuse.uninstall()
    assert getattr(config, SLOT) is theirs
    notes = [note.text for report in qfuse.reports() for note in report.notes]
    assert any(SLOT in text and "Theirs" in text for text in notes)


def test_somebody_who_adds_to_the_slot_stays() -> None:
    qfuse.install()
    setattr(config, SLOT, [getattr(config, SLOT), function])
    qfuse.uninstall()
    assert getattr(config, SLOT) == [function]


def test_options_compose_with_what_the_user_gives() -> None:
    theirs = Theirs()
    setattr(config, SLOT, function)
    options = qfuse.inductor_options(**{"cpp.threads": 1, "max-autotune": False})
    assert options["cpp.threads"] == 1
    assert options["max_autotune"] is False
    assert passes.get_custom_graph_passes(options[SLOT])[0] is function
    options = qfuse.inductor_options(joint_custom_post_pass=theirs)
    assert options[SLOT][0] is theirs
    assert ours(options[SLOT]) == 1
    assert getattr(config, SLOT) is function


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"max_autotun": True}, "did you mean 'max_autotune'"),
        ({"joint_custom_post_pass": 3}, "a function of a graph, a CustomGraphPass"),
        ({"joint_custom_post_pass": [3]}, "not a pass"),
        ({"freezing": True}, "has no effect here"),
        ({"use_joint_graph_passes": False}, "qfuse needs True there"),
        ({"use-post-grad-passes": False}, "qfuse needs True there"),
        ({"cpp.simdlen": "x"}, "'cpp.simdlen' is 'x'"),
        ({"cpu_backend": "x"}, "one of 'cpp'"),
        ({"cpp.threads": "x"}, "type int"),
        ({"max-autotune": 1}, "type bool"),
    ],
)
def test_bad_options_are_errors_that_say_what_to_do(given: dict[str, Any], told: str) -> None:
    with pytest.raises(qfuse.OptionsError, match=told):
        qfuse.inductor_options(**given)


def test_an_option_that_contradicts_freezing_is_an_error() -> None:
    with config.patch(freezing=True):
        assert qfuse.inductor_options(freezing=True)["freezing"]
        with pytest.raises(
            qfuse.OptionsError, match=r"no effect here.*\n.*freezing = False before"
        ):
            qfuse.inductor_options(freezing=False)
    assert qfuse.inductor_options(freezing=False)["freezing"] is False


@pytest.mark.parametrize("freezing", ["yes", 0, 1, [True]])
def test_bad_freezing_is_an_error(freezing: Any) -> None:
    with (
        pytest.raises(qfuse.OptionsError, match="freezing"),
        qfuse.inductor_passes(freezing=freezing),
    ):
        pass


@pytest.mark.parametrize("theirs", [None, Theirs()])
def test_installed_and_in_the_options_is_once(theirs: Any) -> None:
    setattr(config, SLOT, theirs)
    qfuse.install()
    options = qfuse.inductor_options()
    assert [ours(options[slot]) for slot in SLOTS] == [1, 1]
    again = qfuse.inductor_options(**options)
    assert [ours(again[slot]) for slot in SLOTS] == [1, 1]
    assert (theirs is None) or theirs in options[SLOT]
    before = len(qfuse.reports())
    found = freeze(nn.Linear(4, 4).eval(), torch.randn(2, 4))
    assert len(found.reports) == 1
    assert len(qfuse.reports()) == before + 2  # freeze() compiles twice, once without options


def test_reports_can_be_emptied() -> None:
    freeze(nn.Linear(4, 4).eval(), torch.randn(2, 4))
    assert qfuse.reports()
    qfuse.clear_reports()
    assert qfuse.reports() == ()
    found = freeze(nn.Linear(4, 4).eval(), torch.randn(2, 4))
    assert qfuse.reports() == found.reports
    assert len(found.reports) == 1


def test_their_pass_runs_before_ours_and_once() -> None:
    theirs = Theirs()
    dynamo.reset()
    model = nn.Linear(4, 4).eval()
    options = qfuse.inductor_options(joint_custom_post_pass=theirs, fx_graph_cache=False)
    with torch.no_grad():
        torch.compile(model, options=options)(torch.randn(2, 4))
    assert theirs.seen == 1
