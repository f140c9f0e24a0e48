"""``onednn.qconv*_pointwise`` without a second operand."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qfuse.ir.dtypes import BYTES
from qfuse.ir.ops.views import node_of, optional_node, shape_of
from qfuse.ir.sizes import Size, same_size
from qfuse.normalize.importers.library.encoding import (
    Encoding,
    Unpacked,
    check_dtype,
    check_feature_bias,
)
from qfuse.normalize.importers.library.onednn import (
    integers,
    read_activation,
    read_post_op,
    read_result,
    read_weight,
)
from qfuse.normalize.importers.library.onednn_linear import OnednnRule, OnednnSite
from qfuse.normalize.importers.rule import RefusedError, known_arguments
from qfuse.normalize.importers.torch_ops import Registered
from qfuse.rewrite.prelude import MissCode, Node

_KNOWN = (
    *("qx", "x_scale", "x_zero_point", "qw", "w_scale", "w_zero_point", "bias"),
    *("stride", "padding", "dilation", "groups"),
    *("output_scale", "output_zero_point", "output_dtype", "attr", "scalars", "algorithm"),
)
_MOST_AXES = 3


class NormalizeOnednnConvolution(OnednnRule):
    """``qconv_pointwise`` becomes dequantizes, a convolution, an activation and a quantize.

    Refuses: the overloads that accumulate into an operand; a weight that is not constant, or has
    zero points; a result or activation of an unknown type; an unknown activation function.
    """

    name = "normalize-onednn-convolution"
    anchors = Registered(
        "onednn::qconv_pointwise",
        "onednn::qconv1d_pointwise",
        "onednn::qconv2d_pointwise",
        "onednn::qconv3d_pointwise",
    )

    def read(self, node: Node) -> OnednnSite:
        """View a call."""
        a = known_arguments(node, _KNOWN)
        qx = node_of(a["qx"])
        axes = len(shape_of(qx)) - 2
        if not 1 <= axes <= _MOST_AXES:
            text = "its activation has the shape {}"
            raise RefusedError(MissCode.SHAPE, node, text, tuple(shape_of(qx)))
        x = read_activation(node, qx, a["x_scale"], a["x_zero_point"])
        check_dtype(node, "activation", x.spec.dtype, (*BYTES, torch.float8_e4m3fn))
        scale, zero = node_of(a["w_scale"]), node_of(a["w_zero_point"])
        weight = read_weight(node, node_of(a["qw"]), scale, zero, axis=0, rows=axes + 2)
        if weight.spec.rank != axes + 2:
            text = "its packed weight has the rank {}, and {} spatial axes"
            raise RefusedError(MissCode.SHAPE, node, text, weight.spec.rank, axes)
        result = read_result(node, a["output_scale"], a["output_zero_point"])
        bias = optional_node(a["bias"])
        check_feature_bias(node, bias, shape_of(node)[1])
        post = read_post_op(node, a["attr"], a["scalars"], a["algorithm"])
        geometry = [integers(node, a[name], axes) for name in ("stride", "padding", "dilation")]
        _check_shape(node, shape_of(qx), weight, geometry)
        groups = a["groups"]
        if not isinstance(groups, int):
            raise RefusedError(MissCode.ARGUMENT, node, "its number of groups is not known")
        return OnednnSite(
            node, x, weight, bias, None, post, result, (*geometry, False, [0] * axes, groups)
        )


def _check_shape(
    node: Node, shape: Sequence[Size], weight: Encoding, geometry: Sequence[Sequence[int]]
) -> None:
    """Check that torch traced the shape that the op returns.

    Raises:
        RefusedError: It did not, as for one spatial axis.
    """
    assert isinstance(weight.values, Unpacked), "a packed weight is a constant"
    stride, padding, dilation = geometry
    for axis, kernel in enumerate(weight.values.value.shape[2:]):
        covered = dilation[axis] * (kernel - 1) + 1
        size = (shape[axis + 2] + 2 * padding[axis] - covered) // stride[axis] + 1
        traced = shape_of(node)[axis + 2]
        if not same_size(traced, size):
            text = "torch's shape function says that its axis {} has the size {}, and it has {}"
            raise RefusedError(MissCode.SHAPE, node, text, axis + 2, traced, size)
