"""What every test gets: fresh random inputs with the seed printed, and the hypothesis profiles."""

from __future__ import annotations

import functools
import os
import secrets
import zlib
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from qfuse.targets import Target

SEED_VARIABLE = "QFUSE_TEST_SEED"
PROFILE_VARIABLE = "HYPOTHESIS_PROFILE"

# No deadline: the first example of a test may compile something, on a machine shared with others.
settings.register_profile(
    "default", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
# A gate that draws new examples fails changes that are not at fault; `make test` and `make fuzz` draw.
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, database=None)
settings.register_profile("fuzz", settings.get_profile("default"), max_examples=5_000)


def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed of the run before the worker processes start, which inherit it."""
    del config
    os.environ.setdefault(SEED_VARIABLE, str(secrets.randbelow(2**31)))
    settings.load_profile(os.environ.get(PROFILE_VARIABLE, "default"))


def pytest_report_header() -> str:
    """Say how to repeat the run."""
    return f"random inputs: {SEED_VARIABLE}={os.environ[SEED_VARIABLE]} repeats them"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs hardware that this machine lacks, and say what it is."""
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs an accelerator")
    needed = [mark.args[0] for mark in item.iter_markers("isa")]
    missing = [name for name in needed if not this_machine().has(name)]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}")


@functools.cache
def this_machine() -> Target:
    """The facts that the `isa` marker asks for; unknown names of features are an error there."""
    return Target.detect(extensions=False)


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> Iterator[int]:
    """Seed torch differently for every test and every run, and print the seed for failures."""
    run = int(os.environ[SEED_VARIABLE])
    chosen = zlib.crc32(request.node.nodeid.encode()) ^ run
    print(f"torch.manual_seed({chosen}) by {SEED_VARIABLE}={run}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(chosen)
        yield chosen
