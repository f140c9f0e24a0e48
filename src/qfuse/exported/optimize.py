"""Optimize an exported program; the result is one too."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.export import ExportedProgram

from qfuse import api
from qfuse.exported.build import build_program
from qfuse.ir.errors import OptionsError
from qfuse.ir.words import a_kind
from qfuse.options import BuiltinBackend, Options
from qfuse.report import Report
from qfuse.report.structured import log_report
from qfuse.targets import Target

# A program has no place for a report of its own.
_REPORTS: weakref.WeakKeyDictionary[ExportedProgram, Report] = weakref.WeakKeyDictionary()


def optimize(  # noqa: PLR0913 - one keyword per option
    program: ExportedProgram,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: Target | None = None,
    check: str = "pipeline",
    float_dtype: torch.dtype | None = None,
    options: Options | Mapping[str, Any] | None = None,
) -> ExportedProgram:
    """Return an exported program with the same signature that computes with quantized values.

    The result is for ``torch.export.save``, ``torch._inductor.aoti_compile_and_package`` and
    ``.module()``. It contains ops of ATen, and those of qfuse's kernels (``qfuse::``), which a
    process that loads it registers by ``qfuse.kernels.load()``; with
    ``options={"own_kernels": False}`` it contains ops of ATen only. Its weights are those that the
    ops read, in the size of the quantized ones. Its state is its own: the buffers that the program
    writes are copied. ``qfuse.reports(result)`` has the report.

    Args:
        program: The result of ``torch.export.export``, not changed.
        args: Example inputs, for a program that was saved without them.
        kwargs: Example keyword inputs.
        target: As in :func:`qfuse.compile`.
        check: As in :func:`qfuse.compile`; the compiled code is not checked, since there is none.
        float_dtype: As in :func:`qfuse.compile`.
        options: As in :func:`qfuse.compile`; ``backend`` and ``cache`` have no effect, and
            ``float_memory`` is 0, since the program is to be stored.

    Raises:
        CaptureError: The program cannot be captured.
        NormalizeError: A quantization op is malformed, or cannot run on this machine.
        OptionsError: ``program`` is not a program, or an option has an invalid value.
    """
    if not isinstance(program, ExportedProgram):
        raise OptionsError(
            f"the program is {a_kind(program)}",
            fix="pass the result of torch.export.export, or compile the module with qfuse.compile",
        )
    chosen = Options.of(options)
    if not isinstance(chosen.backend, BuiltinBackend):
        raise OptionsError(
            f"backend={chosen.backend!r} cannot claim ops of an exported program",
            fix="use qfuse.compile for a backend of another package",
        )
    chosen = replace(chosen, float_memory=0)
    with api.captured_model(
        program, args, kwargs, target=target, check=check, float_dtype=float_dtype, options=chosen
    ) as captured:
        plan, report = captured.plan()
    made = build_program(plan.lowered, program)
    log_report(report)
    _REPORTS[made] = report
    return made


def report_of(program: object) -> Report | None:
    """Return the report of a result of :func:`optimize`."""
    return _REPORTS.get(program) if isinstance(program, ExportedProgram) else None
