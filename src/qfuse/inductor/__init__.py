"""qfuse inside ``torch.compile``: passes in Inductor's custom pass slots.

The passes merge linears with the same input, in every form that reaches Inductor. See
:func:`inductor_options`, :func:`inductor_passes`, :func:`install` and :func:`qfuse.reports`.
"""

from qfuse.inductor.options import (
    clear_slot_reports,
    inductor_options,
    inductor_passes,
    install,
    slot_reports,
    uninstall,
)

__all__ = [
    "clear_slot_reports",
    "inductor_options",
    "inductor_passes",
    "install",
    "slot_reports",
    "uninstall",
]
