"""What every test gets: seeded random inputs, the hypothesis profiles, and a pinned cost profile."""

from __future__ import annotations

import gc
import logging
import os
import re
import secrets
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from qfuse import session
from qfuse.cost import CostProfile
from qfuse.cost.times import Times
from qfuse.targets import Target
from tests.support import _export_api, machine, pairs, summary

SEED_VARIABLE = "QFUSE_TEST_SEED"
PROFILE_VARIABLE = "HYPOTHESIS_PROFILE"
EXAMPLES_VARIABLE = "QFUSE_FUZZ_EXAMPLES"

# The same draw for everybody: a red run is then the fault of the change. `make fuzz` draws anew.
SEED = 20260101

FOLDER = Path(__file__).parent
# What the tests of these folders and files do, whatever they look at.
_MARKED = {
    "backends": "compiler",
    "benchmarks": "export",
    "bisection": "export",
    "capture": "export",
    "cases": "export",
    "docs": "export",
    "dynamo": "compiler",
    "examples": "export",
    "exported": "export",
    "inductor": "compiler",
    "integration": "export",
    "kernels": "own_kernels",
    "passes": "export",
    "profile": "export",
    "saving": "export",
    "test_api.py": "export",
    "test_bundle.py": "export",
    "test_cli.py": "export",
    "test_cli_pages.py": "export",
    "test_cli_saved.py": "export",
    "test_command.py": "export",
    "test_installed.py": "export",
    "test_measure.py": "own_kernels",
    "test_model_check.py": "export",
    "test_pipeline.py": "export",
    "test_session.py": "export",
    "test_snapshots.py": "export",
    "zoo": "zoo",
}

# No deadline: the first example of a test may compile something, on a machine shared with others.
settings.register_profile(
    "default",
    max_examples=50,
    deadline=None,
    print_blob=True,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "fuzz",
    settings.get_profile("default"),
    derandomize=False,
    max_examples=int(os.environ.get(EXAMPLES_VARIABLE, "1000")),
)

# Before anything is computed: ATen reads its variable once.
machine.set_variables()


def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed of the run before the worker processes start, which inherit it."""
    profile = os.environ.get(PROFILE_VARIABLE, "default")
    chosen = secrets.randbelow(2**31) if profile == "fuzz" else SEED
    os.environ.setdefault(SEED_VARIABLE, str(chosen))
    settings.load_profile(profile)
    patch = pytest.MonkeyPatch()
    config.add_cleanup(patch.undo)
    machine.limit(patch)
    _export_api.shorten(patch)
    # pytest listens to each logger that does not propagate, and torch formats a stack for every
    # symbol that it traces once somebody listens to this one.
    patch.setattr(logging.getLogger("torch.__trace"), "propagate", True)


def pytest_report_header() -> str:
    """Say how to repeat the run."""
    isa = os.environ.get(machine.ISA_VARIABLE)
    limited = f"{machine.ISA_VARIABLE}={isa} " if isa else ""
    return f"random inputs: {limited}{SEED_VARIABLE}={os.environ[SEED_VARIABLE]} repeats them"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs hardware that this machine lacks, and say what it is."""
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs an accelerator")
    if item.get_closest_marker("own_kernels") is not None:
        machine.needs_own_kernels()
    machine.needs(*(mark.args[0] for mark in item.iter_markers("isa")))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import the tests of a folder whose mark is not asked for.

    It reads selections of the form ``not (a or b)``; any other leaves it to pytest.
    """
    left_out = re.fullmatch(r"not \(([\w ]+)\)", config.option.markexpr)
    if left_out is None or collection_path.parent != FOLDER:
        return None
    return _MARKED.get(collection_path.name) in left_out[1].split(" or ") or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of whole folders, and everything that hypothesis draws for."""
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker("property")
        mark = _MARKED.get(item.path.relative_to(FOLDER).parts[0])
        if mark is not None:
            item.add_marker(mark)
    pairs.mark_the_rest(items)


def pytest_collection_finish() -> None:
    """Take what lives as long as the process, modules and tests, out of every garbage collection."""
    gc.collect()
    gc.freeze()
    # A graph has thousands of objects, and fake tensors come and go.
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, None, None]:
    """Take what outlives a module, such as caches of torch, out of the collections too."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Note how many examples a property test drew, where a report carries it to the main process."""
    report: Any = yield
    statistics = getattr(item, "hypothesis_statistics", None)
    if report.when == "call" and statistics is not None:
        report.user_properties.append((summary.EXAMPLES, summary.examples_of(statistics)))
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any) -> Generator[None, Any, Any]:
    """End with what this machine could not test, what took long, and what was drawn anew."""
    result = yield
    stats = terminalreporter.stats
    if terminalreporter.config.option.collectonly:
        return result
    terminalreporter.write_line(
        summary.not_tested_text(summary.not_tested(stats.get("skipped", ())))
    )
    timed = [r for found in stats.values() for r in found if hasattr(r, "duration")]
    terminalreporter.write_line(summary.longest_text(timed))
    if os.environ.get(PROFILE_VARIABLE) == "fuzz":
        called = [r for outcome in ("passed", "failed") for r in stats.get(outcome, ())]
        terminalreporter.write_line(summary.drawn_text(*summary.drawn(called)))
    return result


@pytest.fixture(autouse=True, scope="session")
def pinned_costs() -> Iterator[None]:
    """Let no plan depend on how fast this machine is, or on what else runs on it."""

    def pinned(target: Target, **how: object) -> CostProfile:
        del target, how
        return CostProfile.pinned()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "load_or_measure", pinned)
        patch.setattr(session, "load_times", lambda *_: Times())
        patch.setattr(session, "save_times", lambda *_: None)
        yield


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> Iterator[int]:
    """Seed torch for every test by its name and the seed of the run, and print it for failures."""
    run = int(os.environ[SEED_VARIABLE])
    chosen = zlib.crc32(request.node.nodeid.encode()) ^ run
    print(f"torch.manual_seed({chosen}) by {SEED_VARIABLE}={run}")
    with torch.random.fork_rng(devices=[]):
        # `torch.manual_seed` also seeds accelerators, and formats a stack for each that is absent.
        torch.default_generator.manual_seed(chosen)
        yield chosen
