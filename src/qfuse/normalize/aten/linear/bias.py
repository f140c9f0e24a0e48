"""Turn a constant that is added per output feature of a linear into its bias."""

from __future__ import annotations

from qfuse.ir.ops.constants import constant_value
from qfuse.ir.ops.linear import Linear, as_linear
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.normalize.aten.linear.weights import call_linear
from qfuse.normalize.match.broadcast import is_per_feature
from qfuse.normalize.match.constants import derived
from qfuse.normalize.match.views import ROW_VIEW, reapply_path
from qfuse.rewrite.pattern import Capture, Match, Path, PatternRule, Read, V, guard, through
from qfuse.rewrite.pattern.guards import single_use
from qfuse.rewrite.prelude import Exactness, MissCode, Node, Rewriter

LINEAR, BIAS, PATH = Read("linear", as_linear), V("bias"), Capture[Path]("path")


@guard(MissCode.SHAPE, "a summand of shape {bias.shape} is not one number per feature", at="bias")
def _is_bias(y: Node, bias: Node) -> bool:
    return is_per_feature(shape_of(bias), shape_of(y))


@guard(MissCode.NOT_CONSTANT, "the summand is computed at run time", at="bias")
def _is_constant(bias: Node) -> bool:
    return constant_value(bias) is not None


@guard(MissCode.ARGUMENT, "the linear has a bias already", at="linear")
def _has_no_bias(linear: Linear) -> bool:
    return linear.bias is None


@guard(MissCode.DTYPE, "the sum is {node.dtype}, which is not the dtype of the linear")
def _keeps_type(node: Node, linear: Linear) -> bool:
    return dtype_of(node) == dtype_of(linear.node)


class FuseBias(PatternRule):
    """``linear(x, w) + b`` becomes ``linear(x, w, b)``.

    Before::

        x, w -> linear -> view -> add(b)

    After::

        x, w, b -> linear -> view

    Rounding: the bias may be added before the product is rounded to the dtype of the result.

    Refuses: ``alpha`` other than 1; a summand that is not a constant, or not one number per output
    feature; a linear that has a bias or other users; a sum of another dtype than the linear, since
    the linear would be rounded after the sum instead of before.
    """

    name = "fuse-bias"
    exactness = Exactness.ROUNDING
    # A number is no near miss: it is a residual or a constant offset, not a bias.
    _bias = BIAS.otherwise(MissCode.ARGUMENT, "the summand is a number").given(_is_bias).core()
    pattern = (through(LINEAR, ROW_VIEW, path=PATH).named("y") + _bias).given(
        _is_constant, _has_no_bias, _keeps_type, single_use("path")
    )

    def rewrite(self, site: Match, rw: Rewriter) -> None:
        """Add the bias to the linear."""
        linear, value = site[LINEAR], constant_value(site[BIAS])
        assert value is not None, "the pattern matches only constants"
        # The sum has the dtype of the linear, so this is the cast of torch's promotion.
        bias = derived(rw, site[BIAS], value.reshape(-1).to(dtype_of(linear.node)), "bias")
        new = call_linear(rw, linear.x, linear.weight, bias, like=linear.node)
        rw.replace(site.node, reapply_path(rw, site[PATH], new, dtype_of(site.node)))
