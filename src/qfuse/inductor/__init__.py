"""qfuse inside ``torch.compile``: passes in Inductor's custom pass slots.

The passes merge linears with the same input, in every form that reaches Inductor. See
:func:`inductor_options`, :func:`inductor_passes`, :func:`install` and :func:`reports`.
"""

from qfuse.inductor.options import (
    clear_reports,
    inductor_options,
    inductor_passes,
    install,
    reports,
    uninstall,
)

__all__ = [
    "clear_reports",
    "inductor_options",
    "inductor_passes",
    "install",
    "reports",
    "uninstall",
]
