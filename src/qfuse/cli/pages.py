"""Options of ``compile`` and ``explain`` that write a page, a trace or a profile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from qfuse.api import CompiledModel
from qfuse.cli.options import check_writable
from qfuse.profile import Profile
from qfuse.report import Report

Command = Callable[..., Any]

_HTML = click.option(
    "--html", "report_html", metavar="FILE", help="write the report as one HTML file"
)
_MEASURED = (
    click.option("--profile", "show_profile", is_flag=True, help="measure every op, and print it"),
    click.option("--trace", metavar="FILE", help="write measured times for Perfetto"),
)


def page_options(command: Command) -> Command:
    """Add ``--html`` and ``--lint``."""
    return _HTML(_lint_option("")(command))


def measuring_options(command: Command) -> Command:
    """Add ``--html``, ``--lint``, ``--profile`` and ``--trace``."""
    # Decorators apply from the last to the first.
    for option in reversed((_HTML, _lint_option("with --html, "), *_MEASURED)):
        command = option(command)
    return command


def _lint_option(when: str) -> Callable[[Command], Command]:
    does = "also run it op by op, and say what to change in its quantization"
    return click.option("--lint/--no-lint", default=True, show_default=True, help=f"{when}{does}")


@dataclass(frozen=True, slots=True)
class PageRequest:
    """What to write besides the report.

    Attributes:
        html: The file for the page, or ``None``.
        trace: The file for the trace, or ``None``.
        show: Whether to print the profile.
    """

    html: Path | None = None
    trace: Path | None = None
    show: bool = False

    @classmethod
    def of(cls, html: str | None, trace: str | None = None, *, show: bool = False) -> PageRequest:
        """Check the files before any slow step.

        Raises:
            OptionsError: A file cannot be written.
        """
        return cls(_writable("--html", html), _writable("--trace", trace), show)

    def measure(
        self,
        fast: CompiledModel,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        say: Callable[[str], None],
    ) -> Profile | None:
        """Return a profile if something needs it: the page of a compiled model shows times."""
        if self == PageRequest():
            return None
        say("measuring every op")
        return fast.profile(*args, **kwargs)

    def write(self, report: Report, profile: Profile | None, console: Console) -> None:
        """Write the files, and print the profile."""
        if profile is not None and self.show:
            console.print(profile)
        if profile is not None and self.trace is not None:
            profile.save_chrome_trace(self.trace)
        if self.html is not None:
            report.to_html(self.html, profile=profile)


def _writable(option: str, name: str | None) -> Path | None:
    check_writable(name, option)
    return None if name is None else Path(name)
