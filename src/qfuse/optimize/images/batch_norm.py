"""Fuse a batch norm of quantized values into the op that quantizes its result."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from qfuse.ir.graph.schema import is_call
from qfuse.ir.memory_formats import CHANNELS
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.activation import Activation, as_activation
from qfuse.ir.ops.batch_norm import BATCH_NORMS
from qfuse.ir.ops.epilogue import Add, Epilogue, Mul
from qfuse.ir.ops.output import Output
from qfuse.ir.ops.qdq import as_quantize
from qfuse.ir.ops.views import dtype_of, result_of, results_of, shape_of, tensor_of
from qfuse.optimize.fuse.operands import stored_edge
from qfuse.optimize.images.joined import JoinedImages, images_of_cat
from qfuse.optimize.match.batch_norm import factor_and_shift, normalized, refuse_training
from qfuse.rewrite.prelude import (
    Exactness,
    Miss,
    MissCode,
    Node,
    OpOverload,
    Rewriter,
    Rule,
    arguments,
)

_OTHER = "it does not quantize a batch norm"


@dataclass(frozen=True, slots=True)
class StoredNormSite:
    """A batch norm of quantized values, and what quantizes its result.

    Attributes:
        fused: What comes after the norm, as an op on the quantized values; its node is the
            quantize, or the op without the norm.
        results: The results of the op, with their index.
        joined: The images whose quantized values are joined first, or ``None``; without them the
            op reads ``fused.x``.
        factor: What the norm multiplies by; float32, in a shape that broadcasts.
        shift: What it adds then.
        hint: A name for both.
    """

    fused: Activation
    results: dict[int, Node]
    joined: JoinedImages | None
    factor: torch.Tensor
    shift: torch.Tensor
    hint: str


class FuseStoredBatchNorm(Rule[StoredNormSite]):
    """``quantize(batch_norm(dequantize(q)))`` becomes one op, with a factor and a summand.

    Before::

        q -> dequantize -> batch_norm -> quantize -> user

    After::

        q -> qfuse.activation[mul(0)|add(1,1.0)] -> user

    The input may also be several quantized images that are joined along their channels, each with
    a scale of its own: the op then has one scale per channel. A norm in front of an activation
    that ``fuse-activation-quantize`` has fused with the quantize is fused likewise.

    Norms of the results of convolutions are left to ``fuse-batch-norm``. These read what others
    read too, such as the images of a dense block.

    Rounding: a factor and a summand are rounded instead of the steps of the norm. The values of a
    quantized channel are at most 255 scales apart, so the sum does not cancel as that of floats
    might.

    Refuses: a norm with other users; an input that is not quantized; a norm in training, whose
    statistics are results, or with statistics or parameters that are computed at run time; other
    dtypes than float32.
    """

    name = "fuse-stored-batch-norm"
    anchors: ClassVar[tuple[OpOverload, ...]] = (ops.quantize, ops.activation)
    exactness = Exactness.ROUNDING

    def match(self, node: Node) -> StoredNormSite | Miss:
        """Match what quantizes a norm."""
        y = arguments(node)["x"]
        norm = _norm_of(y)
        if norm is None:
            return Miss(MissCode.PATTERN, node, _OTHER, progress=0)
        training, result = refuse_training(norm), normalized(norm)
        if training is not None or isinstance(result, Miss):
            return training or result  # type: ignore[return-value]
        if len(result.users) > 1:
            text = "the normalized values have other users"
            return Miss(MissCode.SHARED, result, text, progress=2)
        fused = _without_norm(node, result)
        if isinstance(fused, Miss):
            return fused
        refusal = _refuse_dtypes(norm, result)
        return refusal or _site(norm, fused)

    def rewrite(self, site: StoredNormSite, rw: Rewriter) -> None:
        """Replace norm and op by one op."""
        fused = site.fused
        if site.joined is not None:
            x, params = site.joined.make(rw)
            fused = replace(fused, x=x, x_params=params)
        count = len(fused.extras)
        factor = rw.constant(site.factor, f"{site.hint}_factor")
        shift = rw.constant(site.shift, f"{site.hint}_shift")
        whole = replace(
            fused,
            epilogue=Epilogue((Mul(count), Add(count + 1), *fused.epilogue.ops)),
            extras=(*fused.extras, factor, shift),
        )
        values = [tensor_of(node) for _, node in sorted(site.results.items())]
        if as_activation(fused.node) is not None:
            values = list(fused.node.meta["val"])
        call = rw.replay(whole.overload, whole.call_args(), {}, values)
        for index, node in site.results.items():
            rw.replace(node, rw.item(call, index))


def _norm_of(y: object) -> Node | None:
    """Return the norm whose normalized values are ``y``."""
    if not isinstance(y, Node):
        return None
    if is_call(y, *BATCH_NORMS):
        return y
    part = result_of(y)
    return part[0] if part is not None and part[1] == 0 and is_call(part[0], *BATCH_NORMS) else None


def _without_norm(node: Node, result: Node) -> Activation | Miss:
    """Return the op that quantizes ``result``, as an op on the input of the norm."""
    norm = _norm_of(result)
    assert norm is not None, "it is the result of a norm"
    x, params = stored_edge(arguments(norm)["input"])  # type: ignore[arg-type]
    if params is None and images_of_cat(x) is None:
        return Miss(MissCode.NOT_QUANTIZED, x, "the input of the norm is not quantized", progress=2)
    known = as_activation(node)
    if known is not None:
        if result in known.extras:
            text = "the normalized values are an operand of the activation too"
            return Miss(MissCode.SHARED, node, text, progress=2)
        return replace(known, x=x, x_params=params)
    quantize = as_quantize(node)
    assert quantize is not None, "it is one of the anchors"
    if quantize.params.outer_scale is not None:
        text = "its scales have a second level, and a fused op supports one"
        return Miss(MissCode.GRANULARITY, node, text, progress=2)
    return Activation(node, x, params, Epilogue(), (), Output(quantize.params, None, frozenset()))


def _refuse_dtypes(norm: Node, result: Node) -> Miss | None:
    """Refuse other dtypes than float32."""
    x = arguments(norm)["input"]
    assert isinstance(x, Node), "a norm has an input"
    if {dtype_of(x), dtype_of(result)} != {torch.float32}:
        text = "it normalizes {}, and the product of a factor would be rounded"
        return Miss(MissCode.DTYPE, norm, text, dtype_of(x), progress=3)
    return None


def _site(norm: Node, fused: Activation) -> StoredNormSite | Miss:
    shape = shape_of(fused.x)
    size = shape[CHANNELS] if len(shape) > CHANNELS else None
    if not isinstance(size, int):
        text = "it normalizes along axis 1, whose size is not known"
        return Miss(MissCode.AXIS, norm, text, progress=3)
    parts = factor_and_shift(size, norm)
    if isinstance(parts, Miss):
        return parts
    spread = (size, *(1,) * (len(shape) - CHANNELS - 1))
    factor, shift = (part.float().reshape(spread) for part in parts)
    if not bool(factor.isfinite().all() & shift.isfinite().all()):
        return Miss(MissCode.RANGE, norm, "its factors are not finite in float32", progress=3)
    known = as_activation(fused.node)
    results = {0: fused.node} if known is None else results_of(fused.node)
    joined = images_of_cat(fused.x) if fused.x_params is None else None
    return StoredNormSite(fused, results, joined, factor, shift, norm.name)
