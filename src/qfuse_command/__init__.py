"""The console script: what needs no torch is answered without importing it.

Importing torch takes seconds, and most modules of ``qfuse`` need it, so this is a package of its
own: the version, the list of commands, ``diff`` and ``plan``. :mod:`qfuse.cli` has everything else.
"""

from __future__ import annotations

import inspect
import io
import os
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, entry_points, version
from types import MappingProxyType, TracebackType
from typing import Any, NoReturn

import click

__all__ = [
    "APART",
    "COMMANDS",
    "ERROR",
    "INTERRUPTED",
    "NO",
    "UNREAD",
    "console_main",
    "listed_command",
    "overview",
]

COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "accuracy": "Compare MODEL, quantized with --quantize, with its float model, layer by "
        "layer.",
        "bisect": "Find the rewrite, the kernel or the backend that makes compiled MODEL differ.",
        "build-kernels": "Compile qfuse's own kernels for this machine, ahead of the first use.",
        "compile": "Compile MODEL, measure it, and print the report.",
        "diff": "Compare two JSON reports, and say whether the second is worse.",
        "doctor": "Show what this machine supports, what would silently not fuse, and how to fix "
        "it.",
        "explain": "Print the report of compiling MODEL, without compiling it.",
        "lint": "Look for misplaced quantization in MODEL, and say what to change.",
        "plan": "Work with plans that `qfuse compile --save-plan` wrote.",
        "repro": "Say whether the rewrite of DIR still changes values.",
        "run": "Run a saved model on its stored example inputs, and print the results.",
        "verify": "Print a digest of what a saved model computes, for each instruction set of the "
        "kernels.",
    }
)
"""What each command does: the first sentence of its help."""

APART: Mapping[str, str] = MappingProxyType(
    {
        "bench": "measure qfuse against its peers (needs the package qfuse-bench)",
        "demo": "quantize and compile a sentence encoder (needs the package qfuse-bench)",
    }
)
"""The commands of qfuse's own benchmark package, which is not part of the wheel."""

HELP_NAMES = {"help_option_names": ["-h", "--help"]}
"""Settings of every command."""

NO = 1
"""Exit status of a command whose answer is not the good one: it differs, it is worse."""

ERROR = 2
"""Exit status of a command that has no answer; click's own for a wrong option."""

UNREAD = 141
"""Exit status of a command whose output is not read: as a shell has it for SIGPIPE."""

INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended: as a shell has it."""

without_torch = False
"""Whether the process compares files: ``import qfuse`` has the names then that need no torch."""


def console_main() -> None:
    """Run the command line with the arguments of the process."""
    sys.excepthook = _crashed
    for stream in (sys.stdout, sys.stderr):
        # Names of files and modules may have letters that a terminal or a log cannot express.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    before = sys.stdout
    try:
        _run()
    except BrokenPipeError:
        _exit_unread()
    except KeyboardInterrupt:
        # While modules are imported: inside of a command it is told.
        sys.exit(INTERRUPTED)
    except SystemExit as end:
        # With 1, which is an answer of ours: rich while it handles the error, and click after it,
        # when it has put another stream in place.
        broken = isinstance(end.__context__, BrokenPipeError) or sys.stdout is not before
        if end.code == NO and broken:
            _exit_unread()
        raise


def _run() -> None:
    global without_torch  # noqa: PLW0603 - a fact of the process
    match sys.argv[1:]:
        case ["--version"] if (installed := _installed_version()) is not None:
            click.echo(f"qfuse, version {installed}")
        case ["--help" | "-h"] if _plugins() <= set(APART):
            overview()(["--help"], prog_name="qfuse")
        case ["diff", *arguments]:
            without_torch = True
            from qfuse_command.diff import diff_command  # noqa: PLC0415

            diff_command(arguments, prog_name="qfuse diff")
        case ["plan", *arguments]:
            without_torch = True
            from qfuse_command.plan import plan_command  # noqa: PLC0415

            plan_command(arguments, prog_name="qfuse plan")
        case _:
            from qfuse.cli import main  # noqa: PLC0415

            main(prog_name="qfuse")


def listed_command(name: str) -> Callable[[Callable[..., Any]], click.Command]:
    """Return a decorator that makes a command of :data:`COMMANDS`.

    Its help is the text there, and then the docstring of the function.
    """

    def make(function: Callable[..., Any]) -> click.Command:
        text = f"{COMMANDS[name]}\n\n{inspect.getdoc(function)}"
        return click.command(name, help=text, context_settings=HELP_NAMES)(function)

    return make


def overview() -> click.Group:
    """Return a group whose help is that of the command line."""
    text = "Compile quantized PyTorch models, and report what was done and why."
    group = click.Group("qfuse", context_settings=HELP_NAMES, help=text)
    group.params.append(
        click.Option(["--version"], is_flag=True, help="Show the version and exit.")
    )
    group.params.append(click.Option(["-v", "--verbose"], is_flag=True, help="show what is logged"))
    for name, does in COMMANDS.items():
        group.add_command(click.Command(name, help=does))
    for name, does in APART.items():
        group.add_command(click.Command(name, short_help=does))
    return group


def _crashed(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback, and exit as after an error: Python's own status is an answer of ours."""
    sys.__excepthook__(kind, error, trace)
    sys.exit(ERROR)


def _exit_unread() -> NoReturn:
    """Exit; what is still buffered goes nowhere: Python flushes it, and would fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None:
            os.dup2(nowhere, stream.fileno())
    sys.exit(UNREAD)


def _installed_version() -> str | None:
    try:
        return version("qfuse")
    except PackageNotFoundError:
        return None


def _plugins() -> set[str]:
    """Return the commands of other packages; their help is known after their import only."""
    return {entry.name for entry in entry_points(group="qfuse.commands")}
