"""Checks what the page of a report is given besides the report."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from qfuse.ir.errors import OptionsError
from qfuse.profile import Profile

if TYPE_CHECKING:
    from qfuse.report.report import Report


def check_overlays(report: Report, profile: object, sqnr: Mapping[str, float]) -> None:
    """Refuse a profile that is none, and modules that the model does not have.

    Raises:
        OptionsError: What is given does not belong to the report.
    """
    if profile is not None and not isinstance(profile, Profile):
        raise OptionsError(
            f"profile is a {type(profile).__name__}", fix="pass what fast.profile(...) returned"
        )
    paths = {node.module for stage in report.stages for node in stage.nodes}
    known = set(_with_parents(paths))
    # A report that was read from a file has no graphs, so its page has nothing to color.
    if not known:
        return
    for name in sqnr:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3) or sorted(known - {""})[:3]
            raise OptionsError(
                f"sqnr has {name!r}, and the model has no such module",
                fix=f"give paths as model.named_modules() does, such as {', '.join(near)}",
            )


def _with_parents(paths: Iterable[str]) -> Iterator[str]:
    """Yield the paths of modules, and those of the modules that hold them."""
    for path in paths:
        parts = path.split(".")
        yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))
