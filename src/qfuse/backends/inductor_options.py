"""Checks the Inductor options that a user gives, before anything is compiled."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from qfuse.backends import _inductor_api
from qfuse.ir.errors import OptionsError


def checked_inductor_options(
    options: Mapping[str, Any], needed: Mapping[str, object], why: str
) -> dict[str, Any]:
    """Return Inductor options with their names as Inductor has them.

    Args:
        options: The options, by name; ``-`` stands for ``_``, as in ``torch.compile``.
        needed: Values that an option must not differ from.
        why: Why not: the rest of a sentence that begins with "qfuse needs ... there:".

    Raises:
        OptionsError: Inductor has no such option, a value is not of its type, or one differs from
            what is needed.
    """
    known = _inductor_api.option_names()
    given = {name.replace("-", "_"): value for name, value in options.items()}
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            fix = f"did you mean {near[0]!r}?" if near else "see torch._inductor.list_options()"
            raise OptionsError(f"Inductor has no option {name!r}", fix=fix)
        kind = _inductor_api.option_type(name)
        if not _is_of(value, kind):
            raise OptionsError(
                f"Inductor's option {name!r} is {value!r}", fix=f"pass {_described(kind)}"
            )
        if name in needed and (type(value), value) != (type(needed[name]), needed[name]):
            raise OptionsError(
                f"Inductor's option {name!r} is {value!r}, and qfuse needs {needed[name]!r} there: "
                f"{why}",
                fix="leave it out",
            )
    return given


def _is_of(value: object, kind: Any) -> bool:
    """Whether a value is of the declared type of an option, as far as that can be said."""
    # torch.compile is as strict; it does not look into types that are composed of others.
    if kind is float:
        return isinstance(value, float)
    return _fits(value, kind)


def _fits(value: object, kind: Any) -> bool:
    origin = get_origin(kind)
    if origin in {Union, UnionType}:
        return any(_fits(value, one) for one in get_args(kind))
    if origin is Literal:
        # By type too: True equals 1.
        return any(type(value) is type(one) and value == one for one in get_args(kind))
    # What is in a list is left to torch, which reads many as tuples too.
    if origin in {list, tuple}:
        return isinstance(value, (list, tuple))
    if isinstance(value, bool) and kind in {int, float}:
        return False
    if kind is float:
        return isinstance(value, (int, float))
    found = NoneType if kind is None else origin or kind
    # A type that cannot be tested is left to torch, too.
    return not isinstance(found, type) or isinstance(value, found)


def _described(kind: Any) -> str:
    if isinstance(kind, type) and get_origin(kind) is None:
        return f"a value of type {kind.__name__}"
    if "CustomGraphPass" in str(kind):
        return "a function of a graph, a CustomGraphPass, or a list of them"
    choices = [one for one in (kind, *get_args(kind)) if get_origin(one) is Literal]
    if choices:
        none = " or None" if choices[0] is not kind else ""
        return f"one of {', '.join(map(repr, get_args(choices[0])))}{none}"
    return f"a value of type {str(kind).replace('typing.', '').replace('collections.abc.', '')}"
