"""What torch reports about this process and CPU; the only module here with private API."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes


def torch_version() -> str:
    """Return the version of torch with its local part: ``2.13.0+cpu``."""
    return str(torch.__version__)


def thread_count() -> int:
    """Return the number of threads per operator."""
    return torch.get_num_threads()


def cpu_capabilities() -> Mapping[str, Any]:
    """Return cpuinfo's flags per instruction set and some sizes, under torch's names."""
    return torch.cpu.get_capabilities()


def aten_capability() -> str:
    """Return the ISA that ATen dispatches on, such as ``AVX512`` (an env var may lower it)."""
    return str(torch.backends.cpu.get_cpu_capability())


def mkldnn_enabled() -> bool:
    """Whether oneDNN is built in and currently enabled."""
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(available and torch.backends.mkldnn.enabled)


def grad_enabled() -> bool:
    """Whether grad mode is on in this thread."""
    return torch.is_grad_enabled()


def op_exists(name: str) -> bool:
    """Whether an operator with this name and overload has a schema; it may lack a kernel."""
    try:
        # The dispatch key is valid, so an error can only be about the operator.
        torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")
    except RuntimeError:
        return False
    return True


def op_has_kernel(name: str, dispatch_key: str) -> bool:
    """Whether an existing operator has a kernel for this dispatch key."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, dispatch_key))


def _inductor_config() -> Any | None:
    """Return Inductor's config if it is already imported, since importing it is slow."""
    return sys.modules.get("torch._inductor.config")


def inductor_compilers() -> tuple[str | None, ...] | None:
    """Return the C++ compilers in Inductor's config, or ``None`` while it is not imported."""
    config = _inductor_config()
    if config is None:
        return None
    # Inductor accepts one name as well as several.
    listed = config.cpp.cxx
    return tuple(listed) if isinstance(listed, (list, tuple)) else (listed,)


def inductor_freezing(default: bool) -> bool:
    """Return Inductor's global freezing switch; ``default`` while it is not imported."""
    config = _inductor_config()
    return default if config is None else bool(config.freezing)


def pre_grad_pass_installed() -> str | None:
    """Return the name of Inductor's global pre-grad pass, or ``None`` if it is not set."""
    config = _inductor_config()
    installed = None if config is None else config.pre_grad_custom_pass
    if installed is None:
        return None
    name = getattr(installed, "__qualname__", type(installed).__qualname__)
    return f"{getattr(installed, '__module__', '?')}.{name}"


def real_tensors() -> Any:
    """Return a context in which tensors are real, even under a fake or tracing mode."""
    return _disable_current_modes()


def int_mm_fills_one_row() -> bool:
    """Whether ``_int_mm`` computes its result for one row whose row stride is 0.

    Inductor emits this for one token. oneDNN rejects the stride, the error status is ignored, and
    the output is left unwritten: here it holds a value that the product cannot have.
    """
    with real_tensors(), torch.no_grad():
        length = 64
        row = torch.ones(length, dtype=torch.int8, device="cpu").as_strided((1, length), (0, 1))
        weight = torch.ones(length, 32, dtype=torch.int8, device="cpu")
        # Fresh memory could hold the right result by chance.
        out = torch.full((1, 32), -77, dtype=torch.int32, device="cpu")
        torch._int_mm(row, weight, out=out)
        return bool((out == length).all())


def int_mm_exact() -> bool:
    """Whether ``_int_mm`` is correct on extremes, where 16-bit partial sums would overflow."""
    with real_tensors(), torch.no_grad():
        # Two products of -128 * -128 are 32768, one more than 16 bits hold.
        left = torch.full((8, 64), -128, dtype=torch.int8, device="cpu")
        left[:, ::3] = 127
        right = left[0].repeat(32, 1).t()
        expected = int((left[0].to(torch.int64) ** 2).sum())
        return bool((torch._int_mm(left, right) == expected).all())


def has_amx_tiles() -> bool:
    """Whether the system lets this process use tiles; Linux is asked, as by any library."""
    return torch.cpu._init_amx()
