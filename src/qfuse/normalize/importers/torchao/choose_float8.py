"""``torchao.choose_scale_float8``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qfuse.ir.ops import library as ops
from qfuse.ir.ops.views import dtype_of, node_of
from qfuse.ir.quant.choose import ChooseSpec, Formula
from qfuse.ir.quant.spec import dtype_name, dtype_range
from qfuse.normalize.importers.rule import (
    RefusedError,
    SourceRule,
    dtype_argument,
    known_arguments,
)
from qfuse.normalize.importers.torch_ops import Registered
from qfuse.normalize.importers.torchao.block_size import canonical_block, check_reduces
from qfuse.rewrite.prelude import MissCode, Node, Rewriter

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_ARGUMENTS = (
    *("tensor", "block_size", "float8_dtype", "scale_dtype"),
    *("hp_value_lb", "hp_value_ub"),
)


@dataclass(frozen=True, slots=True)
class Float8Choice:
    """A source op that chooses a scale, and its computation."""

    node: Node
    x: Node
    spec: ChooseSpec


class NormalizeChooseFloat8(SourceRule[Float8Choice]):
    """``choose_scale_float8`` becomes the scale of a ``qfuse.choose_qparams``.

    Refuses: scales that are powers of two; limits on the values from which the scale is chosen;
    float8 types without infinities; a block of ones, with which torchao reduces the whole tensor.
    """

    name = "normalize-choose-float8"
    anchors = Registered("torchao::choose_scale_float8")

    def read(self, node: Node) -> Float8Choice:
        """View a call."""
        a = known_arguments(node, _ARGUMENTS)
        x, dtype = node_of(a["tensor"]), dtype_argument(a["float8_dtype"])
        scale_dtype = dtype_argument(a["scale_dtype"])
        # torchao clamps the maximum magnitude to them, which no formula does.
        for limit in ("hp_value_lb", "hp_value_ub"):
            if a[limit] is not None:
                text = "{}={} limits the values from which the scale is chosen"
                raise RefusedError(MissCode.ARGUMENT, node, text, limit, a[limit])
        if dtype not in FLOAT8:
            raise RefusedError(MissCode.DTYPE, node, "{} is not supported here", dtype_name(dtype))
        # With `float8_e8m0fnu` torchao rounds the scale to a power of two, by a formula of its own.
        if scale_dtype is not torch.float32 or not dtype_of(x).is_floating_point:
            text = "its scale is {}, of {}"
            names = dtype_name(scale_dtype), dtype_name(dtype_of(x))
            raise RefusedError(MissCode.DTYPE, node, text, *names)
        block = canonical_block(node, x, a["block_size"])
        check_reduces(node, x, block)
        low, high = dtype_range(dtype)
        return Float8Choice(node, x, ChooseSpec(Formula.AO_FLOAT8, dtype, low, high, block, 0.0))

    def rewrite(self, site: Float8Choice, rw: Rewriter) -> None:
        """Add the canonical op, without a zero point."""
        rw.replace(site.node, rw.item(rw.call(ops.choose_qparams, site.x, str(site.spec)), 0))
