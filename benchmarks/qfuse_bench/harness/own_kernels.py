"""qfuse's kernels, without which some benchmarks have nothing to measure."""

from __future__ import annotations

from qfuse.ir.errors import OptionsError
from qfuse.kernels import KernelLibrary, load


def load_kernels() -> KernelLibrary:
    """Return the kernels of this process, built if need be.

    Raises:
        OptionsError: There are none, with the reason.
    """
    library = load()
    if not library.available:
        raise OptionsError(f"no kernels to measure: {library.reason}", fix="see qfuse doctor")
    return library
