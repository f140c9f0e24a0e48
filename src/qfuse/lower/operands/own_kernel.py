"""What all of qfuse's own kernels share: the compiled library, their ops, and packed constants."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from qfuse.ir.refusal import Refusal
from qfuse.kernels import KernelLibrary
from qfuse.lower.operands.checks import check_platform
from qfuse.lower.operands.packing import Packer
from qfuse.rewrite.prelude import OpOverload
from qfuse.targets.target import Target


@dataclass(frozen=True, slots=True)
class OwnKernel(ABC):
    """A kernel of qfuse: the op ``qfuse::name``, or several with this prefix.

    Attributes:
        library: The compiled kernels, or the reason why they are not available.
    """

    library: KernelLibrary

    @property
    @abstractmethod
    def name(self) -> str:
        """The name in the report: ``qfuse.`` and the name of the first op."""

    def supported(self, target: Target) -> Refusal | None:
        """Refuse if the kernels could not be built."""
        return check_platform(self.library, target)

    def op(self, suffix: str = "") -> OpOverload:
        """Return the op whose name ends in ``suffix``."""
        name = self.name.removeprefix("qfuse.") + suffix
        op: OpOverload = getattr(torch.ops.qfuse, name).default
        return op


@dataclass(frozen=True, slots=True)
class PackingKernel(OwnKernel):
    """A kernel with a packed weight.

    Attributes:
        packer: Packs weights; shared by all kernels of one lowering.
    """

    packer: Packer


def has_own_kernels(kernels: Iterable[object], target: Target) -> bool:
    """Return whether ops of qfuse's library can be called: a kernel on one of them is supported."""
    own = (kernel for kernel in kernels if isinstance(kernel, OwnKernel))
    return any(kernel.supported(target) is None for kernel in own)
