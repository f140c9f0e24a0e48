"""Compile and load AOTInductor packages: this package's only file with private torch API.

``torch._inductor`` and SymPy take a second to import and are not needed to load a package, so the
functions that compile import them.
"""

from __future__ import annotations

import copy
import io
import os
import shutil
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._compile import _disable_dynamo
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from qfuse.ir.compiler_limits import limit_behind
from qfuse.ir.errors import BackendError
from qfuse.kernels.compilation.scratch import scratch_folder
from qfuse.kernels.library import is_loaded

MODEL_NAME = "model"
"""Name of the model in a package, which the loader needs."""

PINNED: Mapping[str, object] = {
    "aot_inductor.package": True,
    # Constants are passed by pointer, not copied into the library.
    "aot_inductor.package_constants_in_so": False,
    # Also returns the constants that Inductor created; nothing is pickled.
    "aot_inductor.package_constants_on_disk_format": "pickle_weights",
    "aot_inductor.package_cpp_only": False,
    "aot_inductor.use_runtime_constant_folding": False,
    # Otherwise reductions are specialized to the thread count of the compiling process, and a
    # call with more threads writes out of bounds.
    "cpp.dynamic_threads": True,
    # A pool of compiler processes would outlive the compilation; C++ is compiled in this process.
    "compile_threads": 1,
    # Passes that were set globally are for other graphs.
    "freezing": False,
    "fx_wrapper": False,
    "always_keep_tensor_constants": False,
    "pre_grad_custom_pass": None,
    "joint_custom_pre_pass": None,
    "joint_custom_post_pass": None,
    "post_grad_custom_pre_pass": None,
    "post_grad_custom_post_pass": None,
}
"""The options that correctness needs, whatever torch's global config is."""

FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""The errors of a failed compilation; Inductor wraps only some of them."""

_TRACED_FROM = 2
_NEEDED_BYTES = 16 << 20

# Inductor's compilation state (virtualized globals, config patches) is not thread-safe.
_COMPILING = threading.Lock()


def new_trace_mode(env: ShapeEnv | None) -> FakeTensorMode:
    """Return a fake mode in which graphs with real constants can be traced.

    Its symbolic sizes are a copy of those in ``env``, so that assumptions of the compilation do not
    change the source graph's environment. A size that was traced at two or more is assumed to be at
    least two, as in ``torch.export``: the graph does not broadcast it, so the code is right for one
    too, and would refuse it otherwise.
    """
    from torch.fx.experimental import symbolic_shapes  # noqa: PLC0415
    from torch.utils._sympy.value_ranges import ValueRanges  # noqa: PLC0415

    if env is None:
        return FakeTensorMode(shape_env=symbolic_shapes.ShapeEnv(), allow_non_fake_inputs=True)
    memo: dict[int, Any] = {id(env.fake_tensor_cache): {}}
    # Both hold fake tensors for replays; these cannot be copied, and are not needed here.
    for name in ("events", "tracked_fakes"):
        held = getattr(env, name, None)
        if isinstance(held, list):
            memo[id(held)] = []
    own = copy.deepcopy(env, memo)
    for symbol, traced in own.backed_var_to_val.items():
        bounds = own.var_to_range[symbol]
        if traced >= _TRACED_FROM > bounds.lower:
            own.var_to_range[symbol] = ValueRanges(_TRACED_FROM, bounds.upper)
    return FakeTensorMode(shape_env=own, allow_non_fake_inputs=True)


def not_traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` for code that Dynamo traces: it breaks its graph around the call.

    ``torch.compiler.disable`` would import Dynamo at once.
    """
    made: Callable[..., Any] = _disable_dynamo(function)
    return made


def copied_size(size: int | torch.SymInt, mode: FakeTensorMode) -> int | torch.SymInt:
    """Return the same size over the symbols of ``mode``."""
    if isinstance(size, int):
        return size
    assert mode.shape_env is not None, "a mode of new_trace_mode has symbols"
    made: int | torch.SymInt = mode.shape_env.create_symintnode(size.node.expr, hint=size.node.hint)
    return made


def config_digest() -> str:
    """Return a digest of torch's global Inductor config, which applies to options not pinned."""
    from torch._inductor import config  # noqa: PLC0415

    digest: bytes = config.get_hash()
    return digest.hex()


def option_names() -> frozenset[str]:
    """Return the names of all options of Inductor."""
    from torch._inductor import config  # noqa: PLC0415

    return frozenset(config.get_config_copy())


