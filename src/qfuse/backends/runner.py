"""The interface of backends: a runner of flat inputs, and the compile options."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import torch

from qfuse.backends._inductor_api import PINNED
from qfuse.backends.inductor_options import checked_inductor_options
from qfuse.ir.errors import OptionsError

BLOCKS_VARIABLE = "QFUSE_BLOCKS"
"""The environment variable with the default of :attr:`BackendOptions.blocks`."""

_LEAST_RUNNERS = 4

Progress = Callable[[str], None]
"""Called with a short description of the current step."""


class Runner(Protocol):
    """A compiled graph; :class:`qfuse.backends.CompiledModule` checks its inputs.

    Any number of threads may call it.
    """

    @property
    def backend(self) -> str:
        """``aoti`` or ``eager``."""

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run the graph, apply its mutations, and return the user outputs.

        Args:
            inputs: The tensors of the signature, in its order, of the right dtype, device and
                shape; any strides. They must not share memory with mutated tensors. Those that the
                source program mutates are written.
        """

    def written(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what a run with ``inputs`` writes, in the order of ``Signature.mutations``."""

    def fork(self) -> Runner:
        """Return a runner with its own copy of the state, and the same constants."""


class BlockChoice(StrEnum):
    """Whether blocks that a graph repeats are compiled once, and run one after another.

    ``AUTO``: where the graph is deep and the boundaries between the blocks cost nothing. ``ON``:
    wherever at least three blocks are equal. ``OFF``: never.
    """

    AUTO = "auto"
    ON = "on"
    OFF = "off"


def _default_runners() -> int:
    return max(_LEAST_RUNNERS, os.cpu_count() or 1)


def _default_blocks() -> BlockChoice:
    name = os.environ.get(BLOCKS_VARIABLE) or BlockChoice.AUTO
    if name not in list(BlockChoice):
        raise OptionsError(
            f"{BLOCKS_VARIABLE}={name!r} is unknown", fix=f"one of {', '.join(BlockChoice)}"
        )
    return BlockChoice(name)


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """Options for compiling a lowered graph.

    Attributes:
        cache: Store compiled packages on disk and reuse them.
        cache_folder: The cache folder; the default is ``aoti`` in qfuse's cache folder.
        runners: How many threads may run the compiled code at the same time; others wait. By
            default as many as the machine has cores, and at least 4.
        blocks: Whether blocks that the graph repeats are compiled once. By default the value of
            the environment variable ``QFUSE_BLOCKS``, and ``auto`` without it.
        fingerprint: Facts about the target that the code depends on, as one text.
        kernels: Digest of the library of custom kernels, "" if there is none.
        inductor: Inductor options for this graph, for experts.

    Raises:
        OptionsError: A value is invalid, or an option of Inductor is one that qfuse sets itself.
    """

    cache: bool = True
    cache_folder: Path | None = None
    runners: int = field(default_factory=_default_runners)
    blocks: BlockChoice = field(default_factory=_default_blocks)
    fingerprint: str = ""
    kernels: str = ""
    inductor: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.runners < 1:
            raise OptionsError(f"runners must be at least 1, not {self.runners}")
        # Inductor takes a second to import.
        if self.inductor:
            why = "compiled code would not be loaded, or be wrong"
            checked = checked_inductor_options(self.inductor, PINNED, why)
            object.__setattr__(self, "inductor", checked)
