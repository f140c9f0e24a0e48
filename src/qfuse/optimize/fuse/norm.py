"""Fuse a norm with the quantize of its result, so that the float result is not stored."""

from __future__ import annotations

from qfuse.ir.graph.stage_graph import op_name
from qfuse.ir.ops.norms import FusedNorm, LayerNorm, RmsNorm
from qfuse.ir.ops.output import ExtraOutput, Output
from qfuse.ir.ops.views import shape_of
from qfuse.ir.sizes import same_shape
from qfuse.optimize.fuse.operands import stored_edge
from qfuse.optimize.fuse.quantized_output import (
    ExtraValue,
    FuseQuantizeSite,
    QuantizedResult,
    fuse_site,
    quantized,
)
from qfuse.patterns.norm import A_NORM, Norm
from qfuse.patterns.statistics import X
from qfuse.rewrite.pattern import Capture, Match, PatternRule, V, check, let, match
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, Rewriter

_SITE = Capture[FuseQuantizeSite]("site")
_RESIDUAL = V("residual", X.dtypes)
_SUM = X + _RESIDUAL


def refuse_shared(norm: Norm) -> Miss | None:
    """Refuse a norm if a part of it has other users."""
    dying = norm.dying()
    # The inner values are not results of the op, so nobody else may need them.
    for node in norm.inner:
        others = sorted({op_name(user) for user in node.users if user not in dying})
        if others:
            text = "a part of the norm, {}, is also used by {}"
            return Miss(MissCode.SHARED, node, text, op_name(node), ", ".join(others))
    return None


def _site(norm: Norm, result: QuantizedResult) -> FuseQuantizeSite | Miss:
    # Fusing the residual sum too is better, but the fusion must not fail because of it.
    plain, added = _site_of(norm, result, None), match(_SUM, norm.x)
    if isinstance(added, Miss):
        return plain
    x, residual = added[X], added[_RESIDUAL]
    # A summand that broadcasts, such as a position embedding, is added outside of the op.
    if not same_shape(shape_of(x), shape_of(residual)):
        return plain
    # The sum may have users before the op's other operands are computed; then it stays outside.
    site = _site_of(norm, result, (x, residual))
    return plain if isinstance(site, Miss) else site


def _site_of(
    norm: Norm, result: QuantizedResult, added: tuple[Node, Node] | None
) -> FuseQuantizeSite | Miss:
    kept = _kept(norm, result, added)
    output = result.block(frozenset(k.what for k in kept))
    fused = fused_norm(norm, result.quantize.node, added, output)
    return fuse_site(fused, result, kept)


def _kept(
    norm: Norm, result: QuantizedResult, added: tuple[Node, Node] | None
) -> tuple[ExtraValue, ...]:
    """Return the values with other users, in the order of the output block."""
    possible = [ExtraValue(ExtraOutput.FLOAT, norm.node, frozenset(result.ends))]
    if added is not None:
        possible.append(ExtraValue(ExtraOutput.SUM, norm.x, norm.dying()))
    return tuple(k for k in possible if k.users)


def fused_norm(
    norm: Norm, node: Node, added: tuple[Node, Node] | None, output: Output
) -> FusedNorm:
    """Return the op for a norm, with the dequantizes of its input and of a residual.

    Args:
        norm: The norm.
        node: The node of the op.
        added: The summands of the norm's input, if the op adds them.
        output: The output block.
    """
    x, residual = (norm.x, None) if added is None else added
    x, params = stored_edge(x)
    other, other_params = (None, None) if residual is None else stored_edge(residual)
    if norm.layer:
        vectors = norm.weight, norm.bias
        return LayerNorm(node, x, params, other, other_params, *vectors, norm.spec, output)
    return RmsNorm(node, x, params, other, other_params, norm.weight, norm.spec, output)


class FuseNormQuantize(PatternRule):
    """``quantize(norm(x + r))`` becomes one op, for RMS and layer norms in all their spellings.

    Before::

        x, r -> add -> pow -> mean -> add -> rsqrt --.
                 `--------------------------------> mul -> mul -> (choose_qparams) -> quantize

    After::

        x, r, weight -> qfuse.rms_norm -> quantized values (, scale, zero point, result, sum)

    Dequantizes of ``x`` and ``r`` are fused too: the op reads quantized values. If the float result
    or the residual sum has other users, the op returns it as an extra output. The spelling is
    recorded as a :class:`~qfuse.ir.ops.norm_spec.NormSpec`, so that the op computes the same bits.

    Refuses: a norm whose spelling no spec describes; a part of the norm with other users;
    parameters that are computed from the norm otherwise than by a choice for it; operands that are
    computed only after the first user of the op's results; strides that would change.
    """

    name = "fuse-norm-quantize"
    exactness = Exactness.EXACT
    pattern = quantized(A_NORM).given(check(refuse_shared), let(_SITE, _site))

    def rewrite(self, site: Match, rw: Rewriter) -> None:
        """Insert the op in front of the first user of its results."""
        site[_SITE].insert(rw)