def option_type(name: str) -> Any:
    """Return the declared type of an option of Inductor, such as ``int | None``."""
    from torch._inductor import config  # noqa: PLC0415

    return config.get_type(name)  # type: ignore[attr-defined]


def called_directly(declarations: Mapping[OpOverload, str]) -> dict[str, object]:
    """Return the option to call ops as the C functions with these declarations.

    Their calls go through a dispatcher otherwise, for which each argument is boxed.
    """
    from torch._inductor import config  # noqa: PLC0415

    known = hasattr(config.aot_inductor, "custom_ops_to_c_shims")
    if not (declarations and known):
        return {}
    shims = {op: [text] for op, text in declarations.items()}
    return {"aot_inductor.custom_ops_to_c_shims": shims}


def arch_flags() -> tuple[str, ...]:
    """Return the compiler flags of the widest vector ISA for Inductor; empty if not x86."""
    from torch._inductor import cpu_vec_isa  # noqa: PLC0415

    if sys.platform != "linux" or not hasattr(cpu_vec_isa, "x86_isa_checker"):
        return ()
    have = set(cpu_vec_isa.x86_isa_checker())
    for isa in cpu_vec_isa.supported_vec_isa_list:
        if set(str(isa).split()) <= have:
            return tuple(str(isa.build_arch_flags()).split())
    return ()


class Compiled(NamedTuple):
    """A package, and its requirements besides inputs of the right dtypes and shapes.

    Attributes:
        package: The content of a ``.pt2`` file.
        constants: The constants passed by pointer, by name, including those that Inductor created;
            the values of all other constants of the graph were compiled into the code.
        conditions: Inductor's assumptions about symbolic sizes, as Python expressions over the
            names of the symbols. The package does not check them, and is wrong if they do not hold.
    """

    package: bytes
    constants: dict[str, torch.Tensor]
    conditions: tuple[str, ...]


def compile_package(
    module: GraphModule,
    examples: Sequence[torch.Tensor],
    patches: Mapping[str, Any],
    ranges: Mapping[str, tuple[int, int | None]],
) -> Compiled:
    """Compile ``module``.

    Args:
        module: A plain graph; its constants are parameters, which Inductor does not clone.
        examples: Fake inputs; symbolic sizes stay symbolic.
        patches: Inductor options of this compilation, which override :data:`PINNED`.
        ranges: Declared lowest and highest value of each symbol.

    Raises:
        BackendError: Inductor or the C++ compiler failed.
        OSError: There is no folder for temporary files.
    """
    import torch._inductor  # noqa: PLC0415
    from torch._inductor.package.package import package_aoti  # noqa: PLC0415

    env = next((t.fake_mode.shape_env for t in examples if isinstance(t, FakeTensor)), None)
    # Only what Inductor assumes besides the captured graph has to be checked in each call.
    known = {str(guard.expr) for guard in env.guards} if env else set()
    with ExitStack() as stack:
        stack.enter_context(_COMPILING)
        folder = stack.enter_context(scratch_folder("qfuse-aoti-"))
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        # The code must not depend on the modes of the caller, whose random state is restored.
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.enter_context(torch.random.fork_rng(devices=()))
        # Inductor mutates both dicts, and the default of `metadata` if it is omitted.
        options = {
            **PINNED,
            **patches,
            "aot_inductor.metadata": {},
            "aot_inductor.output_path": str(folder),
        }
        try:
            made = torch._inductor.aot_compile(module, tuple(examples), options=options)
            assert isinstance(made, list), "a package is made of several files"
            # In memory: torch's writer ends the process if it cannot write to a file.
            package = io.BytesIO()
            package_aoti(package, [item for item in made if isinstance(item, str)])
        except FAILURES as error:
            raise _failure(error) from error
    weights = [item for item in made if not isinstance(item, str)]
    constants = {name: value[0] for group in weights for name, value in group.items()}
    new = [guard.expr for guard in env.guards if str(guard.expr) not in known] if env else []
    return Compiled(package.getvalue(), constants, _conditions(new, ranges))


def load_package(
    package: Path, constants: Mapping[str, torch.Tensor], runners: int
) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """Load a package, bind its constants without copying them, and return its entry.

    The entry checks nothing: a tensor of another dtype or shape than compiled for is read out of
    bounds. The constants must outlive it. If qfuse's kernels are loaded, it releases the GIL, and
    runs as many threads at the same time as there are runners; others wait. Otherwise it is
    torch's own, which holds the GIL, and runs one thread at a time.

    Raises:
        RuntimeError: The file is not a package, or its library cannot be loaded.
        KeyError: A constant of the package is missing.
    """
    if is_loaded():
        return _SharedPackage(package, constants, runners)
    return _SerialPackage(package, constants)


