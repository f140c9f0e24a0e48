"""Options of Inductor are checked before anything is compiled, and the error names the option."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from qfuse.backends import BackendOptions
from qfuse.backends._inductor_api import PINNED, option_type
from qfuse.backends.inductor_options import _is_of
from qfuse.ir.errors import OptionsError


def other(value: object) -> object:
    """Return another value of the same type, as far as the option has one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return print if value is None else "binary_blob"


@pytest.mark.parametrize("name", PINNED)
def test_refuses_what_qfuse_needs(name: str) -> None:
    assert BackendOptions(inductor={name: PINNED[name]}).inductor == {name: PINNED[name]}  # type: ignore[dict-item]

    given: dict[str, Any] = {name: other(PINNED[name])}
    with pytest.raises(OptionsError, match=f"'{name}' is .*qfuse needs .* there") as error:
        BackendOptions(inductor=given)
    assert error.value.fix == "leave it out"


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("max_autotune", "yes", "'max_autotune' is 'yes'\n.*pass a value of type bool"),
        ("cpp.threads", True, "'cpp.threads' is True\n.*pass a value of type int"),
        ("cpp.simdlen", "wide", "'cpp.simdlen' is 'wide'\n.*pass a value of type int | None"),
        ("cpp.cxx", "g++", "'cpp.cxx' is .*\n.*tuple"),
        ("cpu_backend", "gpu", "'cpu_backend' is 'gpu'\n.*pass one of 'cpp', 'triton'"),
        ("cpp.thread", 2, "has no option 'cpp.thread'\n.*did you mean 'cpp.threads'"),
        ("joint_custom_pre_pass", 3, "'joint_custom_pre_pass' is 3\n.*a function of a graph"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_the_option(name: str, value: Any, told: str) -> None:
    with pytest.raises(OptionsError, match=told):
        BackendOptions(inductor={name: value})


def test_names_are_as_torch_compile_reads_them() -> None:
    options = BackendOptions(inductor={"max-autotune": False, "cpp.simdlen": None})
    assert options.inductor == {"max_autotune": False, "cpp.simdlen": None}


def test_the_values_that_inductor_has_itself_are_of_their_types() -> None:
    config: Any = importlib.import_module("torch._inductor.config")
    for name, value in config.get_config_copy().items():
        assert _is_of(value, option_type(name)), name
