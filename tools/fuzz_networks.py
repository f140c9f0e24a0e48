"""Draw many random networks through the lowering, a few hundred at a time.

    python tools/fuzz_networks.py --networks 20000 --seed 1

Each chunk is a process of its own with seeds of its own. What a test drew is written down when it
ends, so that a run that is interrupted goes on where it was, and one of more networks goes on too.
The exit status is 1 if a network failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support import summary  # noqa: E402

FILES = ["tests/property/test_random_networks.py", "tests/property/test_random_convolutions.py"]
# What one test draws in one chunk.
EXAMPLES = 200
# In place of a test: the process of a chunk, written down when it ends.
PROCESS = "the process"
_VARIABLES = f"HYPOTHESIS_PROFILE=fuzz QFUSE_FUZZ_EXAMPLES={EXAMPLES}"


@dataclass(frozen=True)
class Outcome:
    """What one test drew in one chunk.

    Attributes:
        chunk: The number of the chunk.
        seed: The seed of the test.
        test: The test's id.
        drawn: How many networks it tried.
        skipped: How many were skipped, or a part of their checks, by reason.
        failure: What failed, or "".
    """

    chunk: int
    seed: int
    test: str
    drawn: int
    skipped: dict[str, int] = field(default_factory=dict)
    failure: str = ""


class Recorder:
    """Writes down what each test drew, as soon as it ends."""

    def __init__(self, path: Path, chunk: int) -> None:
        self._path, self._chunk = path, chunk

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        """Give each test a seed of its own, or two of them would draw the same networks."""
        # Imported before pytest starts it could not be rewritten by it.
        from hypothesis import core  # noqa: PLC0415

        core.global_force_seed = seed_of(self._chunk, item.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Any:
        """Add a line for a test that was called."""
        report = yield
        statistics = getattr(item, "hypothesis_statistics", None)
        if report.when == "call" and (statistics is not None or report.failed):
            statistics = statistics or ""
            drawn, skipped = summary.examples_of(statistics), summary.skipped_of(statistics)
            failure = str(report.longreprtext) if report.failed else ""
            seed = seed_of(self._chunk, item.nodeid)
            one = Outcome(self._chunk, seed, item.nodeid, drawn, dict(skipped), failure)
            write(self._path, one)
        return report


def seed_of(chunk: int, test: str) -> int:
    """Return the seed of a test in a chunk."""
    return zlib.crc32(test.encode()) ^ chunk


def write(path: Path, outcome: Outcome) -> None:
    """Add an outcome to a file."""
    with path.open("a") as file:
        file.write(json.dumps(asdict(outcome)) + "\n")


def read(path: Path) -> list[Outcome]:
    """Return the outcomes in a file; a line that was cut off is none."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [Outcome(**json.loads(line)) for line in lines if line.endswith("\n")]


def run_chunk(path: Path, chunk: int) -> None:
    """Run what is left of one chunk in a process, and write down if it dies."""
    script = [sys.executable, __file__, "--file", str(path), "--seed", str(chunk), "--chunk"]
    environment = {
        **os.environ,
        "HYPOTHESIS_PROFILE": "fuzz",
        "OMP_NUM_THREADS": "1",
        "QFUSE_FUZZ_EXAMPLES": str(EXAMPLES),
        "QFUSE_TEST_SEED": str(chunk),
    }
    done = subprocess.run(
        script, check=False, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    failed = any(one.failure for one in read(path) if one.chunk == chunk)
    # Python too exits with 1. No test is left where only this line was not written.
    fine = done.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    fine = fine or (done.returncode == pytest.ExitCode.TESTS_FAILED and failed)
    last = f"exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    write(path, Outcome(chunk, chunk, PROCESS, 0, {}, "" if fine else last))


def run_tests(path: Path, chunk: int) -> int:
    """Run the tests that the file has no outcome of, in this process."""
    known = [one.test for one in read(path) if one.chunk == chunk]
    left_out = [word for test in known for word in ("--deselect", test)]
    options = ["-q", "-p", "no:cacheprovider", "-m", "property", "--timeout", "0"]
    return int(pytest.main([*options, *left_out, *FILES], plugins=[Recorder(path, chunk)]))


def text_of(outcomes: Iterable[Outcome]) -> str:
    """Say how many were drawn, what was skipped and why, and what failed."""
    outcomes = list(outcomes)
    chunks = len({one.chunk for one in outcomes})
    lines = [f"drawn: {sum(one.drawn for one in outcomes):,} networks, in {chunks} chunks"]
    skipped = sum((Counter(one.skipped) for one in outcomes), Counter())
    lines += [f"skipped: {count:,} {reason}" for reason, count in skipped.most_common()]
    failed = [one for one in outcomes if one.failure]
    lines.append(f"failed: {len(failed)}")
    for one in failed:
        again = f"{_VARIABLES} QFUSE_TEST_SEED={one.chunk} .venv/bin/python -m pytest "
        again += f"--hypothesis-seed={one.seed} {one.test}"
        if one.test == PROCESS:
            again = f"make fuzz-networks NETWORKS=1 SEED={one.chunk}, after `rm -r build/fuzz`"
        lines += ["", one.failure, "", f"again: {again}"]
    return "\n".join(lines)


def main() -> int:
    """Draw until the file holds as many networks as are wanted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--networks", type=int, default=20_000, help="how many to draw")
    parser.add_argument(
        "--seed",
        type=int,
        default=1,
        help="the number of the first chunk",
    )
    parser.add_argument("--file", type=Path, help="where it is written down")
    parser.add_argument("--chunk", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    path = given.file or ROOT / "build" / "fuzz" / f"networks-{given.seed}.jsonl"
    if given.chunk:
        return run_tests(path, given.seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    chunk = given.seed
    while sum(one.drawn for one in read(path)) < given.networks:
        if not any(one.chunk == chunk and one.test == PROCESS for one in read(path)):
            run_chunk(path, chunk)
        here = [one for one in read(path) if one.chunk == chunk]
        print(f"chunk {chunk}: {text_of(here)}", flush=True)
        if not any(one.drawn for one in here):
            raise SystemExit("the chunk drew nothing")
        chunk += 1
    outcomes = read(path)
    print(text_of(outcomes))
    return 1 if any(one.failure for one in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
