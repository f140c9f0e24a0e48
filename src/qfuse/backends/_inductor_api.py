"""AOTInductor: compile a graph to a package, load a package. The only file on torch's private API.

``torch._inductor`` and SymPy take a second to import and are needed to compile, not to load, so
they are imported inside the functions that compile.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from qfuse.ir.errors import BackendError

MODEL_NAME = "model"
"""Name of the one model in a package; the loader asks for it."""

PINNED: Mapping[str, object] = {
    "aot_inductor.package": True,
    # Constants stay ours: handed over by pointer, never copied into the library.
    "aot_inductor.package_constants_in_so": False,
    # Reports, beside the files, the constants that Inductor made itself; nothing is pickled.
    "aot_inductor.package_constants_on_disk_format": "pickle_weights",
    "aot_inductor.package_cpp_only": False,
    "aot_inductor.use_runtime_constant_folding": False,
    # Without it the thread count of the compiling process is baked into reductions, and a call
    # with more threads writes out of bounds.
    "cpp.dynamic_threads": True,
    # A pool of compiler processes would outlive the compilation, and C++ is compiled in this one.
    "compile_threads": 1,
    # What a user or another library set for its own graphs does not fit this one.
    "freezing": False,
    "fx_wrapper": False,
    "always_keep_tensor_constants": False,
    "pre_grad_custom_pass": None,
    "joint_custom_pre_pass": None,
    "joint_custom_post_pass": None,
    "post_grad_custom_pre_pass": None,
    "post_grad_custom_post_pass": None,
}
"""What every compilation needs to be right, whatever torch's global config says."""

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
"""What a compilation that fails may raise: Inductor wraps some of its errors, not all."""

_TRACED_FROM = 2

# Inductor's compilation state (virtualized globals, config patches) is not made for two at once.
_COMPILING = threading.Lock()


def new_fake_mode(env: ShapeEnv | None) -> FakeTensorMode:
    """Return a mode in which graphs with real constants can be traced.

    Its symbolic sizes are a copy of those in ``env``: what is assumed while compiling must not
    become a fact about the graph that was compiled. A size that was traced at two or more is taken
    to be that, as ``torch.export`` does: the graph does not broadcast it, so the code for two or
    more is right for one as well, and would otherwise refuse it.
    """
    from torch.fx.experimental import symbolic_shapes  # noqa: PLC0415
    from torch.utils._sympy.value_ranges import ValueRanges  # noqa: PLC0415

    if env is None:
        return FakeTensorMode(shape_env=symbolic_shapes.ShapeEnv(), allow_non_fake_inputs=True)
    memo: dict[int, Any] = {id(env.fake_tensor_cache): {}}
    # Both hold fake tensors, which cannot be copied, for replays that nobody asks for here.
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


def copied_size(size: int | torch.SymInt, mode: FakeTensorMode) -> int | torch.SymInt:
    """The same size among the symbols of ``mode``."""
    if isinstance(size, int):
        return size
    assert mode.shape_env is not None, "a mode of new_fake_mode has symbols"
    made: int | torch.SymInt = mode.shape_env.create_symintnode(size.node.expr, hint=size.node.hint)
    return made


def config_digest() -> str:
    """A digest of torch's global Inductor config, which applies where nothing is pinned."""
    from torch._inductor import config  # noqa: PLC0415

    digest: bytes = config.get_hash()
    return digest.hex()


def arch_flags() -> tuple[str, ...]:
    """Compiler flags of the widest vector ISA that Inductor may take here; empty beyond x86."""
    from torch._inductor import cpu_vec_isa  # noqa: PLC0415

    if sys.platform != "linux" or not hasattr(cpu_vec_isa, "x86_isa_checker"):
        return ()
    have = set(cpu_vec_isa.x86_isa_checker())
    for isa in cpu_vec_isa.supported_vec_isa_list:
        if set(str(isa).split()) <= have:
            return tuple(str(isa.build_arch_flags()).split())
    return ()


class Compiled(NamedTuple):
    """What a package needs to be right, besides inputs of the right types.

    Attributes:
        constants: What it reads through pointers, by name. Some Inductor made itself; a constant of
            the graph that is not here was compiled into the code with its value.
        conditions: What Inductor assumed about symbolic sizes, as Python expressions over the names
            of the symbols. The package does not check them, and is wrong where they do not hold.
    """

    constants: dict[str, torch.Tensor]
    conditions: tuple[str, ...]


def compile_package(
    module: GraphModule,
    examples: Sequence[torch.Tensor],
    package: Path,
    patches: Mapping[str, Any],
    ranges: Mapping[str, tuple[int, int | None]],
) -> Compiled:
    """Compile ``module`` into the file ``package``.

    Args:
        module: Plain graph; its constants are parameters, which Inductor does not clone.
        examples: Fake inputs; symbolic sizes stay symbolic.
        package: Where the ``.pt2`` goes.
        patches: Inductor options of this compilation, laid over :data:`PINNED`.
        ranges: Declared lowest and highest value of each symbol.

    Raises:
        BackendError: Inductor or the C++ compiler failed.
    """
    import torch._inductor  # noqa: PLC0415
    from torch._inductor.package.package import package_aoti  # noqa: PLC0415

    env = next((t.fake_mode.shape_env for t in examples if isinstance(t, FakeTensor)), None)
    known = {str(guard.expr) for guard in env.guards} if env else set()
    with ExitStack() as stack:
        stack.enter_context(_COMPILING)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="qfuse-aoti-"))
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.enter_context(torch.random.fork_rng(devices=()))
        # Inductor writes into both dicts, and into the default of `metadata` if none is given.
        options = {
            **PINNED,
            **patches,
            "aot_inductor.metadata": {},
            "aot_inductor.output_path": folder,
        }
        try:
            made = torch._inductor.aot_compile(module, tuple(examples), options=options)
            assert isinstance(made, list), "a package is made of several files"
            package_aoti(str(package), [item for item in made if isinstance(item, str)])
        except FAILURES as error:
            raise BackendError(
                f"AOTInductor could not compile the graph: {_first_line(error)}",
                fix='use backend="eager", and report the graph; the cause is chained below',
            ) from error
    weights = [item for item in made if not isinstance(item, str)]
    constants = {name: value[0] for group in weights for name, value in group.items()}
    new = [guard.expr for guard in env.guards if str(guard.expr) not in known] if env else []
    return Compiled(constants, _conditions(new, ranges))


def load_package(
    package: Path, constants: Mapping[str, torch.Tensor], runners: int
) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """Load a package, bind its constants without copying them, and return its entry.

    The entry checks nothing: a tensor of another dtype or shape than it was compiled for is read
    out of bounds. It releases the GIL, and takes as many threads at once as there are runners. The
    constants must outlive it.

    Raises:
        RuntimeError: The file is no package, or its library cannot be loaded.
        KeyError: The package wants a constant that is not there.
    """
    loader = torch._C._aoti.AOTIModelPackageLoader(str(package), MODEL_NAME, False, runners, -1)
    bound = {name: constants[name] for name in loader.get_constant_fqns()}
    # use_inactive, check_full_update, user_managed. To run without it is a segmentation fault.
    loader.load_constants(bound, False, True, True)
    return loader.run


def _conditions(
    expressions: Iterable[Any], ranges: Mapping[str, tuple[int, int | None]]
) -> tuple[str, ...]:
    """The expressions that do not follow from the declared ranges, as Python."""
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
        value = bound_sympy(expression, bounds)
        if not (value.is_singleton() and value.lower):
            found[printer.doprint(expression)] = None
    return tuple(found)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
