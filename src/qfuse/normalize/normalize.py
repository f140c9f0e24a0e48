"""Runs the dialects over a captured graph, and says what none of them knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qfuse.ir.graph.stage_graph import CapturedGraph, NormalGraph
from qfuse.ir.stages.verify import verify
from qfuse.normalize.builtin import BUILTIN
from qfuse.normalize.importers.dialect import Dialect, discover, rules_of
from qfuse.normalize.unrecognized import note_leftovers
from qfuse.rewrite.context import RewriteContext
from qfuse.rewrite.driver import apply_rules
from qfuse.rewrite.rewriter import GraphEditor


def normalize(
    captured: CapturedGraph,
    context: RewriteContext | None = None,
    dialects: Sequence[Dialect] | None = None,
) -> NormalGraph:
    """Give everything in ``captured``, which is consumed, its one spelling.

    What no rule recognises stays as it is and works; a quantized op among it is named in the log.

    Args:
        captured: Functional ATen and source dialects.
        context: Room, gate and checker of the run.
        dialects: Which dialects to know; the built-in ones and those of installed packages
            unless given.

    Returns:
        The same module, whose quantization is ``qfuse`` ops.

    Raises:
        NormalizeError: A quantized op is malformed, or can never run; or a dialect is broken.
    """
    known = (*BUILTIN, *discover()) if dialects is None else tuple(dialects)
    context = context or RewriteContext("normalize")
    apply_rules(captured, rules_of(known), replace(context, raise_model_errors=True))
    # Such as the float weights that a quantizer left behind.
    GraphEditor(captured.module).sweep()
    normal = NormalGraph(captured.module, captured.signature, captured.log)
    note_leftovers(normal, known, context.stage)
    verify(normal)
    return normal
