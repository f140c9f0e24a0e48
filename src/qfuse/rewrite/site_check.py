"""Check one rewrite by values: the region before and after, on real activations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from qfuse.ir.events import Checked, Exactness
from qfuse.ir.graph.stage_graph import StageGraph
from qfuse.ir.ops.activation import as_activation
from qfuse.ir.ops.epilogue import Round
from qfuse.ir.ops.views import result_of, tensor_of
from qfuse.rewrite.compare import Verdict, compare, compare_rounded
from qfuse.rewrite.rewriter import Journal
from qfuse.rewrite.tolerance import SITE
from qfuse.rewrite.values import Values, meeting_points, region_value, wide_value


class SiteChecker:
    """Checks every rewrite on the values that the example inputs produce there.

    Args:
        program: The graph that is being rewritten.
        inputs: One real tensor per placeholder.
    """

    def __init__(self, program: StageGraph, inputs: Sequence[torch.Tensor]) -> None:
        self._log = program.log
        self._values = Values(program.module, inputs)

    def check(self, journal: Journal, exactness: Exactness, what: str) -> str | None:
        """Compare replaced values with their replacements; return what is wrong, or ``None``."""
        for old, new in journal.replaced:
            # Evaluate both from the same values: values cached further down may come from a matmul
            # that has since been replaced and rounds differently.
            start = meeting_points(old, new)
            truth = None
            # Exact rewrites are compared in bits with the source itself, rounding included.
            if exactness is Exactness.ROUNDING:
                truth = wide_value(old, self._values, start)
            before = _tensors(region_value(old, self._values, start))
            try:
                after = _tensors(region_value(new, self._values, start))
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                # Shapes and dtypes fit, as infer has shown; some ops refuse values or layouts too.
                verdict = Verdict(f"the new ops do not run: {error}")
                return self._judge(verdict, exactness, what)
            wide = _tensors(truth) if truth is not None else (None,) * len(before)
            step = _last_step(old) if exactness is Exactness.ROUNDING else None
            for parts in zip(after, before, wide, strict=True):
                if step is not None and parts[1].is_floating_point():
                    verdict = compare_rounded(*parts, self._values.of(step), SITE)
                else:
                    verdict = compare(*parts, exactness, SITE)
                wrong = self._judge(verdict, exactness, what)
                if wrong is not None:
                    return wrong
        return None

    def _judge(self, verdict: Verdict, exactness: Exactness, what: str) -> str | None:
        wrong = verdict.wrong
        self._log.add(
            Checked(
                "check",
                what,
                wrong is None,
                exactness,
                verdict.error,
                verdict.allowed,
                wrong or "",
            )
        )
        return wrong

    def forget(self, nodes: Sequence[Node]) -> None:
        """Drop the values of erased nodes."""
        self._values.forget(nodes)


def _last_step(node: Node) -> Node | None:
    """Return the scale if the float result of ``node`` ends with a rounding, else ``None``."""
    result = result_of(node)
    fused = as_activation(node if result is None else result[0])
    # A result that is stored quantized is compared by its steps anyway.
    if fused is None or fused.output.spec is not None or not fused.epilogue.ops:
        return None
    last = fused.epilogue.ops[-1]
    if not isinstance(last, Round) or tensor_of(fused.extras[last.scale]).numel() != 1:
        return None
    return fused.extras[last.scale]


def _tensors(value: object) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a node's value, which is one or a tuple of them."""
    parts = value if isinstance(value, (tuple, list)) else (value,)
    return tuple(p for p in parts if isinstance(p, torch.Tensor))
