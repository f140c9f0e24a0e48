"""Casts with other ops than ``aten._to_copy``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qfuse.ir.ops.views import dtype_of, node_of
from qfuse.ir.quant.spec import dtype_name
from qfuse.normalize.importers.rule import (
    RefusedError,
    SourceRule,
    dtype_argument,
    known_arguments,
)
from qfuse.normalize.importers.torch_ops import Registered
from qfuse.rewrite.prelude import MissCode, Node, Rewriter


@dataclass(frozen=True, slots=True)
class ElementCast:
    """A cast, its operand and its dtype."""

    node: Node
    x: Node
    dtype: torch.dtype


class NormalizeElementCast(SourceRule[ElementCast]):
    """``convert_element_type``, of PT2E or of prims, becomes ``aten._to_copy``.

    Refuses: a cast to a complex dtype, which qfuse does not support.
    """

    name = "normalize-element-cast"
    anchors = Registered(
        "quantized_decomposed::convert_element_type", "prims::convert_element_type"
    )

    def read(self, node: Node) -> ElementCast:
        """View a call."""
        a = known_arguments(node, ("input", "a", "dtype"))
        x, dtype = node_of(a["input" if "input" in a else "a"]), dtype_argument(a["dtype"])
        if dtype.is_complex or dtype_of(x).is_complex:
            text = "it casts {} to {}"
            names = dtype_name(dtype_of(x)), dtype_name(dtype)
            raise RefusedError(MissCode.DTYPE, node, text, *names)
        return ElementCast(node, x, dtype)

    def rewrite(self, site: ElementCast, rw: Rewriter) -> None:
        """Cast the same value."""
        rw.replace(site.node, rw.call(torch.ops.aten._to_copy.default, site.x, dtype=site.dtype))
