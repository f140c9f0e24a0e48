"""``onednn.qlinear_pointwise`` in all overloads."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass

import torch
from torch.fx.node import Argument

from qfuse.ir.dtypes import BYTES
from qfuse.ir.ops.views import dtype_of, node_of, optional_node, shape_of
from qfuse.ir.sizes import same_shape
from qfuse.normalize.aten.linear.weights import call_linear
from qfuse.normalize.importers.library.encoding import Encoding, ProductRule, check_feature_bias
from qfuse.normalize.importers.library.onednn import (
    PostOp,
    Result,
    is_number,
    read_activation,
    read_post_op,
    read_result,
    read_weight,
)
from qfuse.normalize.importers.rule import RefusedError, known_arguments
from qfuse.normalize.importers.torch_ops import Registered
from qfuse.rewrite.prelude import MissCode, Node, Rewriter, aten

_COMMON = (
    *("qx", "x_scale", "x_zero_point", "qw", "w_scale", "w_zero_point", "bias"),
    *("output_scale", "output_zero_point", "output_dtype"),
)
_UNARY = ("post_op_name", "post_op_args", "post_op_algorithm")
_BINARY = (
    *("other", "other_scale", "other_zp", "binary_post_op", "binary_alpha"),
    *("unary_post_op", "unary_post_op_args", "unary_post_op_algorithm"),
)


@dataclass(frozen=True, slots=True)
class OnednnSite:
    """A product with an epilogue, as oneDNN computes it.

    Attributes:
        node: The library's product.
        x: The activation.
        weight: The weight, ``[N, ...]``.
        bias: One number per output feature, or ``None``.
        other: A summand: float, or quantized; or ``None``.
        post_op: The activation after the sum.
        result: The type of the result.
        geometry: The arguments of a convolution after its bias; empty for a linear.
    """

    node: Node
    x: Encoding
    weight: Encoding
    bias: Node | None
    other: Node | Encoding | None
    post_op: PostOp
    result: Result
    geometry: tuple[Argument, ...] = ()


class OnednnRule(ProductRule[OnednnSite], ABC):
    """Replaces a oneDNN product by float ops between dequantizes and a quantize."""

    def rewrite(self, site: OnednnSite, rw: Rewriter) -> None:
        """Add the product and its epilogue in float32, then the quantize or cast."""
        name = site.node.name
        x = site.x.dequantize(rw, f"{name}_x")
        weight = site.weight.dequantize(rw, f"{name}_weight")
        bias = site.bias
        if bias is not None and dtype_of(bias) is not torch.float32:
            bias = rw.call(aten._to_copy.default, bias, dtype=torch.float32)
        if site.geometry:
            y = rw.call(aten.convolution.default, x, weight, bias, *site.geometry)
        else:
            y = call_linear(rw, x, weight, bias)
        other = site.other
        if isinstance(other, Encoding):
            other = other.dequantize(rw, f"{name}_other")
        if other is not None:
            if dtype_of(other) is not torch.float32:
                other = rw.call(aten._to_copy.default, other, dtype=torch.float32)
            y = rw.call(aten.add.Tensor, y, other)
        y = site.post_op.build(rw, y)
        rw.replace(site.node, site.result.build(rw, y, name))


class NormalizeOnednnLinear(OnednnRule):
    """``qlinear_pointwise`` becomes dequantizes, a linear, its epilogue and a quantize.

    Refuses: a weight that is not constant, or has zero points; an activation or a result of an
    unknown type; an unknown activation function; a summand with a factor, a quantized one that is
    not accumulated into, or an accumulator with other users, which the op overwrites.
    """

    name = "normalize-onednn-linear"
    anchors = Registered("onednn::qlinear_pointwise")

    def read(self, node: Node) -> OnednnSite:
        """View a call."""
        a = known_arguments(node, (*_COMMON, *_UNARY, *_BINARY))
        x = read_activation(node, node_of(a["qx"]), a["x_scale"], a["x_zero_point"])
        scale, zero = node_of(a["w_scale"]), node_of(a["w_zero_point"])
        weight = read_weight(node, node_of(a["qw"]), scale, zero, axis=1)
        result = read_result(node, a["output_scale"], a["output_zero_point"])
        bias = optional_node(a["bias"])
        check_feature_bias(node, bias, shape_of(node)[-1])
        if "post_op_name" in a:
            post = read_post_op(node, *(a[name] for name in _UNARY))
            return OnednnSite(node, x, weight, bias, None, post, result)
        post = read_post_op(node, *(a[name] for name in _BINARY[-3:]))
        other = _other(node, a, result)
        return OnednnSite(node, x, weight, bias, other, post, result)


def _other(node: Node, a: dict[str, Argument], result: Result) -> Node | Encoding | None:
    """Return the summand of a binary overload."""
    kind, other = a["binary_post_op"], optional_node(a["other"])
    if kind == "none":
        return None
    if kind not in {"sum", "add"} or other is None or not is_number(a["binary_alpha"], 1):
        text = "its binary op is {!r} with the factor {}"
        raise RefusedError(MissCode.ARGUMENT, node, text, kind, a["binary_alpha"])
    if not same_shape(shape_of(other), shape_of(node)):
        text = "its summand of shape {} is broadcast"
        raise RefusedError(MissCode.SHAPE, other, text, tuple(shape_of(other)))
    if kind == "sum":
        # It writes the sum into the summand.
        if len(other.users) > 1 or other.op != "call_function":
            text = "it overwrites its summand, which is used elsewhere"
            raise RefusedError(MissCode.SHARED, other, text)
        if dtype_of(other) != result.dtype:
            text = "it accumulates {} into {}"
            raise RefusedError(MissCode.DTYPE, other, text, result.dtype, dtype_of(other))
    if dtype_of(other) not in BYTES:
        return other
    if kind == "add":
        raise RefusedError(MissCode.DTYPE, other, "it adds {} without a scale", dtype_of(other))
    return read_activation(node, other, a["other_scale"], a["other_zp"])
