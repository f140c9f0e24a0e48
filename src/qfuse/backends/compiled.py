"""The callable for users: binds and checks arguments, runs the graph, unflattens the result."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self

import torch
from torch import nn

from qfuse.backends._inductor_api import not_traced
from qfuse.backends.layout import dense_strides
from qfuse.backends.runner import Runner
from qfuse.ir.errors import CompiledModelError
from qfuse.ir.graph.stage_graph import Signature
from qfuse.ir.signature._tree_api import tracing
from qfuse.ir.signature.caller import Caller
from qfuse.targets import checked_threads, set_threads

_CONVERT = "convert the source model, quantize it again and compile the result"


class CompiledModule(nn.Module):
    """A compiled model with the call signature of its source; thread-safe.

    It is an ``nn.Module`` in eval mode without parameters, buffers or submodules, so it can take
    the place of its source in another module. Its forward hooks work; those that torch registers
    for all modules do not run. What would change its weights, dtype, device or mode is refused with
    :class:`qfuse.CompiledModelError`, also when it is asked of the module around it; a conversion
    that changes nothing, such as ``.to("cpu")``, is not.

    Every input is checked before it reaches compiled code, which would misread a tensor of another
    dtype or shape. Inputs may have any strides; they are copied if the code needs others. Only the
    tensors that the source program mutates are written, in place. Results never require grad.

    Calls of several threads run at the same time and share the weights. Those of a model that keeps
    state, such as a cache in its buffers, take turns; so do calls of code that was loaded without
    qfuse's kernels. A tensor that a call writes must not be given to another call meanwhile.

    In a forked child process (not one started by ``spawn``), use it only if the parent had not run
    parallel code before: the parent's OpenMP threads do not exist in the child, where torch itself
    hangs for the same reason.
    """

    def __init__(self, signature: Signature, runner: Runner, threads: int | None = None) -> None:
        super().__init__()
        self.training = False
        self.signature = signature
        self._entry = _Entry(signature, runner, checked_threads(threads))

    @property
    def runner(self) -> Runner:
        """What runs the graph."""
        return self._entry.runner

    @property
    def backend(self) -> str:
        """``aoti`` or ``eager``."""
        return self.runner.backend

    @property
    def threads(self) -> int | None:
        """How many threads a call uses; ``None`` if that is ``torch.get_num_threads()``."""
        return self._entry.threads

    def with_threads(self, threads: int | None) -> Self:
        """Return the same model, of which a call uses so many threads.

        Both share code, weights, state and hooks. Nothing outside of the calls changes: not
        torch's setting, and not other calls.

        Args:
            threads: The number; ``None`` for ``torch.get_num_threads()``.

        Raises:
            OptionsError: It is not a positive number.
        """
        made = type(self).__new__(type(self))
        vars(made).update(vars(self))
        vars(made)["_entry"] = _Entry(self.signature, self.runner, checked_threads(threads))
        return made

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Call the model.

        Raises:
            InputError: The arguments do not match the captured signature; nothing was run.
            CompiledModelError: The call is traced, as by ``make_fx``, or transformed, as by
                ``torch.vmap``.
        """
        # What `nn.Module` does around every call would cost a microsecond.
        if self._forward_pre_hooks or self._forward_hooks:
            return super().__call__(*args, **kwargs)
        return self._run(args, kwargs)

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Call the model without hooks."""
        return self._run(args, kwargs)

    def _run(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        # Dynamo breaks its graph around the call: packages do not run on its fake tensors.
        if torch.compiler.is_dynamo_compiling():
            return _untraced(self._entry, args, kwargs)
        what = tracing()
        if what:
            raise _refusal(
                f"traced or transformed, and this call is inside {what}",
                "trace, export or transform the source model",
            )
        return self._entry(args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the mutable state and the hooks; code and constants are immutable and shared."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        for name, value in vars(self).items():
            vars(made)[name] = copy.copy(value) if isinstance(value, dict) else value
        vars(made)["_entry"] = _Entry(self.signature, self.runner.fork(), self.threads)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "a compiled graph cannot be pickled\n"
            "  do: pickle or save what qfuse.compile returns, which holds it"
        )

    def train(self, mode: bool = True) -> Self:
        """Stay in eval mode.

        Raises:
            CompiledModelError: ``mode`` is true.
        """
        if mode:
            raise _refusal(
                "trained", "train the source model, quantize it again and compile the result"
            )
        return super().train(mode=False)

    def state_dict(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refuse: the weights are packed for this machine, and merged with others.

        Raises:
            CompiledModelError: Always.
        """
        raise _refusal(
            "asked for a state_dict: its weights are in the layout of kernels of this machine",
            "save the state_dict of the source model, and compile where it is loaded",
        )

    def register_full_backward_hook(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refuse: there is no backward pass.

        Raises:
            CompiledModelError: Always.
        """
        raise _refusal("given a backward hook: it has no backward pass", "hook the source model")

    def register_full_backward_pre_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse as :meth:`register_full_backward_hook` does."""
        self.register_full_backward_hook(*args, **kwargs)

    def register_backward_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse as :meth:`register_full_backward_hook` does."""
        self.register_full_backward_hook(*args, **kwargs)

    def _load_from_state_dict(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        # Called for `load_state_dict` of this module and of the modules around it.
        raise _refusal(
            "loaded with other weights", "load them into the source model and compile it again"
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Accept a conversion that changes nothing: ``to``, ``half``, ``cuda`` and others call it.

        The modules around this one call it too, as ``SentenceTransformer.encode`` does every time.
        """
        del recurse
        for dtype in self._float_dtypes():
            probe = torch.empty(0, dtype=dtype)
            try:
                made = fn(probe)
            except (RuntimeError, AssertionError, NotImplementedError) as error:
                raise _refusal("moved or converted", _CONVERT) from error
            if (made.dtype, made.device) != (probe.dtype, probe.device):
                raise _refusal(f"moved or converted to {made.dtype} on {made.device}", _CONVERT)
        return self

    def _float_dtypes(self) -> tuple[torch.dtype, ...]:
        """Return the dtypes of the float inputs, or float32 if there are none."""
        given = (leaf.dtype for leaf in self.signature.inputs)
        floats = {dtype for dtype in given if dtype is not None and dtype.is_floating_point}
        return tuple(floats) or (torch.float32,)


class _Entry:
    """Binds and checks the arguments of a call, runs the graph, and unflattens the result.

    Apart from the module, because reading an attribute of an ``nn.Module`` takes longer.
    """

    def __init__(self, signature: Signature, runner: Runner, threads: int | None) -> None:
        self.runner = runner
        self.threads = threads
        self._run = runner.run if threads is None else self._limited
        caller = Caller(signature)
        # Without the frames between, which small models would notice.
        self._bind, self._check = caller.binder.bind, caller.guards.check
        self._rebuild = caller.rebuild
        fed = [i for i, leaf in enumerate(signature.inputs) if leaf.placeholder is not None]
        written = [m.input_index for m in signature.mutations if m.input_index is not None]
        self._written = tuple((leaf, fed.index(leaf)) for leaf in written)
        made = [(s.index, s) for s in signature.outputs if s.input_index is None]
        self._strides = tuple({(i, s.strides) for i, s in made if i is not None and s.strides})
        self._orders = tuple({(i, s.order) for i, s in made if i is not None and s.order})

    def __call__(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        """Call the graph."""
        leaves = self._bind(args, kwargs)
        tensors = self._check(leaves)
        outputs = self._run(tensors)
        if self._written:
            self._write_back(leaves, tensors)
        # The caller gets the strides of the source model, whatever the code prefers.
        for index, strides in self._strides:
            outputs[index] = _restrided(outputs[index], strides)
        for index, order in self._orders:
            strides = dense_strides(outputs[index].shape, order)
            outputs[index] = _restrided(outputs[index], strides)
        return self._rebuild(outputs, leaves)

    def _limited(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run the graph with the model's number of threads."""
        assert self.threads is not None, "a model without a number calls the runner"
        before = set_threads(self.threads, self.threads)
        try:
            return self.runner.run(tensors)
        finally:
            set_threads(*before)

    def _write_back(self, leaves: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
        """Copy values that were written to copies back to the caller's tensors."""
        with torch.no_grad():
            for leaf, position in self._written:
                given, used = leaves[leaf], tensors[position]
                if given.data_ptr() != used.data_ptr():
                    given.copy_(used)


@not_traced
def _untraced(entry: _Entry, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    """Call the graph where Dynamo traces what is around it."""
    return entry(args, kwargs)


def _refusal(what: str, fix: str) -> CompiledModelError:
    return CompiledModelError(f"a compiled model cannot be {what}", fix=fix)


def _restrided(value: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return ``value`` with ``strides``; a view where they differ for axes of size one only."""
    if value.stride() == strides or value.numel() == 0:
        return value
    pairs = zip(value.shape, value.stride(), strides, strict=True)
    if all(size == 1 or have == want for size, have, want in pairs):
        return value.as_strided(value.shape, strides)
    made = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
    return made.copy_(value)
