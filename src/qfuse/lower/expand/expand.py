"""Expand an op that no kernel accepts into the ATen calls of its reference.

The calls are traced from the op's reference, so the arithmetic is defined only once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.fx.node import map_arg

from qfuse.ir.errors import CheckError
from qfuse.ir.graph.schema import overload_of
from qfuse.ir.graph.stage_graph import SITE_META, place_of, site_of
from qfuse.ir.ops.epilogue import Epilogue
from qfuse.ir.ops.library import declaration_of
from qfuse.ir.ops.views import all_results_of
from qfuse.lower.expand.template import Template, template_of
from qfuse.rewrite.prelude import Exactness, Node, Rewriter
from qfuse.rewrite.session import RewriteSession, Undone


class Expander:
    """Traces each distinct call once and replays the trace for equal calls.

    Args:
        in_parts: Whether operands and results of fused ops are quantized by calls of
            ``qfuse::quantize`` and ``dequantize`` instead of by plain ops.
    """

    def __init__(self, *, in_parts: bool = False) -> None:
        self._in_parts = in_parts
        self._templates: dict[Hashable, Template] = {}

    def expand(self, node: Node, rw: Rewriter) -> Node | tuple[Node, ...]:
        """Insert the expansion before ``node`` and return its result node or nodes."""
        op = overload_of(node)
        assert op is not None, f"not a call of an op: {node.format_node()}"
        declared = declaration_of(op)
        assert declared is not None, f"not an op of qfuse: {node.format_node()}"
        reference = declared.in_parts if self._in_parts else declared.meaning
        # A tensor that is passed twice is one input of the trace, so that it is also one operand.
        tensors = list(dict.fromkeys(node.all_input_nodes))

        def run(*values: torch.Tensor) -> object:
            known = dict(zip(tensors, values, strict=True))
            args, kwargs = map_arg((node.args, node.kwargs), lambda n: known[n])
            return reference(*args, **kwargs)

        # The float part too: it can be declared anew without the class.
        meaning = reference, declared.reference
        text = _call_text(node, tensors)
        result: Node | tuple[Node, ...] = self._inline(run, meaning, text, tensors, rw)
        return result

    def replace(self, node: Node, session: RewriteSession) -> None:
        """Replace ``node`` by its expansion.

        Raises:
            CheckError: The expansion returns other values than the op.
        """
        place = place_of(node)

        def edit(rw: Rewriter) -> None:
            made = self.expand(node, rw)
            site = site_of(node)
            for new in rw.journal.made:
                new.meta[SITE_META] = site
            if isinstance(made, Node):
                rw.replace(node, made)
                return
            for index, user in all_results_of(node):
                rw.replace(user, made[index])

        # Outside of the rewrite budget: nothing runs the op itself.
        done = session.rewrite_always("expand", node, edit, proof=Exactness.EXACT)
        if isinstance(done, Undone):
            raise CheckError(
                f"{node.name}: the expansion of {node.target} returns other values than the op: "
                f"{done.wrong}",
                where=str(place),
                fix="this is a bug of qfuse; please report it with the model",
            )

    def apply(self, epilogue: Epilogue, y: Node, extras: Sequence[Node], rw: Rewriter) -> Node:
        """Apply ``epilogue`` to ``y`` as ATen calls."""
        tensors = [y, *extras]

        def run(first: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            return epilogue.apply(first, rest)

        result: Node = self._inline(run, Epilogue.apply, str(epilogue), tensors, rw)
        return result

    def _inline(
        self,
        run: Callable[..., object],
        meaning: Hashable,
        text: str,
        tensors: list[Node],
        rw: Rewriter,
    ) -> Any:
        """Add the calls that ``run`` makes; ``meaning`` and ``text`` identify it."""
        values = [t.meta["val"] for t in tensors]
        key = (meaning, text, tuple(map(_type_key, values)))
        template = self._templates.get(key)
        if template is None:
            template = template_of(run, values, (meaning, text))
            self._templates[key] = template
        return template.insert(tensors, rw)


def _call_text(node: Node, tensors: list[Node]) -> str:
    """Return the text of the call with numbered tensors: a key without their dtypes and shapes."""
    # Node names would make every call distinct.
    order: dict[Node, Any] = {t: _Slot(index) for index, t in enumerate(tensors)}
    return f"{node.target}{map_arg((node.args, node.kwargs), lambda n: order[n])!r}"


def _type_key(value: torch.Tensor) -> Hashable:
    """Return a key that differs for tensors that could trace differently."""
    # As text, since symbolic sizes cannot be compared without guards; strides matter because they
    # decide which views the trace may take.
    sizes = tuple(map(str, value.shape)), tuple(map(str, value.stride()))
    return (value.dtype, value.device, *sizes)


class _Slot:
    """A placeholder for a tensor argument in the text of a call."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __repr__(self) -> str:
        return f"<{self._index}>"
