"""The part of a problem that a kernel accepts."""

from __future__ import annotations

from dataclasses import dataclass

from qfuse.cost.model import Workload


@dataclass(frozen=True, slots=True)
class Claim:
    """The part of a problem that a kernel accepts.

    Attributes:
        ops: The number of leading epilogue ops; the rest is expanded after the kernel.
        output: Whether it quantizes the output; only if it covers every epilogue op.
        work: The cost, including the ops that are left after it.
        note: A remark for the report.
        loops: The cost of compiled loops for the same ops, if they are an alternative.
    """

    ops: int
    output: bool
    work: Workload
    note: str = ""
    loops: Workload | None = None
