"""Functions of the user that a command line names: `module:function`, or `file.py:function`."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, TracebackType

from qfuse.capture.provenance import UserFiles, is_installed
from qfuse.ir.errors import OptionsError, QfuseError


class UserCode:
    """Code of the user, whose errors become errors of qfuse that name its line.

    A context manager, since that code may raise anything, also classes of its own. Errors of qfuse
    and interrupts pass.
    """

    def __init__(self, failed: str, fix: str) -> None:
        """Say what failed if the block raises, and what to do about it."""
        self._failed, self._fix = failed, fix

    def __enter__(self) -> None:
        """Run the block."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Raise an error of the block again, as one of qfuse.

        Raises:
            OptionsError: The block failed.
        """
        if isinstance(error, QfuseError) or not isinstance(error, (Exception, SystemExit)):
            return
        if isinstance(error, SystemExit):
            what = f"{self._failed}: it ends the process (SystemExit: {error})"
            fix = 'put what is for running it as a script below if __name__ == "__main__":'
        else:
            what = f"{self._failed} with {type(error).__name__}: {_message(error)}"
            fix = self._fix
        raise OptionsError(what, where=_line_of(error), fix=fix) from error


@contextlib.contextmanager
def imported(module: str, name: str, returns: str) -> Iterator[object]:
    """Import what a command line names; its folder is importable until the block is left.

    Args:
        module: A module, also one in the working folder, or the path of a Python file.
        name: A name in it, with dots for names inside.
        returns: What to define under this name, as the end of a sentence.

    Raises:
        OptionsError: There is no such module or name, or its code fails.
    """
    file = Path(module).absolute() if module.endswith(".py") else None
    if file is not None and not file.is_file():
        what = "this is a folder" if file.is_dir() else "there is no such file"
        raise OptionsError(what, where=str(file), fix="check the path")
    with _importable(Path.cwd() if file is None else file.parent):
        holder = _import_module(module, name) if file is None else _run_file(file)
        yield _named(holder, module, name, returns)


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Make the modules of a folder importable, as Python does for a script."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        # Unless the user's code has removed it.
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))


def _import_module(module: str, name: str) -> ModuleType:
    with UserCode(
        f"importing {module} fails", f"python -c 'import {module}' shows the whole error"
    ):
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            # Another module is missing inside of it.
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise
            raise OptionsError(
                f"there is no module {error.name!r}",
                where=f"{module}:{name}",
                fix="run in the folder that holds it, install it, give the path of the file "
                f"({error.name.rpartition('.')[2] or 'model'}.py:{name}), or check the spelling",
            ) from error


def _run_file(file: Path) -> ModuleType:
    """Import a file under its own name, or under another one if a module has that."""
    name = file.stem if file.stem not in sys.modules else f"{file.stem} ({file})"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None, "a file that ends in .py has a loader"
    assert spec.loader is not None, "a file that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look a module up by its name.
    sys.modules[name] = module
    try:
        with UserCode(f"importing {file.name} fails", f"python {file} shows the whole error"):
            spec.loader.exec_module(module)
    except OptionsError:
        sys.modules.pop(name, None)
        raise
    return module


def _named(holder: ModuleType, module: str, name: str, returns: str) -> object:
    found: object = holder
    for part in name.split("."):
        with UserCode(f"looking up {name} in {module} fails", "check the spelling"):
            missing = not hasattr(found, part)
        if missing:
            raise OptionsError(
                f"{module} has no {name!r}",
                where=getattr(holder, "__file__", None) or module,
                fix=f"define a function that will {returns}",
            )
        found = getattr(found, part)
    return found


def _message(error: BaseException) -> str:
    """Return the message; a syntax error adds a place to it, which is told apart."""
    return error.msg if isinstance(error, SyntaxError) else str(error)


def _line_of(error: BaseException) -> str | None:
    """Return ``file:line: code`` of an error: the deepest line that the user wrote."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        text = (error.text or "").strip()
        return f"{error.filename}:{error.lineno or 1}" + (f": {text}" if text else "")
    frames, files = traceback.extract_tb(error.__traceback__), UserFiles()
    owned = [frame for frame in frames if files.owns(frame.filename)]
    own = [frame for frame in owned if not is_installed(frame.filename)]
    for choice in (own, owned):
        if choice:
            return f"{choice[-1].filename}:{choice[-1].lineno}: {choice[-1].line}"
    return None