class _SharedPackage:
    """A package that several threads run at the same time, on one copy of the constants."""

    def __init__(self, package: Path, constants: Mapping[str, torch.Tensor], runners: int) -> None:
        self._runner = torch.classes.qfuse.PackageRunner(str(package), MODEL_NAME, runners)
        self._runner.bind({name: constants[name] for name in self._runner.constant_names()})
        self._number = self._runner.number()
        self._run = torch.ops.qfuse.run_package.default

    def __call__(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        results: list[torch.Tensor] = self._run(self._number, tensors)
        return results


class _SerialPackage:
    """A package that one thread at a time runs, with torch's own loader."""

    def __init__(self, package: Path, constants: Mapping[str, torch.Tensor]) -> None:
        loader = torch._C._aoti.AOTIModelPackageLoader(str(package), MODEL_NAME, False, 1, -1)
        bound = {name: constants[name] for name in loader.get_constant_fqns()}
        # use_inactive, check_full_update, user_managed. Without this call, running segfaults.
        loader.load_constants(bound, False, True, True)
        self._run = loader.run
        # The loader runs one call at a time, and waiting inside of it would hold the GIL, which an
        # op implemented in Python needs to finish: so calls wait here instead.
        self._turn = threading.Lock()

    def __call__(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        with self._turn:
            return self._run(tensors)


def _conditions(
    expressions: Iterable[Any], ranges: Mapping[str, tuple[int, int | None]]
) -> tuple[str, ...]:
    """Return the expressions that do not follow from the declared ranges, as Python source."""
    from torch.utils._sympy.numbers import int_oo  # noqa: PLC0415
    from torch.utils._sympy.printers import PythonPrinter  # noqa: PLC0415
    from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy  # noqa: PLC0415

    printer = PythonPrinter()
    found: dict[str, None] = {}
    for expression in expressions:
        bounds = {
            symbol: ValueRanges(low, int_oo if high is None else high)
            for symbol in expression.free_symbols
            for low, high in (ranges.get(str(symbol), (0, None)),)
        }
        # An assumption such as `s0 < 2048` follows from a declared maximum of 512.
        value = bound_sympy(_without_small_remainders(expression, bounds), bounds)
        if not (value.is_singleton() and value.lower):
            found[printer.doprint(expression)] = None
    return tuple(found)


def _without_small_remainders(expression: Any, bounds: dict[Any, Any]) -> Any:
    """Replace remainders of a smaller number: ``1 % (26 * (s0 // 2))`` is 1 from ``s0 = 2`` on."""
    from torch.utils._sympy.functions import Mod, PythonMod  # noqa: PLC0415
    from torch.utils._sympy.value_ranges import bound_sympy  # noqa: PLC0415

    def reduced(remainder: Any) -> Any:
        number, by = remainder.args
        x, y = bound_sympy(number, bounds), bound_sympy(by, bounds)
        return number if x.lower >= 0 and x.upper < y.lower else remainder

    return expression.replace(lambda part: isinstance(part, (Mod, PythonMod)), reduced)


def _failure(error: BaseException) -> BackendError:
    """Return the error of a failed compilation: the graph is at fault only if no limit is."""
    what = "AOTInductor could not compile the graph"
    full = _full_folder()
    if full:
        text = f"{what}: {_first_line(error)}, and the disk of {full} is full"
        return BackendError(text, fix=f"free space there: {full}")
    limit = limit_behind(error)
    if limit is not None:
        return BackendError(f"{what}: {limit.what}", fix=f'{limit.fix}, or use backend="eager"')
    return BackendError(
        f"{what}: {_first_line(error)}",
        fix='use backend="eager", and report the graph; the cause is chained below',
    )


def _full_folder() -> str:
    """Return a folder in which a compilation finds no space, "" if all have some.

    A compiler that cannot write says so in its own words, or is killed.
    """
    try:
        folders = (tempfile.gettempdir(), os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""))
        full = (f for f in folders if f and shutil.disk_usage(f).free < _NEEDED_BYTES)
        return next(full, "")
    # Without space there may be no folder for temporary files either.
    except OSError as error:
        return error.filename or "temporary files"


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
