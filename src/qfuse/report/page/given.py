"""Checks what the page of a report is given besides the report."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from numbers import Real
from typing import TYPE_CHECKING

from qfuse.ir.errors import OptionsError
from qfuse.ir.words import a_kind
from qfuse.profile import Profile

if TYPE_CHECKING:
    from qfuse.report.report import Report

_SQNR = 'give the ratio in dB by path of a module, as in sqnr={"encoder.layer.0": 31.5}'


def check_overlays(report: Report, profile: object, sqnr: object) -> None:
    """Refuse a profile or ratios that are none, and modules that the model does not have.

    Raises:
        OptionsError: What is given does not belong to the report.
    """
    if profile is not None and not isinstance(profile, Profile):
        raise OptionsError(
            f"profile is {a_kind(profile)}", fix="pass what fast.profile(...) returned"
        )
    if sqnr is None:
        return
    if not isinstance(sqnr, Mapping):
        raise OptionsError(f"sqnr is {a_kind(sqnr)}", fix=_SQNR)
    for name, value in sqnr.items():
        if not isinstance(name, str):
            raise OptionsError(f"sqnr has the key {name!r}, {a_kind(name)}", fix=_SQNR)
        # A bool is a number in Python.
        if isinstance(value, bool) or not isinstance(value, Real):
            raise OptionsError(f"sqnr has {value!r} for {name!r}, {a_kind(value)}", fix=_SQNR)
    _check_modules(report, sqnr)


def _check_modules(report: Report, names: Iterable[str]) -> None:
    paths = {node.module for stage in report.stages for node in stage.nodes}
    known = set(_with_parents(paths))
    # A report that was read from a file has no graphs, so its page has nothing to color.
    if not known:
        return
    for name in names:
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
