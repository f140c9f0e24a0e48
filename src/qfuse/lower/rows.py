"""The rows of the kernel table, in the order that breaks ties."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qfuse.lower.kernel import LinearKernel

__all__ = ["kernel_rows"]


def kernel_rows(*, own_kernels: bool = True) -> tuple[LinearKernel, ...]:
    """Return the rows; without ``own_kernels`` only those of torch itself."""
    del own_kernels
    return ()
