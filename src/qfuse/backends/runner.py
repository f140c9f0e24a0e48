"""What every backend gives: something that runs flat inputs, and how it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from qfuse.ir.errors import OptionsError

Progress = Callable[[str], None]
"""Told, in a few words, what a long compilation is doing now."""


class Runner(Protocol):
    """A compiled graph. It checks nothing: :class:`qfuse.backends.CompiledModule` does."""

    @property
    def backend(self) -> str:
        """``aoti`` or ``eager``."""

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run the graph, write what the source program writes, and return the user outputs.

        Args:
            inputs: The tensors that the signature lists, in its order, of the right dtype, device
                and shape, which share no memory with what is written; any strides. Those that the
                source program writes are written.
        """

    def written(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what a run with ``inputs`` writes, in the order of ``Signature.mutations``."""

    def fork(self) -> Runner:
        """A runner with its own copy of the state, and the same constants."""


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """How a lowered graph is compiled.

    Attributes:
        cache: Keep compiled packages on disk, and use those that are there.
        cache_folder: Where; the default is ``aoti`` in qfuse's cache folder.
        runners: How many threads may be inside the compiled code at once; others wait.
        fingerprint: Facts about the target that the code depends on, as one text.
        kernels: Digest of the library of custom kernels, "" if the graph calls none.
        inductor: Inductor options for this graph alone, for experts.
    """

    cache: bool = True
    cache_folder: Path | None = None
    runners: int = 4
    fingerprint: str = ""
    kernels: str = ""
    inductor: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.runners < 1:
            raise OptionsError(f"runners must be at least 1, not {self.runners}")
