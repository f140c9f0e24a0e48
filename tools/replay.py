"""Compare what qfuse makes of the zoo with what another revision makes of it.

    python tools/replay.py BASE [--only llama]

BASE is a git revision. Both trees write their files by their own copy of `replay_dump.py`; the
difference is printed. The exit status is 1 if a file differs. Run it after every step of a change
that is meant to change nothing.
"""

from __future__ import annotations

import argparse
import difflib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHOWN = 60


def compare(base: str, only: str, workers: int) -> int:
    """Dump ``base`` and this tree, print what differs, and return the exit status."""
    commit = _git("rev-parse", "--short=12", base)
    # Worktrees of one repository share what older revisions gave.
    shared = Path(_git("rev-parse", "--path-format=absolute", "--git-common-dir")).parent
    old, new = shared / "build" / "replay" / commit, ROOT / "build" / "replay" / "now"
    for path in new.glob("*.txt"):
        path.unlink()
    if not (old / "complete").exists():
        _dump_revision(commit, old, workers)
    _dump(ROOT, new, only, workers)
    names = sorted({p.name for f in (old, new) for p in f.glob("*.txt") if only in p.name})
    changed = [name for name in names if _differs(old / name, new / name)]
    print(f"replay: {len(names) - len(changed)} of {len(names)} cases are those of {commit}")
    return 1 if changed else 0


def _dump_revision(commit: str, folder: Path, workers: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        _git("worktree", "add", "--force", "--detach", place, commit)
        try:
            _dump(Path(place), folder, "", workers)
        finally:
            _git("worktree", "remove", "--force", place)
    (folder / "complete").touch()


def _dump(tree: Path, folder: Path, only: str, workers: int) -> None:
    script = [sys.executable, "tools/replay_dump.py", str(folder), "--only", only]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    subprocess.run([*script, "--workers", str(workers)], cwd=tree, env=environment, check=True)


def _differs(old: Path, new: Path) -> bool:
    before, after = (p.read_text().splitlines() if p.exists() else [] for p in (old, new))
    names = (f"before/{old.name}", f"after/{new.name}")
    lines = list(difflib.unified_diff(before, after, *names, n=1, lineterm=""))
    print("\n".join(lines[:SHOWN]), end="\n" if lines else "")
    return bool(lines)


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("base", help="the git revision to compare with")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    return compare(given.base, given.only, given.workers)


if __name__ == "__main__":
    raise SystemExit(main())
