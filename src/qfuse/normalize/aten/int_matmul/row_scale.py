"""The scale of an activation that comes after the scale of the weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx.node import Argument

from qfuse.ir.ops.linear import Linear, as_linear
from qfuse.ir.ops.qdq import as_dequantize
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.sizes import same_shape
from qfuse.normalize.aten.int_matmul.activation_qparams import Activation, place
from qfuse.normalize.aten.int_matmul.match import EIGHT_BITS
from qfuse.normalize.aten.linear.weights import call_linear
from qfuse.normalize.importers.rule import RefusedError
from qfuse.normalize.match.constants import is_unit
from qfuse.normalize.match.quantized_values import Stored, stored_numbers
from qfuse.normalize.match.views import Path, reapply_views, strip_views
from qfuse.rewrite.prelude import (
    Exactness,
    Miss,
    MissCode,
    Node,
    OpOverload,
    Rewriter,
    Rule,
    arguments,
    aten,
)


@dataclass(frozen=True, slots=True)
class RowScaleSite:
    """A linear on an activation that is not scaled yet, and the product that scales its result."""

    node: Node
    linear: Linear
    path: Path
    x: Activation
    real: torch.dtype


class RowScale(Rule[RowScaleSite]):
    """``linear(dequantize(x, 1), w) * scale`` becomes ``linear(dequantize(x, scale), w)``.

    Before::

        x -> qfuse.dequantize(1) -> linear(w) -> view, cast -> mul(scale [M, 1])

    After::

        x -> qfuse.dequantize(scale) -> linear(w) -> view, cast

    ``int-mm-chain`` leaves the scale 1 when the scale of the weight comes first in a chain. Stored
    activations that are merely cast are such an activation too, if the weight is stored as well:
    a product of integers that is emulated in float.

    Rounding: the scale goes from each sum to each of its terms, each rounded once more.

    Refuses: a factor that is neither per row nor for all; a linear that others read, or that has a
    bias, which would be scaled too; a result that passes through float16, where it may overflow.
    """

    name = "row-scale"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten.mul.Tensor,)
    exactness = Exactness.ROUNDING

    def match(self, node: Node) -> RowScaleSite | Miss:
        """Match a product of such a linear and a scale, in either order."""
        a = arguments(node)
        for value, scale in ((a["self"], a["other"]), (a["other"], a["self"])):
            path = strip_views(value)
            linear = None if path is None else as_linear(path.base)
            if path is None or linear is None:
                continue
            stored = _unscaled(linear)
            if stored is None:
                continue
            assert isinstance(value, Node), "it has a path"
            try:
                return _read(node, linear, stored, path, value, scale)
            except RefusedError as refused:
                return refused.miss
        text = "no factor is a linear on an activation without a scale"
        return Miss(MissCode.PATTERN, node, text, progress=0)

    def rewrite(self, site: RowScaleSite, rw: Rewriter) -> None:
        """Dequantize the activation with the scale, and put back what stood between."""
        x = site.x.build(rw, site.real)
        same = same_shape(shape_of(x), shape_of(site.linear.x))
        like = site.linear.node if same else None
        y = call_linear(rw, x, site.linear.weight, like=like)
        for view in site.x.after:
            y = reapply_views(rw, view, y)
        path = site.path.without_views() if site.x.before else site.path
        rw.replace(site.node, path.restore(rw, y, dtype_of(site.node)))


def _unscaled(linear: Linear) -> Stored | None:
    """Return the stored numbers of an activation whose scale is 1, if the weight is stored too."""
    act = as_dequantize(linear.x)
    if act is not None:
        plain = act.params.spec.is_plain and is_unit(act.params.scale)
        return Stored(act.q, (), act.params.zero_point) if plain else None
    stored = stored_numbers(linear.x)
    if stored is None or stored.views or dtype_of(stored.q) not in EIGHT_BITS:
        return None
    if as_dequantize(linear.weight) is None and stored_numbers(linear.weight) is None:
        return None
    return stored


def _read(
    node: Node, linear: Linear, stored: Stored, path: Path, y: Node, scale: Argument
) -> RowScaleSite:
    if path.shared is not None:
        raise RefusedError(MissCode.SHARED, path.shared, "others read the unscaled result too")
    if linear.bias is not None:
        raise RefusedError(MissCode.ARGUMENT, linear.node, "the linear has a bias, scaled too")
    real = dtype_of(linear.node)
    if torch.float16 in (real, *path.dtypes):
        raise RefusedError(MissCode.DTYPE, node, "the unscaled result passes through float16")
    if isinstance(scale, Node) and not dtype_of(scale).is_floating_point:
        raise RefusedError(MissCode.DTYPE, scale, "the factor is no float tensor")
    x = place(stored.q, scale, stored.zero, y, path)
    return RowScaleSite(node, linear, path, x, real)
